"""What constructors refuse: shared scalers, inner optimizers wrapped twice, foreign scalers, configs without effect."""

import ast
import gc
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megascale
import megascale.amp
from megascale import (
    ChainedOptimizer,
    ConstantGradScaler,
    DistributedOptimizer,
    DynamicGradScaler,
    MegatronGradScaler,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    build_optimizer,
)
from megascale.errors import ArgumentError, ArgumentTypeError, UsageError
from megascale.kernels.newton_schulz import QUINTIC
from tests.training import model, same_bits, set_grads


def _sgd(module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.named_parameters(), **({"lr": 0.1} | options))


# One owner each


def test_a_scaler_serves_optimizers_that_step_as_one() -> None:
    """Two optimizers that step apart would each change the scale that the other's loss had: refused at the first step.

    Chained they step as one. When the other one is dropped, the scaler is free.
    """
    modules, scaler = [model(seed=0), model(seed=1)], DynamicGradScaler()
    optimizers = [
        MixedPrecisionOptimizer(
            torch.optim.SGD([(f"{index}.{name}", p) for name, p in module.named_parameters()], lr=0.1),
            None,
            scaler,
            grads_are_scaled=True,
        )
        for index, module in enumerate(modules)
    ]
    for module in modules:
        set_grads(module, 1)
    for optimizer in optimizers:
        for step in (optimizer.step, optimizer.prepare_grads):
            with pytest.raises(UsageError, match=r"grad scaler is shared with another Mixed.*ChainedOptimizer\("):
                step()
    before = scaler.state_dict()
    chained = ChainedOptimizer(optimizers)
    assert chained.step().success
    assert scaler.state_dict()["growth_tracker"] == before["growth_tracker"] + 1
    with pytest.raises(UsageError, match="is in a ChainedOptimizer, which takes one decision"):
        optimizers[0].step()
    del chained, optimizer, step
    gone = optimizers.pop()
    gone.cycle = gone  # type: ignore[attr-defined]  # gone only when the garbage collector has run
    del gone
    assert optimizers[0].step().success


def test_a_scaler_put_into_an_optimizer_later_counts_too() -> None:
    """Assigning ``grad_scaler`` shares it, and taking it away ends that."""
    modules = model(), model()
    first, second = (
        MixedPrecisionOptimizer(_sgd(module), None, DynamicGradScaler(), grads_are_scaled=True) for module in modules
    )
    for seed, module in enumerate(modules):
        set_grads(module, seed)
    own = second.grad_scaler
    second.grad_scaler = first.grad_scaler
    with pytest.raises(UsageError, match="is shared"):
        second.step()
    second.grad_scaler = own
    assert second.step() is not None
    assert first.step() is not None


def test_an_inner_optimizer_is_wrapped_once() -> None:
    """A second wrapper would keep main params of its own for the same parameters. A dropped one makes place."""
    module = model()
    inner = _sgd(module)
    first = MixedPrecisionOptimizer(inner, None, ConstantGradScaler(2.0), grads_are_scaled=True)
    with pytest.raises(ArgumentError, match=r"optimizer \(SGD\) is wrapped by a MixedPrecisionOptimizer already"):
        MixedPrecisionOptimizer(inner, None, ConstantGradScaler(2.0), grads_are_scaled=True)
    with pytest.raises(ArgumentError, match=r"optimizer \(SGD\) is wrapped by a MixedPrecisionOptimizer already"):
        DistributedOptimizer(inner, None, ConstantGradScaler(2.0), modules=module, grads_are_scaled=True)
    first.cycle = first  # type: ignore[attr-defined]  # gone only when the garbage collector has run
    del first
    second = MixedPrecisionOptimizer(inner, None, ConstantGradScaler(2.0), grads_are_scaled=True)
    set_grads(module, 1)
    assert second.step().success


# Configs of which something has no effect

