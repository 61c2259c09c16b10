"""An error of another thread, kept until a caller can raise it."""

from collections.abc import Callable
from weakref import finalize


class UnraisedError:
    """Holds the newest error of a thread until somebody takes it, to raise it.

    Where nobody does, a warning is given when this object is freed or the process ends.

    Args:
        warn: gives that warning, of the message that the error was noted with. Must not refer to this object's owner.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.error: Exception | None = None
        self._messages: list[str] = []  # not the errors, whose tracebacks would keep this object alive
        finalize(self, _warn_of_each, self._messages, warn)

    def note(self, error: Exception, message: str) -> None:
        """Take note of an error. Called by the thread."""
        self.error = error
        self._messages.append(message)

    def take(self) -> Exception | None:
        """Return the error and forget it; None if there is none."""
        error, self.error = self.error, None
        self._messages.clear()
        return error


def _warn_of_each(messages: list[str], warn: Callable[[str], None]) -> None:
    for message in messages:
        warn(message)
