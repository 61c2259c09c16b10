"""Makes all ranks end a phase of a save or load alike: all succeed, or all raise the same named error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch.distributed import ProcessGroup

from megascale.errors import CheckpointError, MegascaleError
from megascale.utils.collectives import gather_or_raise

T = TypeVar("T")


@contextmanager
def raise_on_all_ranks(doing: str, group: ProcessGroup | None) -> Iterator[list[Any]]:
    """Run a block without communication; then raise on every rank of ``group`` if it raised on any.

    Errors that are not megascale's become CheckpointError ("cannot ``doing``: ..."). The block is given a list, which
    afterwards holds what the block has put into it, of each rank.
    """
    error: MegascaleError | None = None
    shared: list[Any] = []
    try:
        with named(doing):
            yield shared
    except MegascaleError as raised:
        error = raised
    try:
        shared[:] = gather_or_raise([*shared], error, group)
    except MegascaleError:
        raise
    except Exception as lost:
        # The group itself failed: a rank has died, or has left the training loop.
        raise CheckpointError(
            f"cannot {doing}: lost contact with another rank: {lost}; every rank makes this call"
        ) from (error or lost)


def gathered(doing: str, make: Callable[[], T], group: ProcessGroup | None) -> list[T]:
    """Return what ``make`` returns on each rank, or raise as :func:`raise_on_all_ranks` does, in one exchange."""
    with raise_on_all_ranks(doing, group) as values:
        values.append(make())
    return [value for [value] in values]


@contextmanager
def named(doing: str) -> Iterator[None]:
    """Turn any other error, such as a broken connection inside a collective, into a CheckpointError."""
    try:
        yield
    except MegascaleError:
        raise
    except Exception as error:
        raise CheckpointError(f"cannot {doing}: {type(error).__name__}: {error}") from error
