"""What a list makes of the numbers that the one walk over its tensors returns, without the compiled reader."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megascale.kernels import TensorList
from megascale.kernels.tensors import tensor_reader
from megascale.kernels.tensors.tensor_reader import Facts, Memory

CODES = {torch.float32: 3, torch.float16: 5, torch.bfloat16: 7}
TENSORS = [
    torch.zeros(2, dtype=torch.float16),
    torch.zeros(3),
    torch.zeros(2, 3).t(),
    torch.zeros(4, dtype=torch.float16),
    torch.zeros(0, dtype=torch.bfloat16),
    torch.zeros(1),
]


def _read(tensors: list[Tensor], **_: Any) -> Facts:
    """Read as tensor_reader.cpp does: one number for dtype, device and contiguity together."""
    kinds = [(tensor.dtype, tensor.device, tensor.is_contiguous()) for tensor in tensors]
    columns = (
        [tensor.data_ptr() for tensor in tensors],
        [tensor.numel() for tensor in tensors],
        [10 * (1 + kinds.index(kind)) for kind in kinds],
        [0] * len(tensors),
    )
    memory = Memory(*(np.array(column, dtype=np.int64) for column in columns))
    return Facts(memory, np.zeros(len(tensors), np.int64), np.zeros(len(tensors), np.int64), None)


def test_kinds_tell_what_the_tensors_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors of several kinds, in any order: every dtype, every code in its place, whether all are contiguous."""
    monkeypatch.setattr(tensor_reader, "read", _read)
    every = TensorList(TENSORS)
    assert every.dtype_codes(CODES).tolist() == [CODES[tensor.dtype] for tensor in TENSORS]
    assert every.dtypes == {tensor.dtype for tensor in TENSORS}
    assert not every.contiguous
    without = TensorList([*TENSORS[:2], *TENSORS[3:]])
    assert without.contiguous
    assert without.numels.tolist() == [2, 3, 4, 0, 1]
    assert TensorList(TENSORS[1:2]).dtype_codes(CODES).tolist() == [3]
    assert TensorList([]).dtype_codes(CODES).tolist() == []


@pytest.mark.parametrize("unread", [0, 2])
def test_a_tensor_that_could_not_be_read_leaves_no_memory(unread: int) -> None:
    """Where one of the tensors asked for could not be read, nothing is told of any; of the others it is."""
    memory = _read(TENSORS).memory
    memory.kinds[unread] = -1
    assert memory.at(slice(0, 3)) is None
    assert memory.at(np.array([1, unread])) is None
    rest = memory.at(slice(3, 6))
    assert rest is not None
    assert rest.numels.tolist() == [4, 0, 1]
