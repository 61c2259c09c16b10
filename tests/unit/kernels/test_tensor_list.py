"""Lists of tensors that are looked at once."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale.kernels import Forms, GradReader, MemoryRecord, TensorList
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


def test_forms_hold_for_other_tensors_of_the_same_forms() -> None:
    """Wherever these lie; not for fewer or more of them, and not for what is no tensor."""
    tensors = [torch.zeros(2, 3), torch.zeros(3, 2).t(), nn.Parameter(torch.zeros(2).half())]
    forms = Forms(tensors)
    for _ in range(2):
        assert forms.hold([tensor.detach().clone() if index < 2 else tensor for index, tensor in enumerate(tensors)])
        assert not forms.hold(tensors[:2])
        assert not forms.hold([*tensors, torch.zeros(1)])
        assert not forms.hold([None, *tensors[1:]])
        assert not forms.hold([tensors[0].to_sparse(), *tensors[1:]])
        assert not forms.hold([tensors[0].bfloat16(), *tensors[1:]])
        assert not forms.hold([*tensors[:2], tensors[2].detach()])
    assert copy.deepcopy(forms).hold(tensors)


def test_forms_that_held_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second time on one call tells that forms hold: no part of any tensor is read."""
    tensors = [torch.zeros(2, 3), torch.zeros(3)]
    forms, times_read = Forms(tensors), [0]
    read = forms_module._read

    def counted(given: Any) -> Any:
        times_read[0] += 1
        return read(given)

    monkeypatch.setattr(forms_module, "_read", counted)
    assert [forms.hold(tensors) for _ in range(5)] == [True] * 5
    assert times_read == [1 if forms_module.TensorGuards else 5]
    assert Forms([]).hold([])


def test_forms_hold_in_any_context() -> None:
    """Guards that were made elsewhere say no under autocast, and the parts of the forms are compared."""
    tensors = [torch.zeros(2, 3), torch.zeros(3)]
    forms = Forms(tensors)
    assert forms.hold(tensors)
    for context in (torch.autocast("cpu", torch.bfloat16), torch.no_grad(), torch.inference_mode()):
        with context:
            assert forms.hold(tensors)
            assert not forms.hold(tensors[::-1])
    assert forms.hold(tensors)


def test_what_has_no_memory_has_no_row() -> None:
    """Of a sparse tensor among others, and of something that is no tensor; the others have the rows of their places."""
    plain, moved = torch.zeros(3), torch.zeros(3)
    first, second, third = forms_module.rows([plain, plain.to_sparse(), moved])
    assert second is None
    assert first == forms_module.rows([plain])[0] != third


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


class _Wrapped(Tensor):
    """A tensor that is a wrapper: its own memory is not what it shows."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "_Wrapped":
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(func)


def _fit(params: list[nn.Parameter]) -> bool:
    return GradReader(list(params)).read() is not None


@pytest.mark.parametrize("kind", ["none", "sparse", "subclass"])
def test_gradients_that_are_not_plain_are_not_usable(kind: str) -> None:
    """A missing, a sparse and a subclass's gradient among plain ones."""
    params = [nn.Parameter(torch.zeros(4, 2)) for _ in range(40)]
    for param in params:
        param.grad = torch.zeros(4, 2)
    assert _fit(params)
    match kind:
        case "none":
            params[33].grad = None
        case "sparse":
            params[33].grad = torch.zeros(4, 2).to_sparse()
        case _:
            params[33].grad = _Wrapped(torch.zeros(4, 2))
    assert not _fit(params)


@pytest.mark.parametrize(
    "other",
    [torch.zeros(2, 4), torch.zeros(7), torch.zeros(4, 2, dtype=torch.int32), torch._neg_view(torch.zeros(4, 2))],
)
def test_gradients_that_do_not_fit_are_found(other: Tensor) -> None:
    """Of another shape, no number that is added to weights, or not as their bytes say."""
    params = [nn.Parameter(torch.zeros(4, 2)) for _ in range(3)]
    for param in params:
        param.grad = torch.zeros(4, 2)
    assert _fit(params)
    assert params[2].grad is not None
    params[2].grad.data = other
    assert not _fit(params)


def test_a_gradient_of_another_layout_fits() -> None:
    """Its form differs from its parameter's, but kernels read it."""
    param = nn.Parameter(torch.zeros(4, 2))
    param.grad = torch.zeros(2, 4).t()
    assert _fit([param])
