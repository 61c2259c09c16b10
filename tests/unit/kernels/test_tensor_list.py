"""Lists of tensors that are looked at once."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale.kernels import Forms, GradReader, ListReader, MemoryRecord, Places, TensorList
from megascale.kernels.tensors import forms as forms_module

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
        tensors.forms.numels.tolist(),
        tensors.forms.dtype_codes(CODES).tolist(),
        tensors.forms.kinds,
        tensors.forms.devices,
        tensors.forms.contiguous,
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
    assert len(joined) == 4
    assert all(a is b for a, b in zip(joined, tensors, strict=True))
    assert _facts(joined) == (
        [t.data_ptr() for t in tensors],
        [t.numel() for t in tensors],
        [CODES[t.dtype] for t in tensors],
        {t.dtype for t in tensors},
        {t.device for t in tensors},
        all(t.is_contiguous() for t in tensors),
    )


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


@pytest.mark.parametrize("place", [0, 69, 139])
@pytest.mark.parametrize("change", CHANGES)
def test_record_tells_of_every_change(change: str, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor of many, in any block of the walk, contiguous or not; a write into the memory is no change."""
    monkeypatch.setattr(forms_module, "BLOCK", 34)
    tensors, record = _record()
    tensors[place].add_(1)
    assert record.holds()
    CHANGES[change](tensors[place])
    assert not record.holds()


def _slab() -> tuple[list[Tensor], MemoryRecord]:
    """Return nine tensors, among them six of one storage, of which the second comes first, and their record."""
    memory = torch.zeros(6, 4, 6)
    tensors = [torch.zeros(4, 6), *(memory[index].data for index in (1, 0, 2, 3, 4, 5)), torch.zeros(4, 6), memory[0]]
    return tensors, MemoryRecord(tensors)


@pytest.mark.parametrize("place", [0, 1, 6, 8])
@pytest.mark.parametrize("change", CHANGES)
def test_record_tells_of_a_change_to_one_of_a_storage(change: str, place: int) -> None:
    """Whether it is the one that was asked for the size of its storage, another one, or a second view of one."""
    tensors, record = _slab()
    tensors[place].add_(1)
    assert record.holds()
    CHANGES[change](tensors[place])
    assert not record.holds()


@pytest.mark.parametrize("first", [0, 1, 2])
def test_record_tells_of_a_shared_storage_that_was_cut_short(first: int) -> None:
    """At its address, whichever of its tensors were given memory of their own meanwhile: the others are found."""
    memory = torch.zeros(3, 4096)
    tensors = [row.data for row in memory]
    record, address, storage = MemoryRecord(tensors), memory.data_ptr(), memory.untyped_storage()
    del memory
    for _ in range(100):
        storage.resize_(0)
        storage.resize_(32768)
        if storage.data_ptr() == address:
            break
    assert not record.holds()
    tensors[first].data = torch.zeros(4096)
    assert not record.holds()


