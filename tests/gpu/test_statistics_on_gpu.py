"""Statistics across chunks where programs run at once: whoever comes last adds up, in the order of the chunks."""

import pytest
import torch

from megascale.kernels.triton import backend as triton_backend
from megascale.kernels.triton import device_table
from megascale.kernels.triton.backend import TritonBackend
from tests.unit.kernels.test_triton_vectors import at_address, sum_as_documented

pytestmark = pytest.mark.gpu


def test_sums_repeat_bitwise_wherever_a_gradient_lies() -> None:
    """Two groups of chunks and a remainder, aligned and not, 50 times: the bits of the documented order each time."""
    chunk = device_table.CHUNK
    values = torch.randn((triton_backend.FAN + 9) * chunk + 5, generator=torch.Generator().manual_seed(0)).cuda().half()
    grads = [at_address(values, 0)[0], at_address(values, 2)[0], values[:chunk]]
    expected = [sum_as_documented(grad, chunk) for grad in grads]
    backend = TritonBackend()
    found = torch.stack([backend.measure(grads, False).sum_squares for _ in range(50)])
    assert found.unique(dim=0).tolist() == [expected]
    assert expected[0] == expected[1]
