"""Digests of parameters: what ranks compare, also before a save."""

import struct

import pytest
import torch

from megascale.main_params.replica_check import _sums, digests


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_digest_is_two_sums_over_the_bits(dtype: torch.dtype) -> None:
    """Plain and weighted by position, in row-major order, of elements of any size; beside dtype and shape."""
    found = digests({"w": torch.tensor([[1, 3], [2, 4]], dtype=dtype).t(), "b": torch.tensor(7, dtype=dtype)})
    assert found == {"w": (str(dtype), (2, 2), 10, 1 + 4 + 9 + 16), "b": (str(dtype), (), 7, 7)}


def test_sums_of_a_digest_are_modulo_two_to_the_64th() -> None:
    """Sums of negative numbers and of large ones stay as they are."""
    values = [1.0, -2.5, -0.0]
    bits = [struct.unpack("<q", struct.pack("<d", value))[0] for value in values]
    plain, weighted = sum(bits) % 2**64, sum(place * each for place, each in enumerate(bits, 1)) % 2**64
    assert digests({"w": torch.tensor(values, dtype=torch.float64)}) == {"w": ("torch.float64", (3,), plain, weighted)}


def test_a_long_parameter_is_summed_in_parts() -> None:
    """Positions go on from part to part."""
    assert _sums(torch.tensor([1, 2, 3, 4, 5]), chunk=2).tolist() == [15, 1 + 4 + 9 + 16 + 25]
