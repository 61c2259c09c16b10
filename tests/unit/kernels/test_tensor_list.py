"""Lists of tensors that are looked at once."""

import copy
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale.kernels import UNREADABLE, ListReader, TensorList
from megascale.kernels.tensors import list_reader

TENSORS = [
    torch.zeros(3),
    torch.zeros(2, 4, dtype=torch.float16),
    torch.zeros(()),
    torch.zeros(0, dtype=torch.bfloat16),
]


CODES = {dtype: code for code, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16))}


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
@pytest.mark.parametrize("last", [torch.zeros(4, 2), torch.zeros(2, 4).t(), torch.zeros(5, device="meta"), None])
def test_parts_tell_what_lists_of_their_own_would(cut: list[int], last: Tensor | None) -> None:
    """However a list is cut, the parts tell of addresses, lengths, dtypes, devices and layout; of missing ones, too."""
    tensors = [*TENSORS[:3], last]
    slices = [slice(end - length, end) for length, end in zip(cut, accumulate(cut), strict=True)]
    filled = [TENSORS[0] if tensor is None else tensor for tensor in tensors]
    parts = TensorList(tensors, filled=filled).cut(slices)
    for part, where in zip(parts, slices, strict=True):
        expected = TensorList(tensors[where], filled=filled[where])
        assert list(part) == tensors[where]
        assert part.addresses.tolist() == expected.addresses.tolist()
        assert _facts(part) == _facts(expected)


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
def test_reader_tells_of_every_change(change: str, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor of many, in any block of the walk, contiguous or not; a write into the memory is no change."""
    monkeypatch.setattr(list_reader, "BLOCK", 34)
    tensors = [torch.zeros(4, 6) for _ in range(70)] + [torch.zeros(6, 4).t() for _ in range(70)]
    reader = ListReader()
    for _ in range(3):
        assert reader.read(tensors) is not None
        tensors[place].add_(1)
    forms = reader.forms
    CHANGES[change](tensors[place])
    read = reader.read(tensors)
    assert read is None or read.addresses.tolist() == [tensor.data_ptr() for tensor in tensors]
    assert (reader.forms is forms) == (change in ("moved", "replaced", "freed", "cut_short"))


def test_forms_hold_for_other_tensors_of_the_same_forms() -> None:
    """Wherever these lie; not for fewer or more of them, and not for what is no tensor."""
    tensors: list[Any] = [torch.zeros(2, 3), torch.zeros(3, 2).t(), nn.Parameter(torch.zeros(2).half())]
    odd = [
        tensors[:2],
        [*tensors, torch.zeros(1)],
        [],
        [tensors[0].bfloat16(), *tensors[1:]],
        [*tensors[:2], tensors[2].detach()],
    ]
    for index, others in enumerate(([tensors[0].clone(), tensors[1].clone(), tensors[2]], *odd)):
        reader = ListReader()
        reader.read(tensors)
        forms = reader.forms
        for _ in range(2):
            assert reader.addresses(others).tolist() == [one.data_ptr() for one in others]
        assert (reader.forms is forms) == (index == 0)
    for other in (None, tensors[0].to_sparse()):
        with pytest.raises(UNREADABLE):
            reader.addresses([other, *tensors[1:]])
    assert copy.deepcopy(reader).read(tensors) is not None


def test_forms_that_held_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third time on one call tells that forms hold: no part of any tensor is compared."""
    tensors, reader, times = [torch.zeros(2, 3), torch.zeros(3)], ListReader(), [0]
    compare = ListReader._has_forms

    def counted(*given: Any) -> bool:
        times[0] += 1
        return compare(*given)

    monkeypatch.setattr(ListReader, "_has_forms", counted)
    for _ in range(5):
        reader.read(tensors)
    assert times == [1]


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
    return ListReader().read(tensors) is not None


@pytest.mark.parametrize("odd", ODD)
def test_what_kernels_cannot_read_is_not_plain(odd: str) -> None:
    """Alone, and behind others; of a sparse tensor there is no address either."""
    plain = list(PLAIN.values())
    assert _reads(plain)
    assert _reads(plain[:3])
    for tensors in ([ODD[odd]], [*plain[:3], ODD[odd]], [*plain, ODD[odd]]):
        assert not _reads(tensors)


def test_a_missing_tensor_has_the_form_of_another() -> None:
    """Tables that are made of the forms serve whichever are missing; its address is 0, an empty one's is 1."""
    likes, reader, keys = [torch.zeros(shape) for shape in ((4, 2), (0,), (3,))], ListReader(), []
    for missing in (0, 1, 2, None):
        given = [None if index == missing else like.clone() for index, like in enumerate(likes)]
        grads = reader.read(given, [like if one is None else one for one, like in zip(given, likes, strict=True)])
        assert grads is not None
        assert list(grads) == given
        assert grads.addresses.tolist() == [0 if grad is None else grad.data_ptr() or 1 for grad in given]
        assert grads.missing == ([] if missing is None else [missing])
        keys.append(grads.forms.key)
    assert len(set(keys)) == 1
