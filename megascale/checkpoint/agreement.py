"""Makes all ranks end a phase of a save or load alike: all succeed, or all raise the same named error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

from torch.distributed import ProcessGroup

from megascale.errors import CheckpointError, MegascaleError
from megascale.utils.collectives import gather_or_raise

T = TypeVar("T")


@contextmanager
def raise_on_all_ranks(doing: str, group: ProcessGroup | None) -> Iterator[None]:
    """Run a block without communication; then raise on every rank of ``group`` if it raised on any.

    Errors that are not megascale's become CheckpointError ("cannot ``doing``: ...").
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = _named(raised, doing)
    _exchange(doing, None, error, group)


def gathered(doing: str, make: Callable[[], T], group: ProcessGroup | None) -> list[T]:
    """Return what ``make`` returns on each rank, or raise as :func:`together` does: in one exchange for both."""
    value: T | None = None
    error: Exception | None = None
    try:
        value = make()
    except Exception as raised:
        error = _named(raised, doing)
    return _exchange(doing, cast(T, value), error, group)


def _named(error: Exception, doing: str) -> MegascaleError:
    if isinstance(error, MegascaleError):
        return error
    named = CheckpointError(f"cannot {doing}: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named


def _exchange(doing: str, value: T, error: Exception | None, group: ProcessGroup | None) -> list[T]:
    try:
        return gather_or_raise(value, error, group)
    except MegascaleError:
        raise
    except Exception as lost:
        # The group itself failed: a rank has died, or has left the training loop.
        raise CheckpointError(f"cannot {doing}: lost contact with another rank: {lost}") from (error or lost)


@contextmanager
def named(doing: str) -> Iterator[None]:
    """Turn any other error, such as a broken connection inside a collective, into a CheckpointError."""
    try:
        yield
    except MegascaleError:
        raise
    except Exception as error:
        raise CheckpointError(f"cannot {doing}: {type(error).__name__}: {error}") from error
