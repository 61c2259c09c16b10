"""RankWatch names the rank for which others wait, and the call that it has not made."""

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascale import rank_watch
from megascale.errors import RankError
from megascale.rank_watch import RankWatch, _Rounds, calls_begun, is_loss
from megascale.utils.collectives import all_reduce_sum_, timeout_of, twin_group
from megascale.utils.notice_board import NoticeBoard
from tests.pool import RankPool

PATIENCE_S = 0.5


@pytest.mark.timeout(10)
def test_only_the_backends_errors_are_losses() -> None:
    """Also where one is the cause of another error, and not where an error has other causes."""
    lost = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    caused, other = KeyError("a"), ValueError("b")
    caused.__cause__ = ValueError("c")
    caused.__cause__.__cause__ = lost
    other.__cause__ = KeyError("d")
    assert is_loss(lost)
    assert is_loss(caused)
    assert not is_loss(other)
    assert not is_loss(RuntimeError("shapes differ"))


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _watched(
    run: Callable[[RankWatch], object], patience: float = PATIENCE_S, tells: logging.Handler | None = None
) -> tuple[list[str], str]:
    """Run under a RankWatch; return its warnings, and the error that ended the block, by name and text. Each warning is
    given to ``tells``, too.
    """
    handler = _Lines()
    logger = logging.getLogger("megascale.rank_watch")
    logger.addHandler(handler)
    if tells is not None:
        logger.addHandler(tells)
    try:
        with RankWatch(patience) as watch:
            run(watch)
    except Exception as error:
        return handler.lines, f"{type(error).__name__}: {error}"
    finally:
        logger.removeHandler(handler)
        if tells is not None:
            logger.removeHandler(tells)
    return handler.lines, ""


def _threads_of_a_watch() -> list[bool]:
    watch, found = RankWatch(60.0), []
    for _ in range(2):
        with watch:
            for thread in threading.enumerate():
                if thread.name == "megascale rank watch":
                    thread.join(0.05)
                    found += [thread.daemon, thread.is_alive()]
    return found


def test_a_watch_keeps_no_process_alive(ranks: RankPool) -> None:
    """Its thread is a daemon: a rank whose main thread is gone without leaving the block must end. One that enters the
    block again is watched again, and one that is alone is not.
    """
    assert ranks.run(2, _threads_of_a_watch) == [[True, True] * 2] * 2
    assert ranks.run(1, _threads_of_a_watch) == [[]]


def _rounds_of(store: Any, patience: float) -> Any:
    """Return the rounds of this thread, beside a rank that gives no sign, and the warnings to come."""
    rounds = _Rounds(store, threading.get_ident(), patience)
    rounds._ranks = 2
    handler = _Lines()
    logging.getLogger("megascale.rank_watch").addHandler(handler)
    return rounds, handler.lines


def _patience_of_a_round() -> list[Any]:
    rounds, lines = _rounds_of(dist.distributed_c10d._get_default_store(), 100.0)
    seen: list[Any] = []
    for waited in (0, 0, 49, 51, 99, 101, 102):
        rounds._since = time.monotonic() - waited
        rounds.take()
        notice = rounds._board.read(0)
        seen.append((notice is not None, len(lines)))
    rounds.take()
    seen.append(rounds._board.read(0))
    rounds._board.post({"by": "another"})
    rounds.take()
    return [*seen, rounds._board.read(0), notice["calls"] == calls_begun(), lines]


def test_a_rank_tells_of_itself_before_it_warns(ranks: RankPool) -> None:
    """After half its patience others can read where it stands, after all of it it says who is missing, once. When it
    goes on it takes its notice back, once.
    """
    [[*seen, taken_back, left_alone, same_calls, lines]] = ranks.run(1, _patience_of_a_round)
    assert seen == [(False, 0), (False, 0), (False, 0), (True, 0), (True, 0), (True, 1), (True, 1)]
    assert (taken_back, left_alone, same_calls) == (None, {"by": "another"}, True)
    assert re.match(r"rank 0 has waited for 101 s in _Rounds.take, called at .*\. Rank 1 gives no sign: ", lines[0])


class _Gone:
    """A store whose host has ended."""

    def clone(self) -> Any:
        raise ConnectionError("no such host")


