"""Named spans of a step for torch.profiler."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function

is_profiling = _profiler_enabled
"""Returns whether a profiler runs."""

_UNSEEN = nullcontext()


def span(name: str) -> AbstractContextManager[Any]:
    """Return a context that a profiler sees as ``megascale.<name>``; without a profiler it costs almost nothing."""
    return record_function(f"megascale.{name}") if is_profiling() else _UNSEEN
