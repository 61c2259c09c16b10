"""Steps inside torch's modes that change what a new tensor is."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from tests.training import same_bits

BACKENDS = ("native", "torch", "reference")


def _built(backend: str, **options: Any) -> tuple[nn.Module, MixedPrecisionOptimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).half()
    inner = torch.optim.AdamW(module.named_parameters(), lr=0.1)
    config = OptimizerConfig(fp16=True, backend=backend, **options)
    return module, MixedPrecisionOptimizer(inner, config, DynamicGradScaler(64.0, growth_interval=2))


def _backward(module: nn.Module, optimizer: MixedPrecisionOptimizer, step: int) -> None:
    optimizer.zero_grad()
    inputs = torch.full((3, 4), 0.1 * step, dtype=torch.float16)
    optimizer.scale_loss(module(inputs).float().square().sum()).backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_default_device_changes_no_bit(backend: str) -> None:
    """Invariant 9: no scratch of a step lies on torch's default device, where a kernel would write to no memory.

    Steps, state dicts and loading have the same bits inside ``torch.device("meta")``, from the first step on.
    """

    def trained(is_inside: bool) -> dict[str, Tensor]:
        module, optimizer = _built(backend)
        for step in range(4):
            _backward(module, optimizer, step)
            with torch.device("meta" if is_inside else "cpu"):
                assert optimizer.step().success
                if step == 2:
                    optimizer.load_state_dict(optimizer.state_dict())
        scale = optimizer.get_loss_scale()
        return {name: main.clone() for name, main in optimizer.main_params()} | {"scale": scale}

    outside, inside = trained(False), trained(True)
    assert all(tensor.device.type == "cpu" for tensor in inside.values())
    assert same_bits(outside, inside)
