"""Main params and state in host memory, on a GPU: the bodies of the simulated device's tests, with late streams."""

from typing import Any

import pytest
import torch

from tests.fake_device.training import CODES
from tests.unit.fake_device.test_host_update import CASES, DEVICE, REMAINDERS, life_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize(("inner", "held", "stored", "overlap"), [case for case in CASES if case[1] == "replicated"])
def test_the_host_computes(inner: str, held: str, stored: dict[str, Any], overlap: bool, backend: str) -> None:
    """Bits are those without offload, also after a load."""
    way = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": overlap}
    values, places = life_of(inner, held, stored | way | {"backend": backend})
    expected, _ = life_of(inner, held, stored | {"backend": backend})
    assert places == {"cpu"}
    assert all(map(torch.equal, values, expected))


@pytest.mark.parametrize("stored", [{}, CODES, CODES | REMAINDERS], ids=["fp32", "codes", "compact"])
def test_the_device_computes(stored: dict[str, Any]) -> None:
    """State that visits the device has the bits of state that stays there."""
    values, places = life_of("adamw", "replicated", stored | DEVICE | {"backend": "auto"})
    expected, _ = life_of("adamw", "replicated", stored | {"backend": "auto"})
    assert places == {"cpu"}
    assert all(map(torch.equal, values, expected))
