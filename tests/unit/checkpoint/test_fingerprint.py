"""The number that ranks compare before a save: equal for equal bits, another for any change."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.checkpoint import fingerprint as module
from megascale.checkpoint.fingerprint import fingerprint
from megascale.checkpoint.manifest import CHUNK_BYTES

COLUMNS = module._COLUMNS


def _tensors(numel: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(numel)
    values = torch.randint(-9, 9, (numel,), generator=generator).to(dtype)
    return [values, torch.ones(3, dtype=dtype), torch.tensor(1.0), torch.empty(0, dtype=dtype), values.clone()]


NUMELS = (1, 5, 4 * COLUMNS, module._FEW_BYTES + 3, CHUNK_BYTES + 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.uint8])
@pytest.mark.parametrize("numel", NUMELS)
def test_any_bit_counts(numel: int, dtype: torch.dtype) -> None:
    """Wherever it lies, in a tensor of any size."""
    tensors = _tensors(numel, dtype)
    before = fingerprint(tensors)
    assert fingerprint([tensor.clone() for tensor in tensors]) == before
    bits = tensors[0].view(torch.uint8)
    for place in {0, len(bits) // 2, len(bits) - 1}:
        for bit in (1, 128):
            bits[place] ^= bit
            assert fingerprint(tensors) != before
            bits[place] ^= bit
    assert fingerprint(tensors) == before


def test_order_counts() -> None:
    """Of words, of rows of a matrix, of tensors, small and large."""
    one, two = torch.arange(2**18).float(), torch.arange(9).float()
    rows = one.view(512, 512)
    kinds = ([one, two], [two, one], [one.flip(0), two], [one, two.flip(0)], [rows.flip(0), two], [rows.t(), two])
    assert len({fingerprint(tensors) for tensors in kinds}) == len(kinds)
    assert fingerprint([rows, two]) == fingerprint([one, two])


def test_signs_that_swap_places_count() -> None:
    """Two words that change by the same amount, up and down, leave their sum as it was."""
    values = torch.full((2**18,), 3, dtype=torch.int64)
    before = fingerprint([values])
    for place in (1, 2, 512, COLUMNS + 1, 4096, 2**18 - 1):
        changed = values.clone()
        changed[0] += 5
        changed[place] -= 5
        assert fingerprint([changed]) != before


def test_layout_does_not_count() -> None:
    """The same values in other memory are the same."""
    values = torch.randn(700, 900)
    assert fingerprint([values.t().contiguous().t(), values[:3].t()]) == fingerprint([values, values[:3].t().clone()])


def test_small_tensors_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand cost one addition, as ten do; another dtype between them begins anew."""
    calls: list[int] = []
    add = module._added

    def counted(sums: module.Words, data: Any) -> module.Words:
        calls.append(len(data))
        return add(sums, data)

    monkeypatch.setattr(module, "_added", counted)
    for count in (10, 1000):
        fingerprint([torch.ones(7) for _ in range(count)])
    assert calls == [10 * 28, 1000 * 28]
    fingerprint([torch.ones(1), torch.ones(1).half(), torch.ones(1)])
    assert calls[2:] == [4, 2, 4]
