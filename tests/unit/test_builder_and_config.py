"""OptimizerConfig and build_optimizer: what they build and what they refuse."""

import inspect
import math
import re
from dataclasses import FrozenInstanceError, asdict, fields
from typing import Any

import pytest
import torch
from torch import nn

from megascale import ConstantGradScaler, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig, build_optimizer
from megascale.errors import ArgumentError
from tests.training import model

AT_BOUNDS: list[dict[str, Any]] = [
    {"initial_loss_scale": 8.0, "min_loss_scale": 8.0, "max_loss_scale": 8.0},
    {"loss_scale_window": 1, "hysteresis": 1, "loss_scale_growth_factor": 1.5, "loss_scale_backoff_factor": 0.9},
    {"max_consecutive_skips": 1, "max_overflows_at_min_scale": 1},
    {"grad_norm_skip_threshold": 1e-3},
    {"muon_num_ns_steps": 1, "muon_adam_lr": 0.0, "muon_momentum": 0.0},
    {"muon_num_ns_steps": 99, "lr": 0.0, "weight_decay": 0.0, "sgd_momentum": 0.0, "clip_grad": 0.0},
    {"loss_scale": 2.0**-126},
]


@pytest.mark.parametrize("fields", AT_BOUNDS)
def test_fields_may_be_at_their_bounds(fields: dict[str, Any]) -> None:
    """The least and the largest that have a meaning."""
    assert asdict(OptimizerConfig(**fields)).items() >= fields.items()


DEFAULTS: dict[str, Any] = {
    **{"fp16": False, "bf16": False},
    **{"loss_scale": None, "initial_loss_scale": 65536.0, "min_loss_scale": 1.0, "max_loss_scale": None},
    **{"loss_scale_window": 1000, "hysteresis": 2, "hysteresis_reset": "growth"},
    **{"loss_scale_growth_factor": 2.0, "loss_scale_backoff_factor": 0.5},
    **{"clip_grad": 0.0, "log_num_zeros_in_grad": False, "grad_norm_skip_threshold": math.inf},
    **{"max_consecutive_skips": None, "max_overflows_at_min_scale": None, "backend": "auto"},
    **{"exp_avg_dtype": torch.float32, "exp_avg_sq_dtype": torch.float32, "store_param_remainders": False},
    **{"optimizer_cpu_offload": False, "optimizer_offload_fraction": 1.0, "overlap_cpu_optimizer_d2h_h2d": False},
    **{"pin_cpu_grads": True, "pin_cpu_params": True},
    **{"use_distributed_optimizer": False, "overlap_param_gather": False},
    **{"optimizer": "adam", "lr": None, "weight_decay": 0.01, "decoupled_weight_decay": True},
    **{"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "sgd_momentum": 0.9},
    **{"lion_beta1": 0.9, "lion_beta2": 0.99, "muon_momentum": 0.95, "muon_nesterov": True, "muon_num_ns_steps": 5},
    **{"muon_coefficient_type": "quintic", "muon_adjust_lr_fn": "original", "muon_adam_lr": None},
    "muon_ns_dtype": None,
}


def test_defaults_are_megatrons() -> None:
    """Megatron-Core's names and defaults, but for the initial loss scale and clipping; frozen and keyword-only."""
    config = OptimizerConfig()
    assert asdict(config) == DEFAULTS
    with pytest.raises(FrozenInstanceError):
        config.lr = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        OptimizerConfig(True)  # type: ignore[call-arg]


def test_biases_and_norms_are_not_decayed() -> None:
    """The default pattern exempts biases and whatever a norm layer owns, also under names without "norm" in them."""
    module = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.GroupNorm(1, 2), nn.RMSNorm(2), nn.Conv1d(2, 2, 1))
    optimizer = build_optimizer(OptimizerConfig(lr=0.1), module)
    decay = {name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]}
    assert {name for name, value in decay.items() if value} == {"0.weight", "4.weight"}
    assert set(decay) == {name for name, _ in module.named_parameters()}
    assert isinstance(optimizer, MixedPrecisionOptimizer)
    assert isinstance(optimizer._inner, torch.optim.AdamW)


