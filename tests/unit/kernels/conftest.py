"""What kernels are tested with: each backend, and each way to read tensors."""

import pytest
import torch

from megascale.kernels.tensors import tensor_reader
from tests.unit.kernels.memory_cases import BACKENDS


@pytest.fixture(params=["python", pytest.param("native", marks=pytest.mark.slow)])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors read one by one, and in one walk."""
    monkeypatch.setenv(tensor_reader.ENVIRONMENT_VARIABLE, request.param)


@pytest.fixture
def native_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors read in one walk, for tests that need it."""
    if tensor_reader._library() is None:
        pytest.skip("tensor_reader.cpp cannot be built here")
    monkeypatch.setenv(tensor_reader.ENVIRONMENT_VARIABLE, "native")


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
