"""Copies of ``optimizer.state`` that each rank writes by itself: DTensors load again, pieces of a shard do not."""

import pickle
from typing import Any

import pytest
import torch

from megascale import DistributedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.errors import StateDictError
from megascale.utils.nests import map_tensors
from tests.fsdp2_cases import INNER, Case, Net, gathered_weights, train, unlike, whole_state
from tests.pool import RankPool

READERS = ["pickled", "tensor by tensor"]


def _build(kind: str, seed: int) -> tuple[Net, MixedPrecisionOptimizer]:
    if kind == "fsdp2":
        return Case().build(seed)
    torch.manual_seed(seed)
    module = Net().half()
    inner = INNER["adamw"](list(module.named_parameters()))
    scaler = DynamicGradScaler(2.0**12 / (1 + seed), 1.0, 2.0, 0.5, 4, 1)
    config = OptimizerConfig(fp16=True)
    return module, DistributedOptimizer(inner, config, scaler, modules=module, broadcast_params=True, shard=kind)


def _train(module: Net, optimizer: MixedPrecisionOptimizer, steps: range) -> None:
    train(module, optimizer, Case(), steps, {1: 0})


def _read(optimizer: MixedPrecisionOptimizer, reader: str) -> dict[str, Any]:
    """Return what this rank holds, as files have it."""
    [group] = optimizer.param_groups
    if reader == "pickled":
        state = pickle.loads(pickle.dumps([optimizer.state[param] for param in group["params"]]))
    else:
        state = [
            {name: pickle.loads(pickle.dumps(value)) for name, value in optimizer.state[param].items()}
            for param in group["params"]
        ]
    options = {name: value for name, value in group.items() if name != "params"}
    return {"state": dict(enumerate(state)), "param_groups": [options | {"params": list(range(len(state)))}]}


def _round_trip(reader: str) -> list[Any]:
    module, optimizer = _build("fsdp2", 0)
    _train(module, optimizer, range(4))
    copied = _read(optimizer, reader)
    other, resumed = _build("fsdp2", 1)
    resumed.load_state_dict(copied)
    found = [
        unlike(whole_state(resumed), whole_state(optimizer)),
        unlike(gathered_weights(other), gathered_weights(module)),
    ]
    for each in ((module, optimizer), (other, resumed)):
        _train(*each, range(4, 7))
    return [*found, unlike(whole_state(resumed), whole_state(optimizer))]


@pytest.mark.default("pickled")
@pytest.mark.parametrize("reader", READERS)
def test_each_rank_loads_its_own(ranks: RankPool, reader: str) -> None:
    """Main params and moments that are DTensors, and the scaler, come back; training goes on with all bits."""
    assert ranks.run(2, _round_trip, reader) == [[[], [], []]] * 2


def _load_pieces(kind: str) -> tuple[str, list[str]]:
    module, optimizer = _build(kind, 0)
    _train(module, optimizer, range(2))
    state = [map_tensors(torch.clone, optimizer.state[param]) for param in optimizer.param_groups[0]["params"]]
    copied = {"state": dict(enumerate(state)), "param_groups": [{"params": list(range(len(state)))}]}
    before = whole_state(optimizer)
    with pytest.raises(StateDictError) as caught:
        optimizer.load_state_dict(copied)
    return str(caught.value), unlike(whole_state(optimizer), before)


@pytest.mark.parametrize("kind", ["elements", "parameters"])
def test_pieces_are_refused(ranks: RankPool, kind: str) -> None:
    """What one rank of a DistributedOptimizer holds is not the state: the same error on all, which says what is."""
    results = ranks.run(2, _load_pieces, kind)
    assert len({message for message, _ in results}) == 1
    assert "save what state_dict() returns" in results[0][0]
    assert [changed for _, changed in results] == [[], []]