def _without_a_store() -> list[str]:
    rounds, lines = _rounds_of(_Gone(), 0.0)
    for _ in range(3):
        rounds.take()
    rounds.say_last_words("has finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_watch, "GRACE_S", 0.0)
        return [*lines, rounds.after_loss(None)]


def test_a_store_that_is_gone_is_told_of(ranks: RankPool) -> None:
    """Once while this rank waits, and in the error that ends it. It ends no rank by itself."""
    [[line, after_loss]] = ranks.run(1, _without_a_store)
    told = "The store of the process group does not answer: its host has ended or is cut off (no such host)."
    assert line.endswith(told)
    assert after_loss.startswith("The store of the process group does not answer either: its host has ended")


def _leaves(error: Exception | None) -> Any:
    try:
        with RankWatch(60.0) as watch:
            if dist.get_rank() == 1:
                if error is not None:
                    raise error
                return os.getpid()
            end = time.monotonic() + 30
            while (notice := watch._rounds._board.read(1)) is None and time.monotonic() < end:
                time.sleep(0.01)
    except ValueError:
        return os.getpid()
    return notice


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (None, "has finished"),
        (
            ValueError("no batch 17\nof 20"),
            r"has ended with ValueError: no batch 17 \(test_rank_watch.py:\d+ in _leaves: raise error\)",
        ),
    ],
)
def test_a_rank_that_leaves_says_how(ranks: RankPool, error: Exception | None, words: str) -> None:
    """Where the others can read it for as long as they wait."""
    notice, pid = ranks.run(2, _leaves, error)
    assert re.fullmatch(words, notice["words"])
    assert notice["process"].startswith(f"process {pid} on ")


TOLD = "told of the late rank"


class _Tells(logging.Handler):
    """Lets the late rank go on once it has been told of: however busy the machine is, it is late for long enough."""

    def emit(self, record: logging.LogRecord) -> None:
        if "Rank 1 has not made this call" in record.getMessage():
            dist.distributed_c10d._get_default_store().set(TOLD, "")


def _load_batch() -> None:
    store = dist.distributed_c10d._get_default_store()
    while not store.check([TOLD]):
        time.sleep(PATIENCE_S / 10)
    store.delete_key(TOLD)


def _late_rank() -> Any:
    left: list[Any] = []

    def run(watch: RankWatch) -> None:
        all_reduce_sum_(torch.ones(2), dist.group.WORLD)
        if dist.get_rank() == 1:
            _load_batch()
        all_reduce_sum_(torch.ones(2), dist.group.WORLD)
        _all_at_work(PATIENCE_S)
        left.extend(watch._rounds._board.read(rank) for rank in range(2))
        all_reduce_sum_(torch.ones(2), dist.group.WORLD)  # neither leaves before both have read

    return _watched(run, tells=_Tells()), left


def _all_at_work(seconds: float) -> None:
    """Sum up again and again, until rank 0 finds that the time is over."""
    end = time.monotonic() + seconds
    going = torch.ones(1)
    while going.item():
        time.sleep(seconds / 50)
        going.fill_(float(dist.get_rank() == 0 and time.monotonic() < end))
        all_reduce_sum_(going, dist.group.WORLD)


def test_a_late_rank_is_named_with_its_place(ranks: RankPool) -> None:
    """The rank that waits says who has not made its call, and what that rank does, each change of that once; the late
    one says nothing. Once both are at work again, their notices are gone.
    """
    ((first, error), left), (late, _) = ranks.run(2, _late_rank)
    assert (error, late, left) == ("", ([], ""), [None, None])
    told = [re.sub(r"waited for \d+ s", "", line) for line in first]
    assert all(one != other for one, other in pairwise(told))
    line = first[-1]  # on a busy machine one before it may say that rank 1 gives no sign
    assert line.startswith("rank 0 has waited for ")
    assert "all_reduce_sum_, called at test_rank_watch.py:" in line
    assert "Rank 1 has not made this call; it is in test_rank_watch.py:" in line
    assert re.search(r"in _load_batch: .* \(process ", line)


