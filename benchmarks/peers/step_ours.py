"""megascale's step on plain gradients, with any backend."""

import time
import warnings

import torch
from torch import Tensor

from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.errors import ArgumentError, UsageError
from peers.given import CLIP, GROWTH_INTERVAL, HYSTERESIS, SCALE
from peers.rules import ADAMW, FP32_MOMENTS, RULES, Moments
from peers.work import UnavailableError, Work


class Megascale:
    """MixedPrecisionOptimizer on ``param.grad``."""

    own_grad_bytes = 0

    def __init__(self, work: Work) -> None:
        asked = work.options.get("backend", "auto")
        rule = RULES[work.options.get("rule", ADAMW)]
        moments: Moments = work.options.get("moments", FP32_MOMENTS)
        held: bool = work.options.get("remainders", False)
        self.params: list[Tensor] = work.options.get("params") or work.parameters_with_grads()
        inner = rule.build(self.params)
        start = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                config = OptimizerConfig(
                    fp16=work.dtype == torch.float16,
                    bf16=work.dtype == torch.bfloat16,
                    clip_grad=CLIP,
                    backend=asked,
                    exp_avg_dtype=moments[0],
                    exp_avg_sq_dtype=moments[1],
                    store_param_remainders=held,
                )
                scaler = DynamicGradScaler(SCALE, 1.0, 2.0, 0.5, GROWTH_INTERVAL, HYSTERESIS)
                self.optimizer = MixedPrecisionOptimizer(inner, config, scaler, grads_are_scaled=True)
            except (ArgumentError, UsageError, ImportError) as error:
                if asked == "auto":
                    raise
                raise UnavailableError(f"not available: {error}") from error
        self.setup_seconds = time.perf_counter() - start
        self.backend_name = (getattr(self.optimizer, "_backend", None) or self.optimizer.backend).name  # type: ignore[attr-defined]
        if asked not in ("auto", self.backend_name):
            reason = "; ".join(str(warning.message) for warning in caught)
            raise UnavailableError(reason or f"not available: {self.backend_name!r} is taken in its place")
        size = work.dtype.itemsize
        self.traffic = rule.traffic(size, size, moments, held)

    def prepare(self) -> None:
        """Do nothing: the gradients are there, and stay as they are."""

    def step(self) -> None:
        """See :class:`peers.work.Stepper`."""
        self.optimizer.step()

    def parameters(self) -> list[Tensor]:
        """See :class:`peers.work.Stepper`."""
        return [*self.params]


def plain(work: Work) -> Megascale:
    """Return MixedPrecisionOptimizer.

    Options: "backend" ("auto" unless given), "rule" (of peers.rules.RULES: AdamW), "moments" (their two dtypes: fp32),
    and "params" that it shares with others, with their gradients (its own).
    """
    return Megascale(work)
