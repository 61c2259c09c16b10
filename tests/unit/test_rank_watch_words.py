"""What a RankWatch says of other ranks, from their notices."""

from types import SimpleNamespace
from typing import Any

from megascale.errors import MOST_NAMES
from megascale.rank_watch import _describe_ranks, _Rounds, _told_after_loss
from megascale.utils.call_site import CallSite

HERE = CallSite("train.py:40 in main", "step()", "all_reduce", True)
THERE = CallSite("data.py:7 in load", "read()", "", False)
ENDED = {"words": "has finished"}
SILENT = "its process is dead or stopped, or its host is cut off."


def _notice(site: CallSite, beat: int = 2, calls: int = 5, **more: Any) -> dict[str, Any]:
    return {"beat": beat, "calls": calls, "site": list(site), "process": "host, 7", **more}


def test_each_rank_that_is_missed_is_told_of() -> None:
    """Why it has not made this call; not one that waits here, too, or that began more collectives since."""
    cases: list[tuple[dict[str, Any] | None, str]] = [
        (ENDED, "Rank 1 has finished."),
        (None, f"Rank 1 gives no sign: {SILENT}"),
        (_notice(HERE, beat=1), f"Rank 1 gives no sign: {SILENT}"),
        (_notice(HERE, lost=True), f"Rank 1 has lost contact in {HERE} (host, 7)."),
        (_notice(THERE), f"Rank 1 has not made this call; it is in {THERE} (host, 7)."),
        (_notice(HERE, calls=3), "Rank 1 is here, too, but 2 collectives behind (host, 7)."),
        (_notice(HERE, calls=5), ""),
        (_notice(HERE, calls=6), ""),
    ]
    before: dict[int, dict[str, Any] | None] = {1: _notice(HERE, beat=1)}
    for notice, words in cases:
        assert _describe_ranks(HERE, 5, {1: notice}, before) == words
    assert _describe_ranks(HERE, 5, {1: ENDED, 2: None}, {}) == f"Rank 1 has finished. Rank 2 gives no sign: {SILENT}"


def test_after_a_loss_ranks_that_ended_are_named_before_those_elsewhere() -> None:
    """Who has ended has caused it; else who is somewhere else, or has left no word. Who waits here has not."""
    seen: dict[int, dict[str, Any] | None] = {
        1: _notice(THERE),
        2: _notice(THERE, lost=True),
        3: None,
        4: _notice(HERE),
    }
    assert _told_after_loss(HERE, seen) == (
        f"Rank 1 is in {THERE} (host, 7). Rank 2 has lost contact in {THERE} (host, 7). "
        f"Rank 3 has left no word: {SILENT}"
    )
    assert _told_after_loss(HERE, {**seen, 5: ENDED}) == "Rank 5 has finished."
    assert _told_after_loss(HERE, {4: _notice(HERE)}) == "All ranks are in this call."


def test_of_many_ranks_a_few_are_named() -> None:
    """And how many more there are."""
    for number, end in ((MOST_NAMES, "has finished."), (MOST_NAMES + 1, "So 1 more.")):
        words = _describe_ranks(HERE, 5, dict.fromkeys(range(number), ENDED), {})
        assert words.count("has finished.") == MOST_NAMES
        assert words.endswith(end)


def test_a_lower_rank_that_gives_signs_in_the_same_call_looks_itself() -> None:
    """Its notice must be another than the one seen before: a rank that has died there gives no new one."""
    for notice, seen, expected in (
        (_notice(HERE, beat=2), _notice(HERE, beat=1), {}),
        (_notice(HERE), None, {}),
        (_notice(HERE), _notice(HERE), {0: _notice(HERE)}),
        (_notice(THERE), None, {0: _notice(THERE)}),
        (None, _notice(HERE), {0: None}),
        (ENDED, None, {0: ENDED}),
    ):
        board = SimpleNamespace(read=lambda rank, notice=notice: notice)
        rounds: Any = SimpleNamespace(_ranks=2, _rank=1, _board=board, _seen={0: seen})
        assert _Rounds._look(rounds, HERE) == expected
