"""Whole steps on a device that is not there: nobody waits for it, and launches do not grow with the tensors."""

import pytest
import torch

from tests.fake_device.device import FakeDevice
from tests.fake_device.process import OnDevice
from tests.fake_device.training import INNER, parameters, take_steps, wrap

KINDS = [pytest.param(one, marks=() if one == "adamw" else pytest.mark.slow) for one in INNER]
EACH_STEP = ["measure_kernel", "total_kernel", "decide_kernel", "rescale_kernel"]


def _kernel_of(inner: str) -> str:
    return f"{inner.split('_')[0].removesuffix('w')}_kernel"


def _steps(
    device: FakeDevice, inner: str, dtype: torch.dtype = torch.float16, count: int = 6
) -> dict[str, list[list[str]]]:
    params = parameters(count, dtype)
    records = take_steps(device, wrap(INNER[inner](params)), params)
    return {
        "syncs": [seen.syncs() for seen in records],
        "launches": [seen.launches() for seen in records],
        "waits": [seen.event_waits() for seen in records],
        "recorded": [seen.of("record") for seen in records],
    }


@pytest.mark.parametrize(
    "inner", [pytest.param(one, marks=() if one == "adamw" else pytest.mark.slow) for one in INNER]
)
def test_no_step_waits_for_the_device(on_device: OnDevice, inner: str) -> None:
    """Invariant 5: no host sync after the first step, one update, five launches."""
    seen = on_device(_steps, inner)
    assert seen["syncs"][1:] == [[]] * 3
    assert seen["launches"] == [[*EACH_STEP, _kernel_of(inner)]] * 4
    # The host waits for the copy of the step before, no other.
    assert seen["waits"][1:] == seen["recorded"][:-1]
