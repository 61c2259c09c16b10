"""Notices between ranks: what is read, and what is done where the store does not answer."""

import threading
from typing import Any

import pytest
import torch.distributed as dist

from megascale.utils import notice_board
from megascale.utils.notice_board import NoAnswer, NoticeBoard


def test_a_notice_is_read_until_it_is_withdrawn() -> None:
    """By every rank, the last one that was posted; boards of other names on the same store have their own."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    first, second, other = (NoticeBoard(store, name, rank) for name, rank in (("a", 0), ("a", 1), ("b", 0)))
    assert second.read(0) is None
    first.post({"beat": 1})
    first.post({"beat": 2, "site": ["here", ""]})
    assert second.read(0) == first.read(0) == {"beat": 2, "site": ["here", ""]}
    assert first.read(1) is None
    assert other.read(0) is None
    first.withdraw()
    assert second.read(0) is None


class _Store:
    """A store that answers when ``answers`` is set; ``error``: what it raises then. Counts its connections."""

    def __init__(self) -> None:
        self.answers, self.error, self.connections = threading.Event(), "", 0

    def clone(self) -> "_Store":
        """Connect."""
        self.connections += 1
        return self

    def set(self, key: str, value: str) -> None:
        """Answer."""
        assert self.answers.wait(20)
        if self.error:
            raise ValueError(self.error)


def test_a_store_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is asked while it does; its thread keeps no process alive, and one connection serves all."""
    store, threads = _Store(), list[Any]()
    board = NoticeBoard(store, "a", 0)
    monkeypatch.setattr(notice_board, "LIMIT_S", 0.02)
    with pytest.raises(NoAnswer, match=r"^no answer within 0\.02 s$"):
        board.post({})
    threads += [thread for thread in threading.enumerate() if thread.name == "megascale notices"]
    assert [thread.daemon for thread in threads] == [True]
    with pytest.raises(NoAnswer, match=r"^no answer to the last one after 0\.02 s and more$"):
        board.post({})
    store.answers.set()
    threads[0].join(20)
    monkeypatch.setattr(notice_board, "LIMIT_S", 20.0)
    board.post({})
    store.error = "connection reset"
    with pytest.raises(NoAnswer, match=r"^connection reset$"):
        board.post({})
    assert store.connections == 1
