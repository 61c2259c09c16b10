"""Model params in flat buckets: what moves back into one, and what need not be compared."""

import torch
from torch import nn

from megascale import ConstantGradScaler, DistributedOptimizer
from tests.counting import OperatorCounter


def _optimizer(module: nn.Module, lr: float) -> DistributedOptimizer:
    inner = torch.optim.SGD(module.parameters(), lr=lr)
    return DistributedOptimizer(inner, None, ConstantGradScaler(1.0), modules=module)


def _step(optimizer: DistributedOptimizer, module: nn.Module) -> None:
    optimizer.zero_grad()
    optimizer.scale_loss(module(torch.ones(1, 3).half()).float().sum()).backward()
    assert optimizer.step().success


def test_a_parameter_that_became_its_own_transpose_is_followed() -> None:
    """It lies at the same address, in the same bucket, in other strides."""
    module = nn.Linear(3, 3, bias=False).half()
    optimizer = _optimizer(module, 0.0)
    expected = module.weight.detach().t().clone()
    module.weight.data = module.weight.data.t()
    _step(optimizer, module)
    assert torch.equal(module.weight.detach(), expected)
    assert module.weight.is_contiguous()
    assert torch.equal(next(optimizer.main_params())[1], expected.float().flatten())


def test_pieces_that_nobody_else_wrote_cost_no_pass() -> None:
    """Pieces are compared with the parameter after a write by others, not after a step."""
    module = nn.Linear(3, 3).half()
    optimizer = _optimizer(module, 0.1)
    _step(optimizer, module)
    with OperatorCounter() as after_step:
        next(optimizer.main_params())
    with torch.no_grad():
        module.weight.mul_(2)
    with OperatorCounter() as after_write:
        next(optimizer.main_params())
    compared = torch.ops.aten.where.self
    assert (after_step.counts[compared], after_write.counts[compared]) == (0, 1)
