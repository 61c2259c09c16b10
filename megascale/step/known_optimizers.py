"""Optimizers that would train wrongly here: those that hold others, and some that are known by their names alone."""

import re

import torch

from megascale.errors import ArgumentError

_LOW_BIT = re.compile(r"Adam\w*?(8bit|4bit|Fp8)$")
"""The classes of torchao.optim, and of its older places, that hold moments as tensors of a kind of their own."""
_OF_ALL_PARAMETERS = re.compile(r"(Ranger21|Prodigy|DAdapt\w+)$")
"""Optimizers that estimate a step size, or normalize, by a sum over all parameters of all groups."""


def refuse_held_optimizers(optimizer: torch.optim.Optimizer) -> None:
    """Raise ArgumentError where another optimizer in an attribute has state, or param groups, of the same parameters.

    Lookahead's would look for its state under other parameters than those that it is lent; one with groups of its own
    would not be lent any. One that shares both, as SAM's in pytorch_optimizer, is no other.
    """
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    shared = {id(group) for group in optimizer.param_groups}
    for name, value in vars(optimizer).items():
        if name in ("param_groups", "state"):
            continue
        held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        for other in held:
            if not isinstance(other, torch.optim.Optimizer):
                continue
            is_shared = other.state is optimizer.state and shared.issuperset(map(id, other.param_groups))
            if not is_shared and any(id(param) in params for group in other.param_groups for param in group["params"]):
                raise ArgumentError(
                    f"optimizer {type(optimizer).__name__} holds a {type(other).__name__} of the same parameters, with "
                    "state or param groups of its own, which are neither kept in fp32 nor saved; wrap that one, or an "
                    "optimizer that has all of its state in its attribute `state`, and its groups in `param_groups`"
                )


def refuse_low_bit_moments(optimizer: torch.optim.Optimizer) -> None:
    """Raise ArgumentError for torchao's 8-bit, 4-bit and fp8 optimizers."""
    for kind in type(optimizer).__mro__:
        if kind.__module__.partition(".")[0] == "torchao" and _LOW_BIT.match(kind.__name__):
            raise ArgumentError(
                f"optimizer {kind.__name__} of torchao holds its moments in tensors of its own kind, which cannot be "
                "checked, sharded or saved here; wrap torch.optim.AdamW (or Adam) with 8-bit moments of megascale's: "
                "OptimizerConfig(exp_avg_dtype=torch.int8, exp_avg_sq_dtype=torch.uint8, store_param_remainders=True)"
            )


def refuse_sums_over_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Raise ArgumentError where ranks own some parameters each, and an update reads one number of all of them."""
    name = type(optimizer).__name__
    norms = [group["max_grad_norm"] for group in optimizer.param_groups if group.get("max_grad_norm")]
    # pytorch_optimizer's Lamb has the option always, and uses it with pre_norm=True.
    if norms and getattr(optimizer, "pre_norm", True):
        raise ArgumentError(
            f"optimizer {name} divides gradients by one norm over all parameters (max_grad_norm={norms[0]}), but "
            "with shard='parameters' each rank has only the parameters that it updates, and would divide by "
            "another norm; switch that off (max_grad_norm=0, or pre_norm=False) and pass "
            f"clip_grad={norms[0]}, which clips by the norm of all ranks' gradients"
        )
    if any(_OF_ALL_PARAMETERS.match(kind.__name__) for kind in type(optimizer).__mro__):
        raise ArgumentError(
            f"optimizer {name} adds up a number over all parameters, but with shard='parameters' each rank has "
            "only the parameters that it updates; use MixedPrecisionOptimizer, which has all of them on each rank"
        )
