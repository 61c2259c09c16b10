"""Lists of tensors that are looked at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.kernels import MemoryRecord, TensorList

TENSORS = [
    torch.zeros(3),
    torch.zeros(2, 4, dtype=torch.float16),
    torch.zeros(()),
    torch.zeros(0, dtype=torch.bfloat16),
]


CODES = {dtype: code for code, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16))}


pytestmark = pytest.mark.usefixtures("reader")


def _facts(tensors: TensorList) -> tuple[Any, ...]:
    return (
        tensors.pointers.tolist(),
        tensors.versions.tolist(),
        tensors.numels.tolist(),
        tensors.dtype_codes(CODES).tolist(),
        tensors.dtypes,
        tensors.devices,
        tensors.contiguous,
    )


@pytest.mark.parametrize("cut", [[4], [0, 4], [1, 3], [2, 0, 2], [1, 1, 1, 1]])
@pytest.mark.parametrize("last", [torch.zeros(4, 2), torch.zeros(2, 4).t(), torch.zeros(5, device="meta")])
def test_joined_tells_what_one_list_would(cut: list[int], last: Tensor) -> None:
    """However a list is cut, the joined parts tell of addresses, lengths, dtypes, devices and layout as the whole."""
    tensors = [*TENSORS[:3], last]
    parts, start = [], 0
    for length in cut:
        parts.append(TensorList(tensors[start : start + length]))
        start += length
    joined = TensorList.joined(parts)
    assert all(a is b for a, b in zip(joined, tensors, strict=True))
    assert _facts(joined) == (
        [t.data_ptr() for t in tensors],
        [t._version for t in tensors],
        [t.numel() for t in tensors],
        [CODES[t.dtype] for t in tensors],
        {t.dtype for t in tensors},
        {t.device for t in tensors},
        all(t.is_contiguous() for t in tensors),
    )


def test_one_part_is_joined_as_itself() -> None:
    """What is known of a single part stays known: `joined` and `of` return it."""
    part = TensorList(TENSORS)
    assert TensorList.joined([part]) is part
    assert TensorList.of(part) is part
    assert list(TensorList.of(TENSORS)) == TENSORS


def _record() -> tuple[list[Tensor], MemoryRecord]:
    tensors = [torch.zeros(4, 6) for _ in range(70)] + [torch.zeros(6, 4).t() for _ in range(70)]
    return tensors, MemoryRecord(tensors)


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "moved": lambda t: t.share_memory_(),
    "replaced": lambda t: setattr(t, "data", t.data.clone()),
    "cut": lambda t: setattr(t, "data", t.data[:3]),
    "other_dtype": lambda t: setattr(t, "data", t.data.view(torch.int32)),
    "negated": lambda t: setattr(t, "data", torch._neg_view(t.data)),
    "freed": lambda t: t.untyped_storage().resize_(0),
    "cut_short": lambda t: t.untyped_storage().resize_(8),
    "transposed": lambda t: t.t_(),
    "resized": lambda t: t.resize_(2, 2),
}


@pytest.mark.parametrize("place", [0, 33, 69, 70, 139])
@pytest.mark.parametrize("change", CHANGES)
def test_record_tells_of_every_change(change: str, place: int) -> None:
    """One tensor of many, in any block of the walk, contiguous or not; a write into the memory is no change."""
    tensors, record = _record()
    tensors[place].add_(1)
    assert record.holds()
    CHANGES[change](tensors[place])
    assert not record.holds()
