"""What kernels are tested with: each backend."""

import pytest
import torch

from tests.unit.kernels.memory_cases import BACKENDS


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend; triton in its interpreter."""
    if request.param == "triton":
        pytest.importorskip("triton")
        if torch.accelerator.is_available():
            pytest.skip("its kernels run on the accelerator")
    return str(request.param)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors small enough for Triton's interpreter still take several chunks."""
    from megascale.kernels.triton import device_table
    from tests.unit.kernels.triton_cases import CHUNK

    monkeypatch.setattr(device_table, "CHUNK", CHUNK)
