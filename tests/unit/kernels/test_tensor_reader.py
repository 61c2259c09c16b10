"""Reading many tensors in one walk: the library and Python tell the same of every tensor, or leave it to Python."""

import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import Buffer

from megascale import DynamicGradScaler, MixedPrecisionOptimizer
from megascale.kernels import MemoryRecord, ParamList, TensorList, library_build
from megascale.kernels.tensors import tensor_reader
from megascale.main_params.write_tracker import WriteTracker
from tests.unit.kernels.test_tensor_list import _grads_of, _hold_objects, _Wrapped

# The first of them may have to compile the library, which takes half a minute.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("native_reader")]

CODES = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 0, torch.float64: 3, torch.int64: 4}


def _memory(tensors: TensorList) -> tuple[object, ...]:
    return (
        tensors.pointers.tolist(),
        tensors.numels.tolist(),
        tensors.dtype_codes(CODES).tolist(),
        tensors.dtypes,
        tensors.devices,
        tensors.contiguous,
    )


def _facts(tensors: TensorList) -> tuple[object, ...]:
    return (tensors.versions.tolist(), tensors.requires_grad.tolist(), *_memory(tensors))


def _memory_from_python(tensors: list[Tensor]) -> tuple[object, ...]:
    """An oracle: one attribute of one tensor after the other."""
    return (
        [tensor.data_ptr() for tensor in tensors],
        [tensor.numel() for tensor in tensors],
        [CODES[tensor.dtype] for tensor in tensors],
        {tensor.dtype for tensor in tensors},
        {tensor.device for tensor in tensors},
        all(tensor.is_contiguous() for tensor in tensors),
    )


def _from_python(tensors: list[Tensor]) -> tuple[object, ...]:
    return (
        [tensor._version for tensor in tensors],
        [int(tensor.requires_grad) for tensor in tensors],
        *_memory_from_python(tensors),
    )


SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 4), (2, 3, 4)]


@st.composite
def _tensors(draw: st.DrawFn) -> list[Tensor]:
    """Tensors of all dtypes, written a few times, some transposed, some views, some parameters."""
    made = []
    for _ in range(draw(st.integers(0, 150))):
        dtype = draw(st.sampled_from(list(CODES)))
        tensor = torch.zeros(draw(st.sampled_from(SHAPES)), dtype=dtype)
        match draw(st.integers(0, 4)):
            case 0 if tensor.dim() > 1:
                tensor = tensor.transpose(0, 1)
            case 1 if tensor.dim() == 1 and len(tensor):
                tensor = tensor[draw(st.integers(0, len(tensor) - 1)) :]
            case 2 if dtype.is_floating_point:
                tensor = nn.Parameter(tensor, requires_grad=draw(st.booleans()))
            case _:
                pass
        with torch.no_grad():
            for _ in range(draw(st.integers(0, 3))):
                tensor.add_(1)
        made.append(tensor)
    return made


