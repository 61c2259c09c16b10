"""An error of one rank around a state dict is every rank's, whatever raises it; none is left waiting."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megascale import ChainedOptimizer, DistributedOptimizer, DynamicGradScaler
from megascale.base_optimizer import MegascaleOptimizer
from megascale.errors import MegascaleError
from tests.pool import RankPool
from tests.training import bits_equal

Break = Callable[[DistributedOptimizer, MegascaleOptimizer], object]


def _full_disk(*_: object) -> None:
    raise OSError("No space left on device")


def _first_group(part: DistributedOptimizer) -> dict[str, Any]:
    return part._inner.param_groups[0]


def _first_state(part: DistributedOptimizer) -> dict[str, Any]:
    return part._inner.state[_first_group(part)["params"][0]]


SAVE_BREAKS: dict[str, tuple[Break, str]] = {
    "hook": (lambda _, whole: whole.register_state_dict_pre_hook(_full_disk), "rank 1: OSError: No space left"),
    "groups": (lambda part, _: _first_group(part).update(params=None), "rank 1: params of a param group must be a"),
    "option": (lambda part, _: _first_group(part).update(note=object()), "note"),
    "state": (lambda part, _: _first_state(part).update(note=object()), "note"),
}
LOAD_BREAKS: dict[str, tuple[Break, str]] = {
    "hook": (lambda _, whole: whole.register_load_state_dict_pre_hook(_full_disk), "rank 1: OSError: No space left"),
    "post hook": (lambda _, whole: whole.register_load_state_dict_post_hook(_full_disk), "rank 1: OSError: No space"),
    "groups": SAVE_BREAKS["groups"],
    "update": (
        lambda part, _: setattr(part._recipe.members[0].update, "create_states", _full_disk),
        "rank 1: OSError: No",
    ),
}
DIFFERENT: dict[str, tuple[Break, str]] = {
    "lacks_state": (lambda part, _: _first_state(part).pop("exp_avg"), "state of 'weight' has ['exp_avg_sq', 'step']"),
    "order": (lambda part, _: _first_group(part)["params"].reverse(), "of 'weight' on rank 0 and ["),
}


def _make(kind: str) -> tuple[nn.Module, DistributedOptimizer, MegascaleOptimizer]:
    torch.manual_seed(0)
    module = nn.Linear(6, 4).half()
    scaler = DynamicGradScaler(4.0)
    shard = "parameters" if kind == "parameters" else "auto"
    part = DistributedOptimizer(torch.optim.AdamW(module.parameters()), None, scaler, modules=module, shard=shard)
    whole = ChainedOptimizer([part]) if kind == "chain" else part
    whole.scale_loss(module(torch.ones(2, 6).half()).float().sum()).backward()
    whole.step()
    whole.zero_grad()
    return module, part, whole


def _fails_together(kind: str, broken: str, action: str) -> tuple[str, bool]:
    module, part, whole = _make(kind)
    saved = whole.state_dict()
    before = [param.detach().clone() for param in module.parameters()]
    scale = whole.get_loss_scale()
    if dist.get_rank() == 1:
        (LOAD_BREAKS if action == "load" else SAVE_BREAKS | DIFFERENT)[broken][0](part, whole)
    with pytest.raises(MegascaleError) as caught:
        whole.load_state_dict(saved) if action == "load" else whole.state_dict()
    kept = [bits_equal(param.detach(), value) for param, value in zip(module.parameters(), before, strict=True)]
    return str(caught.value), all(kept) and torch.equal(scale, whole.get_loss_scale())


def _check(ranks: RankPool, kind: str, broken: str, action: str, expected: str) -> None:
    (message, is_kept), (other, other_is_kept) = ranks.run(2, _fails_together, kind, broken, action)
    assert message == other
    assert expected in message
    assert is_kept
    assert other_is_kept


@pytest.mark.default("hook-elements", "state-chain", "option-parameters", "groups-parameters")
@pytest.mark.parametrize("kind", ["elements", "parameters", "chain"])
@pytest.mark.parametrize("broken", SAVE_BREAKS)
def test_state_that_one_rank_cannot_save_is_every_ranks_error(ranks: RankPool, kind: str, broken: str) -> None:
    """A hook that fails, param groups or state that a state dict cannot hold: no rank waits for the gathers."""
    _check(ranks, kind, broken, "save", SAVE_BREAKS[broken][1])


@pytest.mark.parametrize("kind", ["elements", "chain"])
@pytest.mark.parametrize("broken", LOAD_BREAKS)
def test_state_that_one_rank_cannot_load_is_every_ranks_error(ranks: RankPool, kind: str, broken: str) -> None:
    """A hook that fails, or param groups that cannot be read: no rank goes on alone."""
    _check(ranks, kind, broken, "load", LOAD_BREAKS[broken][1])


@pytest.mark.parametrize("broken", DIFFERENT)
def test_ranks_whose_state_differs_are_named(ranks: RankPool, broken: str) -> None:
    """Pieces of different tensors would be gathered as one."""
    _check(ranks, "elements", broken, "save", DIFFERENT[broken][1])
