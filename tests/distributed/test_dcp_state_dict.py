"""State through torch.distributed.checkpoint: its state-dict functions, and its save and load, at 1, 2 and 4 ranks."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from megascale import (
    ConstantGradScaler,
    DistributedOptimizer,
    DynamicGradScaler,
    MixedPrecisionOptimizer,
)
from megascale.errors import StateDictError
from tests.fsdp2_cases import INNER, Case, Net, gathered_weights, train, unlike, whole_state
from tests.pool import RankPool

get_state_dict: Any = dsd.get_state_dict
set_state_dict: Any = dsd.set_state_dict
get_optimizer_state_dict: Any = dsd.get_optimizer_state_dict
set_optimizer_state_dict: Any = dsd.set_optimizer_state_dict
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
BAD = {1: 0, 4: 3, 7: 1, 9: 2, 10: 0}  # step: the part of the data whose loss is infinite

Optimizer = Any
Save = Callable[[Path, nn.Module, Optimizer], None]
Load = Callable[[Path, nn.Module, Optimizer], None]


def _save_by_functions(folder: Path, module: nn.Module, optimizer: Optimizer) -> None:
    weights, state = get_state_dict(module, optimizer)
    dcp_save({"model": weights, "optim": state}, checkpoint_id=folder)


def _load_by_functions(folder: Path, module: nn.Module, optimizer: Optimizer) -> None:
    weights, state = get_state_dict(module, optimizer)
    dcp_load({"model": weights, "optim": state}, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=weights, optim_state_dict=state)


class _Container:
    """What torchtitan keeps its optimizers in: a Stateful over flattened state dicts."""

    def __init__(self, module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self.module, self.optimizers = module, optimizers

    def state_dict(self) -> dict[str, Any]:
        parts = [get_optimizer_state_dict(self.module, each, options=FLAT) for each in self.optimizers]
        return {key: value for part in parts for key, value in part.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for each in self.optimizers:
            set_optimizer_state_dict(self.module, each, state_dict, options=FLAT)


def _save_flat(folder: Path, module: nn.Module, optimizer: Optimizer) -> None:
    dcp_save({"model": module, "optimizer": _Container(module, [optimizer])}, checkpoint_id=folder)


def _load_flat(folder: Path, module: nn.Module, optimizer: Optimizer) -> None:
    dcp_load({"model": module, "optimizer": _Container(module, [optimizer])}, checkpoint_id=folder)


def _save_dict(folder: Path, module: nn.Module, optimizer: Optimizer) -> None:
    dcp_save({"model": module.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=folder)


def _load_dict(folder: Path, module: nn.Module, optimizer: Optimizer) -> None:
    state = {"model": module.state_dict(), "optim": optimizer.state_dict()}
    dcp_load(state, checkpoint_id=folder)
    optimizer.load_state_dict(state["optim"])


def _save_stateful(folder: Path, module: nn.Module, optimizer: Optimizer) -> None:
    dcp_save({"model": module, "optim": optimizer}, checkpoint_id=folder)


def _load_stateful(folder: Path, module: nn.Module, optimizer: Optimizer) -> None:
    dcp_load({"model": module, "optim": optimizer}, checkpoint_id=folder)


ROADS: dict[str, tuple[Save, Load]] = {
    "state_dict_functions": (_save_by_functions, _load_by_functions),
    "flattened_as_torchtitan": (_save_flat, _load_flat),
    "plain_dict": (_save_dict, _load_dict),
    "stateful": (_save_stateful, _load_stateful),
}


def quiet(call: Callable[..., None], *args: Any) -> None:
    """Call without warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations, and "no process group" at one rank
        call(*args)


@dataclass(frozen=True)
class Zero1(Case):
    """Sharded by a DistributedOptimizer, whose state dict is whole, on the host."""

    def build(self, seed: int = 0) -> tuple[Net, MixedPrecisionOptimizer]:
        """Return a replicated model and its optimizer."""
        torch.manual_seed(seed)
        module = Net().half()
        inner, scaler = INNER["adamw"](list(module.named_parameters())), DynamicGradScaler(2.0**12 / (1 + seed))
        return module, DistributedOptimizer(inner, None, scaler, modules=module, broadcast_params=True)


CASES = {
    "fp16": Case(),
    "fp32_params": Case(dtype=torch.float32, compute=torch.float16),
    "sgd_without_state": Case(inner="sgd"),
    "its_own_step": Case(inner="adadelta"),
    "zero1": Zero1(),
}
ELSEWHERE: list[tuple[int, Any]] = [
    (1, None),
    (4, None),
    (2, ((2,), ("tp",))),
    (4, ((2, 2), ("dp", "tp"))),
    (4, ((2, 2), ("dp_replicate", "dp"))),
]
"""Numbers of ranks and meshes onto which what two ranks have saved is loaded."""