@given(_tensors(), st.sampled_from([1, 2, 3]))
@settings(max_examples=60, deadline=None)
def test_facts_are_those_that_python_tells(tensors: list[Tensor], threads: int) -> None:
    """Versions, addresses, lengths, flags, dtypes, devices and layout, for any mix and number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        read = TensorList(tensors)
        assert _facts(read) == _from_python(tensors)
        assert read._facts is not None
    finally:
        torch.set_num_threads(before)


COUNTS = [1, 15, 16, 17, 80, 81, 2048, 2049, 5000]
"""Around the tensors that a walk is ahead of itself, and those that a second thread is worth."""


@pytest.mark.parametrize("count", COUNTS)
def test_every_tensor_of_any_number_is_read_at_its_place(count: int) -> None:
    """Fetching ahead and threads leave no tensor out, and mix none up."""
    tensors = [torch.zeros(index % 5, dtype=(torch.float16, torch.float32)[index % 3 == 0]) for index in range(count)]
    for index, tensor in enumerate(tensors):
        for _ in range(index % 4):
            tensor.add_(1)
    assert _facts(TensorList(tensors)) == _from_python(tensors)


@pytest.mark.parametrize("count", COUNTS)
def test_every_tensor_of_a_record_is_looked_at(count: int) -> None:
    """One that has moved is told of at any place, and no longer when it is back."""
    tensors = [torch.zeros(index % 5 + 1) for index in range(count)]
    record = MemoryRecord(tensors)
    assert record.holds()
    for place in {0, count // 2, count - 1}:
        was = tensors[place].data
        tensors[place].data = was.clone()
        assert not record.holds()
        tensors[place].data = was
        assert record.holds()


def test_an_object_keeps_the_tensor_that_a_record_looks_at() -> None:
    """A record owns tensors, not objects: torch refuses to give an object another tensor, until the record is gone."""
    tensors = [torch.zeros(3) for _ in range(5)]
    record = MemoryRecord(tensors)
    with pytest.raises(RuntimeError, match="gradient edge"):
        torch.utils.swap_tensors(tensors[2], torch.ones(3))
    assert record.holds()
    del record
    torch.utils.swap_tensors(tensors[2], torch.ones(3))
    assert tensors[2].sum() == 3


def test_state_whose_swap_torch_refuses_is_as_before() -> None:
    """Nothing has changed in either tensor, and training goes on with the same bits. Writing in place, or assigning
    another tensor to the name, does what the swap was meant to do.
    """

    def train(change: Callable[[dict[str, Tensor]], None]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4).half()
        inner = torch.optim.AdamW(model.named_parameters(), lr=1e-2, fused=True)
        optimizer = MixedPrecisionOptimizer(inner, None, DynamicGradScaler(4.0, 1.0))
        for index in range(6):
            optimizer.zero_grad()
            optimizer.scale_loss(model(torch.ones(2, 4).half()).float().square().sum()).backward()
            optimizer.step()
            if index == 3:
                change(optimizer.state[model.weight])
        return [main.clone() for _, main in optimizer.main_params()]

    def swap(state: dict[str, Tensor]) -> None:
        other = torch.full((4, 4), 2.0)
        before = state["exp_avg"].clone()
        with pytest.raises(RuntimeError, match="It is not possible to get the gradient edge for a Tensor"):
            torch.utils.swap_tensors(state["exp_avg"], other)
        assert torch.equal(state["exp_avg"], before)
        assert other.eq(2.0).all()

    def assign(state: dict[str, Tensor]) -> None:
        state["exp_avg"] = torch.full((4, 4), 2.0)

    untouched, refused, assigned, filled = (
        train(change) for change in (lambda _: None, swap, assign, lambda state: state["exp_avg"].fill_(2.0))
    )
    assert all(map(torch.equal, untouched, refused))
    assert all(map(torch.equal, assigned, filled))
    assert not torch.equal(assigned[0], untouched[0])


def test_a_record_that_is_gone_keeps_nothing() -> None:
    """The memory of its tensors is freed with them."""
    tensors = [torch.zeros(3) for _ in range(5)]
    storage = weakref.ref(tensors[4].untyped_storage())
    record = MemoryRecord(tensors)
    tensors.clear()
    assert record.holds()
    assert storage() is not None
    del record
    assert storage() is None


def test_a_room_serves_again_when_nothing_read_into_it_is_held() -> None:
    """Looks that follow each other are read into the same memory; one of which a column is held stays as it was."""
    tensors, room = [torch.zeros(3) for _ in range(5)], tensor_reader.Room()

    def versions() -> np.ndarray[Any, np.dtype[np.int64]]:
        return TensorList(tensors, room=room).versions

    first = versions().ctypes.data
    others = [bytearray(240) for _ in range(9)]  # would take what had been given back
    assert versions().ctypes.data == first
    del others
    held = versions()[1:3]
    tensors[1].add_(1)
    later = versions()
    assert later[1:3].tolist() == [1, 0]
    assert held.tolist() == [0, 0]
    del held
    tensors.append(torch.zeros(3))  # other lists need other memory
    assert versions().tolist() == [0, 1, 0, 0, 0, 0]
    assert later.tolist() == [0, 1, 0, 0, 0]


def test_looks_of_a_watch_share_memory() -> None:
    """One piece of it serves step after step."""
    watch = WriteTracker([nn.Parameter(torch.zeros(3)) for _ in range(5)])
    addresses: set[int] = set()
    others: list[bytearray] = []
    for _ in range(6):
        addresses.add(watch.snapshot().versions.ctypes.data)
        others += [bytearray(400) for _ in range(9)]  # would take what had been given back
    assert len(addresses) == 1


def test_gradients_are_read_through_their_parameters() -> None:
    """The facts of gradients are read without holding one; who asks for a gradient gets the parameter's own."""
    params = [nn.Parameter(torch.zeros(index + 1)) for index in range(100)]
    for index, param in enumerate(params):
        param.grad = torch.full((index + 1,), float(index))
    grads = _grads_of(params)
    assert grads.fit()
    assert len(grads) == 100
    assert _memory(grads) == _memory_from_python([param.grad for param in params if param.grad is not None])
    assert "_held" not in vars(grads)
    assert grads[7] is params[7].grad
    assert all(grad is param.grad for grad, param in zip(grads, params, strict=True))
    held = grads[3]
    params[3].grad = None
    assert grads.tensors[3] is held


