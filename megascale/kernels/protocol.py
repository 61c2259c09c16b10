"""Operands, the arguments of kernels: parallel lists of local tensors; and runs of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from megascale.kernels.compact_moments import is_scale

T = TypeVar("T")

FP16_OVERFLOW = 65520.0
"""The smallest fp32 magnitude that rounds to inf in fp16."""


@dataclass(eq=False)
class Operands:
    """The tensors of one update. All lists have one entry per parameter; entries of one parameter share a shape.

    A list may be a TensorList, too: what that has read is not read again.

    The same object may be passed again with another ``grad``, as long as no other tensor has moved.

    Attributes:
        model: model params, updated with the rounding of main. The same object as in ``main`` where there is no copy.
        main: main params, fp32 (or fp64 where the model is).
        grad: gradients, still scaled, in any floating dtype. Never written. None: the parameter has none, and
            nothing of it is written, its step count included; the others are updated. An empty gradient is one.
        state: optimizer state by torch's names (``exp_avg``, ``momentum_buffer``, ...), each a list like ``main``, in a
            dtype of its own: that of ``main``, or fp16 or bf16 beside fp32. The arithmetic is in the dtype of ``main``.
            Moments may be 8-bit codes: their scales are state too, see :mod:`megascale.kernels.compact_moments`.
        step: landed steps of each parameter before this one: 0-d fp32 tensors, counted by the update. Empty where
            nothing depends on them; 8-bit codes do.
        start: of each parameter, the index of its first element in the whole parameter, a multiple of 32: 8-bit
            codes depend on it. Empty: 0.
        remainder: int16, contiguous as ``model`` is: main params are held as remainders, see
            :mod:`megascale.kernels.remainders`, and ``main`` has no memory in an update. Empty: ``main`` holds the
            values.
        groups: how many parameters each param group has, of all of them together. Empty: they are of one group. See
            :meth:`megascale.kernels.ReferenceBackend.kind_of`.
        tables: what backends have made of all tensors but gradients.
    """

    model: list[Tensor] = field(default_factory=list)
    main: list[Tensor] = field(default_factory=list, repr=False)
    grad: Sequence[Any] = field(default_factory=list)
    state: dict[str, list[Tensor]] = field(default_factory=dict)
    step: list[Tensor] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    remainder: list[Tensor] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    tables: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def has_codes(self) -> bool:
        """Whether a state is held as 8-bit codes."""
        return any(map(is_scale, self.state))

    def pick(self, indices: Sequence[int]) -> "Operands":
        """Return the operands of the parameters at ``indices``, one param group. Lists that are empty stay so."""

        def pick(column: Sequence[T]) -> list[T]:
            return [column[index] for index in indices] if column else []

        return Operands(
            model=pick(self.model),
            main=pick(self.main),
            grad=pick(self.grad),
            state={name: pick(tensors) for name, tensors in self.state.items()},
            start=pick(self.start),
            step=pick(self.step),
            remainder=pick(self.remainder),
        )


def flags_at(indices: Sequence[int], flags: Tensor, count: int) -> Tensor:
    """Return overflow flags of ``count`` parameters, of which those at ``indices``, at least one, have ``flags``."""
    if len(indices) == count:
        return flags
    found = dict(zip(indices, flags.unbind(), strict=True))  # stacked, as an index would travel to the device
    unset = torch.zeros_like(flags[0])
    return torch.stack([found.get(index, unset) for index in range(count)])


def runs_of(tensors: Sequence[Tensor], most: int) -> Iterator[list[int]]:
    """Yield the indices of neighbours of one dtype, of at most ``most`` elements together; of a larger one alone."""
    indices: list[int] = []
    numel = 0
    for index, tensor in enumerate(tensors):
        numel += tensor.numel()
        if indices and (numel > most or tensor.dtype != tensors[indices[0]].dtype):
            yield indices
            indices, numel = [], tensor.numel()
        indices.append(index)
    if indices:
        yield indices
