"""Megatron-Core's param groups under our optimizer: overrides take effect as there, or are refused by name."""

import os
from dataclasses import fields
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.peers import megatron_on_cpu
from megascale.errors import ArgumentError
from megascale.integrations import megatron as ours
from megascale.integrations.megatron_config import from_megatron_config
from tests.pool import RankPool
from tests.training import bits_equal

megatron_on_cpu.install()
pytest.importorskip("megatron.core", reason="needs megatron-core: pip install --no-deps megatron-core pydantic einops")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.optimizer import ParamKey  # noqa: E402

from tests.integrations import megatron_runs as runs  # noqa: E402

FUSED = mock.patch.dict(os.environ, {"MEGASCALE_BACKEND": "torch"})
"""With torch's fused AdamW on both sides the arithmetic has one order, and results have the same bits."""

EFFECTIVE: list[dict[Any, dict[str, Any]] | None] = [
    None,
    {},
    {"first.*": {"max_lr": 3e-2, "min_lr": 1e-3}, "*.bias": {"wd_mult": 0.5}},
    {"head.*": {"start_wd": 0.3, "end_wd": 0.4}, "first.*": {"eps": 1e-2, "betas": (0.5, 0.6)}},
    {"head.*": {"optimizer": "adam", "optimizer_cpu_offload": False}},
]


def _keyed(overrides: dict[str, dict[str, Any]] | None) -> Any:
    """Return ``overrides`` by Megatron's key; names in its wrapper begin with "module."."""
    if overrides is None:
        return None
    return {ParamKey(name=(pattern, f"module.{pattern}")): override for pattern, override in overrides.items()}


def _side_by_side(overrides: Any) -> list[Any]:
    with runs.model_parallel(), FUSED:
        started = [
            runs.start(maker, fused=True, clip_grad=0.0, overrides=_keyed(overrides)) for maker in ("theirs", "ours")
        ]
        groups = [
            [
                {key: group.get(key) for key in ("wd_mult", "max_lr", "lr", "weight_decay", "eps")}
                for group in run.groups
            ]
            for run in started
        ]
        return [groups, *(runs.train(run, range(12)) for run in started)]


@pytest.mark.parametrize("overrides", EFFECTIVE, ids=str)
def test_overrides_have_megatrons_effect(ranks: RankPool, overrides: Any) -> None:
    """The same groups, rates, decays and bits of every param, at None, {} and each key that takes effect.

    With None, Megatron-Core from 0.19.2 on applies its standard overrides outside of the function that makes the
    groups: biases and norms were decayed here.
    """
    [(groups, theirs, mine)] = ranks.run(1, _side_by_side, overrides)
    assert groups[0] == groups[1]
    if overrides is None:
        assert [group["wd_mult"] for group in groups[1]] == [1.0, 0.0]
    for (log, params), (own_log, own_params) in zip(theirs, mine, strict=True):
        assert (log[0], *log[2:]) == (own_log[0], *own_log[2:])
        assert all(bits_equal(a, b) for a, b in zip(params, own_params, strict=True))


def _refused(overrides: Any, mark: Any = None) -> str:
    with runs.model_parallel():
        module = runs.Net(torch.float16, fp32_norm=False, frozen=False, expert=False)
        if mark is not None:
            mark(module)
        with pytest.raises(ArgumentError) as error:
            ours.get_megatron_optimizer(runs.config(), [runs.wrap(module)], _keyed(overrides))
    return str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            {"optimizer": "sgd"},
            "config_overrides set optimizer='sgd' for some parameters and config.optimizer is 'adam'",
        ),
        ({"optimizer_cpu_offload": True}, "config_overrides set optimizer_cpu_offload=True"),
        (
            {"overlap_param_gather_with_optimizer_step": True},
            "config_overrides set overlap_param_gather_with_optimizer_step=True",
        ),
        (
            {"adam_beta1": 0.5},
            "config_overrides set adam_beta1=0.5, which nothing would read; an override may set max_lr",
        ),
        ({"clip_grad": 0.5}, "config_overrides set clip_grad=0.5, which nothing would read"),
        ({"wd_mul": 0.0}, "config_overrides set wd_mul=0.0, which nothing would read"),
        ({"lr_mult": 2.0}, "config_overrides set lr_mult=2.0, which nothing would read"),
        ({"momentum": 0.5}, "config_overrides set momentum=0.5, which nothing would read"),
    ],
)
def test_overrides_without_effect_are_refused(ranks: RankPool, override: dict[str, Any], message: str) -> None:
    """A key that would change nothing is named, with its value and the keys that take effect."""
    assert message in ranks.run(1, _refused, {"first.*": override})[0]


