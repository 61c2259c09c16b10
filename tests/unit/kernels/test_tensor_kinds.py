"""What a list makes of the numbers that the one walk over its tensors returns, without the compiled reader."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megascale.kernels import GradList, ParamList, TensorList
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


class _Owner:
    """Who finds out something."""


_NUMBERS: dict[Any, int] = {}


def _number(form: Any) -> int:
    return _NUMBERS.setdefault(form, 10 + len(_NUMBERS))


def _memory(tensors: Sequence[Tensor | None]) -> Memory:
    """Read as tensor_reader.cpp does: one number for dtype, device and contiguity together, -1 for what is missing.

    No tensor lies at such addresses, which shows where they come from.
    """
    rows = [
        (-1, 0, -1, 0)
        if tensor is None
        else (
            tensor.data_ptr() + 1,
            tensor.numel(),
            _number((tensor.dtype, tensor.device, tensor.is_contiguous())),
            _number((tensor.shape, tensor.stride())),
        )
        for tensor in tensors
    ]
    return Memory(*np.array(rows, dtype=np.int64).reshape(-1, 4).T.copy())


def _read(tensors: list[Tensor], *, grads: bool = False, **_: Any) -> Facts:
    """Return versions that no tensor has either."""
    numbers = np.arange(len(tensors))
    held = _memory([tensor.grad for tensor in tensors]) if grads else None
    return Facts(_memory(tensors), numbers + 100, numbers + 200, held, WeakKeyDictionary())


@pytest.fixture(autouse=True)
def _walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_reader, "read", _read)


def test_kinds_tell_what_the_tensors_would() -> None:
    """Of tensors of several kinds, in any order: every dtype, every code in its place, whether all are contiguous."""
    every = TensorList(TENSORS)
    assert every.dtype_codes(CODES).tolist() == [CODES[tensor.dtype] for tensor in TENSORS]
    assert every.dtypes == {tensor.dtype for tensor in TENSORS}
    assert not every.contiguous
    without = TensorList([*TENSORS[:2], *TENSORS[3:]])
    assert without.contiguous
    assert without.numels.tolist() == [2, 3, 4, 0, 1]
    assert TensorList(TENSORS[:2]).dtype_codes(CODES).tolist() == [5, 3]
    assert TensorList(TENSORS[1:2]).dtype_codes(CODES).tolist() == [3]
    assert TensorList([]).dtype_codes(CODES).tolist() == []


@pytest.mark.parametrize("unread", [0, 2])
def test_a_tensor_that_could_not_be_read_leaves_no_memory(unread: int) -> None:
    """Where one of the tensors asked for could not be read, nothing is told of any; of the others it is."""
    memory = _memory(TENSORS)
    memory.kinds[unread], memory.kinds[4] = -1, 0
    assert memory.at(slice(0, 3)) is None
    assert memory.at(np.array([1, unread])) is None
    rest = memory.at(slice(3, 6))
    assert rest is not None
    assert rest.numels.tolist() == [4, 0, 1]


def test_one_walk_tells_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is asked once more, and the walk is asked for once: for the list as it is, and as it was told."""
    asked: list[Any] = []

    def read(tensors: list[Tensor], **given: Any) -> Facts:
        asked.append((tensors, given))
        return _read(tensors)

    monkeypatch.setattr(tensor_reader, "read", read)
    held, room = list(TENSORS), tensor_reader.Room()
    for among in (None, 5000):
        every = TensorList(held, among, room)
        assert every.versions.tolist() == [100, 101, 102, 103, 104, 105]
        assert every.requires_grad.tolist() == [200, 201, 202, 203, 204, 205]
        assert every.pointers.tolist() == [tensor.data_ptr() + 1 for tensor in TENSORS]
        assert every.are_plain()
        assert every.devices == {torch.device("cpu")}
        assert every.form == TensorList(held).form != TensorList(held[::-1]).form
        assert every.forms.differ(TensorList(held).forms).tolist() == [False] * 6
        assert every.forms.differ(TensorList(held[::-1]).forms).tolist() == [True, True, True, True, True, True]
    assert [given for tensors, given in asked if tensors is held and given["room"] is room] == [
        {"among": 6, "room": room},
        {"among": 5000, "room": room},
    ]
    ParamList(held, 70, room).versions  # noqa: B018
    assert asked[-1][1] == {"among": 70, "grads": True, "room": room}


def test_findings_of_a_walk_are_each_owners() -> None:
    """What one has found is there when it asks again."""
    read, one, other = TensorList(TENSORS), _Owner(), _Owner()
    read.findings(one)["answer"] = 42
    assert read.findings(one) == {"answer": 42}
    assert read.findings(other) == {}


def test_gradients_are_those_at_their_params_places() -> None:
    """Read by the walk over their parameters; one that is missing is no other group's affair."""
    params: list[Tensor] = [nn.Parameter(torch.zeros(index + 1)) for index in range(6)]
    for param in params[1:]:
        param.grad = torch.ones_like(param)
    look, owner = ParamList(params), _Owner()
    assert not look.grads(params[:3], slice(0, 3)).fit()
    chosen = [params[5], params[3]]
    grads = look.grads(chosen, np.array([5, 3]), owner)
    assert grads.fit()
    assert grads.numels.tolist() == [6, 4]
    assert grads.pointers.tolist() == [param.grad.data_ptr() + 1 for param in chosen if param.grad is not None]
    assert grads.dtypes == {torch.float32}
    assert "_held" not in vars(grads)


def test_what_was_found_of_gradients_serves_their_owner_again() -> None:
    """While the walk's findings are kept: no gradient is looked at, as one shows that no longer fits."""
    params: list[Tensor] = [nn.Parameter(torch.zeros(2, 3)) for _ in range(3)]
    for param in params:
        param.grad = torch.zeros(3, 2).t()
    look, owner = ParamList(params), _Owner()

    def grads(owner: object = None) -> GradList:
        return look.grads(params, slice(None), owner)

    assert grads(owner).fit()
    assert grads(owner).dtype_codes(CODES).tolist() == [3, 3, 3]
    [members] = look.findings(owner)["members"]
    assert (members[0], members[1].tolist()) == (0, [True, True, True])
    params[1].grad.data = torch.zeros(6)  # type: ignore[union-attr]
    assert grads(owner).fit()
    assert grads(owner)._members is look.findings(owner)["members"]
    assert not grads().fit()
    assert not grads(_Owner()).fit()


def test_findings_are_not_kept_of_gradients_that_were_not_read() -> None:
    """Where one is missing, nobody would tell that it has come."""
    params: list[Tensor] = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    look, owner = ParamList(params), _Owner()
    assert not look.grads(params, slice(None), owner).fit()
    for param in params:
        param.grad = torch.zeros(2)
    assert look.grads(params, slice(None), owner).fit()
