"""Waits for other ranks: what is waited for, and what is raised where the backend fails, or never answers."""

import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megascale.utils.collectives import Pending


@dataclass
class _Message:
    """A message, as a backend's Work. It fails if ``fails``, else arrives ``after`` an event; gloo tells of it once.

    ``log`` gets its name each time that somebody waits for it.
    """

    name: str
    log: list[str]
    fails: bool = False
    after: threading.Event | None = None

    def wait(self) -> bool:
        self.log.append(self.name)
        if self.fails:
            raise RuntimeError(f"no end of {self.name}")
        assert self.after is None or self.after.wait(60)
        return True


def _pending(*messages: Any) -> Pending:
    return Pending(messages, [torch.ones(2)])


def test_all_messages_are_waited_for_once() -> None:
    """A second wait() has nothing to wait for; None needed no message."""
    log: list[str] = []
    pending = _pending(_Message("a", log), None, _Message("b", log))
    pending.wait()
    pending.wait()
    assert log == ["a", "b"]


def test_a_message_that_failed_never_counts_as_arrived() -> None:
    """The numbers in its memory are anything: who waits again is told again."""
    log: list[str] = []
    pending = _pending(_Message("a", log), _Message("b", log, fails=True), _Message("c", log))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no end of b"):
            pending.wait()
    assert log == ["a", "b", "b"]


def test_two_threads_wait_for_the_same_messages() -> None:
    """Modules may run in several threads; the backend tells of each message to one of them."""
    log, arrives = list[str](), threading.Event()
    pending = _pending(_Message("a", log, after=arrives))
    both = [threading.Thread(target=pending.wait, daemon=True) for _ in range(2)]
    for thread in both:
        thread.start()
    arrives.set()
    for thread in both:
        thread.join(60)
    assert not any(thread.is_alive() for thread in both)
    assert log == ["a"]
