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
    """A unit with its param groups' options and its local gradients: this rank, or for ``counted`` another, has one.

    Attributes:
        options: one dict for each of ``unit.groups``.
        calls: of kernels, which update it; None: the optimizer's own ``step()`` is to run.
    """

    options: list[dict[str, Any]]
    unit: UpdateUnit
    grads: TensorList
    calls: "KernelCalls | None" = None

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


Kernel = Callable[..., Tensor]
"""Takes operands, hyperparameters, the decision, and hyperparameters of further param groups, where it can; see
:meth:`megascale.kernels.ReferenceBackend.kind_of`. Returns overflow flags, one per parameter.
"""


class KernelCall(NamedTuple):
    """One call of a kernel, which updates some of a unit's main params.

    Attributes:
        part: of the unit's main params, those that it updates.
        names: of their state.
        kernel: must not hold the unit, in which this call is kept, nor its KernelUpdate.
        operands: have gradients in an update only.
        may_overflow: these main params, if a model param of one is fp16; else none, and no flag need be counted.
        hypers: hyperparameters of each param group.
    """

    part: slice
    names: list[str]
    kernel: Kernel
    operands: Operands
    may_overflow: list[MainParam]
    hypers: Sequence[Hyper] = ()


class KernelCalls(NamedTuple):
    """What updates a unit, from step to step.

    Attributes:
        calls: one after the other through the unit's main params.
        counts: fp32, 1-D: the step counts of parameters that are trained, and whose elements other ranks own.
        storages: of main params and state, by address.
        values: of the options, of which hyperparameters were made.
    """

    calls: list[KernelCall]
    counts: list[Tensor]
    storages: dict[int, torch.UntypedStorage]
    values: Sequence[Any] = ()

    def run(self, grads: TensorList, decision: Decision) -> list[OverflowFlags]:
        """Update a unit where the step lands. Any thread may call it, one at a time."""
        overflow_flags = []
        parts = [grads] if len(self.calls) == 1 else grads.cut([call.part for call in self.calls])
        for call, own in zip(self.calls, parts, strict=True):
            if own.num_there:
                operands, (hyper, *others) = call.operands, call.hypers
                operands.grad = own
                try:
                    flags = call.kernel(operands, hyper, decision.to(operands.main[0].device), *others)
                finally:
                    operands.grad = ()  # operands are kept, and must not keep gradients that the caller drops
                if call.may_overflow:
                    overflow_flags.append(OverflowFlags(call.may_overflow, flags))
        if self.counts:
            landed = 1 - decision.to(self.counts[0].device).found_inf
            torch._foreach_add_(self.counts, [landed] * len(self.counts))
        return overflow_flags


MarkWritten = Callable[[UpdateUnit], None]
"""Takes a unit whose model params were written."""
