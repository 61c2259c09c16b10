"""What is told of one tensor's memory: why no kernel can use it, and which tensors share it."""

import re
import warnings

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from megascale.kernels import ListReader
from megascale.kernels.tensors.faults import memory_fault, tensor_fault


def _resized(tensor: Tensor, nbytes: int) -> Tensor:
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def _matrix() -> Tensor:
    """Return two rows, the second and third of four; the last element is the 17th, which ends with byte 68."""
    return torch.zeros(4, 6)[1:3, ::2]


SOUND: dict[str, Tensor] = {
    "whole": torch.zeros(3),
    "scalar": torch.zeros(()),
    "empty": torch.zeros(0),
    "empty and freed": _resized(torch.zeros(4)[4:], 0),
    "just long enough": _resized(_matrix(), 68),
    "expanded": _resized(torch.zeros(1).expand(2, 9), 4),
}
FAULTS: dict[str, tuple[Tensor, str]] = {
    "sparse": (torch.zeros(3).to_sparse(), "has layout torch.sparse_coo"),
    "meta": (torch.zeros(3, device="meta"), "is on the meta device"),
    "empty on meta": (torch.zeros(0, device="meta"), "is on the meta device"),
    "freed": (_resized(torch.zeros(3), 0), "has lost its memory: its storage has 0 bytes, 12 are needed"),
    "cut": (_resized(_matrix(), 67), "has lost its memory: its storage has 67 bytes, 68 are needed"),
    "traced": (torch._to_functional_tensor(torch.zeros(3)), "is a Tensor without memory of its own"),
}


@pytest.mark.parametrize("tensor", SOUND.values(), ids=SOUND)
def test_sound_memory_has_no_fault(tensor: Tensor) -> None:
    """Of what has elements, up to the last byte of the last one."""
    assert memory_fault(tensor) is None


@pytest.mark.parametrize(("tensor", "message"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_told(tensor: Tensor, message: str) -> None:
    """In words that follow the tensor's name."""
    assert memory_fault(tensor) == message


@pytest.mark.slow
def test_a_fake_tensor_has_no_memory() -> None:
    """Its storage counts bytes that are not there."""
    with FakeTensorMode():
        fake = torch.zeros(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "has lost its memory" in str(memory_fault(fake))


def _of_inference() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


ODD: dict[str, tuple[Tensor, str]] = {
    "expanded": (torch.zeros(1).expand(2), "has elements that share memory, as expand() makes them: .* its clone()"),
    "expanded in part": (torch.zeros(3, 1).expand(3, 2), "has elements that share memory"),
    "negative": (torch._neg_view(torch.zeros(2)), "has torch's negative bit set: replace it by its resolve_neg()"),
    "of a conjugate": (torch.zeros(2, dtype=torch.complex64).conj().imag, "has torch's negative bit set"),
    "of inference": (_of_inference(), "was made in torch.inference_mode(), .* its clone(), made outside"),
    "freed": (_resized(torch.zeros(3), 0), "has lost its memory"),
    "zeros without memory": (torch._efficientzerotensor(3), "is a Tensor without memory of its own"),
}


@pytest.mark.parametrize(("tensor", "message"), ODD.values(), ids=ODD)
def test_what_no_kernel_reads_is_told(tensor: Tensor, message: str) -> None:
    """With the remedy. A fast path takes none of these."""
    assert re.match(re.escape(message).replace(r"\.\*", ".*"), str(tensor_fault(tensor)))
    assert ListReader().read([torch.zeros(2), tensor]) is None


def test_strides_of_one_element_tell_nothing() -> None:
    """Of a dimension of size 1 nobody uses the stride; other layouts share no elements."""
    for tensor in (torch.zeros(2, 3).t(), torch.zeros(3).as_strided((1, 3), (0, 1)), torch.zeros(())):
        assert tensor_fault(tensor) is None
        assert ListReader().read([tensor]) is not None
