"""What tests can count instead of timing: host reads and dispatched operators."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

HOST_READ = torch.ops.aten._local_scalar_dense.default


class OperatorCounter(TorchDispatchMode):
    """Counts every operator that is dispatched while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count, then run."""
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))

    @property
    def host_reads(self) -> int:
        """How often a tensor's value went to the host (``item()``, ``bool()``, ``float()``)."""
        return self.counts[HOST_READ]