DYNAMIC = DynamicGradScaler(2.0**12, 1.0, 2.0, 0.5, 1000, 2)
INEFFECTIVE: list[tuple[dict[str, Any], MegatronGradScaler, str]] = [
    ({"lr": 0.2}, DYNAMIC, r"config.lr=0.2 has no effect: the AdamW has 0.001; build the optimizer with it"),
    ({"weight_decay": 0.1}, DYNAMIC, r"config.weight_decay=0.1 has no effect: the AdamW has 0.0 and 0.05"),
    ({"adam_beta1": 0.8}, DYNAMIC, r"config.adam_beta1=0.8 has no effect: the AdamW has 0.9;"),
    ({"adam_beta2": 0.95}, DYNAMIC, r"config.adam_beta2=0.95 has no effect: the AdamW has 0.999;"),
    ({"adam_eps": 1e-6}, DYNAMIC, r"config.adam_eps=1e-06 has no effect: the AdamW has 1e-08;"),
    ({"decoupled_weight_decay": False}, DYNAMIC, r"decoupled_weight_decay=False has no effect: the AdamW has True"),
    ({"optimizer": "sgd"}, DYNAMIC, r"config.optimizer='sgd' has no effect: the AdamW has 'adam'"),
    ({"optimizer": "lion"}, DYNAMIC, r"config.optimizer='lion' has no effect"),
    ({"sgd_momentum": 0.5}, DYNAMIC, r"config.sgd_momentum=0.5 has no effect: the AdamW has no such option"),
    ({"lion_beta1": 0.95}, DYNAMIC, r"config.lion_beta1=0.95 has no effect"),
    ({"lion_beta2": 0.98}, DYNAMIC, r"config.lion_beta2=0.98 has no effect"),
    ({"loss_scale": 128.0}, DYNAMIC, r"loss_scale=128.0 has no effect: the Dynamic.*pass a ConstantGradScaler"),
    (
        {"initial_loss_scale": 2.0**10},
        DYNAMIC,
        r"initial_loss_scale=1024.0 has no effect: .* has 4096.0; pass a",
    ),
    ({"min_loss_scale": 2.0}, DYNAMIC, r"min_loss_scale=2.0 has no effect: the DynamicGradScaler has 1.0"),
    ({"max_loss_scale": 2.0**20}, DYNAMIC, r"max_loss_scale=1048576.0 has no effect"),
    ({"loss_scale_window": 7}, DYNAMIC, r"loss_scale_window=7 has no effect: the DynamicGradScaler has 1000"),
    ({"hysteresis": 3}, DYNAMIC, r"hysteresis=3 has no effect: the DynamicGradScaler has 2"),
    ({"hysteresis_reset": "clean_step"}, DYNAMIC, r"hysteresis_reset='clean_step' has no effect: .* has 'growth'"),
    ({"loss_scale_growth_factor": 4.0}, DYNAMIC, r"loss_scale_growth_factor=4.0 has no effect"),
    ({"loss_scale_backoff_factor": 0.25}, DYNAMIC, r"loss_scale_backoff_factor=0.25 has no effect"),
    (
        {"loss_scale": 128.0},
        ConstantGradScaler(64.0),
        r"loss_scale=128.0 has no effect: the Constant.* has 64.0",
    ),
    ({"hysteresis": 3}, ConstantGradScaler(64.0), r"hysteresis=3 has no effect: the Constant.* has no such option"),
    ({"muon_momentum": 0.9}, DYNAMIC, r"muon_momentum=0.9 has no effect: the AdamW has no such option"),
    ({"muon_nesterov": False}, DYNAMIC, r"muon_nesterov=False has no effect: the AdamW has no such"),
    ({"muon_num_ns_steps": 6}, DYNAMIC, r"muon_num_ns_steps=6 has no effect"),
    ({"muon_coefficient_type": "polar_express"}, DYNAMIC, r"muon_coefficient_type='polar_express' has no effect"),
    ({"muon_adjust_lr_fn": "match_rms_adamw"}, DYNAMIC, r"muon_adjust_lr_fn='match_rms_adamw' has no effect"),
    ({"muon_adam_lr": 0.5}, DYNAMIC, r"muon_adam_lr=0.5 has no effect: the AdamW has 0.001"),
    ({"muon_ns_dtype": torch.float32}, DYNAMIC, r"muon_ns_dtype=torch.float32 has no effect"),
    ({"use_distributed_optimizer": True}, DYNAMIC, r"use_distributed_optimizer=True has no effect: a MixedPrecision"),
]


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    decayed, rest = list(module.parameters())[:2], list(module.parameters())[2:]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.05}, {"params": rest}]
    return torch.optim.AdamW(groups, weight_decay=0.0)


@pytest.mark.parametrize(("asked", "scaler", "message"), INEFFECTIVE)
def test_fields_without_effect_are_refused(asked: dict[str, Any], scaler: MegatronGradScaler, message: str) -> None:
    """A config beside ready-made objects that asks for what they are not is refused, with what they have instead."""
    with pytest.raises(ArgumentError, match=message):
        MixedPrecisionOptimizer(_adamw(model()), OptimizerConfig(fp16=True, **asked), scaler, grads_are_scaled=True)


