"""Training steps that torch.compile has compiled, whole or call by call: they do what they do when they are not.

The library's calls are graph breaks; what a program computes between them is traced.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics
from torch.optim.lr_scheduler import LambdaLR

import megascale
from megascale import ChainedOptimizer, MixedPrecisionOptimizer
from megascale.amp import GradScaler, optimizer_step
from megascale.averages import AveragedMainParams
from megascale.grad_scaler import DynamicGradScaler
from megascale.schedules import LandedLRScheduler
from tests.cells import CELLS, SHAPES, Cell, Given, integers
from tests.fsdp2_cases import whole
from tests.needs import without_cxx
from tests.pool import RankPool

pytestmark = pytest.mark.filterwarnings("ignore:Using `torch.compile")

LIBRARY = str(Path(megascale.__file__).parent)
STEPS, OVERFLOW = 6, 2
"""The steps of a life, and the one whose gradients hold inf."""


def _one_call_each(on: Any, grads: Sequence[Tensor]) -> None:
    on.zero_grad()
    on.scale_loss(on.model(grads)).backward()
    result = on.step()
    on.advance(result.success)
    on.average()


def _two_halves(on: Any, grads: Sequence[Tensor]) -> None:
    on.zero_grad()
    on.scale_loss(on.model(grads)).backward()
    on.prepare_grads()
    on.clip_grad_value_(0.5)
    on.advance(on.step_with_ready_grads().success)


def _clipped(on: Any, grads: Sequence[Tensor]) -> None:
    on.zero_grad()
    on.scale_loss(on.model(grads)).backward()
    on.clip_grad_norm_(1.0)
    on.step()
    on.advance()


def _in_one(on: Any, grads: Sequence[Tensor]) -> None:
    on.optimizer_step(on.model(grads), on.optimizer, None, 1.0, 0.5)


LOOPS = (_one_call_each, _two_halves, _clipped, _in_one)


def _calls(model: nn.Module, optimizer: MixedPrecisionOptimizer | ChainedOptimizer) -> SimpleNamespace:
    """Return what the loops call."""
    names = (
        *("zero_grad", "scale_loss", "step", "prepare_grads", "step_with_ready_grads"),
        *("clip_grad_norm_", "clip_grad_value_"),
    )
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        optimizer_step=optimizer_step,
        advance=LandedLRScheduler(LambdaLR(optimizer, lambda step: 1 / (1 + step))).step,
        average=AveragedMainParams(model, optimizer).update_parameters,
        **{name: getattr(optimizer, name) for name in names},
    )


def _torch_way(on: Any, grads: Sequence[Tensor]) -> None:
    on.optimizer.zero_grad()
    on.scale(on.model(grads)).backward()
    on.unscale_(on.optimizer)
    torch.nn.utils.clip_grad_norm_(on.model.parameters(), 1.0)
    on.step(on.optimizer)
    on.update()


def _step_unscales(on: Any, grads: Sequence[Tensor]) -> None:
    on.optimizer.zero_grad()
    on.scale(on.model(grads)).backward()
    on.step(on.optimizer)
    on.update()


def _amp_in_one(on: Any, grads: Sequence[Tensor]) -> None:
    on.optimizer_step(on.model(grads), on.optimizer, on.scaler, 1.0)


AMP_LOOPS = (_torch_way, _step_unscales, _amp_in_one)


def _amp_calls(model: nn.Module, optimizer: torch.optim.Optimizer) -> SimpleNamespace:
    scaler = GradScaler("cpu", init_scale=16.0)
    names = ("scale", "unscale_", "step", "update")
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        optimizer_step=optimizer_step,
        **{name: getattr(scaler, name) for name in names},
    )


def _life(
    on: Any,
    loops: Sequence[Callable[..., None]],
    shapes: Sequence[Sequence[int]],
    compiled: tuple[str, str] | None = None,
    num_plain: int = 0,
) -> list[Tensor]:
    """Take steps with one loop after another; return the weights.

    compiled: how and by which backend, from step ``num_plain`` on: "whole" steps, or every call "alone". None: never.
    """
    torch._dynamo.reset()
    counters.clear()
    calls = dict(vars(on))
    for index in range(STEPS):
        if compiled is not None and index == num_plain:
            way, backend = compiled
            if way == "whole":
                loops = [torch.compile(loop, backend=backend) for loop in loops]
            else:
                is_call = {name: name not in ("model", "optimizer", "scaler") for name in calls}
                calls = {n: torch.compile(c, backend=backend) if is_call[n] else c for n, c in calls.items()}
        grads = integers(shapes, index)
        if index == OVERFLOW:
            grads[0][0, 0] = torch.inf
        loops[index % len(loops)](SimpleNamespace(**calls), grads)
    return [whole(param) for param in on.model.parameters()]


def _wrapped(cell: Cell, compiled: tuple[str, str] | None = None, num_plain: int = 0, *, chained: bool = False) -> Any:
    """Return what is left of a life with a wrapped optimizer: weights, rates and counts. chained: of two."""
    model = cell.model()
    optimizer = _chain(model) if chained else cell.optimizer(model)
    weights = _life(_calls(model, optimizer), LOOPS, cell.shapes, compiled, num_plain)
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    landed, skipped = optimizer.num_landed_steps.item(), optimizer.num_skipped_steps.item()
    return weights, [*rates, landed, skipped, optimizer.get_loss_scale().item()]


def _chain(model: nn.Module) -> ChainedOptimizer:
    named, scaler = list(model.named_parameters()), DynamicGradScaler(2.0**4, hysteresis=1)
    halves = [
        MixedPrecisionOptimizer(torch.optim.AdamW(named[:2], lr=2.0**-7), None, scaler),
        MixedPrecisionOptimizer(torch.optim.SGD(named[2:], lr=2.0**-7), None, scaler),
    ]
    return ChainedOptimizer(halves)


def _amp(fused: bool, compiled: tuple[str, str] | None = None, num_plain: int = 0) -> Any:
    """Return what is left of a life with a GradScaler."""
    model = Given(SHAPES)
    on = _amp_calls(model, torch.optim.Adam(model.parameters(), lr=2.0**-7, fused=fused))
    return _life(on, AMP_LOOPS, SHAPES, compiled, num_plain), [on.scaler.get_scale()]


def _compare(
    compiled: tuple[str, str], life: Callable[..., Any], *args: Any, **options: Any
) -> list[tuple[bool, int, set[str]]]:
    """Return for each of two numbers of plain steps: whether all is left as by a program that compiles nothing, the
    number of graphs, and the names of the library's functions that were traced apart.
    """
    weights, numbers = life(*args, **options)
    found = []
    for num_plain in (0, 2):
        clear_compilation_metrics()
        others, other_numbers = life(*args, compiled, num_plain, **options)
        is_same = numbers == other_numbers and all(map(torch.equal, weights, others))
        traced = [one for one in get_compilation_metrics() if (one.co_filename or "").startswith(LIBRARY)]
        found.append((is_same, counters["stats"]["unique_graphs"], {str(one.co_name) for one in traced}))
    return found


def _check(way: str, every_rank: list[list[tuple[bool, int, set[str]]]]) -> None:
    for is_same, num_graphs, traced in chain.from_iterable(every_rank):
        assert is_same
        assert not traced
        assert (num_graphs > 0) == (way == "whole")  # what the program itself computes: its forward


def _inductor(*values: Any) -> Any:
    return pytest.param(
        *values, marks=[pytest.mark.release, pytest.mark.skipif(without_cxx() is not None, reason="C++")]
    )


QUICK = [Cell(torch.float16, "replicated"), Cell(torch.float16, "zero1"), Cell(torch.bfloat16, "fsdp2")]
WAYS = ("whole", "alone")


@pytest.mark.parametrize(
    ("cell", "way", "backend"),
    [
        *(pytest.param(cell, "whole", "aot_eager", marks=pytest.mark.slow) for cell in QUICK),
        pytest.param(QUICK[0], "alone", "eager"),
        *(
            pytest.param(cell, way, "eager", marks=pytest.mark.slow if cell in QUICK else pytest.mark.release)
            for cell in CELLS
            for way in WAYS
            if (cell, way) != (QUICK[0], "alone")
        ),
        *(_inductor(cell, way, "inductor") for cell in QUICK for way in WAYS),
    ],
    ids=str,
)
def test_compiled_steps_have_the_bits_of_others(ranks: RankPool, cell: Cell, way: str, backend: str) -> None:
    """step(), its two halves, clipping, scale_loss(), schedule and averages, from the first step on or the third.

    A compiled step() was a segmentation fault after plain steps, and an AssertionError in a fresh process.
    All eighteen cells exist.
    """
    _check(way, ranks.run(cell.world_size, _compare, (way, backend), _wrapped, cell, timeout=240))


@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param("whole", marks=pytest.mark.slow), "alone"])
def test_compiled_steps_of_a_chain(way: str) -> None:
    """A chain's steps; the scale is there once for both members."""
    _check(way, [_compare((way, "eager"), _wrapped, QUICK[0], chained=True)])


@pytest.mark.parametrize(
    ("fused", "way", "backend"),
    [
        (False, "alone", "eager"),
        *(pytest.param(fused, "whole", "aot_eager", marks=pytest.mark.slow) for fused in (True, False)),
        pytest.param(True, "alone", "eager", marks=pytest.mark.slow),
        *(_inductor(fused, way, "inductor") for fused in (True, False) for way in WAYS),
    ],
)
def test_compiled_steps_of_a_grad_scaler(fused: bool, way: str, backend: str) -> None:
    """scale(), unscale_(), step(), update() and optimizer_step() of an optimizer that reads the decision, or does not.

    It exists for fp32 parameters: the optimizer is torch's own.
    """
    _check(way, [_compare((way, backend), _amp, fused)])