def _conflicting_on_one_rank() -> str:
    pattern = "first.*" if dist.get_rank() == 1 else "nothing.*"
    return _refused({pattern: {"wd_mult": 0.5}, "*.bias": {"wd_mult": 0.0}})


def test_overrides_that_conflict_on_one_rank(ranks: RankPool) -> None:
    """Megatron raises on the rank that holds the parameter, and the others wait; here all raise."""
    for message in ranks.run(2, _conflicting_on_one_rank):
        assert "'module.first.bias' two values" in message
        assert "Conflicting overrides for wd_mult" in message


def _mark_mtp(module: Any) -> None:
    for param in module.head.parameters():
        param.grad_norm_group = "mtp"


def test_parameters_that_are_clipped_apart_are_refused(ranks: RankPool) -> None:
    """Megatron-Core from 0.19.2 on gives parameters with a grad_norm_group a norm of their own; here it was ignored."""
    [message] = ranks.run(1, _refused, None, _mark_mtp)
    assert message.startswith("'head.weight', 'head.bias' have grad_norm_group 'mtp'")
    assert "one norm is that of all gradients" in message


class MimoModel(nn.Linear):
    """Has the name of Megatron's model whose modules have optimizers of their own."""


class FullyShardedDataParallelV2(nn.Linear):
    """Has the name of the wrapper of Megatron's second FSDP, which has no ``use_megatron_fsdp``."""


def _refused_module(kind: type[nn.Linear]) -> str:
    with runs.model_parallel(), pytest.raises(ArgumentError) as error:
        ours.get_megatron_optimizer(runs.config(), [kind(2, 2).half()])
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [(MimoModel, "model_chunks hold a MimoModel"), (FullyShardedDataParallelV2, "wrapped in Megatron's FSDP")],
)
def test_modules_with_optimizers_of_their_own_are_refused(ranks: RankPool, kind: type[nn.Linear], message: str) -> None:
    """Megatron-Core from 0.19.2 on sends them to other builders."""
    assert message in ranks.run(1, _refused_module, kind)[0]


@pytest.mark.parametrize(("group", "kind"), [("gtp_remat", "gtp"), ("expt_gtp_remat", "expert_gtp")])
def test_a_collection_that_splits_single_weights_is_refused(ranks: RankPool, group: str, kind: str) -> None:
    """From 0.19.2 on a collection may hold such a group where parallel_state has none; norms would count too little."""
    for message in ranks.run(2, _split_weights, group):
        assert f"pg_collection splits single weights over 2 ranks more ({kind}_weight_remat)" in message


def _split_weights(group: str) -> str:
    with runs.model_parallel():
        alone = parallel_state.get_model_parallel_group()
        groups = {"dp_cp": dist.group.WORLD, "mp": alone, "tp": alone, "expt_dp": dist.group.WORLD, "expt_tp": alone}
        assert ours.parallel_groups(SimpleNamespace(**groups)).data_parallel == dist.group.WORLD
        with pytest.raises(ArgumentError) as error:
            ours.parallel_groups(SimpleNamespace(**groups, **{group: dist.group.WORLD}))
    return str(error.value)


DECLARED = {field.name for field in fields(runs.OptimizerConfig)}


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("optimizer_cuda_graph", True, "megascale.StepGraph"),
        ("use_layer_wise_distributed_optimizer", True, "use_distributed_optimizer=True"),
    ],
)
def test_fields_of_newer_versions_are_refused(field: str, value: Any, remedy: str) -> None:
    """What changes a step and is not done here is named, with its value and the remedy."""
    if field not in DECLARED:
        pytest.skip(f"this Megatron-Core has no {field}")
    given = runs.config(**{field: value})
    with pytest.raises(ArgumentError, match=f"config.{field} is {value}, .*{remedy}"):
        from_megatron_config(given)
