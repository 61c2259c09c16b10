"""What a step keeps of the one before it, and what it lets go."""

import gc
from weakref import ref

import torch
from torch import nn

from megascale import ConstantGradScaler, MixedPrecisionOptimizer


def _optimizer(params: list[nn.Parameter]) -> MixedPrecisionOptimizer:
    return MixedPrecisionOptimizer(torch.optim.SGD(params, lr=0.1), None, ConstantGradScaler(1.0))


def _step(optimizer: MixedPrecisionOptimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    assert optimizer.step().success


def test_a_replaced_parameter_is_let_go() -> None:
    """Who swaps a model's parameters, as Accelerate does under FSDP2, has their memory back two steps later."""
    optimizer = _optimizer([nn.Parameter(torch.ones(3).half())])
    _step(optimizer)
    group = optimizer.param_groups[0]
    old, group["params"] = ref(group["params"][0]), [nn.Parameter(torch.ones(3).half())]
    _step(optimizer)
    _step(optimizer)  # an error of the step before could still name it
    gc.collect()
    assert old() is None
