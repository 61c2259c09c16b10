"""megascale.amp and torch optimizers whose moments a dropped wrapper left as 8-bit codes."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megascale import MixedPrecisionOptimizer, OptimizerConfig
from megascale.amp import GradScaler, optimizer_step
from megascale.errors import UsageError
from tests.training import bits_equal, model, set_grads


def _step_wrapped(module: nn.Module, optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> None:
    """Step once with a wrapper, and drop it."""
    wrapper = MixedPrecisionOptimizer(optimizer, config)
    set_grads(module, 0)
    assert wrapper.step().success
    del wrapper
    gc.collect()


def _loss(module: nn.Module) -> Tensor:
    loss: Tensor = module(torch.ones(8, 4)).square().mean()
    return loss


def _stepped(module: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler) -> None:
    scaler.scale(_loss(module)).backward()
    scaler.step(optimizer)


def _unscaled(module: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler) -> None:
    scaler.scale(_loss(module)).backward()
    assert not scaler._found_inf_per_device(optimizer)  # a look, as Accelerate takes one, begins no iteration
    scaler.unscale_(optimizer)


WAYS: dict[str, Callable[[nn.Module, torch.optim.Optimizer, GradScaler], object]] = {
    "step": _stepped,
    "unscale_": _unscaled,
    "optimizer_step": lambda module, optimizer, scaler: optimizer_step(_loss(module), optimizer, scaler, 0.5),
    "no scaler": lambda module, optimizer, scaler: optimizer_step(_loss(module), optimizer, None),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_codes_of_a_dropped_wrapper_are_refused(fused: bool, cast: bool, way: str) -> None:
    """Before a parameter or state has changed, also where torch's ``load_state_dict`` has cast codes to fp32, with
    which any step() would train in silence; fp32 moments train on.
    """
    module = model(torch.float32)
    optimizer = torch.optim.AdamW(module.named_parameters(), fused=fused)
    _step_wrapped(module, optimizer, OptimizerConfig(exp_avg_dtype=torch.int8, exp_avg_sq_dtype=torch.uint8))
    if cast:
        optimizer.load_state_dict(optimizer.state_dict())
        assert all(state["exp_avg"].dtype == torch.float32 for state in optimizer.state.values())

    def held() -> list[Tensor]:
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [value.detach().clone() for value in (*module.parameters(), *states)]

    before, scaler = held(), GradScaler("cpu", init_scale=128.0)
    with pytest.raises(UsageError, match=r"AdamW holds exp_avg and exp_avg_sq as 8-bit codes, .*: wrap the optimizer"):
        WAYS[way](module, optimizer, scaler)
    assert all(map(bits_equal, before, held()))
    if not cast:
        _step_wrapped(module, optimizer, OptimizerConfig())
        assert optimizer_step(_loss(module), optimizer, GradScaler("cpu", init_scale=128.0), 0.5).success
