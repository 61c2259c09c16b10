"""Short notices between ranks through torch.distributed's store, outside all collectives.

A store's connection cannot be told to give up: a read from a host that is cut off lasts for minutes. So each exchange
runs in a thread of its own, for which its caller waits a limited time. While one hangs there is no other.
"""

import json
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")
Notice = dict[str, Any]
LIMIT_S = 5.0
"""How long a caller waits for the store, in seconds."""


class NoAnswer(Exception):
    """The store does not answer: the process that holds it has ended, or cannot be reached."""


class NoticeBoard:
    """One notice of each rank, which every rank can read.

    Args:
        store: the process group's `torch.distributed.Store`. Its own connection is not used: whoever waits in it keeps
            others out.
        name: distinguishes boards on one store.
        rank: this rank's number.
    """

    def __init__(self, store: Any, name: str, rank: int) -> None:
        self._store = store
        self._connection: Any = None
        self._name = name
        self._rank = rank
        self._last: Future[Any] = Future()
        self._last.set_result(None)

    def post(self, notice: Notice) -> None:
        """Set this rank's notice, a dict that JSON can hold. Raises NoAnswer."""
        self._within_limit(lambda store: store.set(self._key(self._rank), json.dumps(notice)))

    def read(self, rank: int) -> Notice | None:
        """Return the notice of ``rank``; None if there is none. Raises NoAnswer."""
        key = self._key(rank)
        # get() waits for a key that is missing.
        text = self._within_limit(lambda store: store.get(key) if store.check([key]) else None)
        return (json.loads(text) or None) if text else None

    def withdraw(self) -> None:
        """Take this rank's notice back. Raises NoAnswer."""
        self.post({})  # a FileStore does not forget a key for good

    def _key(self, rank: int) -> str:
        return f"megascale/{self._name}/{rank}"

    def _within_limit(self, exchange: Callable[[Any], T]) -> T:
        if not self._last.done():
            raise NoAnswer(f"no answer to the last one after {LIMIT_S:g} s and more")
        future: Future[T] = Future()

        def run() -> None:
            try:
                if self._connection is None:
                    self._connection = self._store.clone()
                future.set_result(exchange(self._connection))
            except Exception as error:  # whatever the store raises
                future.set_exception(error)

        try:
            self._last = future
            Thread(target=run, name="megascale notices", daemon=True).start()
            return future.result(LIMIT_S)
        except Exception as error:  # the store's, or TimeoutError
            raise NoAnswer(str(error) or f"no answer within {LIMIT_S:g} s") from error
