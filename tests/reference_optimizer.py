"""The whole step in some sixty lines: five rules, clipping, skips and loss scaling, with everything in fp32.

What a run of the library is compared with: see tests/life.py. It imports nothing of the library. Each operation is
rounded to fp32 in the order that docs/numerics.md states; numbers that are shared by all elements are taken in fp64.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOMENTS = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "lion": ("exp_avg",),
    "muon": ("momentum_buffer",),
}
"""The state that each rule keeps of a parameter."""


class Result(NamedTuple):
    """What a step did: whether it landed, the norm of the unscaled gradients, and how many of their elements are 0."""

    success: bool
    grad_norm: Tensor
    num_zeros: int


class ReferenceOptimizer:
    """One optimizer and its dynamic loss scale.

    Attributes:
        main: fp32 main params by name.
        state: of each parameter its moments, fp32, and the number of its landed steps.
        options: of each parameter its learning rate and what else its rule reads.
        scale, growth, hysteresis: of the loss scale, and its two trackers.
    """

    def __init__(self, rule: str, scale: float, most_scale: float, interval: int, hysteresis: int) -> None:
        self.rule, self.most_scale, self.interval, self.most_hysteresis = rule, most_scale, interval, hysteresis
        self.main: dict[str, Tensor] = {}
        self.state: dict[str, dict[str, Any]] = {}
        self.options: dict[str, dict[str, Any]] = {}
        self.scale, self.growth, self.hysteresis = scale, 0, hysteresis

    def add(self, name: str, weight: Tensor, options: Mapping[str, Any]) -> None:
        """Train one more parameter."""
        self.main[name], self.options[name] = weight.float(), dict(options)
        self.state[name] = {moment: torch.zeros_like(self.main[name]) for moment in MOMENTS[self.rule]} | {"step": 0}

    def step(self, grads: Mapping[str, Tensor], clip_grad: float) -> Result:
        """Take one step with unscaled gradients, fp32, of those parameters that have one."""
        squares = sum(float((grad * self.scale).double().square().sum()) for grad in grads.values())
        success, inverse = math.isfinite(squares), 1 / self.scale
        norm = math.sqrt(squares) * inverse if success else math.nan
        clip = min(1.0, clip_grad / (norm + 1e-6)) if clip_grad > 0 and success else 1.0
        if success:
            coefficient = torch.tensor(inverse * clip, dtype=torch.float32)
            for name, grad in grads.items():
                update = getattr(self, f"_{self.rule.removesuffix('w')}")
                self.state[name]["step"] += 1
                self.main[name] = update(self.main[name], grad * self.scale * coefficient, **self._of(name))
        self._rescale(success)
        return Result(success, torch.tensor(norm), sum(int((grad == 0).sum()) for grad in grads.values()))

    def _of(self, name: str) -> dict[str, Any]:
        return self.options[name] | {"state": self.state[name]}

    def _rescale(self, success: bool) -> None:
        if not success:
            self.growth, self.hysteresis = 0, max(self.hysteresis - 1, 0)
            self.scale = max(self.scale / 2, 1.0) if self.hysteresis == 0 else self.scale
            return
        self.growth += 1
        if self.growth >= self.interval:
            self.growth, self.hysteresis = 0, self.most_hysteresis
            self.scale = min(self.scale * 2, self.most_scale)

    def _adam(
        self, p: Tensor, g: Tensor, state: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> Tensor:
        if self.rule == "adamw":
            p = p * (1 - lr * weight_decay)
        elif weight_decay:
            g = g + weight_decay * p
        (beta1, beta2), t = betas, state["step"]
        state["exp_avg"] = beta1 * state["exp_avg"] + (1 - beta1) * g
        state["exp_avg_sq"] = beta2 * state["exp_avg_sq"] + (1 - beta2) * g * g
        denominator = state["exp_avg_sq"].double().sqrt().float() * (1 / math.sqrt(1 - beta2**t)) + eps
        return p - (lr / (1 - beta1**t)) * state["exp_avg"] / denominator

    def _sgd(self, p: Tensor, g: Tensor, state: Any, lr: float, momentum: float, nesterov: bool) -> Tensor:
        state["momentum_buffer"] = momentum * state["momentum_buffer"] + g
        return p - lr * (g + momentum * state["momentum_buffer"] if nesterov else state["momentum_buffer"])

    def _lion(
        self, p: Tensor, g: Tensor, state: Any, lr: float, betas: tuple[float, float], weight_decay: float
    ) -> Any:
        beta1, beta2 = betas
        direction = (beta1 * state["exp_avg"] + (1 - beta1) * g).sign()
        state["exp_avg"] = beta2 * state["exp_avg"] + (1 - beta2) * g
        return p * (1 - lr * weight_decay) - lr * direction

    def _muon(self, p: Tensor, g: Tensor, state: Any, lr: float, momentum: float, weight_decay: float) -> Tensor:
        state["momentum_buffer"] = state["momentum_buffer"].lerp(g, 1 - momentum)
        x = g.lerp(state["momentum_buffer"], momentum)  # Nesterov's
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return p * (1 - lr * weight_decay) - lr * math.sqrt(max(1, p.size(0) / p.size(1))) * x
