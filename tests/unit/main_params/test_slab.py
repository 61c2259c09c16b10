"""Small tensors side by side: each has memory of its own there, in slabs that are no longer than what they hold."""

import io
import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megascale import ConstantGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.main_params.slab import ALIGNMENT, SLAB, SMALL, Slabs
from tests.training import bits_equal

SHAPES = [(), (1,), (0,), (15,), (16,), (17,), (40, 25), (SMALL,), (SMALL + 1,), (64, 64, 2)]


def _storages(tensors: list[Tensor]) -> dict[int, int]:
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


@given(st.lists(st.sampled_from(SHAPES), max_size=60), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_no_two_tensors_share_an_element(shapes: list[tuple[int, ...]], chance: random.Random) -> None:
    """Each tensor, in whatever order they are made, holds zeros, then what is written into it and nothing else."""
    likes = [torch.empty(shape, dtype=torch.float16) for shape in shapes]
    wanted = [
        (like, dtype, purpose) for like in likes for dtype, purpose in ((torch.float32, "a"), (torch.float64, "b"))
    ]
    chance.shuffle(wanted)
    slabs = Slabs(likes)
    made: list[Tensor] = []
    for like, dtype, purpose in wanted:
        tensor = slabs.zeros(like, dtype, purpose)
        assert (tensor.shape, tensor.dtype) == (like.shape, dtype)
        assert tensor.is_contiguous()
        assert not tensor.any()
        assert tensor.numel() < ALIGNMENT or tensor.storage_offset() % ALIGNMENT == 0
        assert tensor.untyped_storage().nbytes() <= max(SLAB * tensor.itemsize, tensor.nbytes)
        made.append(tensor.fill_(len(made) + 1))
    for index, tensor in enumerate(made):
        assert (tensor == index + 1).all()
        assert tensor._version == 1
        assert not tensor._is_view()
    held = sum(_storages([tensor for tensor in made if tensor.numel()]).values())
    padding = sum((ALIGNMENT - 1) * tensor.itemsize for tensor in made)
    assert held <= sum(tensor.nbytes for tensor in made) + padding


def test_neighbours_of_one_purpose_lie_side_by_side() -> None:
    """A tensor begins where the one before it ends, up to 15 elements later; other purposes do not come between."""
    likes = [torch.empty(500) for _ in range(8)]
    slabs = Slabs(likes)
    pairs = [(slabs.zeros(like, torch.float32, "main"), slabs.zeros(like, torch.float32, "exp_avg")) for like in likes]
    for column in zip(*pairs, strict=True):
        assert {b.data_ptr() - a.data_ptr() for a, b in pairwise(column)} == {512 * 4}


def test_large_strided_and_unknown_tensors_have_memory_and_strides_of_their_own() -> None:
    """What has no place in a slab is what torch.zeros_like makes."""
    likes = [torch.empty(4097), torch.empty(4097), torch.empty(4, 6).t(), torch.empty(0), torch.empty(3)]
    slabs = Slabs(likes[:-1])
    for like in likes:
        made = slabs.zeros(like, torch.float32, "main")
        assert made.stride() == like.stride()
        assert made.untyped_storage().nbytes() == made.nbytes


def test_a_slab_is_filled_to_the_last_element() -> None:
    """Four of the longest tensors that lie in slabs, 16 KiB of fp32 each, are one; the fifth begins another."""
    likes = [torch.empty(4096) for _ in range(5)]
    slabs = Slabs(likes)
    made = [slabs.zeros(like, torch.float32, "main") for like in likes]
    assert sorted(_storages(made).values()) == [16384, 65536]


def test_adoption_copies_once() -> None:
    """A small tensor moves into a slab with its values; one that lies there, or is large, stays as it is."""
    alone, other, large = torch.arange(10.0), torch.arange(10.0), torch.arange(float(SMALL + 1))
    slabs = Slabs([alone, other, large])
    adopted = slabs.moved_in(alone, alone, "exp_avg")
    assert adopted is not alone
    assert bits_equal(adopted, alone)
    assert slabs.moved_in(adopted, alone, "exp_avg") is adopted
    assert slabs.moved_in(large, large, "exp_avg") is large


def _optimizer() -> tuple[MixedPrecisionOptimizer, torch.optim.AdamW, list[nn.Parameter]]:
    params = [nn.Parameter(torch.zeros(100, dtype=torch.float16)) for _ in range(1000)]
    inner = torch.optim.AdamW(params)
    return MixedPrecisionOptimizer(inner, None, ConstantGradScaler(1.0)), inner, params


def test_who_saves_one_small_tensor_saves_a_slab_at_most() -> None:
    """torch.save writes a tensor's whole storage: 64 KiB."""
    [(_, main), *_] = _optimizer()[0].main_params()
    file = io.BytesIO()
    torch.save(main, file)
    assert file.tell() < 65536 + 4096


@pytest.mark.slow
@pytest.mark.parametrize("loaded", [False, True])
def test_state_of_small_params_lies_in_few_slabs(loaded: bool) -> None:
    """Main params, moments and steps, as they were made and after a state dict has been loaded."""
    optimizer, inner, params = _optimizer()
    if loaded:
        optimizer.load_state_dict(optimizer.state_dict())
    few = -(-1000 // (SLAB // 112))
    assert len(_storages([main for _, main in optimizer.main_params()])) == few
    for name in ("exp_avg", "exp_avg_sq"):
        assert len(_storages([inner.state[param][name] for param in params])) == few
    assert len(_storages([inner.state[param]["step"] for param in params])) == 1


@pytest.mark.parametrize("backend", ["native", "reference", "torch"])
def test_neighbours_survive_who_frees_one(backend: str) -> None:
    """Invariant 9: ``resize_(0)`` on one tensor would free those beside it; torch refuses, and no bit has changed."""
    params = [nn.Parameter(torch.ones(20).half()) for _ in range(3)]
    inner = torch.optim.AdamW(params, lr=0.1)
    config = OptimizerConfig(fp16=True, backend=backend)
    optimizer = MixedPrecisionOptimizer(inner, config, ConstantGradScaler(1.0))
    held = [main for _, main in optimizer.main_params()]
    for step in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        held = [*held[:3], *(value for param in params for value in inner.state[param].values())]
        before = [value.clone() for value in held]
        for value in held:
            with pytest.raises(RuntimeError, match="not resizable"):
                value.untyped_storage().resize_(0)
        assert all(bits_equal(value, old) for value, old in zip(held, before, strict=True))
        assert float(inner.state[params[0]]["step"]) == step + 1
