"""Gradients and state of dtypes that kernels do not take, or without memory, beside those that they do."""

import pytest
import torch
from torch import nn

from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.errors import UsageError


def _wrap(inner: torch.optim.Optimizer) -> MixedPrecisionOptimizer:
    config = OptimizerConfig(fp16=True, backend="native")
    return MixedPrecisionOptimizer(inner, config, DynamicGradScaler(4.0, 1.0, 2.0, 0.5, 9, 1))


@pytest.mark.native
def test_freed_state_of_an_optimizer_of_its_own_step_is_refused() -> None:
    """RMSprop's own step would read the freed memory, and kill the process."""
    param = nn.Parameter(torch.ones(3, dtype=torch.float16))
    inner = torch.optim.RMSprop([param])
    optimizer = _wrap(inner)
    for _ in range(2):
        param.grad = torch.ones_like(param) * optimizer.get_loss_scale().item()
        before = param.detach().clone()
        if inner.state:
            inner.state[param]["square_avg"].untyped_storage().resize_(0)
            with pytest.raises(UsageError, match=r"state\['0'\]\['square_avg'\] has lost its memory"):
                optimizer.step()
            assert torch.equal(param, before)
        else:
            optimizer.step()
