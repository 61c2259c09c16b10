"""A Megatron checkpoint whose groups or parameters are in another order: refused, not loaded into one another."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.peers import megatron_on_cpu
from megascale import DynamicGradScaler, MixedPrecisionOptimizer
from megascale.errors import InteropError
from megascale.integrations.megatron import load_megatron_checkpoint
from megascale.integrations.megatron_checkpoint import megatron_state_dict
from tests.pool import RankPool
from tests.training import same_bits, snapshot

megatron_on_cpu.install()
pytest.importorskip("megatron.core", reason="needs megatron-core: pip install --no-deps megatron-core pydantic einops")

from megatron.core.optimizer import ParamKey  # noqa: E402

from tests.integrations import megatron_runs as runs  # noqa: E402


def _reversed(state: dict[str, Any]) -> None:
    """Let the file have its groups the other way round, as another version or build may write them."""
    optimizer = state["optimizer"]
    optimizer["optimizer"]["param_groups"].reverse()
    optimizer["fp32_from_fp16_params"].reverse()


def _swapped_inside(state: dict[str, Any]) -> None:
    """Let two main params of one shape change places in their group."""
    groups = state["optimizer"]["fp32_from_fp16_params"]
    group = next(group for group in groups if len({tuple(main.shape) for main in group}) < len(group))
    first = next(i for i, main in enumerate(group) if [m.shape for m in group].count(main.shape) > 1)
    second = next(i for i, main in enumerate(group) if i > first and main.shape == group[first].shape)
    group[first], group[second] = group[second], group[first]


CASES: list[tuple[dict[str, dict[str, Any]], Callable[[dict[str, Any]], None], bool, str]] = [
    (
        {"*first.*": {"max_lr": 3e-2}, "*still.*": {"max_lr": 2e-2}, "*norm.*": {"max_lr": 2e-2}},
        _reversed,
        False,
        r"param group 0 has max_lr=0.03 in the checkpoint and 0.01 here; build the same groups in the same order",
    ),
    (
        {"*first.*": {"min_lr": 1e-3}},
        _reversed,
        False,
        r"param group 0 has min_lr=0.001 in the checkpoint and 0.0 here",
    ),
    (
        {"*first.*": {"start_wd": 0.0}},
        _reversed,
        False,
        r"param group 0 has start_wd=0.0 in the checkpoint and None here",
    ),
    (
        {},
        _swapped_inside,
        True,
        r"model weights 'first.bias', 'still.bias' are not the main params that would be loaded for them, rounded",
    ),
]


def _load(index: int) -> tuple[str, bool]:
    overrides, disturb, with_model, _ = CASES[index]
    keyed = {ParamKey(name=name): override for name, override in overrides.items()}
    with runs.model_parallel():
        theirs, mine = (runs.start(maker, overrides=keyed) for maker in ("theirs", "ours"))
        runs.train(theirs, range(3))
        runs.train(mine, range(5))
        state = runs.checkpoint(theirs)
        optimizer = mine.optimizer.optimizer
        load_megatron_checkpoint(state if with_model else state["optimizer"], optimizer)
        disturb(state)
        before = snapshot(optimizer, mine.module), str(optimizer.param_groups)
        with pytest.raises(InteropError) as error:
            load_megatron_checkpoint(state if with_model else state["optimizer"], optimizer)
        after = snapshot(optimizer, mine.module), str(optimizer.param_groups)
        return str(error.value), same_bits(before[0], after[0]) and before[1] == after[1]


@pytest.mark.parametrize("index", range(len(CASES)), ids=["max_lr", "min_lr", "start_wd", "inside a group"])
def test_another_order_is_refused(ranks: RankPool, index: int) -> None:
    """Groups that differ in one option alone, and parameters of one shape: each main param went into another param.

    As it is, the same file loads. What a group says is enough where the file holds no model; where it does, every main
    param must round to the weight of its name.
    """
    [(message, unchanged)] = ranks.run(1, _load, index)
    assert re.search(CASES[index][3], message), message
    assert unchanged


class Twins(nn.Module):
    """Layers of one shape, which nothing but their names tells apart."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)


def _optimizer(
    names: tuple[str, str], prefix: str = "", options: Mapping[str, dict[str, Any]] | None = None
) -> tuple[Twins, MixedPrecisionOptimizer]:
    """Return the model and the optimizer of one group per layer, with the ``options`` of its name."""
    module = Twins().half()
    groups = [
        {"params": [(f"{prefix}{name}.weight", getattr(module, name).weight)], **(options or {}).get(name, {})}
        for name in names
    ]
    scaler = DynamicGradScaler(2.0**10, 1.0, 2.0, 0.5, 3, 2)
    return module, MixedPrecisionOptimizer(torch.optim.AdamW(groups, lr=0.1), None, scaler)


@pytest.mark.parametrize("wrapper", ["", "module."])
@pytest.mark.parametrize("chunks", [1, 2])
def test_model_tells_what_groups_do_not(chunks: int, wrapper: str) -> None:
    """Groups without Megatron's keys, alike in every option: the file's model tells the order, also in chunks."""
    prefix = "1." if chunks == 2 else ""
    module, optimizer = _optimizer(("left", "right"), prefix)
    packed = optimizer.state_dict()
    weights = {wrapper + name: value for name, value in module.state_dict().items()}
    models: dict[str, Any] = {"model": weights} if chunks == 1 else {"model0": {}, "model1": weights}
    state = {
        "optimizer": {
            "optimizer": {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}, {"lr": 0.1, "params": [1]}]},
            "fp32_from_fp16_params": [[main] for main in packed["main_params"].values()],
            "grad_scaler": packed["grad_scaler"],
        },
        **models,
    }
    _, swapped = _optimizer(("right", "left"), prefix)
    with pytest.raises(InteropError, match=rf"'{prefix}right.weight', '{prefix}left.weight' are not the main params"):
        load_megatron_checkpoint(state, swapped)
    load_megatron_checkpoint(state, optimizer)


@pytest.mark.parametrize(
    ("option", "left", "right"),
    [("betas", (0.8, 0.9), (0.9, 0.95)), ("eps", 1e-8, 1e-5), ("lr", 0.1, torch.tensor(0.2))],
)
def test_options_tell_the_order_of_groups_alike_in_identity(option: str, left: Any, right: Any) -> None:
    """Overrides of lr, betas or eps alone make groups with equal identity keys, and an optimizer's state has no model
    to tell: an option with the same values at other groups does. Another value is a change, and loads.
    """
    identity = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    options = {"left": {**identity, option: left}, "right": {**identity, option: right}}
    _, optimizer = _optimizer(("left", "right"), options=options)
    state = megatron_state_dict(optimizer)
    module, swapped = _optimizer(("right", "left"), options=options)
    before = snapshot(swapped, module)
    with pytest.raises(InteropError, match=rf"param groups have {option}=\[.*here: they are in another order"):
        load_megatron_checkpoint(state, swapped)
    assert same_bits(snapshot(swapped, module), before)
    swapped.param_groups[0][option] = left
    load_megatron_checkpoint(state, swapped)
