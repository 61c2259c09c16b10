"""Optimizers whose update of an element reads the whole parameter, as users write them: none knows of megascale."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Lamb(torch.optim.Optimizer):
    """LAMB (arXiv 1904.00962): Adam's direction, scaled by the ratio of two norms of each parameter."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 0.1)
                state["exp_avg_sq"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                update = state["exp_avg"] / (1 - 0.9 ** state["step"])
                update /= (state["exp_avg_sq"] / (1 - 0.999 ** state["step"])).sqrt().add_(1e-6)
                update.add_(p, alpha=group["weight_decay"])
                sizes = p.norm(), update.norm()
                ratio = torch.where((sizes[0] > 0) & (sizes[1] > 0), sizes[0] / sizes[1], torch.ones(()))
                p.add_(update * ratio, alpha=-group["lr"])


def _root(matrix: Tensor, power: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix + 1e-4 * torch.eye(len(matrix)))
    return vectors @ torch.diag(values.clamp_min(1e-6) ** power) @ vectors.T


class Shampoo(torch.optim.Optimizer):
    """Shampoo-like (arXiv 1802.09568): state is a list of square matrices, one for each side of a matrix."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None and p.numel()):
                state = self.state[p]
                grad = p.grad.flatten(1) if p.dim() > 1 else p.grad.reshape(-1, 1)
                if not state:
                    state |= {"step": torch.tensor(0), "sides": [torch.zeros(n, n) for n in grad.shape]}
                state["step"] += 1
                state["sides"][0].add_(grad @ grad.T)
                state["sides"][1].add_(grad.T @ grad)
                update = _root(state["sides"][0], -0.25) @ grad @ _root(state["sides"][1], -0.25)
                p.sub_(update.view(p.shape), alpha=group["lr"])


class Soap(torch.optim.Optimizer):
    """SOAP-like (arXiv 2409.11321): Adam in the eigenbasis of Shampoo's matrices, found every second step."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None and p.numel()):
                state = self.state[p]
                grad = p.grad.flatten(1) if p.dim() > 1 else p.grad.reshape(-1, 1)
                if not state:
                    state["step"] = 0
                    state["moments"] = {name: torch.zeros_like(grad) for name in ("exp_avg", "exp_avg_sq")}
                    state["sides"] = tuple(torch.zeros(n, n) for n in grad.shape)
                for side, product in zip(state["sides"], (grad @ grad.T, grad.T @ grad), strict=True):
                    side.lerp_(product, 0.05)
                if state["step"] % 2 == 0:
                    state["bases"] = [torch.linalg.eigh(side).eigenvectors.contiguous() for side in state["sides"]]
                state["step"] += 1
                left, right = state["bases"]
                turned, moments = left.T @ grad @ right, state["moments"]
                moments["exp_avg"].lerp_(grad, 0.1)
                moments["exp_avg_sq"].mul_(0.95).addcmul_(turned, turned, value=0.05)
                update = (left.T @ moments["exp_avg"] @ right) / moments["exp_avg_sq"].sqrt().add_(1e-8)
                p.sub_((left @ update @ right.T).view(p.shape), alpha=group["lr"])


def named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that are trained, by name."""
    return [(name, param) for name, param in module.named_parameters() if param.requires_grad]


WHOLE: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "muon": lambda m: torch.optim.Muon([(n, p) for n, p in named(m) if p.dim() == 2 and p.numel()], lr=1e-2),
    "adafactor": lambda m: torch.optim.Adafactor([(n, p) for n, p in named(m) if p.numel()], lr=1e-2),
    "lamb": lambda m: Lamb(named(m)),
    "shampoo": lambda m: Shampoo(named(m)),
    "soap": lambda m: Soap(named(m)),
}