def test_every_field_is_judged_or_has_an_effect() -> None:
    """A field added to the config must be thought of here."""
    judged = {name for asked, _, _ in INEFFECTIVE for name in asked} | {"exp_avg_sq_dtype", "overlap_param_gather"}
    has_effect = {"fp16", "bf16", "clip_grad", "log_num_zeros_in_grad", "backend", "exp_avg_dtype"}
    has_effect |= {"store_param_remainders", "optimizer_cpu_offload", "optimizer_offload_fraction"}
    has_effect |= {"overlap_cpu_optimizer_d2h_h2d", "pin_cpu_grads", "pin_cpu_params"}
    has_effect |= {"max_consecutive_skips", "max_overflows_at_min_scale", "grad_norm_skip_threshold"}
    assert {field.name for field in fields(OptimizerConfig)} == judged | has_effect


def test_a_step_knows_no_other_config_than_its_own() -> None:
    """What a step reads is in StepConfig, whose fields ranks compare: its modules see no OptimizerConfig, and mypy
    refuses them other fields. The arguments of a constructor are checked before there is a step.
    """
    package = Path(megascale.__file__).parent
    modules = {path for folder in ("step", "main_params", "grad_sync") for path in (package / folder).glob("*.py")}
    assert {path.name for path in modules if "OptimizerConfig" in _imported(path)} == {"arguments.py"}


def _imported(path: Path) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in nodes for alias in node.names}


def test_fields_that_agree_are_taken() -> None:
    """What the given objects have may be said a second time: rates in a tensor, in one group, before a warmup."""
    config = OptimizerConfig(
        fp16=True, lr=1e-3, weight_decay=0.05, initial_loss_scale=2.0**12, loss_scale_window=1000, hysteresis=2
    )
    MixedPrecisionOptimizer(_adamw(model()), config, DYNAMIC, grads_are_scaled=True)
    module = model()
    warming = torch.optim.AdamW([{"params": list(module.parameters()), "lr": torch.tensor(2e-3)}])
    torch.optim.lr_scheduler.LinearLR(warming, 0.1)
    MixedPrecisionOptimizer(warming, OptimizerConfig(fp16=True, lr=2e-3), DynamicGradScaler(), grads_are_scaled=True)
    MixedPrecisionOptimizer(
        _sgd(model(), momentum=0.5),
        OptimizerConfig(fp16=True, optimizer="sgd", sgd_momentum=0.5),
        DynamicGradScaler(),
        grads_are_scaled=True,
    )
    MixedPrecisionOptimizer(
        _sgd(model()), OptimizerConfig(fp16=True, loss_scale=8.0), ConstantGradScaler(8.0), grads_are_scaled=True
    )


def _muon(module: nn.Module) -> torch.optim.Optimizer:
    matrices = [(name, param) for name, param in module.named_parameters() if param.dim() == 2]
    return torch.optim.Muon(
        matrices, momentum=0.9, nesterov=False, ns_steps=6, ns_coefficients=QUINTIC, adjust_lr_fn="match_rms_adamw"
    )


def test_fields_of_muon_are_compared_with_it() -> None:
    """What it has may be said again, and how its work is done is the config's; the rest is refused."""
    agreed: dict[str, Any] = {
        "optimizer": "muon",
        "muon_momentum": 0.9,
        "muon_nesterov": False,
        "muon_num_ns_steps": 6,
        "muon_adjust_lr_fn": "match_rms_adamw",
        "muon_ns_dtype": torch.float32,
    }
    MixedPrecisionOptimizer(_muon(model(torch.float32)), OptimizerConfig(**agreed))
    for asked, has in (
        ({"muon_momentum": 0.8}, "0.9"),
        ({"muon_coefficient_type": "polar_express"}, "'quintic'"),
        ({"muon_adam_lr": 0.5}, "no such option"),
        ({"exp_avg_sq_dtype": torch.bfloat16}, "no such option"),
    ):
        with pytest.raises(ArgumentError, match=f"{next(iter(asked))}=.* has no effect: the Muon has {has};"):
            MixedPrecisionOptimizer(_muon(model(torch.float32)), OptimizerConfig(**asked))


def test_refused_arguments_leave_the_modules_free() -> None:
    """They are refused before gradients of the modules have an owner, which an error that is kept would keep alive."""
    module = model(torch.float32)
    with pytest.raises(ArgumentTypeError, match="config must be an OptimizerConfig") as kept:
        DistributedOptimizer(_sgd(module), "fp32", modules=module)  # type: ignore[arg-type]
    DistributedOptimizer(_sgd(module), modules=module)
    assert "got str" in str(kept.value)


