"""Megatron-Core's optimizer checkpoints in torch format: read from its own optimizer, and written for it."""

import os
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.peers import megatron_on_cpu
from megascale import DynamicGradScaler, MixedPrecisionOptimizer
from megascale.errors import InteropError, StateDictError
from megascale.integrations.megatron import load_megatron_checkpoint
from tests.pool import RankPool
from tests.training import bits_equal, model, same_bits, snapshot, wrap

megatron_on_cpu.install()
pytest.importorskip("megatron.core", reason="needs megatron-core: pip install --no-deps megatron-core pydantic einops")

from tests.integrations import megatron_runs as runs  # noqa: E402

FUSED = mock.patch.dict(os.environ, {"MEGASCALE_BACKEND": "torch"})
"""With torch's fused AdamW on both sides the arithmetic has one order, and results have the same bits."""


def same(left: list[Any], right: list[Any]) -> bool:
    """Whether two trainings have the same logs, but for the last bits of the norm, and the same params, bit for bit."""
    logs = all((a[0], *a[2:]) == (b[0], *b[2:]) for (a, _), (b, _) in zip(left, right, strict=True))
    params = [pair for (_, a), (_, b) in zip(left, right, strict=True) for pair in zip(a, b, strict=True)]
    return logs and all(bits_equal(p, q) for p, q in params)


def mains(run: runs.Run) -> list[torch.Tensor]:
    """Return Megatron's main params, in the order of its groups."""
    return [
        main for one in run.optimizer.chained_optimizers for group in one.fp32_from_float16_groups for main in group
    ]


def ours_in_its_order(run: runs.Run) -> list[torch.Tensor]:
    """Return our main params, in the same order."""
    state = run.optimizer.state_dict()
    parts = state if isinstance(state, list) else [state]
    return [main for part in parts for group in part["fp32_from_fp16_params"] for main in group]


# Theirs, continued by ours


def _continue_theirs(folder: str, options: dict[str, Any]) -> list[Any]:
    """Train Megatron, save, load into ours, train both on; return both logs, and whether main params were equal."""
    with runs.model_parallel(), FUSED:
        theirs = runs.start("theirs", fused=True, clip_grad=0.0, **options)
        runs.train(theirs, range(7))
        path = Path(folder) / f"model_optim_rng_{dist.get_rank()}.pt"
        torch.save(runs.checkpoint(theirs), path)
        mine = runs.start("ours", fused=True, clip_grad=0.0, **options)
        runs.train(mine, range(20, 22))
        mine.module.load_state_dict(theirs.module.state_dict())
        load_megatron_checkpoint(path, mine.optimizer.optimizer)
        mine.scheduler.num_steps = 0
        mine.scheduler.load_state_dict(theirs.scheduler.state_dict())
        equal = [bits_equal(a, b) for a, b in zip(mains(theirs), ours_in_its_order(mine), strict=True)]
        return [runs.train(theirs, range(7, 16)), runs.train(mine, range(7, 16)), all(equal)]


CONTINUED: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (1, {"frozen": True, "fp32_norm": True}),
    (1, {"expert": True}),
    (1, {"loss_scale": 128.0}),
    (1, {"dtype": torch.bfloat16, "loss_scale": 128.0}),
    (2, {}),
]


@pytest.mark.parametrize(("world", "options"), CONTINUED)
def test_training_continues_as_megatron_would(
    ranks: RankPool, tmp_path: Path, world: int, options: dict[str, Any]
) -> None:
    """A file of its Float16 optimizer, read into ours: the same main params, then nine steps with the bits of its own.

    Skips and scales too, with several groups, frozen and fp32 parameters, and a ChainedOptimizer's list.
    """
    for theirs, mine, equal in ranks.run(world, _continue_theirs, str(tmp_path), options):
        assert equal
        assert [log[0] for log, _ in theirs].count(False) == 1
        assert same(theirs, mine)