def _everything(module: nn.Module, optimizer: Any) -> dict[str, Any]:
    weights = {f"model.{name}": value for name, value in gathered_weights(module).items()}
    return whole_state(optimizer) | weights | {"skipped": optimizer.num_skipped_steps.clone()}


def _along(road: str, case: Case, folder: str, is_saved: bool) -> dict[str, Any]:
    module, optimizer = case.build(seed=0 if is_saved else 1)
    if is_saved:
        train(module, optimizer, case, range(6), BAD)
    quiet(ROADS[road][0 if is_saved else 1], Path(folder), module, optimizer)
    return _everything(module, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "road"), [*product(["fp16", "zero1"], ROADS), ("fp32_params", "stateful")])
def test_a_road_leads_to_any_ranks(ranks: RankPool, tmp_path: Path, name: str, road: str) -> None:
    """What two ranks save under FSDP2, or a DistributedOptimizer, is the same state, to the bit, on one rank and on
    four; FSDP2's also under tensor parallelism, under both, and under HSDP.
    """
    case = CASES[name]
    saved = ranks.run(2, _along, road, case, str(tmp_path), True)[0]
    for size, mesh in ELSEWHERE[: 2 if name == "zero1" else None]:
        for found in ranks.run(size, _along, road, replace(case, mesh=mesh), str(tmp_path), False):
            assert unlike(found, saved) == [], (size, mesh)


# The functions alone

OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sharded": ({}, {}),
    "flat": ({"flatten_optimizer_state_dict": True}, {"flatten_optimizer_state_dict": True}),
    "offloaded": ({"cpu_offload": True}, {"cpu_offload": True}),
    "full": ({"full_state_dict": True}, {"full_state_dict": True}),
    "full_from_rank_0": (
        {"full_state_dict": True, "cpu_offload": True},
        {"full_state_dict": True, "broadcast_from_rank0": True},
    ),
    "not_strict": ({}, {"strict": False}),
}


def _round_trip(case: Case, option: str, steps: int) -> list[Any]:
    get, put = (StateDictOptions(**given) for given in OPTIONS[option])
    module, optimizer = case.build()
    if steps:
        train(module, optimizer, case, range(steps), BAD)
    optimizer.zero_grad()
    before = _everything(module, optimizer)
    given = get_optimizer_state_dict(module, optimizer, options=get)
    changed = unlike(_everything(module, optimizer), before)
    count = len(given)
    other, resumed = case.build(seed=1)
    fresh = gathered_weights(other)
    set_optimizer_state_dict(other, resumed, given, options=put)
    weights = unlike(gathered_weights(other), gathered_weights(module))
    stepped = resumed._recipe.members[0].counter.steps + sum(param.grad is not None for param in other.parameters())
    same = unlike(whole_state(resumed), whole_state(optimizer))
    halves = any(param.dtype == torch.float16 for param in other.parameters())
    return [changed, same, weights if halves else unlike(gathered_weights(other), fresh), stepped, count]


@pytest.mark.default("fp32_params-full", "zero1-full", "its_own_step-sharded")
@pytest.mark.parametrize(
    ("name", "option"),
    [
        *product(["fp16", "fp32_params"], OPTIONS),
        *product(["zero1"], ["sharded", "flat", "full", "full_from_rank_0"]),
        ("sgd_without_state", "full_from_rank_0"),
        ("its_own_step", "sharded"),
    ],
)
def test_state_dict_functions(ranks: RankPool, name: str, option: str) -> None:
    """Under every option what is got from one optimizer and set in another is the same state, to the bit.

    Getting changes nothing. Setting writes fp16 model params anew from their main params and leaves fp32 ones alone. An
    optimizer whose state appears at its first step is not stepped to make it appear.
    """
    for steps in (0, 9):
        results = ranks.run(2, _round_trip, CASES[name], option, steps)
        for rank, (changed, same, weights, stepped, count) in enumerate(results):
            assert [changed, same, weights, stepped] == [[], [], [], 0]
            assert name == "zero1" or (count == 0) == (option == "full_from_rank_0" and rank == 1)


def _lost(option: str) -> list[Any]:
    case = CASES["its_own_step"]
    get, put = (StateDictOptions(**given) for given in OPTIONS[option])
    module, optimizer = case.build()
    train(module, optimizer, case, range(3), {})
    other, resumed = case.build(seed=1)
    before = _everything(other, resumed)
    given = get_optimizer_state_dict(module, optimizer, options=get)
    with pytest.raises(StateDictError) as caught:
        set_optimizer_state_dict(other, resumed, given, options=put)
    untouched = unlike(_everything(other, resumed), before)
    resumed.load_state_dict(get_optimizer_state_dict(module, optimizer, options=StateDictOptions(full_state_dict=True)))
    return [str(caught.value), untouched, unlike(whole_state(resumed), whole_state(optimizer))]


