"""Training that has stopped is noticed by every rank at the same step."""

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascale import (
    ChainedOptimizer,
    ConstantGradScaler,
    DistributedOptimizer,
    DynamicGradScaler,
    MixedPrecisionOptimizer,
    OptimizerConfig,
)
from megascale.errors import MinScaleError, NonFiniteParamError, SkippedStepsError
from megascale.grad_sync import GradSync
from tests.pool import RankPool
from tests.training import INNER, Tiny, grad_of, model, set_grads, wrap


def _sharded_with_nan() -> list[object]:
    module = model()
    with torch.no_grad():
        module.head.weight[0, 0] = math.nan  # in the shard of one rank
    inner = torch.optim.AdamW(module.named_parameters())
    optimizer = DistributedOptimizer(inner, None, ConstantGradScaler(8.0), modules=module)
    for step in range(1, 20):
        optimizer.zero_grad()
        optimizer.scale_loss(module(torch.ones(3, 4, dtype=torch.float16)).float().square().mean()).backward()
        try:
            optimizer.step()
        except NonFiniteParamError as error:
            return [step, str(error)]
    return []


def test_damaged_shard_of_one_rank_is_named_on_all(ranks: RankPool) -> None:
    """Invariant 7: the rank that owns the NaN names the parameter, the others raise the same at the same step."""
    results = ranks.run(4, _sharded_with_nan)
    assert results == [results[0]] * 4
    step, message = results[0]
    assert int(str(step)) <= 8
    assert "main param of 'head.weight' holds inf or NaN" in str(message)


def _inf_on_one_rank(module: Tiny) -> None:
    set_grads(module, 0)
    if dist.get_rank() == 1:
        grad_of(module.head.weight)[0, 0] = math.inf


def _skipped_for_long() -> list[object]:
    module = model(torch.bfloat16)
    optimizer = wrap(module, INNER["adamw_fused"], None, max_consecutive_skips=40)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(40):
            _inf_on_one_rank(module)
            optimizer.step()
    _inf_on_one_rank(module)
    with pytest.raises(SkippedStepsError) as error:
        optimizer.step()
    return [[str(one.message)[:40] for one in caught if one.category is RuntimeWarning], str(error.value)]


def test_skips_for_long_are_told_on_all(ranks: RankPool) -> None:
    """An overflow that one rank alone can see: all ranks warn at the 32nd skip, and give up at the 41st."""
    for told, message in ranks.run(2, _skipped_for_long):
        assert told == ["32 steps in a row were skipped: the grad"]
        assert str(message).startswith("41 steps in a row were skipped, max_consecutive_skips allows 40")


def _build(kind: str, module: Tiny, scale: float, **options: Any) -> Any:
    """Return an optimizer of which ranks reduce their gradients: whole, sharded, or a chain of two that are sharded."""
    config = OptimizerConfig(fp16=True, **options)
    scaler = DynamicGradScaler(scale, 1.0, hysteresis=1)
    named = list(module.named_parameters())
    if kind == "replicated":
        inner = torch.optim.AdamW(named)
        return MixedPrecisionOptimizer(inner, config, scaler, grad_sync=GradSync(module.named_parameters()))
    parts = [named] if kind == "sharded" else [named[:3], named[3:]]
    sharded = [DistributedOptimizer(torch.optim.AdamW(part), config, scaler, modules=module) for part in parts]
    return sharded[0] if kind == "sharded" else ChainedOptimizer(sharded)


def _backward(optimizer: Any, module: Tiny, factor: float) -> None:
    """One step's gradients: of a loss that one rank may multiply by ``factor``."""
    optimizer.zero_grad()
    loss = module(torch.ones(3, 4, dtype=torch.float16)).float().square().mean()
    optimizer.scale_loss(loss * factor).backward()


def _collapse(kind: str) -> list[list[object]]:
    """Overflows without end on each rank in turn: where each rank stops, with what, and what has been counted."""
    ends: list[list[object]] = []
    for bad_rank in range(dist.get_world_size()):
        module = model()
        optimizer = _build(kind, module, 4.0, max_overflows_at_min_scale=3)
        for step in range(20):
            # A finite loss, so that parameters are blamed.
            _backward(optimizer, module, 1e12 if dist.get_rank() == bad_rank else 1.0)
            try:
                optimizer.step()
            except MinScaleError as error:
                ends.append([step, str(error), int(optimizer.num_skipped_steps), float(optimizer.get_loss_scale())])
                break
    return ends


@pytest.mark.default("4-sharded")
@pytest.mark.parametrize(("world", "kind"), [(1, "replicated"), (2, "chained"), (4, "sharded")])
def test_collapse_ends_alike_on_all(ranks: RankPool, world: int, kind: str) -> None:
    """Gradients that always overflow, on one rank: two steps take the scale from 4 to 1, three are allowed there, and
    all ranks end the next one with the same error. It names the parameters and the ranks that hold their gradients.
    """
    results = ranks.run(world, _collapse, kind)
    assert results == [results[0]] * world
    assert len(results[0]) == world
    for step, message, skipped, scale in results[0]:
        assert (step, skipped, scale) == (5, 5, 1.0)
        assert str(message).startswith("4 steps in a row overflowed at the smallest loss scale, 1.0, max_overflo")
        assert "most inf or NaN: '" in str(message)
        assert "elements, " in str(message)


def _spikes(kind: str) -> list[Any]:
    """A spike of each rank in turn, after steps without one; the decisions, bit by bit."""
    module = model()
    optimizer = _build(kind, module, 1.0, grad_norm_skip_threshold=25.0)
    seen: list[Any] = []
    ranks = dist.get_world_size()
    for step in range(1 + 2 * ranks):
        bad_rank, phase = divmod(step - 1, 2)
        factor = 4000.0 if phase == 0 and dist.get_rank() == bad_rank else 1.0
        before = [param.detach().clone() for param in module.parameters()]
        _backward(optimizer, module, factor + step / 64)
        result = optimizer.step()
        changed = any(not one.equal(param) for one, param in zip(before, module.parameters(), strict=True))
        seen.append([bool(result.success), changed, float(result.grad_norm), float(optimizer.get_loss_scale())])
    counts = [int(optimizer.num_landed_steps), int(optimizer.num_skipped_steps)]
    return [seen, counts]


@pytest.mark.parametrize(("world", "kind"), [(4, "sharded"), (2, "chained"), (2, "replicated")])
def test_spike_of_one_rank_is_one_of_all(ranks: RankPool, world: int, kind: str) -> None:
    """Each rank's batch spikes in turn: all ranks skip the same steps, change nothing in them, and leave the scale
    alone.
    """
    results = ranks.run(world, _spikes, kind)
    assert results == [results[0]] * world
    seen, counts = results[0]
    for step, (landed, changed, norm, scale) in enumerate(seen):
        assert landed == changed == (step % 2 == 0), (step, norm)
        assert scale == 1.0
    assert counts == [world + 1, world]
