"""What kernels are tested with: each backend, and each way to read tensors."""

import pytest
import torch

from megascale.kernels.tensors import list_reader
from tests.unit.kernels.memory_cases import BACKENDS


@pytest.fixture(params=["guards", pytest.param("columns", marks=pytest.mark.slow)])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forms compared by torch's guards, and, as in a torch that has none, part by part."""
    if request.param == "columns":
        monkeypatch.setattr(list_reader, "TensorGuards", None)


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
