"""Lives of an optimizer on a GPU: see tests/life.py."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu import device
from tests.life import Setup, live

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("number", [number for number in range(45) if number % 3 != 2])  # FSDP2 needs a process group
def test_life(number: int, backend: str, tmp_path: Path) -> None:
    """Invariants 2, 3 and 6 on the device's own streams, and with its own kernels."""
    setup = Setup.of(number, 1, "cuda")
    live(number, tmp_path, device().type, replace(setup, fields=setup.fields | {"backend": backend}))