def test_overrides_apply_in_order() -> None:
    """Patterns match names; later ones win; lr_mult multiplies the group's lr."""
    overrides = {"*bias": {"weight_decay": 0.3}, "first.*": {"lr_mult": 0.5}, "first.bias": {"weight_decay": 0.0}}
    optimizer = build_optimizer(OptimizerConfig(lr=0.1, fp16=True), model(), overrides=overrides)
    options = {
        name: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for name in group["param_names"]
    }
    assert options["first.weight"] == (0.05, 0.01)
    assert options["first.bias"] == (0.05, 0.0)
    assert options["second.bias"] == (0.1, 0.3)
    assert options["norm.weight"] == (0.1, 0.0)


def test_scaler_follows_the_config() -> None:
    """loss_scale: constant. fp16: dynamic with the config's numbers. bf16 and fp32: none."""
    constant = build_optimizer(OptimizerConfig(lr=0.1, fp16=True, loss_scale=128.0), model()).grad_scaler
    assert isinstance(constant, ConstantGradScaler)
    config = OptimizerConfig(lr=0.1, fp16=True, loss_scale_window=7, hysteresis=3, max_loss_scale=2.0**20)
    dynamic = build_optimizer(config, model()).grad_scaler
    assert isinstance(dynamic, DynamicGradScaler)
    assert (dynamic.growth_interval, dynamic.hysteresis, dynamic.max_scale) == (7, 3, 2.0**20)
    assert build_optimizer(OptimizerConfig(lr=0.1, bf16=True), model(torch.bfloat16)).grad_scaler is None


def test_given_scaler_is_taken_and_not_contradicted() -> None:
    """One object may serve several optimizers; a config that asks for another scale is refused."""
    scaler = ConstantGradScaler(8.0)
    assert build_optimizer(OptimizerConfig(lr=0.1, fp16=True), model(), grad_scaler=scaler).grad_scaler is scaler
    with pytest.raises(ArgumentError, match=r"config.loss_scale=16.0 has no effect"):
        build_optimizer(OptimizerConfig(lr=0.1, fp16=True, loss_scale=16.0), model(), grad_scaler=scaler)
    config = OptimizerConfig(lr=0.1, fp16=True, sgd_momentum=0.5)
    assert build_optimizer(config, model(), grad_scaler=scaler)._config.sgd_momentum == 0.9


def test_kinds_and_chunks() -> None:
    """Adam without decoupled decay, SGD with momentum; chunks have prefixed names, tied weights are taken once."""
    adam = build_optimizer(OptimizerConfig(lr=0.1, decoupled_weight_decay=False), nn.Linear(2, 2))
    assert isinstance(adam, MixedPrecisionOptimizer)
    assert type(adam._inner) is torch.optim.Adam
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    optimizer = build_optimizer(OptimizerConfig(lr=0.1, optimizer="sgd"), [first, second])
    assert isinstance(optimizer, MixedPrecisionOptimizer)
    assert isinstance(optimizer._inner, torch.optim.SGD)
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert sorted(name for name, _ in optimizer.main_params()) == ["0.bias", "0.weight", "1.bias"]


def test_a_built_optimizer_takes_gradients_that_are_vouched_for() -> None:
    """grads_are_scaled=True; without it the loss must have been scaled, as one that was wrapped by hand requires."""
    module = nn.Linear(4, 2).half()
    optimizer = build_optimizer(OptimizerConfig(fp16=True, lr=1e-3), module, grads_are_scaled=True)
    module(torch.ones(3, 4).half()).float().sum().backward()
    assert optimizer.step().success


def test_help_has_every_field_with_its_default() -> None:
    """`help(OptimizerConfig)` and the site show five tables by purpose: each field once, what it means, its default."""
    text = inspect.getdoc(OptimizerConfig) or ""
    tables = re.split(r"^Attributes: .*\n", text, flags=re.MULTILINE)[1:]
    assert len(tables) == 5
    rows = [
        re.fullmatch(r"(\w+)(?: \(\w+\))?: (.+)\. Default: (.+)\.", " ".join(row.split()))
        for table in tables
        for row in re.split(r"\n(?=    \w)", table.split("\n\n")[0].rstrip())
    ]
    assert None not in rows
    described = {row[1]: row[3] for row in rows if row is not None}
    assert len(described) == len(rows)
    values = {name: eval(default, {"math": math, "torch": torch}) for name, default in described.items()}
    assert values == {field.name: field.default for field in fields(OptimizerConfig)} | {"compact_state": False}