def test_record_asks_each_storage_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six tensors in one storage and two in others three are asked, while all tell their addresses."""
    tensors, record = _slab()
    asked: list[int] = []
    told: list[int] = []

    def noted(ids: list[int], read: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def noting(tensor: Tensor) -> Any:
            ids.append(id(tensor))
            return read(tensor)

        return noting

    monkeypatch.setattr(forms_module, "_STORAGE", noted(asked, Tensor.untyped_storage))
    monkeypatch.setattr(Tensor, "data_ptr", noted(told, Tensor.data_ptr))
    assert record.holds()
    assert asked == [id(tensors[index]) for index in (0, 1, 7)]
    assert told == list(map(id, tensors))


def test_forms_hold_for_other_tensors_of_the_same_forms() -> None:
    """Wherever these lie; not for fewer or more of them, and not for what is no tensor."""
    tensors = [torch.zeros(2, 3), torch.zeros(3, 2).t(), nn.Parameter(torch.zeros(2).half())]
    forms = Forms(tensors)
    for _ in range(2):
        others = [tensor.detach().clone() if index < 2 else tensor for index, tensor in enumerate(tensors)]
        assert forms.places(others) == Places.of(others)
        assert forms.places(tensors[:2]) is None
        assert forms.places([*tensors, torch.zeros(1)]) is None
        assert forms.places([None, *tensors[1:]]) is None
        assert forms.places([tensors[0].to_sparse(), *tensors[1:]]) is None
        assert forms.places([tensors[0].bfloat16(), *tensors[1:]]) is None
        assert forms.places([*tensors[:2], tensors[2].detach()]) is None
    assert copy.deepcopy(forms).places(tensors) is not None


def test_forms_that_held_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second time on one call tells that forms hold: no part of any tensor is read."""
    tensors = [torch.zeros(2, 3), torch.zeros(3)]
    forms, times_read = Forms(tensors), [0]
    read = forms_module._read

    def counted(given: Any) -> Any:
        times_read[0] += 1
        return read(given)

    monkeypatch.setattr(forms_module, "_read", counted)
    assert [forms.places(tensors) for _ in range(5)] == [Places.of(tensors)] * 5
    assert times_read == [1 if forms_module.TensorGuards else 5]
    assert Forms([]).places([]) == Places([], [], [])


def _cut_short(tensor: Tensor, nbytes: int) -> Tensor:
    tensor.untyped_storage().resize_(nbytes)
    return tensor


PLAIN: dict[str, Tensor] = {
    "contiguous": torch.zeros(3),
    "empty": torch.zeros(0),
    "the end of its storage": torch.zeros(6)[2:],
    "transposed": torch.zeros(3, 2).t(),
}
ODD: dict[str, Tensor] = {
    "sparse": torch.zeros(3).to_sparse(),
    "meta": torch.zeros(3, device="meta"),
    "conjugate": torch.zeros(3, dtype=torch.complex64).conj(),
    "negative": torch._neg_view(torch.zeros(3)),
    "without memory": torch._efficientzerotensor(3),
    "cut short": _cut_short(torch.zeros(6)[2:], 20),
    "cut short, of large elements": _cut_short(torch.zeros(4, dtype=torch.float64), 24),
    "freed": _cut_short(torch.zeros(3), 0),
    "transposed and freed": _cut_short(torch.zeros(3, 2).t(), 0),
    "with gaps and cut short": _cut_short(torch.zeros(4, 6)[:, ::2], 60),
    "transposed and negative": torch._neg_view(torch.zeros(3, 2).t()),
    "expanded": torch.zeros(3, 1).expand(3, 2),
}


def _reads(tensors: list[Tensor]) -> bool:
    return ListReader(lambda forms: True).read(tensors) is not None


@pytest.mark.parametrize("odd", ODD)
def test_what_kernels_cannot_read_is_not_plain(odd: str) -> None:
    """Alone, and behind others; of a sparse tensor there is no address either."""
    plain = list(PLAIN.values())
    assert _reads(plain)
    assert _reads(plain[:3])
    for tensors in ([ODD[odd]], [*plain[:3], ODD[odd]], [*plain, ODD[odd]]):
        assert not _reads(tensors)


def test_a_missing_gradient_has_the_form_of_its_parameter() -> None:
    """Tables that are made of the forms serve whichever are missing; its address is 0, an empty one's is 1."""
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((4, 2), (0,), (3,))]
    reader, keys = GradReader(list(params)), []
    for missing in (0, 1, 2, None):
        for param in params:
            param.grad = torch.zeros_like(param)
        if missing is not None:
            params[missing].grad = None
        grads = reader.read()
        assert grads is not None
        given = [param.grad for param in params]
        assert all(one is grad for one, grad in zip(grads, given, strict=True))
        assert grads.addresses.tolist() == [0 if grad is None else grad.data_ptr() or 1 for grad in given]
        assert grads.missing == ([] if missing is None else [missing])
        keys.append(grads.forms.key)
    assert len(set(keys)) == 1