def _load_beside_frozen() -> tuple[list[bool], list[str]]:
    with runs.model_parallel():
        theirs = runs.start("theirs", frozen=True)
        runs.train(theirs, range(3))
        module = runs.Net(torch.float16, fp32_norm=False, frozen=True, expert=False)
        named = list(module.named_parameters())
        groups = [[(n, p) for n, p in named if p.dim() > 1], [(n, p) for n, p in named if p.dim() == 1]]
        inner = torch.optim.AdamW([{"params": group} for group in groups])
        optimizer = MixedPrecisionOptimizer(inner, None, DynamicGradScaler(2.0**10, 1.0, 2.0, 0.5, 3, 2))
        load_megatron_checkpoint(theirs.optimizer.state_dict(), optimizer)
        loaded = [(name, main) for name, main in optimizer.main_params() if not name.startswith("still")]
        equal = [bits_equal(main, saved) for (_, main), saved in zip(loaded, mains(theirs), strict=True)]
        return equal, [name for group in optimizer.param_groups for name in group["param_names"]]


def test_frozen_parameters_in_our_groups(ranks: RankPool) -> None:
    """Megatron's groups leave frozen parameters out. Where ours hold them, those after them keep their own state."""
    [(equal, names)] = ranks.run(1, _load_beside_frozen)
    assert equal == [True] * 6
    assert [name for name in names if name.startswith("still")] == ["still.weight", "still.bias"]


def _continue_sharded() -> list[Any]:
    with runs.model_parallel(), FUSED:
        theirs = runs.start("theirs", fused=True, clip_grad=0.0)
        runs.train(theirs, range(7))
        mine = runs.start("ours", bare=True, sharded=True, clip_grad=0.0)
        mine.module.load_state_dict(theirs.module.state_dict())
        mine.optimizer.load_state_dict(runs.checkpoint(theirs))
        mine.scheduler.num_steps = 0
        mine.scheduler.load_state_dict(theirs.scheduler.state_dict())
        return [runs.train(theirs, range(7, 16)), runs.train(mine, range(7, 16))]


@pytest.mark.parametrize("world", [1, 2])
def test_sharded_optimizer_continues_it_too(ranks: RankPool, world: int) -> None:
    """Our DistributedOptimizer takes the same state, each rank its shard; it reduces gradients itself."""
    for theirs, mine in ranks.run(world, _continue_sharded):
        assert same(theirs, mine)


def _continue_fp32() -> list[Any]:
    with runs.model_parallel(), FUSED:
        theirs, mine = (runs.start(kind, torch.float32, fused=True, clip_grad=0.0) for kind in ("theirs", "ours"))
        runs.train(theirs, range(7), ())
        mine.module.load_state_dict(theirs.module.state_dict())
        mine.optimizer.load_state_dict(theirs.optimizer.state_dict())
        back = runs.start("theirs", torch.float32, fused=True, clip_grad=0.0)
        back.module.load_state_dict(mine.module.state_dict())
        back.optimizer.load_state_dict(deepcopy(mine.optimizer.state_dict()))
        for run in (mine, back):
            run.scheduler.num_steps = 0
            run.scheduler.load_state_dict(theirs.scheduler.state_dict())
        return [runs.train(run, range(7, 12), ()) for run in (theirs, mine, back)]


def test_fp32_optimizer_both_ways(ranks: RankPool) -> None:
    """Its FP32 optimizer's state, which has no main params, is read and written."""
    [(theirs, mine, back)] = ranks.run(1, _continue_fp32)
    assert same(theirs, mine)
    assert same(theirs, back)


# Ours, continued by Megatron


