"""Small models, gradients and comparisons that many tests share."""

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from megascale import (
    ConstantGradScaler,
    DynamicGradScaler,
    Lion,
    MixedPrecisionOptimizer,
    OptimizerConfig,
)
from megascale.base_optimizer import MegascaleOptimizer

Inner = Callable[[nn.Module], torch.optim.Optimizer]

INNER: dict[str, Inner] = {
    "adamw_fused": lambda m: torch.optim.AdamW(m.named_parameters(), lr=1e-2, fused=True),
    "adamw_foreach": lambda m: torch.optim.AdamW(m.named_parameters(), lr=1e-2, foreach=True),
    "adam_amsgrad": lambda m: torch.optim.Adam(m.named_parameters(), lr=1e-2, weight_decay=0.1, amsgrad=True),
    "adam_maximize": lambda m: torch.optim.Adam(m.named_parameters(), lr=1e-2, maximize=True),
    "lion": lambda m: Lion(m.named_parameters(), lr=1e-3, weight_decay=0.1),
    "sgd": lambda m: torch.optim.SGD(m.named_parameters(), lr=1e-2),
    "sgd_momentum_fused": lambda m: torch.optim.SGD(m.named_parameters(), lr=1e-2, momentum=0.9, fused=True),
    "sgd_nesterov": lambda m: torch.optim.SGD(
        m.named_parameters(), lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "sgd_dampening": lambda m: torch.optim.SGD(m.named_parameters(), lr=1e-2, momentum=0.9, dampening=0.3),
    "sgd_maximize": lambda m: torch.optim.SGD(m.named_parameters(), lr=1e-2, momentum=0.5, maximize=True),
}


class Sign(torch.optim.Optimizer):
    """A user-written optimizer (Lion-like: the sign of an interpolated momentum) without any host read of its own."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    average.lerp_(p.grad, 1 - group["beta"])
                    p.add_(average.sign(), alpha=-group["lr"])


class Tiny(nn.Module):
    """Two linear layers and a layer norm: 7 tensors of 4 to 24 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.second = nn.Linear(6, 4)
        self.head = nn.Linear(4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return shape [..., 1]."""
        out: Tensor = self.head(self.second(self.norm(self.first(x))))
        return out


class Bag(nn.Module):
    """Parameters without a forward."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.params = nn.ParameterList(nn.Parameter(tensor) for tensor in tensors)

    def __getitem__(self, index: int) -> nn.Parameter:
        return cast(nn.Parameter, self.params[index])


def model(dtype: torch.dtype = torch.float16, seed: int = 0) -> Tiny:
    """Return a Tiny model in ``dtype``."""
    torch.manual_seed(seed)
    return Tiny().to(dtype)


def grad_of(param: Tensor) -> Tensor:
    """Return a parameter's gradient, which must be there."""
    if param.grad is None:
        raise LookupError("the parameter has no gradient")
    return param.grad


def wrap(
    module: nn.Module, inner: Inner = INNER["adamw_fused"], scale: float | None = 2.0**10, **options: Any
) -> MixedPrecisionOptimizer:
    """Wrap ``module``'s parameters: dynamic scale with window 4 and hysteresis 1 (``scale`` None: no scaler).

    Gradients are vouched for: tests write them by hand.
    """
    scaler = None if scale is None else DynamicGradScaler(scale, 1.0, 2.0, 0.5, 4, 1)
    dtypes = {p.dtype for p in module.parameters()}
    fp16 = torch.float16 in dtypes
    config = OptimizerConfig(fp16=fp16, bf16=torch.bfloat16 in dtypes and not fp16, **({"clip_grad": 0.0} | options))
    return MixedPrecisionOptimizer(inner(module), config, scaler, grads_are_scaled=True)


def constant(module: nn.Module, inner: Inner, scale: float, **options: Any) -> MixedPrecisionOptimizer:
    """Wrap ``module``'s parameters with a constant scale."""
    fp16 = any(p.dtype == torch.float16 for p in module.parameters())
    config = OptimizerConfig(fp16=fp16, bf16=not fp16, **({"clip_grad": 0.0} | options))
    return MixedPrecisionOptimizer(inner(module), config, ConstantGradScaler(scale), grads_are_scaled=True)


def set_grads(module: nn.Module, seed: int, scale: float = 1.0) -> None:
    """Give every parameter a normal gradient times ``scale``, rounded to the parameter's dtype."""
    generator = torch.Generator().manual_seed(seed)
    for param in module.parameters():
        grad = torch.randn(param.shape, generator=generator) * scale
        param.grad = grad.to(param.device, param.dtype)


def snapshot(optimizer: MegascaleOptimizer, module: nn.Module) -> dict[str, Tensor]:
    """Return copies of everything that a skipped step must leave alone: model, main params and state, flat by name."""
    flat = {f"model.{name}": p.detach().clone() for name, p in module.named_parameters()}
    packed = optimizer.state_dict()
    flat |= {f"main.{name}": tensor for name, tensor in packed["main_params"].items()}
    for name, state in packed["optimizer"]["state"].items():
        flat |= {f"state.{name}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    return flat


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether two snapshots agree in keys, dtypes and every bit (NaNs and signed zeros included)."""
    return left.keys() == right.keys() and all(bits_equal(left[key], right[key]) for key in left)


def bits_equal(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors agree in dtype, shape and every bit."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    # A clone, as a single element counts as contiguous with any stride, and cannot be viewed as bytes then.
    left, right = (each.detach().cpu().clone(memory_format=torch.contiguous_format) for each in (left, right))
    return left.reshape(-1).view(torch.uint8).equal(right.reshape(-1).view(torch.uint8))


def same_values(left: Any, right: Any) -> bool:
    """Whether two nests of dicts, lists and tuples agree: tensors in every bit, all else in type and value."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return bits_equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_values(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same_values, left, right))
    return type(left) is type(right) and bool(left == right)


def trained(module: nn.Module, inner: Inner, steps: int, **options: Any) -> dict[str, Tensor]:
    """Return everything after some steps with a constant scale, the third of which overflows and changes nothing."""
    optimizer = constant(module, inner, 256.0, **options)
    for step in range(steps):
        set_grads(module, seed=step, scale=256.0)
        before = snapshot(optimizer, module)
        if step == 2:
            grad_of(next(iter(module.parameters())))[0, 0] = math.inf
        optimizer.step()
        assert (step == 2) == same_bits(before, snapshot(optimizer, module))
    return snapshot(optimizer, module)


def check_invariant_6(optimizer: MixedPrecisionOptimizer, module: nn.Module) -> None:
    """Require that model params are the roundings of their main params."""
    mains = dict(optimizer.main_params())
    for name, param in module.named_parameters():
        if name in mains:
            assert bits_equal(param, mains[name].to(param.dtype))
