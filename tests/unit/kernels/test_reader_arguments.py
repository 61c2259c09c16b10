"""The functions of tensor_reader.cpp check what they are given before they read or write it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megascale.kernels.tensors import tensor_reader

TENSORS = [torch.zeros(2) for _ in range(5)]
WRONG: list[tuple[str, tuple[Any, ...], type[Exception]]] = [
    ("read_facts", (TENSORS, np.zeros((6, 5), np.int64), True), ValueError),
    ("read_facts", (TENSORS, np.zeros((10, 4), np.int64), True), ValueError),
    ("read_facts", (tuple(TENSORS), np.zeros((6, 5), np.int64), False), TypeError),
    ("read_facts", (TENSORS,), TypeError),
    ("expect_memory", (tuple(TENSORS),), TypeError),
    ("holds_memory", (TENSORS,), ValueError),
    ("read_versions", (TENSORS, np.zeros(4, np.int64)), ValueError),
    ("increment_versions", (TENSORS, np.zeros(6, np.int64)), ValueError),
    ("increment_versions", (TENSORS, np.broadcast_to(np.int64(0), 5)), ValueError),
    ("same_objects", (TENSORS, tuple(TENSORS)), TypeError),
    ("same_values", ({0: 0}, [0], np.zeros(2, np.int64)), ValueError),
    ("same_values", ([0], [0], np.zeros(1, np.int64)), TypeError),
    ("hold_objects", ([{}] * 5, ["a"], [tuple(TENSORS)], np.zeros(5, np.int64)), TypeError),
    ("hold_objects", ([{}] * 5, ["a"], [TENSORS], np.zeros(4, np.int64)), ValueError),
]


@pytest.mark.slow
@pytest.mark.usefixtures("native_reader")
@pytest.mark.parametrize(("name", "given", "error"), WRONG)
def test_wrong_arguments_are_refused(name: str, given: tuple[Any, ...], error: type[Exception]) -> None:
    """Arrays of another length, or read-only, other types, too few arguments: no version has changed."""
    before = [tensor._version for tensor in TENSORS]
    with pytest.raises(error):
        getattr(tensor_reader._library(), name)(*given)
    assert [tensor._version for tensor in TENSORS] == before


def test_another_header_is_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that was built with an older header is not taken for this one."""
    for name in (tensor_reader.SOURCE.name, tensor_reader.HEADER):
        (tmp_path / name).write_text(tensor_reader.SOURCE.with_name(name).read_text())
    monkeypatch.setattr(tensor_reader, "SOURCE", tmp_path / tensor_reader.SOURCE.name)
    before = tensor_reader._recipe(("c++",), ()).stem()
    header = tmp_path / tensor_reader.HEADER
    header.write_text(header.read_text() + "\n")
    assert tensor_reader._recipe(("c++",), ()).stem() != before