def _continue_ours(options: dict[str, Any]) -> list[Any]:
    with runs.model_parallel(), FUSED:
        mine = runs.start("ours", fused=True, clip_grad=0.0, **options)
        runs.train(mine, range(7))
        theirs = runs.start("theirs", fused=True, clip_grad=0.0, **options)
        theirs.module.load_state_dict(mine.module.state_dict())
        theirs.optimizer.load_state_dict(deepcopy(mine.optimizer.state_dict()))
        theirs.scheduler.num_steps = 0
        theirs.scheduler.load_state_dict(mine.scheduler.state_dict())
        return [runs.train(theirs, range(7, 16)), runs.train(mine, range(7, 16))]


@pytest.mark.parametrize("options", [{}, {"expert": True}, {"frozen": True}, {"loss_scale": 128.0}])
def test_megatron_continues_ours(ranks: RankPool, options: dict[str, Any]) -> None:
    """state_dict() of the drop-in is Megatron's own format: its optimizer loads it and goes on with the same bits."""
    [(theirs, mine)] = ranks.run(1, _continue_ours, options)
    assert same(theirs, mine)


# What does not fit


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a lost main param": (
        lambda state: state["optimizer"]["fp32_from_fp16_params"][1].pop(),
        "group 1 has .* main params",
    ),
    "a lost group": (
        lambda state: state["optimizer"]["fp32_from_fp16_params"].pop(),
        "main params of 1 groups, the optimizer has 2",
    ),
    "another shape": (
        lambda state: state["optimizer"]["fp32_from_fp16_params"][0].__setitem__(0, torch.zeros(3)),
        "has shape",
    ),
    "a lost moment": (lambda state: state["optimizer"]["optimizer"]["state"][0].pop("exp_avg"), "lacks 'exp_avg'"),
    "swapped groups": (
        lambda state: state["optimizer"]["optimizer"]["param_groups"].reverse(),
        "param group 0 has wd_mult=0.0 in the checkpoint and 1.0 here",
    ),
    "no scaler": (
        lambda state: state["optimizer"].pop("grad_scaler"),
        "holds no grad scaler, the optimizer has one; pass keep_grad_scaler=True",
    ),
    "a torn scaler": (lambda state: state["optimizer"]["grad_scaler"].pop("growth_tracker"), "lacks growth_tracker"),
    "an infinite scale": (
        lambda state: state["optimizer"]["grad_scaler"].update(scale=torch.tensor([torch.inf])),
        "scale must be finite",
    ),
    "no optimizer": (lambda state: state.pop("optimizer"), "holds no optimizer"),
    "no main params": (lambda state: state["optimizer"].pop("fp32_from_fp16_params"), "no fp32_from_fp16_params"),
    "two optimizers": (lambda state: state.update(optimizer=[state["optimizer"]] * 2), "groups of"),
    "a number": (lambda state: state.update(optimizer=3), "must be a dict, or a list of them"),
}


def _load_damaged(name: str) -> tuple[str, bool]:
    with runs.model_parallel():
        theirs, mine = runs.start("theirs"), runs.start("ours")
        runs.train(theirs, range(3))
        runs.train(mine, range(5))
        state = runs.checkpoint(theirs)
        if dist.get_rank() == dist.get_world_size() - 1:
            DAMAGES[name][0](state)
        optimizer = mine.optimizer.optimizer
        before = snapshot(optimizer, mine.module), optimizer.grad_scaler.state_dict(), str(optimizer.param_groups)
        with pytest.raises(StateDictError) as error:
            load_megatron_checkpoint(state, optimizer)
        after = snapshot(optimizer, mine.module), optimizer.grad_scaler.state_dict(), str(optimizer.param_groups)
        return str(error.value), same_bits(before[0], after[0]) and before[1:] == after[1:]


@pytest.mark.parametrize("name", DAMAGES)
def test_what_does_not_fit_changes_nothing(ranks: RankPool, name: str) -> None:
    """Megatron truncates silently and changes half; here an error names what is wrong, and every bit stays."""
    [(message, unchanged)] = ranks.run(1, _load_damaged, name)
    assert re.search(DAMAGES[name][1], message), message
    assert unchanged


