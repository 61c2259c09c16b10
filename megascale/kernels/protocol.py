"""Backend, the Protocol of kernels, and their arguments: parallel lists of local tensors."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from megascale.kernels.compact_moments import is_scale
from megascale.kernels.decision import Decision, GradWeights, ScaleRule, StepDecision, TensorStats
from megascale.rules import AdamHyper, LionHyper, SgdHyper

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
        tables: what backends have made of all tensors but gradients.
    """

    model: list[Tensor] = field(default_factory=list)
    main: list[Tensor] = field(default_factory=list, repr=False)
    grad: Sequence[Any] = field(default_factory=list)
    state: dict[str, list[Tensor]] = field(default_factory=dict)
    step: list[Tensor] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    remainder: list[Tensor] = field(default_factory=list)
    tables: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def has_codes(self) -> bool:
        """Whether a state is held as 8-bit codes."""
        return any(map(is_scale, self.state))

    def pick(self, indices: Sequence[int]) -> "Operands":
        """Return the operands of the parameters at ``indices``. A list that is empty, as unused ones are, stays so."""

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


class Backend(Protocol):
    """One implementation of the passes over memory and of the decision between them, without a host sync.

    Every method takes local tensors on one device. Updates change nothing, bit for bit, where ``decision.found_inf`` is
    set. They return a bool tensor of shape [parameters]: whether the main param's rounding into fp16 is not finite;
    False where there is no gradient.
    """

    name: str

    def measure(self, grads: Sequence[Tensor | None], count_zeros: bool) -> TensorStats:
        """One pass over ``grads``, of which one is there at least, in the dtypes they have. Numbers of None are 0."""

    def total(self, stats: TensorStats, weights: GradWeights, errors: Tensor, scaled: float) -> Tensor:
        """Return a rank's statistics: shape [NUM_STATISTICS], indexed by :class:`Statistic`.

        Args:
            stats: of at least one tensor, on one device.
            weights: of each tensor's statistics.
            errors: 0-d, statistics dtype: this rank's errors.
            scaled: 0 if this rank knows that the loss was not scaled, else 1.
        """

    def decide(
        self, vector: Tensor, scale: Tensor | None, clip_grad: float, most_norm: float = math.inf
    ) -> StepDecision:
        """Return the decision that follows from the agreed statistics.

        ``found_inf`` is set by any non-finite element, by a sum of squares beyond fp32, by an error on any rank, by
        replicas that differ (a contrast beyond REPLICA_TOLERANCE times the sum of squares), and if no rank has a scaled
        loss. ``clip = min(1, clip_grad / (norm + 1e-6))``, Megatron-Core's and torch's rule; 0 does not clip.

        Args:
            vector: shape [NUM_STATISTICS], statistics dtype: the sums over all ranks.
            scale: fp32, shape [1], the loss scale; None: 1. Its reciprocal is taken in the statistics dtype and rounded
                to fp32 once.
            clip_grad: largest norm of the unscaled gradients.
            most_norm: a larger one, compared in fp32, skips the step: Megatron-Core's rule (``ChainedOptimizer.step``
                from 0.19.2 on). As there, it is no overflow.
        """

    def rescale_(
        self, found_inf: Tensor, scale: Tensor, growth_tracker: Tensor, hysteresis_tracker: Tensor, rule: ScaleRule
    ) -> None:
        """Update the loss scale after one step, by the rule of :class:`megascale.DynamicGradScaler`.

        Args:
            found_inf: fp32, one element; not 0, or NaN: found.
            scale: fp32, shape [1]; updated, as are the trackers.
            growth_tracker: int64, shape [1]: clean steps since the scale moved or an overflow.
            hysteresis_tracker: int64, shape [1]: overflows until the scale backs off.
            rule: the constants.
        """

    def unscale(self, grads: list[Tensor], mains: list[Tensor], coefficient: Tensor) -> list[Tensor]:
        """Return new tensors ``grad * coefficient`` in the dtypes of ``mains``."""

    def adam_(self, operands: Operands, hyper: AdamHyper, decision: Decision) -> Tensor:
        """Update with state ``exp_avg``, ``exp_avg_sq`` (and ``max_exp_avg_sq``), then round main into model."""

    def sgd_(self, operands: Operands, hyper: SgdHyper, decision: Decision) -> Tensor:
        """Update with state ``momentum_buffer`` (where momentum is not 0), then round main into model."""

    def lion_(self, operands: Operands, hyper: LionHyper, decision: Decision) -> Tensor:
        """Update with state ``exp_avg``, then round main into model."""

    def decode_(self, operands: Operands) -> None:
        """Write the main params, fp32, of ``operands`` that have remainders, at least one."""

    def encode_(self, operands: Operands, found_inf: Tensor) -> Tensor:
        """Write model params and remainders for the main params of ``operands``, unless ``found_inf`` is set.

        A finite element that would round to inf in fp16 keeps its model param and remainder. Returns a bool tensor of
        shape [parameters]: whether the main param's rounding into fp16 is not finite.
        """

    def write_back_(self, operands: Operands) -> Tensor:
        """Round main params (at least one) into their model params, also those without a gradient."""
