"""A run with a LandedLRScheduler, saved and resumed in each of the ways of docs/fsdp2.md, in every cell."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim.lr_scheduler import CosineAnnealingLR

import megascale.checkpoint
from megascale.schedules import LandedLRScheduler
from tests.cells import CELLS, Cell, integers
from tests.distributed.test_dcp_state_dict import ROADS, Load, Save, quiet
from tests.fsdp2_cases import unlike, whole, whole_state
from tests.pool import RankPool

get_state_dict: Any = dsd.get_state_dict
set_model_state_dict: Any = dsd.set_model_state_dict
set_optimizer_state_dict: Any = dsd.set_optimizer_state_dict
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_ONE = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
STEPS, SKIPPED = 6, (2, 4)


def _save_whole(folder: Path, module: nn.Module, optimizer: Any) -> None:
    saved = get_state_dict(module, optimizer, options=WHOLE)
    if dist.get_rank() == 0:
        torch.save(saved, folder)
    dist.barrier()


def _load_whole(folder: Path, module: nn.Module, optimizer: Any) -> None:
    weights, state = torch.load(folder, weights_only=True) if dist.get_rank() == 0 else ({}, {})
    # Not set_state_dict(), which takes ranks without weights for ones that load none.
    set_model_state_dict(module, weights, options=FROM_ONE)
    set_optimizer_state_dict(module, optimizer, state, options=FROM_ONE)


def _load_weights_first(folder: Path, module: nn.Module, optimizer: Any) -> None:
    """set_state_dict() loads weights last, which is a write that resets remainders."""
    weights, state = get_state_dict(module, optimizer)
    dcp_load({"model": weights, "optim": state}, checkpoint_id=folder)
    set_model_state_dict(module, weights)
    set_optimizer_state_dict(module, optimizer, state)


def _save_ours(folder: Path, module: nn.Module, optimizer: Any) -> None:
    megascale.checkpoint.save(folder, STEPS, module, optimizer)


def _load_ours(folder: Path, module: nn.Module, optimizer: Any) -> None:
    megascale.checkpoint.load(folder, module, optimizer)


WAYS: dict[str, tuple[Save, Load]] = {
    **ROADS,
    "full_state_dict": (_save_whole, _load_whole),
    "megascale_checkpoint": (_save_ours, _load_ours),
}
Run = tuple[dict[str, Any], list[Tensor], list[float]]


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.dtype == torch.float16], ids=str)
def test_a_run_with_a_schedule_is_resumed_in_every_way(cell: Cell, ranks: RankPool, tmp_path: Path) -> None:
    """After landed and skipped steps, saved and loaded into a run that has just begun: the same state, types too, and
    the same bits and rates from there on. `dcp.load` raised that a number was expected for the rate and a tensor found.
    """
    saved = ranks.run(cell.world_size, _saved, cell, str(tmp_path))
    for way in WAYS:
        for found, expected in zip(ranks.run(cell.world_size, _resumed, cell, str(tmp_path), way), saved, strict=True):
            assert unlike(found[0][0], expected[0][0]) == [], way
            assert unlike(found[1][0], expected[1][0]) == [], way
            assert all(map(torch.equal, found[1][1], expected[1][1])), way
            assert found[1][2] == expected[1][2], way


def _built(cell: Cell, seed: int) -> tuple[nn.Module, Any, LandedLRScheduler]:
    model = cell.model()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(seed)
    optimizer = cell.optimizer(model)
    return model, optimizer, LandedLRScheduler(CosineAnnealingLR(optimizer, 50))


def _train(cell: Cell, run: tuple[nn.Module, Any, LandedLRScheduler], steps: range) -> Run:
    model, optimizer, schedule = run
    for step in steps:
        optimizer.zero_grad()
        grads = integers(cell.shapes, step)
        if step in SKIPPED:
            grads[0].fill_(float("inf"))
        cell.backward(optimizer, model, grads)
        schedule.step(optimizer.step().success)
    rates = [float(rate) for rate in schedule.get_last_lr()]
    return whole_state(optimizer), [whole(weight) for weight in model.parameters()], rates


def _saved(cell: Cell, folder: str) -> tuple[Run, Run]:
    run = _built(cell, 1)
    at_save = _train(cell, run, range(STEPS))
    for way, (save, _) in WAYS.items():
        quiet(save, Path(folder) / way, *run[:2])
    quiet(lambda: dcp_save({"schedule": run[2]}, checkpoint_id=Path(folder) / "schedule"))
    return at_save, _train(cell, run, range(STEPS, STEPS + 2))


def _resumed(cell: Cell, folder: str, way: str) -> tuple[Run, Run]:
    run = _built(cell, 2)
    has_remainders = cell.state == "compact" and cell.dtype != torch.float32
    load = _load_weights_first if has_remainders and way == "state_dict_functions" else WAYS[way][1]
    quiet(load, Path(folder) / way, *run[:2])
    quiet(lambda: dcp_load({"schedule": run[2]}, checkpoint_id=Path(folder) / "schedule"))
    return _train(cell, run, range(0)), _train(cell, run, range(STEPS, STEPS + 2))


@pytest.mark.default("float16-replicated-fp32")
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.dtype == torch.float16], ids=str)
def test_types_do_not_tell_how_long_a_run_is(cell: Cell, ranks: RankPool, tmp_path: Path) -> None:
    """Before the first step, after some, and after a load a state dict has the same keys, types and dtypes."""
    for new, run, loaded in ranks.run(cell.world_size, _types, cell, str(tmp_path)):
        assert new == run == loaded


def _types(cell: Cell, folder: str) -> list[Any]:
    model, optimizer, schedule = run = _built(cell, 1)
    found = [_kinds([optimizer.state_dict(), schedule.state_dict()])]
    _train(cell, run, range(STEPS))
    found.append(_kinds([optimizer.state_dict(), schedule.state_dict()]))
    megascale.checkpoint.save(folder, 0, model, optimizer, user_state=schedule.state_dict())
    other, resumed, late = _built(cell, 2)
    late.load_state_dict(megascale.checkpoint.load(folder, other, resumed).user_state)
    return [*found, _kinds([resumed.state_dict(), late.state_dict()])]


def _kinds(value: Any) -> Any:
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape)
    if isinstance(value, dict):
        return {key: _kinds(item) for key, item in value.items()}
    return [_kinds(item) for item in value] if isinstance(value, (list, tuple)) else type(value).__name__