def test_damage_on_one_rank_is_told_on_all(ranks: RankPool) -> None:
    """A rank whose file is damaged leaves no other waiting: both raise, and name it."""
    results = ranks.run(2, _load_damaged, "a lost main param")
    assert all(message.startswith("rank 1: ") and unchanged for message, unchanged in results)


class _Boom:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["MEGASCALE_BOOM"],)


def _load_hostile(folder: str) -> float:
    with runs.model_parallel(), mock.patch.dict(os.environ, {"MEGASCALE_BOOM": f"{folder}/boom"}):
        theirs, mine = runs.start("theirs"), runs.start("ours")
        runs.train(theirs, range(5))
        state = runs.checkpoint(theirs) | {"extra": _Boom()}
        torch.save(state, f"{folder}/model_optim_rng.pt")
        mine.optimizer.load_state_dict(f"{folder}/model_optim_rng.pt")
        scale: float = mine.optimizer.get_loss_scale().item()
        return scale


def test_nothing_in_a_file_is_executed(ranks: RankPool, tmp_path: Path) -> None:
    """A checkpoint holds arbitrary pickled objects, args among them; none of them is built or called."""
    assert ranks.run(1, _load_hostile, str(tmp_path)) == [2.0**10]
    assert not (tmp_path / "boom").exists()


def _keep_scaler() -> tuple[float, float]:
    with runs.model_parallel():
        theirs, mine = runs.start("theirs"), runs.start("ours", initial_loss_scale=64.0)
        runs.train(theirs, range(3))
        with_scaler = theirs.optimizer.state_dict()
        load_megatron_checkpoint(with_scaler, mine.optimizer.optimizer, keep_grad_scaler=True)
        first = mine.optimizer.get_loss_scale().item()
        without = {key: value for key, value in with_scaler.items() if key != "grad_scaler"}
        load_megatron_checkpoint(without, mine.optimizer.optimizer, keep_grad_scaler=True)
        return first, mine.optimizer.get_loss_scale().item()


def test_live_scale_can_be_kept(ranks: RankPool) -> None:
    """keep_grad_scaler=True: main params and state are loaded, the live scale stays, whatever the file holds."""
    assert ranks.run(1, _keep_scaler) == [(64.0, 64.0)]


def _scalers_apart() -> tuple[float, float]:
    with runs.model_parallel():
        theirs, mine = runs.start("theirs", expert=True), runs.start("ours", expert=True)
        dense, experts = theirs.optimizer.state_dict()
        experts["grad_scaler"]["scale"] = experts["grad_scaler"]["scale"] / 4
        mine.optimizer.load_state_dict([dense, experts])
        return mine.optimizer.get_loss_scale().item(), dense["grad_scaler"]["scale"].item()


def test_chained_scalers_that_differ(ranks: RankPool) -> None:
    """After an overflow among experts alone Megatron has two scales. Ours takes the one that has scaled the loss."""
    [(scale, of_dense)] = ranks.run(1, _scalers_apart)
    assert scale == of_dense


def _scaler_without_place() -> str:
    with runs.model_parallel():
        theirs = runs.start("theirs", torch.bfloat16, loss_scale=8.0)
        mine = runs.start("ours", torch.bfloat16)
        with pytest.raises(InteropError) as error:
            mine.optimizer.load_state_dict(theirs.optimizer.state_dict())
        return str(error.value)


def test_scaler_without_a_place_is_an_error(ranks: RankPool) -> None:
    """A scaler on one side only is not dropped silently."""
    assert "the optimizer has none; pass keep_grad_scaler=True" in ranks.run(1, _scaler_without_place)[0]


def test_missing_file_says_what_to_pass(tmp_path: Path) -> None:
    """A folder is not guessed at: each model-parallel rank has a file of its own."""
    optimizer = wrap(model())
    with pytest.raises(InteropError, match=r"is no file; pass this rank's iter_\*/mp_rank_\*/model_optim_rng.pt"):
        load_megatron_checkpoint(tmp_path, optimizer)
