"""Spikes of the gradient norm: steps that are skipped, or clipped harder, because their norm is far too large.

They are found on the device, after overflows, from the norm that all ranks share: no collective and no host read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megascale.config import StepConfig
from megascale.errors import ArgumentError, StateDictError
from megascale.kernels import Decision, coefficient_to, inverse, stats_dtype
from megascale.utils import validate

STD_EPSILON = 1e-6
"""ZClip's: added to the standard deviation before a z-score is divided by it."""
NORM_KEYS = ("mean", "variance", "count")


@dataclass(frozen=True)
class NormJudgement:
    """What ZClip says of one norm.

    Attributes:
        is_spike: bool, 0-d.
        bound: statistics dtype, 0-d: the norm that a spike is clipped to.
        new_state: statistics dtype, shape [3]: mean, variance and count that include this norm.
    """

    is_spike: Tensor
    bound: Tensor
    new_state: Tensor


class NormStatistics:
    """The running mean and variance of the gradient norm, on the device, and what ZClip (arXiv 2504.02507) says of it.

    Args:
        config: its ``zclip_z_thresh``, ``zclip_alpha`` and ``zclip_warmup_steps`` are the constants of ZClip's code.
        device: of the norm.

    Attributes:
        state: mean, variance, and the number of norms that they were taken from: statistics dtype, shape [3]. Updated
            in place: captured graphs hold this address.
    """

    def __init__(self, config: StepConfig, device: torch.device) -> None:
        self._config = config
        self.state = torch.zeros(len(NORM_KEYS), dtype=stats_dtype(device), device=device)

    def judge(self, grad_norm: Tensor) -> NormJudgement:
        """Judge a norm, fp32, 0-d. Changes nothing.

        In the first ``warmup_steps`` no norm is a spike, and mean and variance are those of all norms so far. Later::

            z     = (norm - mean) / (deviation + 1e-6)
            spike = z > z_thresh
            bound = mean + z_thresh * deviation / (z / z_thresh)

        and the mean and variance move by ``1 - alpha`` towards ``norm``. A spike moves them towards ``bound``, so that
        norms that stay high are no spikes after a while. ``deviation`` is the square root of the variance, rounded to
        fp32. Source: ``zclip.py`` of github.com/bluorion-com/ZClip, mode "zscore" with adaptive scaling.
        """
        z_thresh = self._config.zclip_z_thresh
        norm = grad_norm.to(self.state.dtype)
        mean, variance, count = self.state.unbind()
        # torch's fp64 sqrt is not correctly rounded on every CPU. Taken of an fp32 number and rounded to fp32, it is.
        deviation = variance.float().to(norm.dtype).sqrt().float().to(norm.dtype)
        is_warm = count >= self._config.zclip_warmup_steps
        z = (norm - mean) / (deviation + STD_EPSILON)
        is_spike = (z > z_thresh) & is_warm
        bound = mean + deviation * z_thresh / (z / z_thresh)
        seen = count + 1
        weight = torch.where(is_warm, 1 - self._config.zclip_alpha, seen.reciprocal())
        off = torch.where(is_spike, bound, norm) - mean
        mean = mean + off * weight
        still_off = off - off * weight
        square = torch.where(is_warm, still_off, off) * still_off
        return NormJudgement(is_spike, bound, torch.stack((mean, variance + (square - variance) * weight, seen)))

    def state_dict(self) -> dict[str, float | int]:
        """Return ``mean``, ``variance`` and ``count`` as numbers. Waits for the device."""
        mean, variance, count = self.state.tolist()
        return {"mean": mean, "variance": variance, "count": int(count)}

    def load_state_dict(self, given: Mapping[str, float]) -> None:
        """Continue from numbers that :func:`parse_norm_statistics` returned."""
        self.state.copy_(torch.tensor([given[key] for key in NORM_KEYS], dtype=self.state.dtype, device="cpu"))


def parse_norm_statistics(given: Any) -> dict[str, float]:
    """Return saved statistics of the norm, checked. Raises StateDictError."""
    if not isinstance(given, Mapping) or not set(NORM_KEYS) <= set(given):
        raise StateDictError(
            f"state dict's 'norm_statistics' must hold {', '.join(map(repr, NORM_KEYS))}, got {given!r}"
        )
    try:
        numbers = {
            key: validate.non_negative(f"state dict's norm_statistics[{key!r}]", given[key]) for key in NORM_KEYS
        }
        validate.integer("state dict's norm_statistics['count']", given["count"], minimum=0)
    except ArgumentError as error:
        raise StateDictError(str(error)) from None
    return numbers


class SpikeJudge:
    """Takes spikes into a step's decision, which knows of overflows: they are skipped, or clipped harder.

    Two rules, of which ``config`` asks for one or both:

    - ``grad_norm_skip_threshold``: a step with ``norm > threshold`` is skipped; compared in fp32. Megatron-Core's rule
      (``ChainedOptimizer.step`` from 0.19.2 on; 0.16.1 has none).
    - ``zclip``: see :class:`NormStatistics`. Steps that are skipped for another reason do not change the statistics.

    As in Megatron, a spike is no overflow: the scaler takes the step for a clean one.

    Args:
        config: with at least one rule, see :meth:`of`.
        device: of the decision.

    Attributes:
        statistics: None without ``zclip``.
    """

    def __init__(self, config: StepConfig, device: torch.device) -> None:
        self._threshold = config.grad_norm_skip_threshold
        self._skips = config.zclip == "skip"
        self._new_state: Tensor | None = None
        self.statistics = None if config.zclip is None else NormStatistics(config, device)

    @classmethod
    def of(cls, config: StepConfig, device: torch.device) -> "SpikeJudge | None":
        """Return the judge that ``config`` asks for; None if it asks for none."""
        is_asked = math.isfinite(config.grad_norm_skip_threshold) or config.zclip is not None
        return cls(config, device) if is_asked else None

    def judge(self, decision: Decision, scale: Tensor | None) -> Decision:
        """Return the step's decision. The statistics change in :meth:`commit` only.

        Args:
            decision: as overflows alone make it.
            scale: the loss scale of the step, fp32, shape [1]; None: 1.
        """
        found, coefficient = decision.found_inf, decision.coefficient
        if math.isfinite(self._threshold):
            found = torch.maximum(found, (decision.grad_norm > self._threshold).float())
        if self.statistics is not None:
            judged = self.statistics.judge(decision.grad_norm)
            self._new_state = torch.where(found == 0, judged.new_state, self.statistics.state)
            if self._skips:
                found = torch.maximum(found, judged.is_spike.float())
            else:
                clip = coefficient_to(decision.grad_norm.to(judged.bound.dtype), judged.bound)
                clipped = clip if scale is None else clip * inverse(scale).reshape(())
                least = torch.minimum(coefficient, clipped.float())
                coefficient = torch.where(judged.is_spike, least, coefficient)
        return replace(decision, found_inf=found, coefficient=coefficient)

    def commit(self) -> None:
        """Let the statistics include the norm that was judged last."""
        if self.statistics is not None and self._new_state is not None:
            self.statistics.state.copy_(self._new_state)