@pytest.mark.parametrize(
    ("precision", "kind", "sharded"),
    [
        ({"fp16": True}, "adam", False),
        ({"bf16": True}, "sgd", False),
        ({}, "lion", True),
        ({"fp16": True, "loss_scale": 64.0}, "adam", True),
    ],
)
def test_build_optimizer_takes_any_config(precision: dict[str, Any], kind: str, sharded: bool) -> None:
    """One config file serves every run: what nothing is built from is no error there, and not in the built config."""
    config = OptimizerConfig(
        optimizer=kind,
        lr=0.1,
        weight_decay=0.2,
        adam_beta1=0.8,
        adam_eps=1e-6,
        decoupled_weight_decay=False,
        sgd_momentum=0.5,
        lion_beta2=0.95,
        exp_avg_sq_dtype=torch.bfloat16,
        initial_loss_scale=2.0**10,
        max_loss_scale=2.0**12,
        loss_scale_window=7,
        use_distributed_optimizer=sharded,
        overlap_param_gather=sharded,
        **precision,
    )
    dtype = torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else torch.float32
    built = build_optimizer(config, model(dtype), overrides={"*weight": {"lr_mult": 0.5, "weight_decay": 0.25}})
    assert built._config.lr == 0.1
    is_dynamic = config.fp16 and config.loss_scale is None
    assert built._config.initial_loss_scale == (2.0**10 if is_dynamic else 2.0**16)


# Defaults


def test_a_dynamic_scaler_has_the_configs_defaults() -> None:
    """``DynamicGradScaler()`` is the scaler of ``OptimizerConfig()``, as build_optimizer makes it."""
    built = build_optimizer(OptimizerConfig(lr=0.1, fp16=True), model()).grad_scaler
    plain = DynamicGradScaler()
    for name in ("initial_scale", "min_scale", "max_scale", "growth_factor", "backoff_factor", "growth_interval"):
        assert getattr(plain, name) == getattr(built, name)
    assert (plain.hysteresis, plain.hysteresis_reset) == (2, "growth")
    assert plain.initial_scale == 2.0**16


CONFIGS: dict[str, OptimizerConfig | None] = {
    "none": None,
    "empty": OptimizerConfig(bf16=True),
    "compact": OptimizerConfig(
        bf16=True, exp_avg_dtype=torch.int8, exp_avg_sq_dtype=torch.uint8, store_param_remainders=True
    ),
    "counting": OptimizerConfig(bf16=True, log_num_zeros_in_grad=True),
}


@pytest.mark.default("counting", "none")
@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_does_not_switch_clipping_on(config: str) -> None:
    """Asking for 8-bit moments clipped to norm 1.0, Megatron's default. Moments of larger gradients show it.

    The default lies in one place for all layouts and dtypes: this test has no cells.
    """

    def stepped(**clip: Any) -> tuple[MixedPrecisionOptimizer, dict[str, torch.Tensor]]:
        module = model(torch.bfloat16)
        optimizer = MixedPrecisionOptimizer(_adamw(module), CONFIGS[config], **clip)
        for param in module.parameters():
            param.grad = torch.full_like(param, 16.0)
        optimizer.step()
        saved = optimizer.state_dict()["optimizer"]["state"]
        return optimizer, {f"{name}.{key}": saved[name][key] for name in saved for key in saved[name]}

    optimizer, state = stepped()
    assert optimizer.clip_grad == 0.0
    assert "does not clip gradients" in repr(optimizer)
    assert same_bits(state, stepped(clip_grad=0.0)[1])
    assert not same_bits(state, stepped(clip_grad=1.0)[1])


# Parameters without values


@pytest.mark.default("dtype0-AdamW-False")
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_optimizer_built_on_meta_parameters_trains_nothing(dtype: torch.dtype, kind: Any, sharded: bool) -> None:
    """It is named at its first use, before and after ``to_empty``; torch's own errors came. Built after, it trains."""
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(dtype)
    scaler = ConstantGradScaler(4.0)

    def wrapped(inner: torch.optim.Optimizer) -> MixedPrecisionOptimizer:
        if sharded:
            return DistributedOptimizer(inner, None, scaler, modules=module)
        return MixedPrecisionOptimizer(inner, None, scaler)

    inner = kind(module.named_parameters(), lr=0.1)
    early = wrapped(inner)
    for _ in range(2):
        calls: dict[Any, tuple[Any, ...]] = {
            early.step: (),
            early.load_state_dict: ({},),
        }
        for call, arguments in calls.items():
            with pytest.raises(UsageError, match=r"built while its parameters were on the meta .*to_empty\(device"):
                call(*arguments)
        module.to_empty(device="cpu")
    del early, call, calls
    gc.collect()
    module.load_state_dict(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).state_dict())
    inner = kind(module.named_parameters(), lr=0.1)
    before = [param.detach().clone() for param in module.parameters()]
    optimizer = wrapped(inner)
    assert optimizer.get_loss_scale().item() == 4.0
    optimizer.scale_loss(module(torch.ones(2, 4, dtype=dtype)).float().square().sum()).backward()
    assert optimizer.step().success
    assert any(bool((param != old).any()) for param, old in zip(module.parameters(), before, strict=True))