def test_gradients_of_a_group_are_those_at_its_places() -> None:
    """One walk over all parameters serves each group; a gradient that one group lacks is no other's affair."""
    params: list[Tensor] = [nn.Parameter(torch.zeros(index + 1)) for index in range(100)]
    for param in params[1:]:
        param.grad = torch.ones_like(param)
    look = ParamList(params)
    assert look._facts is not None
    members = [params[0:40], params[40:97], [params[99], params[97], params[98]]]
    found = [
        look.grads(members[0], slice(0, 40)),
        look.grads(members[1], slice(40, 97)),
        look.grads(members[2], np.array([99, 97, 98])),
    ]
    assert [grads.fit() for grads in found] == [False, True, True]
    for grads, group in zip(found[1:], members[1:], strict=True):
        assert "_held" not in vars(grads)
        assert _memory(grads) == _memory_from_python([param.grad for param in group if param.grad is not None])


def test_what_is_not_plain_memory_is_left_to_python() -> None:
    """Sparse tensors, subclasses, inference tensors and things that are no tensors are not read."""
    plain = torch.zeros(3)
    with torch.inference_mode():
        inference = torch.zeros(3)
    for odd in (plain.to_sparse(), _Wrapped(plain), inference):
        assert tensor_reader.read([plain, odd]) is None
    assert tensor_reader.read([plain, object()]) is None  # type: ignore[list-item]
    assert tensor_reader.read([plain, Buffer(plain)]) is not None


def test_increment_is_seen_by_autograd() -> None:
    """Each tensor's version grows by one; a saved tensor that was incremented fails backward, as after a write."""
    params = [nn.Parameter(torch.ones(3)) for _ in range(200)]
    loss = (params[150] * params[150]).sum()
    before = [param._version for param in params]
    now = tensor_reader.increment_versions(list(params))
    assert now is not None
    assert now.tolist() == [param._version for param in params] == [version + 1 for version in before]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_increment_tells_of_subclasses_too() -> None:
    """Where one of the tensors is not plain, torch's own function tells of all, of the plain ones a second time."""

    class Named(nn.Parameter):
        pass

    params: list[Tensor] = [nn.Parameter(torch.ones(3)), Named(torch.ones(3))]
    assert tensor_reader.increment_versions(params) is None
    assert [param._version > 0 for param in params] == [True, True]


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="dicts have no tags")
def test_dicts_that_have_not_changed_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they are compared with may change unseen, which shows that nobody looks."""
    monkeypatch.setenv(tensor_reader.ENVIRONMENT_VARIABLE, "native")
    entries: list[dict[str, Any]] = [{"first": index} for index in range(100)]
    column, tags, tag = list(range(100)), tensor_reader.new_tags(100), tensor_reader.new_tags(1)
    listed = list(entries[3].values())
    assert tensor_reader.hold_objects(entries, ["first"], [column], tags)
    assert tensor_reader.same_values(entries[3], listed, tag)
    column[3] = listed[0] = -1
    assert tensor_reader.hold_objects(entries, ["first"], [column], tags)
    assert tensor_reader.same_values(entries[3], listed, tag)
    assert not _hold_objects(entries, ["first"], [column])


def test_without_a_compiler_python_reads(tmp_path: Path) -> None:
    """No compiler, or one that fails: steps work as ever, and one line of the log says why they are slower."""
    code = (
        "import logging, sys, torch; logging.basicConfig(level=logging.INFO, stream=sys.stdout)\n"
        "from megascale.kernels import TensorList\n"
        "print(TensorList([torch.zeros(3)] * 5000).numels.sum(), TensorList([torch.zeros(2)]).numels.tolist())\n"
        "print(TensorList([torch.zeros(3)] * 5000).numels.sum())\n"
    )
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho no such header >&2; exit 1\n")
    broken.chmod(0o755)
    for variables, reason in (({"PATH": "/nowhere"}, "no C++ compiler"), ({"CXX": str(broken)}, "no such header")):
        environment = {key: value for key, value in os.environ.items() if key != "CXX"}
        environment.pop(tensor_reader.ENVIRONMENT_VARIABLE)
        environment |= variables | {library_build.CACHE_VARIABLE: str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
        )
        assert reason in done.stdout
        assert done.stdout.count("read from Python") == 1
        assert "15000 [2]\n15000" in done.stdout
