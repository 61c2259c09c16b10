"""Lists of tensors that are looked at once."""

from collections import UserDict
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megascale.kernels import GradList, MemoryRecord, ParamList, TensorList
from megascale.kernels.tensors import tensor_reader
from megascale.kernels.tensors.tensor_list import Forms

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
    assert len(joined) == 4
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
    assert TensorList.of(TENSORS).tensors is TENSORS
    assert list(TensorList(iter(TENSORS))) == TENSORS
    assert list(part.parts) == [part]
    parts = [part, TensorList(TENSORS[:1])]
    assert list(TensorList.joined(parts).parts) == parts


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


def test_forms_are_told_by_place(by_hand: bool) -> None:
    """Shape, strides and dtype, of some or all; a copy takes another's without a change of the original."""
    forms, others = _forms(by_hand)
    assert forms.differ(others).tolist() == [False, True, True, True]
    assert forms.differ(forms).tolist() == [False] * 4
    assert forms.at(slice(0, 2)).differ(others.at(slice(0, 2))).tolist() == [False, True]
    assert forms.at(np.array([3, 0])).differ(others.at(np.array([3, 0]))).tolist() == [True, False]
    copy = forms.copy()
    assert copy.put(2, others, 2)
    assert copy.differ(others).tolist() == [False, True, False, True]
    assert forms.differ(others).tolist() == [False, True, True, True]


def test_forms_that_were_read_in_different_ways_differ() -> None:
    """A walk's numbers mean nothing beside strides and dtypes; none is put among them."""
    walked, looked_up = _forms(True)[0], Forms(([10, 10, 10, 10], [1, 1, 1, 1]))
    for one, other in ((walked, looked_up), (looked_up, walked)):
        assert one.differ(other).tolist() == [True] * 4
        copy = one.copy()
        assert copy.put(0, other, 0) is False
        assert not copy.differ(one).any()


@pytest.fixture(params=[False, True], ids=["read", "by hand"])
def by_hand(request: pytest.FixtureRequest) -> bool:
    """Whether forms are numbers, as of a walk."""
    return bool(request.param)


def _forms(by_hand: bool) -> tuple[Forms, Forms]:
    """Return forms of four tensors, and of four of which only the first has the same."""
    if by_hand:
        one, other = ([10, 10, 10, 10], [1, 1, 1, 1]), ([10, 10, 20, 30], [1, 2, 2, 1])
        forms = (Forms(tuple(map(np.array, columns))) for columns in (one, other))
    else:
        plain = [torch.zeros(2, 3) for _ in range(4)]
        odd = [torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(3, 2).t(), torch.zeros(2, 3).double()]
        forms = (TensorList(tensors).forms for tensors in (plain, odd))
    return next(forms), next(forms)


def test_keys_of_lists_are_equal_for_equal_ones() -> None:
    """`form` tells dtype, length and layout, wherever the tensors lie; `places` tells where."""
    held = [torch.zeros(2, 3), torch.zeros(4, 2).t()]
    one, again, other = TensorList(held), TensorList(list(held)), TensorList([tensor.clone() for tensor in held])
    assert one.form == again.form == other.form
    assert one.places == again.places != other.places
    for place, changed in ((0, held[0].double()), (0, torch.zeros(2, 4)), (1, torch.zeros(4, 2)), (1, held[1].t())):
        tensors = [*held[:place], changed, *held[place + 1 :]]
        assert TensorList(tensors).form != one.form
    assert TensorList(held[:1]).form != TensorList([torch.zeros(3, 2).t()]).form
    assert TensorList([torch.zeros(4, 6)[:, :3]]).form != TensorList([torch.zeros(4, 6)[:, ::2]]).form


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
}


@pytest.mark.parametrize("odd", ODD)
def test_what_kernels_cannot_read_is_not_plain(odd: str) -> None:
    """Alone, and behind others; of a sparse tensor there is no address either."""
    plain = list(PLAIN.values())
    assert TensorList(plain).are_plain()
    assert TensorList(plain[:3]).are_plain()
    for tensors in ([ODD[odd]], [*plain[:3], ODD[odd]], [*plain, ODD[odd]]):
        assert TensorList(tensors).are_plain() is False


def test_a_tensor_without_memory_lies_nowhere() -> None:
    """Its address is -1; those of others are told all the same."""
    plain = torch.zeros(3)
    assert TensorList([plain, plain.to_sparse()]).pointers.tolist() == [plain.data_ptr(), -1]


def test_what_requires_grad_is_told_and_without_a_walk_nothing_is_kept() -> None:
    """A cache of findings that nobody empties would be wrong: each is new."""
    tensors = TensorList([torch.zeros(3), nn.Parameter(torch.zeros(3)), torch.zeros(3).to_sparse()])
    assert tensors.requires_grad.tolist() == [0, 1, 0]
    owner = SimpleNamespace()
    tensors.findings(owner)["answer"] = 42
    assert tensors.findings(owner) == {}


class _Wrapped(Tensor):
    """A tensor that is a wrapper: its own memory is not what it shows."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "_Wrapped":
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(func)


def _grads_of(params: list[nn.Parameter]) -> GradList:
    held: list[Tensor] = list(params)
    return ParamList(held).grads(held, slice(None))


@pytest.mark.parametrize("kind", ["none", "sparse", "subclass"])
def test_gradients_that_are_not_plain_are_not_usable(kind: str) -> None:
    """A missing, a sparse and a subclass's gradient among plain ones: both ways of reading say so."""
    params = [nn.Parameter(torch.zeros(4, 2)) for _ in range(40)]
    for param in params:
        param.grad = torch.zeros(4, 2)
    assert _grads_of(params).fit()
    match kind:
        case "none":
            params[33].grad = None
        case "sparse":
            params[33].grad = torch.zeros(4, 2).to_sparse()
        case _:
            params[33].grad = _Wrapped(torch.zeros(4, 2))
    assert not _grads_of(params).fit()