def _late_for_a_message() -> Any:
    def run(watch: RankWatch) -> None:
        if dist.get_rank() == 1:
            _load_batch()
        work = dist.all_reduce(torch.ones(2), async_op=True)
        assert work is not None
        work.wait()

    return _watched(run, tells=_Tells())


@pytest.mark.slow
def test_a_wait_that_no_python_frame_shows(ranks: RankPool) -> None:
    """A line that calls a method of torch's own, such as wait() or item(), waits too."""
    (first, _), _ = ranks.run(2, _late_for_a_message)
    assert "in run: work.wait(). Rank 1 has not made this call; it is in " in first[-1]


def _clean_steps(patience: float) -> Any:
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()  # the other rank may still post the last words of the test before
    keys = [store.num_keys()]

    def run(watch: RankWatch) -> None:
        dist.barrier()
        _all_at_work(4 * patience)
        keys.append(store.num_keys())
        dist.barrier()

    return _watched(run, patience), keys[1] - keys[0]


def test_clean_steps_send_nothing(ranks: RankPool) -> None:
    """No message to the store and no warning in many times the patience, while collectives go on."""
    assert ranks.run(2, _clean_steps, 0.2) == [(([], ""), 0)] * 2


def _failing_rank(kind: str) -> Any:
    def run(watch: RankWatch) -> None:
        all_reduce_sum_(torch.ones(2), dist.group.WORLD)
        if dist.get_rank() == 1:
            if kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no batch 17")
        all_reduce_sum_(torch.ones(2), dist.group.WORLD)

    found = _watched(run)
    if dist.get_rank() == 1:
        dist.destroy_process_group()
    board = NoticeBoard(dist.distributed_c10d._get_default_store(), "rank_watch/0", 0)
    return *found, board.read(0) if dist.get_rank() == 0 else None


LEFT = {
    "raises": r"Rank 1 has ended with ValueError: no batch 17 \(test_rank_watch.py:\d+ in run: raise ValueError",
    "killed": r"Rank 1 has left no word: its process is dead or stopped, or its host is cut off\.",
}


@pytest.mark.parametrize("kind", [pytest.param("raises", marks=pytest.mark.slow), "killed"])
def test_loss_of_contact_names_its_cause(ranks: RankPool, kind: str) -> None:
    """The backend speaks of a closed connection; the error says whose, and why where that rank could tell."""
    with ranks.spawn(2, _failing_rank, kind) as fresh:
        [survivor, _] = fresh.outcomes(timeout=30, grace=20)
    assert survivor.value is not None, survivor.error
    _, error, notice = survivor.value
    assert (notice["lost"], notice["site"][2]) == (True, "all_reduce_sum_")
    assert error.startswith("RankError: lost contact with another rank in all_reduce_sum_, called at ")

    assert re.search(LEFT[kind], error), error
    assert "The backend says: " in error


def test_alone_nothing_is_watched() -> None:
    """Without torch.distributed the block is only a block, and errors pass through."""
    with pytest.raises(RuntimeError, match="Connection closed"), RankWatch():
        raise RuntimeError("Connection closed by peer")
    assert issubclass(RankError, RuntimeError)


def _timeouts() -> Any:
    group = dist.new_group(timeout=timedelta(seconds=71))
    twin = twin_group(group)
    assert twin is not None
    return timeout_of(group), timeout_of(twin)


def test_background_saves_wait_as_long_as_training(ranks: RankPool) -> None:
    """The group of the thread that saves has the timeout of training's, not torch's half an hour."""
    assert ranks.run(2, _timeouts) == [(timedelta(seconds=71),) * 2] * 2


def _joins_alone() -> Any:
    group = dist.new_group(timeout=timedelta(seconds=3))

    def run(watch: RankWatch) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        twin_group(group)

    return _watched(run)


@pytest.mark.slow
def test_rank_that_dies_while_a_group_is_made(ranks: RankPool) -> None:
    """The others know after the group's timeout, where torch waits for many of them."""
    with ranks.spawn(2, _joins_alone) as fresh:
        [survivor, _] = fresh.outcomes(timeout=20, grace=20)
    assert survivor.value is not None, survivor.error
    _, error = survivor.value
    assert "in twin_group" in error
    assert "Rank 1 has left no word" in error
    assert "Timed out waiting 3000ms for the other ranks to join a new process group" in error
