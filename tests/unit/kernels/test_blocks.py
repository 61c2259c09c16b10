"""How the torch backend cuts parameters into blocks that fit the cache."""

import math

import pytest
import torch

from megascale.kernels import Decision, LionHyper, Operands, SgdHyper, block_statistics, blocks, select_backend


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


def test_layouts_are_walked_in_memory_order() -> None:
    """Tensors of one dense layout, contiguous or not, become views of their memory; others are not taken."""
    memory = torch.arange(24.0)
    for tensor in (memory.view(4, 6), memory.view(4, 6).t(), memory.view(2, 3, 4).permute(0, 2, 1)):
        found = blocks.flat([tensor, tensor])
        assert found is not None
        assert all(one.data_ptr() == memory.data_ptr() and torch.equal(one, memory) for one in found)
    assert blocks.flat([memory.view(4, 6)[:, ::2]]) is None
    assert blocks.flat([memory.view(4, 6), memory.view(6, 4).t()]) is None


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


@pytest.fixture(params=[False, True], ids=["one by one", "many at once"])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The torch backend as on a CPU, and as on a device, where one launch reads many tensors."""
    for module in (blocks, block_statistics):
        monkeypatch.setattr(module, "takes_many", lambda device: request.param)
    monkeypatch.setattr(blocks, "BLOCK_ON_CPU", 10)
    return bool(request.param)


@pytest.mark.usefixtures("at_once")
def test_overflow_flags_of_many_tensors() -> None:
    """Either sign, NaN, in a second block; a bf16 model param of any value and an empty one never."""
    values = [[1.0, 65519.996], [65520.0], [-65520.0], [0.0] * 15 + [math.nan], [1e9], []]
    mains = [torch.tensor(value) for value in values]
    models = [main.bfloat16() if index == 4 else main.half() for index, main in enumerate(mains)]
    flags = select_backend("torch").write_back_(mains, models)
    assert flags.tolist() == [False, True, True, True, False, False]
    grads = [torch.zeros_like(main) for main in mains]
    zeros = {"momentum_buffer": [torch.zeros_like(main) for main in mains]}
    none, one = torch.zeros(()), torch.ones(())
    flags = select_backend("torch").sgd_(
        Operands(models, mains, grads, zeros),
        SgdHyper(0.1, 0.9, 0.0, 0.0, False, False),
        Decision(none, one, one, none),
    )
    assert flags.tolist() == [False, True, True, True, False, False]
