"""Optimizers of other libraries, wrapped: pytorch_optimizer, schedulefree and torchao."""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale import DistributedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer
from megascale.checkpoint import Checkpointer
from megascale.errors import ArgumentError
from tests.training import bits_equal

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
Params = Iterable[nn.Parameter]


def _library(name: str) -> Any:
    return pytest.importorskip(name, reason=f"needs {name}")


def _build(dtype: torch.dtype, inner: Callable[[Params], torch.optim.Optimizer]) -> tuple[nn.Linear, Any]:
    torch.manual_seed(0)
    model = nn.Linear(32, 32).to(dtype)
    scaler = DynamicGradScaler(2.0**4) if dtype == torch.float16 else None
    return model, MixedPrecisionOptimizer(inner(list(model.parameters())), None, scaler)


def _backward(model: nn.Linear, optimizer: Any, seed: int) -> None:
    data = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed))
    optimizer.scale_loss(model(data.to(model.weight.dtype)).float().square().mean()).backward()


def _step(model: nn.Linear, optimizer: Any, seed: int) -> None:
    _backward(model, optimizer, seed)
    optimizer.step()
    optimizer.zero_grad()


OWN: dict[str, Callable[[Any, Params], torch.optim.Optimizer]] = {
    "StableSPAM": lambda lib, params: lib.StableSPAM(params, lr=0.01, t_max=10),
    "Ranger21": lambda lib, params: lib.Ranger21(params, num_iterations=20, lr=0.01),
}


@pytest.mark.parametrize(
    ("kind", "dtype", "way"),
    [
        *((kind, torch.float16, "checkpoint") for kind in OWN),
        *(("StableSPAM", dtype, "state dict") for dtype in DTYPES),
    ],
)
def test_an_own_state_dict_is_resumed_with_every_bit(kind: str, dtype: torch.dtype, way: str, tmp_path: Path) -> None:
    """After four steps another run takes over: both have the same weights after five more."""
    library = _library("pytorch_optimizer")
    model, optimizer = _build(dtype, lambda params: OWN[kind](library, params))
    for step in range(4):
        _step(model, optimizer, step)
    other, resumed = _build(dtype, lambda params: OWN[kind](library, params))
    if way == "checkpoint":
        Checkpointer(tmp_path).save(4, model, optimizer)
        Checkpointer(tmp_path).load(other, resumed)
    else:
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(4, 9):
        _step(model, optimizer, step)
        _step(other, resumed, step)
    assert bits_equal(model.weight, other.weight)
    pairs = zip(optimizer.main_params(), resumed.main_params(), strict=True)
    assert all(bits_equal(mine, theirs) for (_, mine), (_, theirs) in pairs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_schedule_free_weights_are_swapped_on_main_params(dtype: torch.dtype) -> None:
    """`train()` and `eval()` of the wrapper: main params are those of a run in fp32, given the same gradients."""
    library = _library("schedulefree")
    model, optimizer = _build(dtype, lambda params: library.AdamWScheduleFree(params, lr=0.01))
    plain = [nn.Parameter(param.detach().float()) for param in model.parameters()]
    alone = library.AdamWScheduleFree(plain, lr=0.01)
    for one in (optimizer, alone):
        one.train()
    for step in range(4):
        _backward(model, optimizer, step)
        scale = float(optimizer.get_loss_scale())
        for param, own in zip(plain, model.parameters(), strict=True):
            assert isinstance(own.grad, Tensor)
            param.grad = own.grad.float() / scale
        for one in (optimizer, alone):
            one.step()
            one.eval()
        assert all(
            bits_equal(main, param.detach()) for (_, main), param in zip(optimizer.main_params(), plain, strict=True)
        )
        assert all(bits_equal(own, param.to(dtype)) for own, param in zip(model.parameters(), plain, strict=True))
        for one in (optimizer, alone):
            one.train()
            one.zero_grad()


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_sam_climbs_on_main_params(dtype: torch.dtype) -> None:
    """`first_step()` inside main_grads(), whose state and climb are fp32; `second_step()` there goes back and down."""
    library = _library("pytorch_optimizer")
    model, optimizer = _build(dtype, lambda params: library.SAM(params, torch.optim.SGD, lr=0.125, rho=0.5))
    before = {name: main.clone() for name, main in optimizer.main_params()}
    _backward(model, optimizer, 0)
    with optimizer.main_grads() as inner:
        inner.first_step(zero_grad=True)
    assert model.weight.grad is None
    old = optimizer.state[model.weight]["old_p"]
    assert bits_equal(old, before["0"])
    climbed = {name: main.clone() for name, main in optimizer.main_params()}
    moves = torch.cat([(climbed[name] - before[name]).flatten() for name in before])
    assert moves.norm().item() == pytest.approx(0.5, rel=1e-4)
    _backward(model, optimizer, 1)
    scaled: list[Any] = [param.grad for param in model.parameters()]
    grads = [grad.float() / float(optimizer.get_loss_scale()) for grad in scaled]
    with optimizer.main_grads() as inner:
        inner.second_step(zero_grad=True)
    for (name, main), grad in zip(optimizer.main_params(), grads, strict=True):
        assert torch.allclose(main, before[name] - 0.125 * grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit", "Adam4bit", "AdamFp8"])
def test_low_bit_optimizers_of_torchao_are_refused(kind: str) -> None:
    """At construction, with the way to 8-bit moments here."""
    library = _library("torchao.optim")
    with pytest.raises(ArgumentError, match=r"exp_avg_sq_dtype=torch\.uint8"):
        _build(torch.bfloat16, lambda params: getattr(library, kind)(params, lr=0.01))


SUMS: dict[str, Callable[[Any, Params], torch.optim.Optimizer]] = {
    "Lamb": lambda lib, params: lib.Lamb(params, pre_norm=True),
    "Ranger21": lambda lib, params: lib.Ranger21(params, num_iterations=20),
    "Prodigy": lambda lib, params: lib.Prodigy(params),
    "DAdaptAdam": lambda lib, params: lib.DAdaptAdam(params),
}


@pytest.mark.parametrize("kind", SUMS)
def test_sums_over_all_parameters_are_refused_by_parameters(kind: str) -> None:
    """A rank has some of the parameters only; without the sum, and replicated, they are wrapped."""
    library = _library("pytorch_optimizer")
    model = nn.Linear(8, 8).bfloat16()
    with pytest.raises(ArgumentError, match=r"pass clip_grad=1\.0|use MixedPrecisionOptimizer"):
        DistributedOptimizer(SUMS[kind](library, list(model.parameters())), modules=model)
    MixedPrecisionOptimizer(SUMS[kind](library, list(model.parameters())))
    DistributedOptimizer(library.Lamb(list(model.parameters())), modules=model)
