"""How the torch backend cuts parameters into blocks that fit the cache."""

import pytest
import torch

from megascale.kernels import Decision, LionHyper, Operands, blocks, select_backend


def test_blocks_bound_the_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces fill blocks up to the limit and no further, in order, every element once."""
    monkeypatch.setattr(blocks, "BLOCK_ON_CPU", 10)
    columns = [torch.arange(numel) + 100 * index for index, numel in enumerate([3, 0, 6, 4, 25, 1, 9, 1, 2])]
    rows = [[main, main.half(), main.half()] for main in [*columns[:-1], columns[-1].double()]]
    made = list(blocks.blocks_of(rows))
    assert [block.numel for block in made] == [9, 4, 10, 10, 6, 10, 2]
    assert [block.owners for block in made] == [[0, 2], [3], [4], [4], [4, 5], [6, 7], [8]]
    joined = torch.cat([piece for block in made[:-1] for piece in block.column(0)])
    assert torch.equal(joined, torch.cat(columns[:-1]))


def test_torch_measures_blocks_in_fp32_and_adds_them_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 beside 2**24, in another block, is not lost."""
    monkeypatch.setattr(blocks, "BLOCK_ON_CPU", 10)
    grad = torch.zeros(25)
    grad[[0, 10, 20]] = torch.tensor([4096.0, 1.0, 1.0])
    stats = select_backend("torch").measure([grad, grad[:10]], count_zeros=False)
    assert stats.sum_squares.tolist() == [2.0**24 + 2, 2.0**24]


def test_overflow_in_any_block_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a parameter of several blocks, in the last one, of either sign."""
    monkeypatch.setattr(blocks, "BLOCK_ON_CPU", 10)
    mains = [torch.zeros(15) for _ in range(3)]
    mains[0][14], mains[2][14] = 65520.0, -65520.0
    models = [main.half() for main in mains]
    operands = Operands(models, mains, [torch.zeros(15)] * 3, {"exp_avg": [torch.zeros(15) for _ in mains]})
    zero = torch.zeros(())
    flags = select_backend("torch").lion_(
        operands, LionHyper(0.1, 0.9, 0.99, 0.0, False), Decision(zero, zero, zero, zero)
    )
    assert flags.tolist() == [True, False, True]
