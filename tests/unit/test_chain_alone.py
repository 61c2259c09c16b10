"""Of the optimizers of a chain none steps by itself: the others would miss the decision that is taken for all."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from megascale import ChainedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer
from megascale.errors import UsageError
from tests.cells import FP32_STATE, Cell, Given, Named, adamw, integers
from tests.fsdp2_cases import whole
from tests.pool import RankPool

Attempt = Callable[[ChainedOptimizer, MixedPrecisionOptimizer], object]


def _step(_: ChainedOptimizer, alone: MixedPrecisionOptimizer) -> object:
    return alone.step()


def _prepare(_: ChainedOptimizer, alone: MixedPrecisionOptimizer) -> object:
    return alone.prepare_grads()


def _clip(_: ChainedOptimizer, alone: MixedPrecisionOptimizer) -> object:
    return alone.clip_grad_norm_(1.0)


def _step_prepared(chain: ChainedOptimizer, alone: MixedPrecisionOptimizer) -> object:
    chain.prepare_grads()
    return alone.step()


def _second_half(chain: ChainedOptimizer, alone: MixedPrecisionOptimizer) -> object:
    chain.prepare_grads()
    return alone.step_with_ready_grads()


def _lend(_: ChainedOptimizer, alone: MixedPrecisionOptimizer) -> object:
    with alone.main_grads() as inner:
        return inner


ATTEMPTS = [_step, _prepare, _clip, _step_prepared, _second_half, _lend]


def _pair(cell: Cell) -> tuple[Given, list[MixedPrecisionOptimizer]]:
    """Return a model and two optimizers, each of a part of its parameters."""
    model = cell.model()
    scaler = DynamicGradScaler(2.0**4, 1.0, 2.0, 0.5, 1000, 1) if cell.dtype == torch.float16 else None

    def of(begin: int) -> MixedPrecisionOptimizer:
        def inner(named: Named) -> torch.optim.Optimizer:
            return adamw(list(named)[begin::2])

        return cell.optimizer(model, inner)

    pair = [of(0), of(1)]
    for optimizer in pair:
        optimizer.grad_scaler = scaler
    return model, pair


def _refused(cell: Cell, attempt: Attempt) -> tuple[str, bool, bool]:
    model, pair = _pair(cell)
    chain = ChainedOptimizer(pair)
    before = [whole(weight) for weight in model.parameters()]
    chain.scale_loss(model(integers(cell.shapes, 1))).backward()
    with pytest.raises(UsageError) as caught:
        attempt(chain, pair[1])
    kept = all(map(torch.equal, before, map(whole, model.parameters())))
    return str(caught.value), kept, bool(chain.step().success)


@pytest.mark.default(
    "float32-replicated-fp32-_second_half",
    "bfloat16-fsdp2-fp32-_step_prepared",
    "float16-zero1-fp32-_step",
    "bfloat16-fsdp2-fp32-_prepare",
)
@pytest.mark.parametrize("attempt", ATTEMPTS)
@pytest.mark.parametrize("cell", FP32_STATE, ids=str)
def test_one_of_a_chain_does_not_step(cell: Cell, attempt: Attempt, ranks: RankPool) -> None:
    """Whatever the dtype, and by whichever half: it is named, no bit has changed, and the chain steps.

    How state is held does not matter, so compact cells repeat these.
    """
    for message, kept, landed in ranks.run(cell.world_size, _refused, cell, attempt):
        assert "the optimizer of 'weights.1' is in a ChainedOptimizer" in message
        assert kept
        assert landed


def test_a_dropped_chain_leaves_its_optimizers_alone() -> None:
    """Also one that only a reference cycle keeps; and of two chains the newer one steps."""
    cell = Cell(torch.bfloat16, "replicated")
    model, pair = _pair(cell)
    first = ChainedOptimizer(pair)
    second = ChainedOptimizer(pair)
    second.keeps = second  # type: ignore[attr-defined]
    for optimizer, is_refused in ((first, True), (second, False)):
        optimizer.scale_loss(model(integers(cell.shapes, 1))).backward()
        with pytest.raises(UsageError, match="built last") if is_refused else nullcontext():
            optimizer.step()
    del first, second, optimizer
    pair[0].scale_loss(model(integers(cell.shapes, 2))).backward()
    assert pair[0].step().success
