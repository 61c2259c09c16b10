"""Waits for other ranks: what is waited for, and what is raised where the backend fails, or never answers."""

import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascale.utils.collectives import Pending, _joined


@dataclass
class _Message:
    """A message to or from ``peer``, as a backend's Work: it fails where it is started, where it is waited for, or not.

    ``log`` gets the name of each that has been waited for.
    """

    name: str
    peer: int
    log: list[str]
    fails: str | None = None

    def start(self) -> Any:
        if self.fails == "start":
            raise RuntimeError(f"no start of {self.name}")
        return self

    def wait(self) -> bool:
        self.log.append(self.name)
        if self.fails == "wait":
            raise RuntimeError(f"no end of {self.name}")
        return True


def _pending(log: list[str], **fails: str) -> Pending:
    """Return messages a and b of rank 1, c and d of rank 2."""
    messages = [_Message(name, peer, log, fails.get(name)) for name, peer in (("a", 1), ("b", 1), ("c", 2), ("d", 2))]
    return Pending([(one.peer, one.start) for one in messages], [torch.ones(2)])


def test_all_messages_are_waited_for_once() -> None:
    """A second wait() has nothing to wait for; a start that returns None needed no message."""
    log: list[str] = []
    pending = _pending(log)
    pending.wait()
    pending.wait()
    assert log == ["a", "b", "c", "d"]
    Pending([(1, lambda: None), (None, lambda: None)]).wait()


@pytest.mark.parametrize(
    ("fails", "waited"),
    [
        ({"a": "wait"}, ["a", "c", "d"]),
        ({"a": "start"}, ["c", "d"]),
        ({"b": "wait"}, ["a", "b", "c", "d"]),
        ({"d": "start"}, ["a", "b"]),
    ],
)
def test_a_lost_rank_is_raised_after_the_others_messages(fails: dict[str, str], waited: list[str]) -> None:
    """Its further messages would never end; what the others sent is complete. A failed message is never taken for one
    that has arrived: the numbers in its memory are anything.
    """
    log: list[str] = []
    pending = _pending(log, **fails)
    [(name, where)] = fails.items()
    with pytest.raises(RuntimeError, match=f"no {'start' if where == 'start' else 'end'} of {name}"):
        pending.wait()
    assert log == waited


def test_of_several_errors_the_first_is_raised() -> None:
    """The others may follow from it."""
    log: list[str] = []
    with pytest.raises(RuntimeError, match="no start of c"):
        _pending(log, a="wait", c="start").wait()
    assert log == ["a"]


def test_a_new_group_is_what_its_maker_returns_or_raises() -> None:
    """In a thread, whose error is the caller's."""
    group: Any = object()
    assert _joined(lambda: group, timedelta(seconds=60)) is group
    with pytest.raises(ZeroDivisionError):
        _joined(lambda: 1 // 0, timedelta(seconds=60))  # type: ignore[arg-type,return-value]


def test_a_group_that_others_do_not_join_is_given_up() -> None:
    """After the group's timeout, which the error names. The thread that still waits keeps no process alive."""
    end, waiting = threading.Event(), list[threading.Thread]()

    def make() -> Any:
        waiting.append(threading.current_thread())
        end.wait()

    try:
        with pytest.raises(dist.DistNetworkError, match="Timed out waiting 20ms for the other ranks to join"):
            _joined(make, timedelta(milliseconds=20))
        assert [thread.daemon for thread in waiting] == [True]
    finally:
        end.set()