@pytest.mark.default("full_from_rank_0")
@pytest.mark.parametrize("option", ["flat", "full_from_rank_0"])
def test_state_that_torch_would_drop_is_missed(ranks: RankPool, option: str) -> None:
    """Where torch's functions take names from the live optimizer, which has no state yet, all ranks raise alike.

    The remedy that the message names works.
    """
    for message, untouched, differ in ranks.run(2, _lost, option):
        assert "'up.weight' had 3 entries and arrives with []" in message
        assert "give load_state_dict() a full state dict, or use megascale.checkpoint" in message
        assert untouched == []
        assert differ == []


def _partial() -> list[Any]:
    case = Case()
    module, optimizer = case.build()
    train(module, optimizer, case, range(4), {})
    given = get_optimizer_state_dict(module, optimizer)
    removed = given["state"].pop("down.weight")
    other, resumed = case.build(seed=1)
    before = whole_state(resumed)
    with pytest.raises(RuntimeError, match=r"Missing optimizer state for parameter 'down\.weight'"):
        set_optimizer_state_dict(other, resumed, given)
    untouched = unlike(whole_state(resumed), before)
    set_optimizer_state_dict(other, resumed, given, options=StateDictOptions(strict=False))
    return [len(removed) > 0, untouched, unlike(whole_state(resumed), whole_state(optimizer))]


def test_missing_parameters(ranks: RankPool) -> None:
    """A parameter that the state dict lacks is an error of torch's; with ``strict=False`` it keeps its live state."""
    left = [f"/optimizer/state/down.weight/{key}" for key in ("exp_avg", "exp_avg_sq", "step")]
    for removed, untouched, differ in ranks.run(2, _partial):
        assert removed
        assert untouched == []
        assert differ == ["/main_params/down.weight", *left]


def _wrapped(kind: str) -> list[Any]:
    """Names of the model that are not the optimizer's: wrappers put prefixes before or into them."""
    case = Case()

    def build(seed: int) -> tuple[nn.Module, MixedPrecisionOptimizer]:
        module, optimizer = case.build(seed)
        if kind == "compiled":
            return torch.compile(module), optimizer  # type: ignore[return-value]
        if kind == "renamed":
            inner = torch.optim.AdamW(list(module.parameters()), lr=2e-3)
            return module, MixedPrecisionOptimizer(inner, optimizer._config, ConstantGradScaler(2.0))
        module.up = checkpoint_wrapper(module.up)  # type: ignore[assignment]
        return module, optimizer

    module, optimizer = build(0)
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    optimizer.get_loss_scale()
    optimizer.step()
    found = []
    for options in (StateDictOptions(), FLAT, StateDictOptions(full_state_dict=True)):
        given = get_optimizer_state_dict(module, optimizer, options=options)
        names = [*given.get("state", {})] or [*{key.rpartition(".")[0] for key in given if key.startswith("state.")}]
        other, resumed = build(1)
        set_optimizer_state_dict(other, resumed, given, options=options)
        found.append([sorted(names)[-1], unlike(whole_state(resumed), whole_state(optimizer))])
    return found


@pytest.mark.default("renamed")
@pytest.mark.parametrize("kind", ["compiled", "activation_checkpointing", "renamed"])
def test_names_of_the_model(ranks: RankPool, kind: str) -> None:
    """``torch.compile``, activation checkpointing and optimizers without names: the model's names are used, bare."""
    for found in ranks.run(2, _wrapped, kind):
        assert found == [["up.weight", []], ["state.up.weight", []], ["up.weight", []]]


def _dtensors_stay() -> list[bool]:
    module, optimizer = Case().build()
    state = get_optimizer_state_dict(module, optimizer)["state"]["up.weight"]
    live = dict(optimizer.main_params())["up.weight"]
    main = state["main_param"]
    assert isinstance(main, DTensor)
    assert isinstance(live, DTensor)
    same = main.placements == live.placements and main.device_mesh == live.device_mesh
    return [same, main.to_local().data_ptr() != live.to_local().data_ptr()]


def test_dtensors_stay_dtensors(ranks: RankPool) -> None:
    """Sharded state is got as DTensors of the parameters' placements; they are copies, which a load may write into."""
    assert ranks.run(2, _dtensors_stay) == [[True, True]] * 2
