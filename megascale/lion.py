"""Lion, which torch.optim lacks."""

from collections.abc import Iterable
from typing import Any

import torch

from megascale.errors import UsageError
from megascale.utils import validate


class Lion(torch.optim.Optimizer):
    """Lion: the sign of an interpolated momentum, with decoupled weight decay (arXiv 2302.06675).

    Wrapped, its update runs on megascale's kernels in one pass. Alone, ``step()`` is plain torch code.

    Args:
        params: parameters, (name, parameter) pairs or param groups.
        lr: learning rate; a tenth to a third of AdamW's is usual.
        betas: weights of the old momentum in the step's direction, and in the momentum.
        weight_decay: decoupled, times lr.
        maximize: ascend.

    Raises:
        ArgumentError, ArgumentTypeError: naming the argument.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        validate.non_negative("lr", lr)
        validate.betas("betas", betas)
        validate.non_negative("weight_decay", weight_decay)
        validate.flag("maximize", maximize)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step with the gradients in ``param.grad``. Raises UsageError for a closure."""
        if closure is not None:
            raise UsageError("step() takes no closure: run forward and backward first")
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad = -param.grad if group["maximize"] else param.grad
                state = self.state[param]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                exp_avg = state["exp_avg"]
                direction = (beta1 * exp_avg + (1 - beta1) * grad).sign_()
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * direction)
                exp_avg.mul_(beta2).add_((1 - beta2) * grad)
