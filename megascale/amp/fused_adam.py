"""torch's fused Adam and AdamW on our kernels: same state, same arithmetic, but gradients are not written.

torch's own kernel with a ``grad_scale`` writes back every gradient that it has divided: 4 bytes of 32 per parameter.
"""

from typing import TypeGuard

import torch
from torch import Tensor, nn

from megascale.kernels import AdamHyper, Backend, Decision, Operands, TensorList, TorchBackend
from megascale.rules import ADAM
from megascale.step.kernel_state import rate
from megascale.utils.step_hooks import has_step_hooks


def fits(optimizer: torch.optim.Optimizer, backend: Backend) -> TypeGuard[torch.optim.Adam]:
    """Return whether :func:`step_` can replace the optimizer's ``step()``; results differ in the last bits at most.

    That must be torch's own ``step()``, with ``fused=True`` and without hooks, on plain fp32 parameters.
    """
    if type(optimizer) not in ADAM.kinds or isinstance(backend, TorchBackend):
        return False
    # An LR scheduler wraps step() only to see that it was called.
    replaced = "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched")
    if has_step_hooks(optimizer) or replaced:
        return False
    numbers = all(
        group["fused"] and not any(isinstance(beta, Tensor) for beta in group["betas"])
        for group in optimizer.param_groups
    )
    params = [param for group in optimizer.param_groups for param in group["params"]]
    places = {(type(param), param.dtype, param.device) for param in params}
    are_fp32 = {(kind, dtype) for kind, dtype, _ in places} == {(nn.Parameter, torch.float32)}
    return numbers and len(places) == 1 and are_fp32 and _are_plain(optimizer, params)


def _are_plain(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> bool:
    """Return whether our kernels can read parameters and state; torch's own step handles others, or refuses them."""
    states = [(param, optimizer.state[param]) for param in params if optimizer.state.get(param)]
    for name in (moment.name for moment in ADAM.moments):
        held = [(param, state[name]) for param, state in states if name in state]
        moments = TensorList(moment for _, moment in held)
        fit = all(moment.shape == param.shape and moment.device == param.device for param, moment in held)
        if not (fit and moments.are_plain() and moments.dtypes <= {torch.float32}):
            return False
    steps = TensorList(state["step"] for _, state in states if isinstance(state.get("step"), Tensor))
    counts = len(steps) == len(states) and all(step.dim() == 0 for step in steps) and steps.dtypes <= {torch.float32}
    return counts and steps.are_plain() and TensorList(params).are_plain()


@torch.no_grad()
def step_(optimizer: torch.optim.Adam, backend: Backend, decision: Decision) -> None:
    """Update parameters and state if the step lands. Missing state is created as torch creates it."""
    for group in optimizer.param_groups:
        lists: list[list[Tensor]] = [[] for _ in range(6)]
        optimizer._init_group(group, *lists)
        params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps = lists
        if not params:
            continue
        state = {"exp_avg": exp_avgs, "exp_avg_sq": exp_avg_sqs}
        if group["amsgrad"]:
            state["max_exp_avg_sq"] = max_exp_avg_sqs
        beta1, beta2 = group["betas"]
        hyper = AdamHyper(
            lr=rate(group),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["decoupled_weight_decay"],
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
        )
        backend.adam_(Operands(params, params, grads, state, steps), hyper, decision)
    optimizer._opt_called = True  # type: ignore[attr-defined]  # an LR scheduler reads it
