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
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize(("dtype", "other"), [(torch.float16, torch.float32), (torch.float32, torch.float16)])
def test_gradients_of_another_dtype_stay_through_an_optimizer_of_its_own_step(
    dtype: torch.dtype, other: torch.dtype, told: bool
) -> None:
    """It cannot be assigned, so that putting it back after RMSprop's step raised, with half of the others lost."""
    params = [nn.Parameter(torch.ones(3, dtype=torch.float16)), nn.Parameter(torch.ones(3, dtype=dtype))]
    optimizer = _wrap(torch.optim.RMSprop(params, lr=0.5))
    odd = params[1]
    for param in params:
        param.grad = torch.ones_like(param) * optimizer.get_loss_scale().item()
    grad = odd.grad
    assert grad is not None
    if told:
        odd.grad = None
        odd.grad_dtype = other
        odd.grad = grad = grad.to(other)
    else:
        grad.data = grad.data.to(other)
    optimizer.step()
    assert odd.grad is grad
    assert torch.equal(params[0], odd.half())
    assert float(odd[0].detach()) < 0


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
