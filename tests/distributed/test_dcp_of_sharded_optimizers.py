"""torch.distributed.checkpoint's functions on a DistributedOptimizer and a ChainedOptimizer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from megascale import (
    ChainedOptimizer,
    ConstantGradScaler,
    DistributedOptimizer,
    MixedPrecisionOptimizer,
)
from tests.distributed.test_dcp_state_dict import (
    FLAT,
    OPTIONS,
    ROADS,
    get_optimizer_state_dict,
    quiet,
    set_optimizer_state_dict,
)
from tests.fsdp2_cases import INNER, Net, gathered_weights, unlike, whole_state
from tests.pool import RankPool
from tests.training import set_grads


def _sharded_by_us(option: str) -> list[Any]:
    get, put = (StateDictOptions(**given) for given in OPTIONS[option])

    def build(seed: int) -> tuple[Net, DistributedOptimizer]:
        torch.manual_seed(seed)
        module = Net().half()
        inner = INNER["adamw"](list(module.named_parameters()))
        return module, DistributedOptimizer(inner, None, ConstantGradScaler(8.0), modules=module, broadcast_params=True)

    module, optimizer = build(0)
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.scale_loss(module(torch.ones(2, 6).half()).float().square().mean()).backward()
        optimizer.step()
    given = get_optimizer_state_dict(module, optimizer, options=get)
    other, resumed = build(1)
    set_optimizer_state_dict(other, resumed, given, options=put)
    return [
        unlike(whole_state(resumed), whole_state(optimizer)),
        unlike(gathered_weights(other), gathered_weights(module)),
    ]


@pytest.mark.default("full")
@pytest.mark.parametrize("option", ["sharded", "flat", "full", "full_from_rank_0"])
def test_distributed_optimizer(ranks: RankPool, option: str) -> None:
    """A DistributedOptimizer's state dict is whole, on the host, and passes through the functions as it is."""
    assert ranks.run(2, _sharded_by_us, option) == [[[], []]] * 2


def _stateful_distributed_optimizer(folder: str, road: str, write: bool) -> dict[str, Any]:
    torch.manual_seed(0 if write else 1)
    module = Net().half()
    inner = INNER["adamw"](list(module.named_parameters()))
    optimizer = DistributedOptimizer(inner, None, ConstantGradScaler(8.0), modules=module, broadcast_params=True)
    if write:
        optimizer.scale_loss(module(torch.ones(2, 6).half()).float().square().mean()).backward()
        optimizer.step()
    quiet(ROADS[road][0 if write else 1], Path(folder) / road, module, optimizer)
    return whole_state(optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("road", ["state_dict_functions", "flattened_as_torchtitan", "plain_dict", "stateful"])
def test_distributed_optimizer_through_dcp(ranks: RankPool, tmp_path: Path, road: str) -> None:
    """Saved at two ranks by ``dcp.save``, loaded at four and at one: the same state, to the bit."""
    saved = ranks.run(2, _stateful_distributed_optimizer, str(tmp_path), road, True)[0]
    for world in (4, 1):
        for state in ranks.run(world, _stateful_distributed_optimizer, str(tmp_path), road, False):
            assert unlike(state, saved) == []


def _chained(flat: bool) -> list[Any]:
    options = FLAT if flat else StateDictOptions()

    def build(seed: int) -> tuple[nn.Module, ChainedOptimizer]:
        torch.manual_seed(seed)
        module, scaler = Net().half(), ConstantGradScaler(8.0 + seed)
        named = list(module.named_parameters())
        parts = [
            MixedPrecisionOptimizer(INNER[inner](chosen), None, scaler)
            for inner, chosen in (("adamw", named[:3]), ("momentum", named[3:]))
        ]
        return module, ChainedOptimizer(parts)

    module, optimizer = build(0)
    before = whole_state(optimizer)
    get_optimizer_state_dict(module, optimizer, options=options)
    changed = unlike(whole_state(optimizer), before)
    set_grads(module, 0)
    optimizer.get_loss_scale()
    optimizer.step()
    other, resumed = build(1)
    set_optimizer_state_dict(
        other, resumed, get_optimizer_state_dict(module, optimizer, options=options), options=options
    )
    return [changed, unlike(whole_state(resumed), whole_state(optimizer))]


@pytest.mark.parametrize("flat", [False, True])
def test_chained_optimizer(ranks: RankPool, flat: bool) -> None:
    """A ChainedOptimizer has the param groups and the state of all of its optimizers."""
    assert ranks.run(2, _chained, flat) == [[[], []]] * 2
