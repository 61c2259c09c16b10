"""Copies of ``optimizer.state`` that each rank writes by itself: they load on the ranks that wrote them."""

import pickle
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascale import DistributedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.errors import StateDictError
from tests.fsdp2_cases import INNER, Case, Net, gathered_weights, train, unlike, whole_state
from tests.pool import RankPool

KINDS = ["elements", "parameters", "fsdp2", "8 bit"]
READERS = ["pickled", "tensor by tensor"]
CODES: dict[str, Any] = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}


def _build(kind: str, seed: int) -> tuple[Net, MixedPrecisionOptimizer]:
    if kind == "fsdp2":
        return Case().build(seed)
    torch.manual_seed(seed)
    module = Net().half()
    inner = INNER["adamw"](list(module.named_parameters()))
    scaler = DynamicGradScaler(2.0**12 / (1 + seed), 1.0, 2.0, 0.5, 4, 1)
    config = OptimizerConfig(fp16=True, **(CODES if kind == "8 bit" else {}))
    shard = "parameters" if kind == "parameters" else "elements"
    return module, DistributedOptimizer(inner, config, scaler, modules=module, broadcast_params=True, shard=shard)


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


def _round_trip(kind: str, reader: str) -> list[Any]:
    module, optimizer = _build(kind, 0)
    _train(module, optimizer, range(4))
    copied = _read(optimizer, reader)
    other, resumed = _build(kind, 1)
    resumed.load_state_dict(copied)
    found = [
        unlike(whole_state(resumed), whole_state(optimizer)),
        unlike(gathered_weights(other), gathered_weights(module)),
    ]
    for each in ((module, optimizer), (other, resumed)):
        _train(*each, range(4, 7))
    return [*found, unlike(whole_state(resumed), whole_state(optimizer))]


@pytest.mark.default("8 bit-pickled")
@pytest.mark.parametrize(("kind", "reader"), list(product(KINDS, READERS)))
def test_each_rank_loads_its_own(ranks: RankPool, kind: str, reader: str) -> None:
    """Pieces of main params and moments, and the scaler, come back where they were; training goes on with all bits."""
    assert ranks.run(2, _round_trip, kind, reader) == [[[], [], []]] * 2


def _save(folder: str, kind: str) -> None:
    module, optimizer = _build(kind, 0)
    _train(module, optimizer, range(2))
    torch.save(_read(optimizer, "pickled"), Path(folder, f"{dist.get_rank()}.pt"))


def _load_elsewhere(folder: str, kind: str) -> tuple[str, list[str]]:
    _, optimizer = _build(kind, 1)
    before = whole_state(optimizer)
    copied = torch.load(Path(folder, f"{dist.get_rank() % 2}.pt"), weights_only=True)
    with pytest.raises(StateDictError) as caught:
        optimizer.load_state_dict(copied)
    return str(caught.value), unlike(whole_state(optimizer), before)


@pytest.mark.default("elements")
@pytest.mark.parametrize("kind", ["elements", "parameters"])
def test_on_other_ranks_the_error_names_the_pieces(ranks: RankPool, kind: str, tmp_path: Path) -> None:
    """Four ranks find files of two: the same error on all, before anything has changed."""
    ranks.run(2, _save, str(tmp_path), kind)
    results = ranks.run(4, _load_elsewhere, str(tmp_path), kind)
    assert len({message for message, _ in results}) == 1
    assert "Load the copy on the same ranks, built alike, or save what state_dict() returns" in results[0][0]
    assert [changed for _, changed in results] == [[]] * 4
