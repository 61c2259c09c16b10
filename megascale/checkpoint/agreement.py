"""Makes all ranks end a phase of a save or load alike: all succeed, or all raise the same named error."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import ProcessGroup

from megascale.errors import CheckpointError, MegascaleError
from megascale.utils.collectives import raise_together


@contextmanager
def together(doing: str, group: ProcessGroup | None) -> Iterator[None]:
    """Run a block without communication; then raise on every rank of ``group`` if it raised on any.

    Errors that are not megascale's become CheckpointError ("cannot ``doing``: ...").
    """
    error: Exception | None = None
    try:
        yield
    except MegascaleError as named:
        error = named
    except Exception as other:
        error = CheckpointError(f"cannot {doing}: {type(other).__name__}: {other}")
        error.__cause__ = other
    try:
        raise_together(error, group)
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
