"""Arguments and results of an update, for our kernels and for the optimizer's own ``step()``."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megascale.kernels import (
    Decision,
    Operands,
    TensorList,
)
from megascale.main_params.main_param import MainParam
from megascale.main_params.update_unit import UpdateUnit
from megascale.rules import Hyper


@dataclass(frozen=True)
class PendingUpdate:
    """A unit with its param group's options, and its local gradients, of which one is there, or is elsewhere.

    Attributes:
        call: of a kernel; None: the optimizer's own ``step()`` is to run.
    """

    options: dict[str, Any]
    unit: UpdateUnit
    grads: TensorList
    call: "KernelCall | None" = None

    @property
    def params(self) -> Sequence[MainParam]:
        """The main params that have a gradient."""
        return self.grads.beside(self.unit.params)

    def trained(self) -> Iterator[MainParam]:
        """Yield the main params that have a gradient, and the empty pieces of those that have one elsewhere."""
        return chain(self.params, self.unit.counted)

    def pairs(self) -> Iterator[tuple[MainParam, Tensor]]:
        """Yield the main params that have a gradient, each with it."""
        for param, grad in zip(self.unit.params, self.grads, strict=True):
            if grad is not None:
                yield param, grad


@dataclass(frozen=True)
class OverflowFlags:
    """Main params of one device and, shape [len(params)], whether the rounding of each into fp16 was not finite."""

    params: list[MainParam]
    overflowed: Tensor


Kernel = Callable[[Operands, Any, Decision], Tensor]
"""Takes operands, hyperparameters and the decision; returns overflow flags, one per parameter."""


class KernelCall(NamedTuple):
    """What updates a unit: one call of a kernel. It is kept from step to step.

    Attributes:
        kernel: must not refer to who keeps this call.
        values: of the options, of which ``hyper`` and ``names`` were made.
        hyper: hyperparameters.
        names: of the state.
        operands: have gradients in an update only.
        counts: fp32, 1-D: the step counts of parameters that are trained, and whose elements other ranks own.
        rounds_to_fp16: whether a main param may grow too large for its model param.
        storages: of main params and state.
        addresses: of these.
    """

    kernel: Kernel
    values: list[Any]
    hyper: Hyper
    names: list[str]
    operands: Operands
    counts: list[Tensor]
    rounds_to_fp16: bool
    storages: list[torch.UntypedStorage]
    addresses: list[int]

    def run(self, params: list[MainParam], grads: TensorList, decision: Decision) -> list[OverflowFlags]:
        """Update a unit, whose ``params`` these are, where the step lands. Any thread may call it, one at a time."""
        found = []
        if grads.num_there:
            operands = self.operands
            operands.grad = grads
            flags = self.kernel(operands, self.hyper, decision.to(operands.main[0].device))
            operands.grad = ()  # operands are kept, and must not keep gradients that the caller drops
            if self.rounds_to_fp16:  # else no flag is ever set, and nobody need count them
                found = [OverflowFlags(params, flags)]
        if self.counts:
            landed = 1 - decision.to(self.counts[0].device).found_inf
            torch._foreach_add_(self.counts, [landed] * len(self.counts))
        return found


MarkWritten = Callable[[UpdateUnit], None]
"""Takes a unit whose model params were written."""
