"""The decision of a step and the update of the loss scale: arithmetic on a few numbers, on the device."""

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from megascale.utils.transfer import to_device_async

LARGEST_SUM_SQUARES = torch.finfo(torch.float32).max
"""A larger sum of squares counts as overflow on every backend, because some accumulate in fp32."""
CLIP_EPSILON = 1e-6
"""Added to the norm that clipping divides by: torch's and Megatron-Core's."""
REPLICA_TOLERANCE = 1e-4
"""Largest accepted difference of replicas' sums of squares, relative to the sum over all gradients.

Reduced gradients have equal bits. If ranks compute a gradient twice, with kernels that add in any order, sums differ by
less than this.
"""


class Statistic(IntEnum):
    """Indices into the vector of statistics that is summed over all ranks in a step."""

    SUM_SQUARES = 0
    """Sum of squares of the scaled gradients."""
    NON_FINITE = 1
    """Elements that are inf or NaN."""
    ZEROS = 2
    """Elements that are zero; NaN where they are not counted."""
    ERRORS = 3
    """Errors of a rank that all ranks must raise: not 0 if there are any."""
    CONTRAST = 4
    """Sum of squares, weighted so that the sum over ranks with the same gradients is 0."""
    SCALED = 5
    """Number of ranks that do not know their loss to be unscaled, less :data:`WITH_GRADS` per rank with gradients."""


NUM_STATISTICS = len(Statistic)

WITH_GRADS = 2.0**-16
"""What a rank that has gradients takes off SCALED: less than 1 over all ranks, so that no number travels beside it."""


class GradWeights(NamedTuple):
    """Weights of each gradient's statistics, each of shape [number of gradients], in fp64.

    Attributes:
        shares: of its squares and zeros: 1 / number of ranks that hold the same gradient.
        contrasts: of its squares in CONTRAST; they add up to 0 over those ranks. None: not compared.
    """

    shares: Tensor
    contrasts: Tensor | None


class TensorStats(NamedTuple):
    """Per-tensor statistics of gradients, each of shape [number of tensors], in fp64."""

    sum_squares: Tensor
    non_finite: Tensor
    zeros: Tensor | None

    @classmethod
    def of_pieces(cls, table: Tensor, num_pieces: list[int]) -> "TensorStats":
        """Add up what was measured in pieces.

        Args:
            table: of each piece its sum of squares, non-finite count and, where they are counted, zeros.
            num_pieces: of each tensor, one after the other.
        """
        if num_pieces != [1] * len(num_pieces):
            table = torch.stack([part[0] if len(part) == 1 else part.sum(0) for part in table.split(num_pieces)])
        return cls(table[:, 0], table[:, 1], table[:, 2] if table.shape[1] > 2 else None)


@dataclass(frozen=True)
class Decision:
    """The decision that an update reads: 0-d tensors on one device.

    Attributes:
        found_inf: fp32, 1.0 where the step is skipped, else 0.0.
        coefficient: fp32, ``inv_scale * clip``, by which gradients are multiplied.
        grad_norm: fp32, global L2 norm of the unscaled gradients.
        num_zeros: zero elements of the gradients, NaN where not counted.
    """

    found_inf: Tensor
    coefficient: Tensor
    grad_norm: Tensor
    num_zeros: Tensor

    def to(self, device: torch.device) -> "Decision":
        """Return the decision on ``device``."""
        if self.found_inf.device == device:
            return self
        moved = (to_device_async(t, device) for t in (self.found_inf, self.coefficient, self.grad_norm, self.num_zeros))
        return Decision(*moved)


@dataclass(frozen=True)
class StepDecision(Decision):
    """The decision that follows from the statistics of a step.

    Attributes:
        overflow: fp32, what ``found_inf`` is without a norm that is too large: the loss scale follows it.
        success: bool, whether the step lands.
    """

    overflow: Tensor
    success: Tensor


class ScaleRule(NamedTuple):
    """The constants of a dynamic loss scale; see :class:`megascale.DynamicGradScaler`.

    Attributes:
        each_clean_step: whether every clean step replenishes hysteresis; else only one that lets the scale grow.
        fp64_products: whether the scale times a factor is taken in fp64 and rounded once, as torch.amp does; else it is
            a product of two fp32 numbers, as in Megatron-Core.
    """

    min_scale: float
    max_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    hysteresis: int
    each_clean_step: bool
    fp64_products: bool = False