@pytest.mark.parametrize(
    "other",
    [torch.zeros(2, 4), torch.zeros(7), torch.zeros(4, 2, dtype=torch.int32), torch._neg_view(torch.zeros(4, 2))],
)
def test_gradients_that_do_not_fit_are_found(other: Tensor) -> None:
    """Of another shape, no number that is added to weights, or not as their bytes say: by either way to compare."""
    params = [nn.Parameter(torch.zeros(4, 2)) for _ in range(3)]
    for param in params:
        param.grad = torch.zeros(4, 2)
    assert GradList(params).fit()
    assert _grads_of(params).fit()
    assert params[2].grad is not None
    params[2].grad.data = other
    assert not GradList(params).fit()
    assert not _grads_of(params).fit()


def test_a_gradient_of_another_layout_fits() -> None:
    """Its form differs from its parameter's, but kernels read it."""
    param = nn.Parameter(torch.zeros(4, 2))
    param.grad = torch.zeros(2, 4).t()
    assert _grads_of([param]).fit()


def test_held_gradients_outlive_their_place() -> None:
    """Before hold(), a gradient is the parameter's at the moment; after it, or once all were asked for, the list's."""
    params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for param in params:
        param.grad = torch.zeros(2)
    first = params[1].grad
    grads, later = _grads_of(params), _grads_of(params)
    assert grads[1] is first
    grads.hold()
    params[1].grad = second = torch.ones(2)
    assert grads[1] is first
    assert later[1] is second
    assert later[1:][0] is second
    params[1].grad = None
    assert later[1] is second
    assert all(a is b for a, b in zip(later, [params[0].grad, second, params[2].grad], strict=True))


def test_lists_and_entries_are_compared_by_identity() -> None:
    """Equal tensors that are other objects, other lengths and missing keys all differ."""
    tensors = [torch.zeros(2) for _ in range(100)]
    assert tensor_reader.same_objects(tensors, list(tensors))
    assert tensor_reader.same_objects([], [])
    assert not tensor_reader.same_objects(tensors, tensors[:-1])
    assert not tensor_reader.same_objects(tensors, [*tensors[:-1], torch.zeros(2)])

    numbered = dict(enumerate(tensors))
    assert _same_values(numbered, list(tensors))
    assert _same_values({}, [])
    assert _same_values(UserDict(numbered), tensors)
    assert not _same_values(numbered, tensors[:-1])
    assert not _same_values(numbered, tensors[::-1])
    assert not _same_values(numbered | {7: torch.zeros(2)}, tensors)

    entries: list[dict[str, Any]] = [{"first": tensor, "second": index} for index, tensor in enumerate(tensors)]
    columns: list[list[Any]] = [list(tensors), list(range(100))]
    assert _hold_objects(entries, ["first", "second"], columns)
    assert _hold_objects(entries, ["first"], columns[:1])
    assert _hold_objects(entries, [], [])
    entries[50] = {"".join(["fir", "st"]): tensors[50], "second": 50}  # an equal name may be another object
    assert _hold_objects(entries, ["first", "second"], columns)
    assert not _hold_objects(entries, ["first", "second"], [columns[0], columns[1][:-1]])
    assert not _hold_objects(entries, ["first", "third"], columns)
    assert not _hold_objects(entries, ["second", "first"], columns)
    assert not _hold_objects(entries[:-1], ["first"], columns[:1])
    entries[98]["first"] = torch.zeros(2)
    assert not _hold_objects(entries, ["first", "second"], columns)
    assert _hold_objects(entries, ["second"], columns[1:])


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry.update(first=torch.zeros(2)),
        lambda entry: entry.pop("first"),
        lambda entry: entry.clear(),
        lambda entry: entry.__delitem__("second"),
        lambda entry: entry.__ior__({"second": -1}),
    ],
)
def test_dicts_that_have_changed_are_read_again(change: Callable[[dict[str, Any]], Any]) -> None:
    """However a dict is changed, what it holds is seen, and what it holds when it is changed back."""
    values = [{"first": torch.zeros(2), "second": index} for index in range(100)]
    entries: list[dict[str, Any]] = [dict(value) for value in values]
    columns = [[value[name] for value in values] for name in ("first", "second")]
    tags, tag = tensor_reader.new_tags(100), tensor_reader.new_tags(1)
    listed = list(values[7].values())
    for _ in range(2):
        assert tensor_reader.hold_objects(entries, ["first", "second"], columns, tags)
        assert tensor_reader.same_values(entries[7], listed, tag)
        change(entries[7])
        for _ in range(2):
            assert not tensor_reader.hold_objects(entries, ["first", "second"], columns, tags)
            assert not tensor_reader.same_values(entries[7], listed, tag)
        entries[7].clear()
        entries[7].update(values[7])
    entries[7] = dict(values[8])
    assert not tensor_reader.hold_objects(entries, ["first", "second"], columns, tags)
    holder, attribute = SimpleNamespace(first=0), tensor_reader.new_tags(1)
    assert tensor_reader.same_values(vars(holder), [0], attribute)
    holder.first = 1  # without a call of its dict
    assert not tensor_reader.same_values(vars(holder), [0], attribute)


def _same_values(entries: Mapping[Any, Any], values: list[Any]) -> bool:
    return tensor_reader.same_values(entries, values, tensor_reader.new_tags(1))


def _hold_objects(entries: list[dict[str, Any]], names: list[str], columns: list[list[Any]]) -> bool:
    return tensor_reader.hold_objects(entries, names, columns, tensor_reader.new_tags(len(entries)))
