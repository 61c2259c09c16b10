"""Optimizers with methods besides ``step()``, or a ``state_dict()`` of their own: none knows of megascale."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.fsdp2_cases import whole


class Sophia(torch.optim.Optimizer):
    """Sophia-like (arXiv 2305.14342): ``update_hessian()`` reads the gradients of a backward of its own."""

    def __init__(self, params: Iterable[Any], lr: float = 2.0**-5) -> None:
        super().__init__(params, {"lr": lr, "updates": 0})
        self.num_updates = 0

    @torch.no_grad()
    def update_hessian(self) -> None:
        """Average the squared gradients."""
        self.num_updates += 1
        for group in self.param_groups:
            group["updates"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if "hessian" not in state:
                    state["hessian"] = torch.zeros_like(p)
                state["hessian"].lerp_(p.grad.square(), 0.5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 0.25)
                scale = state["hessian"] if "hessian" in state else torch.ones_like(p)
                p.sub_((state["momentum"] / (scale + 2.0**-4)).clamp(-1, 1), alpha=group["lr"])


class Sam(torch.optim.Optimizer):
    """SAM-like (arXiv 2010.01412), without its norm: ``first_step()`` climbs, and ``step()`` goes back, then down.

    It is written as usual: with ``p.data = old``, but for DTensors, on which torch ignores that.
    """

    def __init__(self, params: Iterable[Any], lr: float = 2.0**-5, rho: float = 2.0**-4) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        """Climb along the gradients."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad, alpha=group["rho"])
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def restore(self) -> None:
        """Go back to where :meth:`first_step` began, if it was called since."""
        for group in self.param_groups:
            for p in group["params"]:
                if "old_p" in self.state[p]:
                    old = self.state[p].pop("old_p")
                    if isinstance(p, DTensor):
                        p.copy_(old)
                    else:
                        p.data = old

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take the second step of SAM."""
        self.restore()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad, alpha=group["lr"])


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (arXiv 2405.15682): weights are y in training and x in evaluation; the state has z."""

    def __init__(self, params: Iterable[Any], lr: float = 2.0**-5, beta: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "train_mode": False, "k": 0})

    def _move(self, weight_of: Any, train_mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train_mode:
                group["train_mode"] = train_mode
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight=weight_of(group["beta"]))

    @torch.no_grad()
    def train(self) -> None:
        """Show y."""
        self._move(lambda beta: 1 - beta, True)

    @torch.no_grad()
    def eval(self) -> None:
        """Show x."""
        self._move(lambda beta: 1 - 1 / beta, False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call train() before step()")
            group["k"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.clone()
                x = p.lerp(state["z"], weight=1 - 1 / group["beta"])
                state["z"].sub_(p.grad, alpha=group["lr"])
                x.lerp_(state["z"], weight=1 / group["k"])
                p.copy_(x.lerp_(state["z"], weight=1 - group["beta"]))


class Bf16Momentum(torch.optim.Optimizer):
    """SGD whose momentum is bf16 on purpose, whatever the parameters are."""

    def __init__(self, params: Iterable[Any], lr: float = 2.0**-5) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if "m" not in state:
                    state["m"] = torch.zeros_like(p, dtype=torch.bfloat16)
                state["m"].lerp_(p.grad.bfloat16(), 0.25)
                p.sub_(state["m"].float(), alpha=group["lr"])


class Warming(torch.optim.Optimizer):
    """SGD with momentum whose step count and schedule are attributes, saved beside the state as StableSPAM does it."""

    def __init__(self, params: Iterable[Any], lr: float = 2.0**-5) -> None:
        super().__init__(params, {"lr": lr})
        self.total_step = 0
        self.clock = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.clock, 0.5)
        self.recent: dict[int, float] = {}

    def state_dict(self) -> dict[str, Any]:
        """Add the count and the schedule."""
        own = {"total_step": self.total_step, "recent": dict(self.recent)}
        clock = {"optimizer": self.clock.state_dict(), "schedule": self.schedule.state_dict()}
        return {**super().state_dict(), **own, "clock": clock}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take them."""
        super().load_state_dict(state_dict)
        self.total_step, self.recent = state_dict["total_step"], dict(state_dict["recent"])
        self.clock.load_state_dict(state_dict["clock"]["optimizer"])
        self.schedule.load_state_dict(state_dict["clock"]["schedule"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step, at the rate of the schedule."""
        rate = self.clock.param_groups[0]["lr"]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 1 / (1 + self.total_step))
                p.sub_(state["momentum"], alpha=group["lr"] * rate)
        self.total_step += 1
        self.recent[self.total_step % 2] = rate
        self.clock.step()
        self.schedule.step()


def values_in(nest: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of a nest by path; tensors as whole copies."""
    if isinstance(nest, dict):
        found = [values_in(value, f"{path}.{key}") for key, value in nest.items()]
    elif isinstance(nest, (list, tuple)):
        found = [values_in(value, f"{path}.{index}") for index, value in enumerate(nest)]
    else:
        return {path: whole(nest) if isinstance(nest, Tensor) else nest}
    return {name: leaf for part in found for name, leaf in part.items()}
