"""What is told of one tensor's memory: why it cannot be used, whether elements share it, whether bytes are values."""

import warnings

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from megascale.kernels import plain
from megascale.kernels.tensors.checked_memory import MemoryRecord, is_plain, memory_fault, overlapping, shares_elements


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
    "zeros without memory": torch._efficientzerotensor(3),
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


def test_a_record_of_memory_that_is_gone_does_not_hold() -> None:
    """Also where torch can no longer tell of it."""
    tensor = torch.zeros(3)
    record = MemoryRecord([tensor])
    assert record.holds() is True
    tensor.data = torch._to_functional_tensor(torch.zeros(3))
    assert record.holds() is False


def test_elements_share_memory_where_a_stride_is_0() -> None:
    """But for a dimension of size 1, whose stride nobody uses."""
    assert shares_elements(torch.zeros(1).expand(2))
    assert shares_elements(torch.zeros(3, 1).expand(3, 2))
    assert not shares_elements(torch.zeros(2, 3).t())
    assert not shares_elements(torch.zeros(3).as_strided((1, 3), (0, 1)))


def test_tensors_that_only_touch_do_not_overlap() -> None:
    """With gaps or without: the end of the last element counts."""
    memory = torch.zeros(20)
    assert overlapping([memory[:5:4], memory[5:10:2], memory[8:10]]) == [1, 2]
    assert overlapping([memory[:5:4], memory[5:8:2], memory[8:10]]) == []
    assert overlapping([memory[:8].view(2, 4)[:, :3], memory[6:9]]) == [0, 1]
    assert overlapping([memory[:8].view(2, 4)[:, :3], memory[7:9]]) == []
    assert overlapping([memory[9:], memory[:10], memory[10:12]]) == [0, 1, 2]
    assert overlapping([]) == []


def test_bytes_are_values_but_for_marked_tensors() -> None:
    """Those are copied to be read; others are taken as they are."""
    numbers = torch.tensor([1.0 + 2.0j, 3.0j])
    marked = {
        torch._neg_view(torch.tensor([1.0, -2.0])): torch.tensor([-1.0, 2.0]),
        numbers.conj(): torch.tensor([1.0 - 2.0j, -3.0j]),
        numbers.conj().imag: torch.tensor([-2.0, -3.0]),
        torch._efficientzerotensor((2, 3), dtype=torch.float16): torch.zeros(2, 3, dtype=torch.float16),
    }
    for tensor, expected in marked.items():
        assert not is_plain(tensor)
        copy = plain(tensor)
        assert is_plain(copy)
        assert copy.dtype == expected.dtype
        assert torch.equal(copy, expected)
    assert is_plain(numbers)
    assert plain(numbers) is numbers
