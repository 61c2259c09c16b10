"""Training that has stopped is noticed by every rank at the same step."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist

from megascale import ConstantGradScaler, DistributedOptimizer
from megascale.errors import NonFiniteParamError, SkippedStepsError
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
        assert str(message).startswith("41 steps in a row were skipped, config.max_consecutive_skips allows 40")
