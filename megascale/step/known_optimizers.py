"""Optimizers of other libraries that would train wrongly here, known by their names: none of these is imported."""

import re
from collections.abc import Iterator

import torch

from megascale.errors import ArgumentError
from megascale.step.lending import holders_of

_LOW_BIT = re.compile(r"Adam\w*?(8bit|4bit|Fp8)$")
"""The classes of torchao.optim, and of its older places, that hold moments as tensors of a kind of their own."""
_OF_ALL_PARAMETERS = re.compile(r"(Ranger21|Prodigy|DAdapt\w+)$")
"""Optimizers that estimate a step size, or normalize, by a sum over all parameters of all groups."""


def refuse_low_bit_moments(optimizer: torch.optim.Optimizer) -> None:
    """Raise ArgumentError for torchao's 8-bit, 4-bit and fp8 optimizers."""
    for kind in _kinds(optimizer):
        if kind.__module__.partition(".")[0] == "torchao" and _LOW_BIT.match(kind.__name__):
            raise ArgumentError(
                f"optimizer {kind.__name__} of torchao holds its moments in tensors of its own kind, which cannot be "
                "checked, sharded or saved here; wrap torch.optim.AdamW (or Adam) with 8-bit moments of megascale's: "
                "OptimizerConfig(exp_avg_dtype=torch.int8, exp_avg_sq_dtype=torch.uint8, store_param_remainders=True)"
            )


def refuse_sums_over_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Raise ArgumentError where ranks own some parameters each, and an update reads one number of all of them."""
    name = type(optimizer).__name__
    for holder in holders_of(optimizer).values():
        norms = [group["max_grad_norm"] for group in holder.param_groups if group.get("max_grad_norm")]
        # pytorch_optimizer's Lamb has the option always, and uses it with pre_norm=True.
        if norms and getattr(holder, "pre_norm", True):
            raise ArgumentError(
                f"optimizer {name} divides gradients by one norm over all parameters (max_grad_norm={norms[0]}), but "
                "with shard='parameters' each rank has only the parameters that it updates, and would divide by "
                "another norm; switch that off (max_grad_norm=0, or pre_norm=False) and pass "
                f"clip_grad={norms[0]}, which clips by the norm of all ranks' gradients"
            )
    for kind in _kinds(optimizer):
        if _OF_ALL_PARAMETERS.match(kind.__name__):
            raise ArgumentError(
                f"optimizer {name} adds up a number over all parameters, but with shard='parameters' each rank has "
                "only the parameters that it updates; use MixedPrecisionOptimizer, which has all of them on each rank"
            )


def _kinds(optimizer: torch.optim.Optimizer) -> Iterator[type]:
    for holder in holders_of(optimizer).values():
        yield from type(holder).__mro__
