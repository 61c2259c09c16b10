"""Progress bars on large files: on a terminal, where tqdm is installed, in the thread that asked for one.

Whoever reads or writes calls `advance`, which does nothing where no bar is shown.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from megascale.utils.nests import tensors_in

LEAST_BYTES = 1 << 28
"""Below it no bar is shown: the work takes about a second."""

_bar: ContextVar[Any] = ContextVar("bar", default=None)


@contextmanager
def progress_bar(doing: str, total: int, *, wanted: bool) -> Iterator[None]:
    """Show a bar on stderr during the block if ``wanted``, and if stderr is a terminal; it is cleared at the end.

    Args:
        doing: a word in front of the bar.
        total: bytes to come, which `advance` counts. Fewer than `LEAST_BYTES` show no bar.
        wanted: commonly the caller's argument, and whether this is the first rank.
    """
    bar = _new_bar(doing, total) if wanted and total >= LEAST_BYTES and sys.stderr.isatty() else None
    if bar is None:
        yield
        return
    token = _bar.set(bar)
    try:
        yield
    finally:
        _bar.reset(token)
        bar.close()


def advance(count: int) -> None:
    """Tell this thread's bar, if there is one, of ``count`` more bytes."""
    bar = _bar.get()
    if bar is not None:
        bar.update(count)


def torch_save(content: Any, path: str | os.PathLike[str], *, wanted: bool) -> None:
    """``torch.save(content, path)`` with a bar, as for :func:`progress_bar`."""
    with progress_bar("writing", sum(tensor.nbytes for tensor in tensors_in(content)), wanted=wanted):
        if _bar.get() is None:
            torch.save(content, path)
        else:
            from tqdm.utils import CallbackIOWrapper

            with open(path, "wb") as stream:
                torch.save(content, CallbackIOWrapper(advance, stream, "write"))


def _new_bar(doing: str, total: int) -> Any:
    """Return tqdm's bar, None where it is not installed."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return None
    return tqdm(
        total=total, desc=doing, unit="B", unit_scale=True, unit_divisor=1024, leave=False, dynamic_ncols=True,
        file=sys.stderr,
    )  # fmt: skip