class TorchDecisions:
    """Decisions by torch's operators, on any device, without a host sync. Base of all backends, of which those with
    their own kernels are tested against it.
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def unscale(self, grads: list[Tensor], mains: list[Tensor], coefficient: Tensor) -> list[Tensor]:
        """Return new tensors ``grad * coefficient`` in the dtypes of ``mains``, for optimizers' own ``step()``."""
        unscaled = [torch.empty_like(main) for main in mains]
        if unscaled:
            torch._foreach_copy_(unscaled, grads)
            torch._foreach_mul_(unscaled, coefficient)
        return unscaled

    def total(self, stats: TensorStats, weights: GradWeights, errors: Tensor, scaled: float) -> Tensor:
        """Return a rank's statistics: shape [NUM_STATISTICS], indexed by :class:`Statistic`.

        Args:
            stats: of at least one tensor, on one device.
            weights: of each tensor's statistics.
            errors: 0-d, fp64: this rank's errors.
            scaled: 0 if this rank knows that the loss was not scaled, else 1.
        """
        # 0 * inf is NaN: a non-finite copy with weight 0 makes the norm NaN, but only in a step that is skipped.
        nothing = torch.zeros_like(errors)
        statistics = {
            Statistic.SUM_SQUARES: (stats.sum_squares * weights.shares).sum(),
            Statistic.NON_FINITE: stats.non_finite.sum(),
            Statistic.ZEROS: nothing + math.nan if stats.zeros is None else (stats.zeros * weights.shares).sum(),
            Statistic.ERRORS: errors,
            Statistic.CONTRAST: nothing if weights.contrasts is None else (stats.sum_squares * weights.contrasts).sum(),
            Statistic.SCALED: nothing + scaled,
        }
        return torch.stack([statistics[field] for field in Statistic])

    def decide(
        self, vector: Tensor, scale: Tensor | None, clip_grad: float, most_norm: float = math.inf
    ) -> StepDecision:
        """Return the decision that follows from the agreed statistics.

        ``found_inf`` is set by any non-finite element, by a sum of squares beyond fp32, by an error on any rank, by
        replicas that differ (a contrast beyond REPLICA_TOLERANCE times the sum of squares), and if no rank has a scaled
        loss. ``clip = min(1, clip_grad / (norm + 1e-6))``, Megatron-Core's and torch's rule; 0 does not clip.

        Args:
            vector: shape [NUM_STATISTICS], fp64: the sums over all ranks.
            scale: fp32, shape [1], the loss scale; None: 1. Its reciprocal is taken in fp64 and rounded
                to fp32 once.
            clip_grad: largest norm of the unscaled gradients.
            most_norm: a larger one, compared in fp32, skips the step: Megatron-Core's rule (``ChainedOptimizer.step``
                from 0.19.2 on). As there, it is no overflow.
        """
        agreed = dict(zip(Statistic, vector.unbind(), strict=True))
        sum_squares = agreed[Statistic.SUM_SQUARES]
        # "not <=" also catches NaN.
        overflow = (
            (sum_squares <= LARGEST_SUM_SQUARES).logical_not()
            | (agreed[Statistic.NON_FINITE] > 0)
            | (agreed[Statistic.ERRORS] != 0)
            | (agreed[Statistic.CONTRAST].abs() > REPLICA_TOLERANCE * sum_squares)
            | (agreed[Statistic.SCALED] <= 0)
        )
        unscale = torch.ones_like(sum_squares)
        if scale is not None:
            unscale = inverse(scale).reshape(()).to(sum_squares.dtype)
        norm = sum_squares.sqrt() * unscale
        coefficient = unscale
        if clip_grad > 0:
            coefficient = coefficient * clip_coefficient(norm, clip_grad)
        grad_norm = norm.float()
        is_skipped = overflow | (grad_norm > most_norm)
        return StepDecision(
            found_inf=is_skipped.float(),
            coefficient=coefficient.float(),
            grad_norm=grad_norm,
            # Shares such as 1/3 do not add up exactly.
            num_zeros=agreed[Statistic.ZEROS].round(),
            overflow=overflow.float(),
            success=is_skipped.logical_not(),
        )

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
        found = found_inf.reshape(1) != 0
        hysteresis_after_inf = (hysteresis_tracker - 1).clamp_(min=0)
        factor = scale.to(torch.float64) if rule.fp64_products else scale
        backed_off = (factor * rule.backoff_factor).float().clamp_(min=rule.min_scale)
        scale_after_inf = torch.where(hysteresis_after_inf == 0, backed_off, scale)

        clean_steps = growth_tracker + 1
        grows = clean_steps >= rule.growth_interval
        grown = (factor * rule.growth_factor).float()
        grown = torch.where(torch.isfinite(grown), grown.clamp(max=rule.max_scale), scale)
        replenished = torch.ones_like(grows) if rule.each_clean_step else grows

        growth_tracker.copy_(torch.where(found | grows, 0, clean_steps))
        hysteresis_tracker.copy_(
            torch.where(found, hysteresis_after_inf, torch.where(replenished, rule.hysteresis, hysteresis_tracker))
        )
        scale.copy_(torch.where(found, scale_after_inf, torch.where(grows, grown, scale)))


def clip_coefficient(norm: Tensor, most: float | Tensor) -> Tensor:
    """Return what gradients of this norm are multiplied by so that it is at most ``most``: torch's rule. 1 or below."""
    return (most / (norm + CLIP_EPSILON)).clamp(max=1.0)


def inverse(scale: Tensor) -> Tensor:
    """Return the reciprocal of a loss scale, taken in fp64 and rounded once to fp32."""
    return scale.double().reciprocal().float()
