"""RankWatch: names the rank for which the others wait, and the call that it has not made."""

import contextlib
import itertools
import logging
import os
import re
import socket
import threading
import time
from types import TracebackType
from typing import Any

import torch.distributed as dist

from megascale.errors import MOST_NAMES, RankError
from megascale.utils import call_site, validate
from megascale.utils.call_site import CallSite
from megascale.utils.collectives import is_alone_in_world
from megascale.utils.notice_board import NoAnswer, Notice, NoticeBoard
from megascale.utils.spelling import names_arguments

logger = logging.getLogger(__name__)
GRACE_S = 1.0
"""How long a rank that has lost contact waits for the last words of others, in seconds."""
READ_LIMIT_S = 10.0
"""How long one look at the other ranks' notices may take, in seconds."""
_BACKEND_FAILURE = re.compile(
    r"gloo/transport|Connection (closed|reset)|Timed out waiting \d+ms|lost contact with another rank"
)
_boards = itertools.count()


@names_arguments
class RankWatch:
    """Watches the ranks of torch.distributed while its ``with`` block runs, and says for which of them the others wait.

    If a rank stands still for longer than ``patience`` inside a call that waits for other ranks, it logs a warning with
    the ranks that have not made this call, and where these are in their program; or that they give no sign. If the
    backend then raises an error in the block, it becomes a :class:`megascale.errors.RankError` that says the same.

    While steps are clean this costs no message and no wait: a thread wakes four times in ``patience`` and compares the
    number of collectives that this rank has begun, which torch counts. Without torch.distributed, or on one rank,
    nothing is watched. Every rank enters the block, and the same number of times.

    Args:
        patience: seconds. Longer than what one rank may do alone, such as an evaluation, or it is named, too.
    """

    def __init__(self, patience: float = 60.0) -> None:
        self._patience = validate.positive("patience", patience)
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def __enter__(self) -> "RankWatch":
        if not is_alone_in_world():
            store = dist.distributed_c10d._get_default_store()
            self._ended.clear()
            self._rounds = _Rounds(store, threading.get_ident(), self._patience)
            self._thread = threading.Thread(target=self._watch, name="megascale rank watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        rounds = self._rounds
        del self._rounds
        if error is None:
            rounds.say_last_words("has finished")
            return
        site = call_site.of_error(error)
        first_line = str(error).partition("\n")[0]
        if not is_loss(error):
            rounds.say_last_words(f"has ended with {type(error).__name__}: {first_line} ({site})")
        else:
            told = rounds.after_loss(site)
            raise RankError(
                f"lost contact with another rank in {site}. {told} The backend says: {first_line}"
            ) from error

    def _watch(self) -> None:
        while not self._ended.wait(self._patience / 4):
            self._rounds.take()


def is_loss(error: BaseException) -> bool:
    """Return whether ``error``, or one that caused it, is the backend's, of a rank that cannot be reached."""
    causes: BaseException | None = error
    while causes is not None:
        if isinstance(causes, dist.DistError) or (
            isinstance(causes, RuntimeError) and _BACKEND_FAILURE.search(str(causes))
        ):
            return True
        causes = causes.__cause__
    return False


class _Rounds:
    """What the watching thread remembers from one round to the next."""

    def __init__(self, store: Any, thread: int, patience: float) -> None:
        self._board = NoticeBoard(store, f"rank_watch/{next(_boards)}", dist.get_rank())
        self._watched = thread
        self._patience = patience
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._state: tuple[int, CallSite | None] = (-1, None)
        self._since = 0.0
        self._beat = 0
        self._is_posted = False
        self._seen: dict[int, Notice | None] = {}
        self._told = ""

    def take(self) -> None:
        """Compare this rank with the round before; if it stands still, say so, and look who does not."""
        state, now = (calls_begun(), call_site.of_thread(self._watched)), time.monotonic()
        if state != self._state:
            self._state, self._since, self._seen, self._told = state, now, {}, ""
            self._withdraw()
            return
        still = now - self._since
        calls, site = state
        if site is None or still < self._patience / 2:
            return
        try:
            self._beat += 1
            self._is_posted = True
            self._board.post({"beat": self._beat, "calls": calls, "site": site, "process": _process()})
            if not site.waits:
                return
            before, self._seen = self._seen, self._look(site)
        except NoAnswer as error:
            told = f"The store of the process group does not answer: its host has ended or is cut off ({error})."
        else:
            told = _describe_ranks(site, calls, self._seen, before)
        if still >= self._patience and told and told != self._told:
            self._told = told
            logger.warning("rank %d has waited for %.0f s in %s. %s", self._rank, still, site, told)

    def say_last_words(self, words: str) -> None:
        """Let other ranks know how this one has left."""
        self._post_if_heard({"words": words})

    def after_loss(self, site: CallSite | None) -> str:
        """Let other ranks know where this one has lost contact; return what is known of them."""
        self._post_if_heard({"lost": True, "site": site})
        time.sleep(GRACE_S)
        try:
            return _told_after_loss(site, self._look(None))
        except NoAnswer:
            return "The store of the process group does not answer either: its host has ended or is cut off."

    def _withdraw(self) -> None:
        if self._is_posted:
            with contextlib.suppress(NoAnswer):  # then at the next round
                self._board.withdraw()
                self._is_posted = False

    def _post_if_heard(self, notice: Notice) -> None:
        try:
            self._board.post(notice | {"process": _process()})
        except NoAnswer:
            logger.debug("the store of the process group does not take the last notice of rank %d", self._rank)

    def _look(self, site: CallSite | None) -> dict[int, Notice | None]:
        """Return other ranks' notices; none if a lower rank waits in the same call ``site``, and so looks itself."""
        end = time.monotonic() + READ_LIMIT_S
        seen: dict[int, Notice | None] = {}
        for rank in range(self._ranks):
            if rank == self._rank or time.monotonic() > end:
                continue
            notice = seen[rank] = self._board.read(rank)
            is_new = notice is not None and notice != self._seen.get(rank)
            if site is not None and rank < self._rank and is_new and _site(notice) == site:
                return {}
        return seen


def calls_begun() -> int:
    """Return how many collectives and messages this rank has begun, in all groups, as torch counts them."""
    total = 0
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    for group in groups:
        try:
            total += group._get_sequence_number_for_group()
        except RuntimeError:  # a backend that does not count, or one that has not begun
            continue
    return total


def _process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _site(notice: Notice | None) -> CallSite | None:
    return CallSite(*notice["site"]) if notice is not None and notice.get("site") else None


def _describe_ranks(
    site: CallSite, calls: int, seen: dict[int, Notice | None], before: dict[int, Notice | None]
) -> str:
    """Return which ranks have not made the call ``site``, one sentence each; "" if all wait in it.

    Args:
        site: where this rank waits.
        calls: how many collectives it has begun.
        seen: the other ranks' notices; empty if another rank tells of them.
        before: the same, one round earlier. Who has posted nothing since then gives no sign.
    """
    absent = []
    for rank, notice in seen.items():
        if notice is not None and "words" in notice:
            absent.append(f"Rank {rank} {notice['words']}.")
        elif notice is None or notice == before.get(rank):
            absent.append(f"Rank {rank} gives no sign: its process is dead or stopped, or its host is cut off.")
        elif "lost" in notice:
            absent.append(f"Rank {rank} has lost contact in {_site(notice)} ({notice['process']}).")
        elif _site(notice) != site:
            absent.append(f"Rank {rank} has not made this call; it is in {_site(notice)} ({notice['process']}).")
        elif notice["calls"] < calls:
            absent.append(
                f"Rank {rank} is here, too, but {calls - notice['calls']} collectives behind ({notice['process']})."
            )
    return _few(absent)


def _told_after_loss(site: CallSite | None, seen: dict[int, Notice | None]) -> str:
    """Return which ranks have caused the loss of contact in ``site``, from the other ranks' notices."""
    ended, elsewhere, silent = [], [], []
    for rank, notice in seen.items():
        if notice is None:
            silent.append(f"Rank {rank} has left no word: its process is dead or stopped, or its host is cut off.")
        elif "words" in notice:
            ended.append(f"Rank {rank} {notice['words']}.")
        elif _site(notice) != site:
            doing = "has lost contact" if "lost" in notice else "is"
            elsewhere.append(f"Rank {rank} {doing} in {_site(notice)} ({notice['process']}).")
    return _few(ended or elsewhere + silent) or "All ranks are in this call."


def _few(sentences: list[str]) -> str:
    rest = len(sentences) - MOST_NAMES
    return " ".join(sentences[:MOST_NAMES]) + (f" So {rest} more." if rest > 0 else "")
