"""An error that a device's host learns one step late names what differed in its step, not what differs in the next."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megascale import ChainedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.errors import UsageError
from tests.fake_device.device import FakeDevice
from tests.fake_device.process import OnDevice

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NAMES = ("first", "second", "third")


def _apart(_device: FakeDevice, dtype: torch.dtype, chained: bool, later: tuple[str, ...]) -> str:
    """Give "second" gradients that differ between ranks, in the next step those of ``later``; return the error."""
    params = {name: nn.Parameter(torch.ones(4, dtype=dtype, device="cuda")) for name in NAMES}
    config = OptimizerConfig(fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16, backend="reference")
    scaler = DynamicGradScaler() if dtype == torch.float16 else None
    lists = [list(params.items())[:1], list(params.items())[1:]] if chained else [list(params.items())]
    inner = [torch.optim.AdamW(named) for named in lists]
    members = [MixedPrecisionOptimizer(one, config, scaler, grads_are_scaled=True) for one in inner]
    optimizer = ChainedOptimizer(members) if chained else members[0]
    for differing in ((), ("second",)):
        _give(params, differing)
        optimizer.step()
    _give(params, later)
    if not later:
        params["first"].grad = None  # the next step has fewer gradients
    with pytest.raises(UsageError) as caught:
        optimizer.step()
    return str(caught.value)


def _give(params: dict[str, nn.Parameter], differing: tuple[str, ...]) -> None:
    for name, param in params.items():
        param.grad = torch.full_like(param, 1.0 + dist.get_rank() * (name in differing))


@pytest.mark.default("torch.float32-False")
@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_parameter_of_its_own_step_is_named(on_device: OnDevice, dtype: torch.dtype, chained: bool) -> None:
    """Whatever the next step's gradients are. Of sharded gradients (ZeRO-1, FSDP2) no two ranks hold the same."""
    for later in (("third",), ()):
        for message in on_device.ranks(2, _apart, dtype, chained, later):
            assert "have different gradients: nobody has reduced them (those of 'second')." in message
