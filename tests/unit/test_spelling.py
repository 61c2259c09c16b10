"""Who types another library's name for an argument, or misspells a value, is told ours."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megascale import (
    DistributedOptimizer,
    DynamicGradScaler,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    build_optimizer,
    estimate,
)
from megascale.errors import ArgumentError, ArgumentTypeError
from megascale.grad_sync import GradSync
from megascale.kernels import select_backend
from megascale.utils.spelling import ELSEWHERE


@pytest.mark.parametrize(
    ("made", "theirs", "ours"),
    [
        (OptimizerConfig, "max_norm", "clip_grad"),
        (OptimizerConfig, "max_grad_norm", "clip_grad"),
        (OptimizerConfig, "gradient_clipping", "clip_grad"),
        (OptimizerConfig, "init_scale", "initial_loss_scale"),
        (OptimizerConfig, "growth_interval", "loss_scale_window"),
        (OptimizerConfig, "learning_rate", "lr"),
        (OptimizerConfig, "adam_epsilon", "adam_eps"),
        (OptimizerConfig, "bfloat16", "bf16"),
        (DynamicGradScaler, "loss_scale_window", "growth_interval"),
        (DynamicGradScaler, "min_loss_scale", "min_scale"),
        (DynamicGradScaler, "delayed_shift", "hysteresis"),
        (DynamicGradScaler, "initial_loss_scale", "initial_scale"),
        (OptimizerConfig, "clip_gard", "clip_grad"),
        (OptimizerConfig, "weightdecay", "weight_decay"),
        (OptimizerConfig, "adam_beta_1", "adam_beta1"),
        (OptimizerConfig, "loss_scal_windw", "loss_scale_window"),
        (DynamicGradScaler, "histeresis", "hysteresis"),
    ],
)
def test_a_name_of_another_library_or_a_misspelt_one_is_told_in_ours(made: type, theirs: str, ours: str) -> None:
    """Those of other libraries share no letters with ours; misspelt ones are one or two letters away."""
    with pytest.raises(
        ArgumentTypeError, match=rf"{made.__name__} has no argument '{theirs}'; did you mean '{ours}'\?"
    ):
        made(**{theirs: 1.0})


@pytest.mark.parametrize("name", ["nonsense", "fp8", "fp32", "adam_beta3", "adam_beta", "scale", "foreach", "fused"])
def test_a_name_that_may_be_another_is_not_guessed(name: str) -> None:
    """A wrong guess is worse than none: the error is Python's own."""
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'$"):
        OptimizerConfig(**dict[str, Any]({name: 1.0}))


def test_the_table_has_names_of_ours() -> None:
    """What a name of theirs leads to exists, and no class is told that a name which it has is another's."""
    known = [*(set(inspect.signature(one).parameters) for one in (OptimizerConfig, DynamicGradScaler))]
    for theirs, ours in ELSEWHERE.items():
        assert set(ours) <= set.union(*known), theirs
        assert any(theirs not in names and names & set(ours) for names in known), theirs


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"loss_scale": 0}, {}),
        ({"optimizer": "adamw"}, {"optimizer": "adam", "decoupled_weight_decay": True}),
        ({"exp_avg_dtype": "int8"}, {"exp_avg_dtype": torch.int8}),
        (
            {"compact_state": True, "exp_avg_dtype": "int8"},
            {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8, "store_param_remainders": True},
        ),
    ],
)
def test_a_value_of_another_library_means_what_it_means_there(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """They were refused. ``replace`` makes the same config again."""
    assert OptimizerConfig(**theirs) == replace(OptimizerConfig(**theirs)) == OptimizerConfig(**ours)


def test_the_scaler_takes_torchs_name_for_its_first_scale() -> None:
    """``init_scale`` is torch.amp's."""
    assert DynamicGradScaler(init_scale=8.0).scale.item() == 8.0
    with pytest.raises(ArgumentError, match="one argument under two names"):
        DynamicGradScaler(8.0, init_scale=8.0)
    with pytest.raises(ArgumentError, match="initial_scale must be above 0"):
        DynamicGradScaler(init_scale=-8.0)


def test_a_scaler_in_the_place_of_the_config() -> None:
    """The likeliest slip: the message says what to write."""
    inner = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    for scaler in (DynamicGradScaler(), torch.amp.GradScaler("cpu", enabled=False)):
        for build in (
            lambda scaler: MixedPrecisionOptimizer(inner, scaler),
            lambda scaler: DistributedOptimizer(inner, scaler, modules=nn.Linear(1, 1)),
        ):
            with pytest.raises(ArgumentTypeError, match="pass a scaler by its name, grad_scaler="):
                build(scaler)


@pytest.mark.parametrize(
    ("take", "nearest"),
    [
        (lambda: OptimizerConfig(backend="trition"), "triton"),
        (lambda: select_backend("Native"), "native"),
        (lambda: OptimizerConfig(optimizer="adamm"), "adam"),
        (lambda: OptimizerConfig(hysteresis_reset="grow"), "growth"),
        (lambda: DynamicGradScaler(hysteresis_reset="cleanstep"), "clean_step"),
        (lambda: GradSync([], reduction="men"), "mean"),
        (lambda: estimate(10, sharding="grad_sink"), "grad_sync"),
        (lambda: estimate(10, optimizer="adamW"), "adamw"),
        (lambda: OptimizerConfig(optimizer="adma"), "adam"),
        (
            lambda: build_optimizer(OptimizerConfig(lr=0.1), nn.Linear(1, 1), overrides={"*": {"weight_deca": 0.0}}),
            "weight_decay",
        ),
    ],
)
def test_a_misspelt_value_names_the_nearest(take: Callable[[], object], nearest: str) -> None:
    """Backends, optimizers' rules, modes, options of overrides."""
    with pytest.raises(ArgumentError, match=rf"got '\w+'; did you mean '{nearest}'\?$"):
        take()
