"""build_optimizer: from a config and modules to a ready optimizer, in one call."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megascale.config import OptimizerConfig
from megascale.distributed_optimizer import DistributedOptimizer
from megascale.errors import ArgumentError, ArgumentTypeError
from megascale.grad_scaler import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler
from megascale.lion import Lion
from megascale.megatron_config import check_grouping, from_megatron_config, is_megatron_config
from megascale.optimizer import MixedPrecisionOptimizer
from megascale.parallel import ParallelGroups
from megascale.step.arguments import ineffective
from megascale.utils import validate

Overrides = Mapping[str, Mapping[str, Any]]
Options = dict[str, Any]

OVERRIDABLE = ("lr", "lr_mult", "weight_decay", "betas", "eps", "momentum")


def build_optimizer(
    config: OptimizerConfig | Any,
    modules: nn.Module | Sequence[nn.Module],
    *,
    groups: ParallelGroups | ProcessGroup | DeviceMesh | None = None,
    overrides: Overrides | None = None,
    grads_are_scaled: bool = False,
    replicas_may_differ: bool = False,
) -> MixedPrecisionOptimizer:
    """Build param groups, torch optimizer, grad scaler and wrapper: Megatron-Core's ``get_megatron_optimizer``.

    Biases and the parameters of norm layers get no weight decay: names that end in "bias", and parameters owned by a
    module whose class name contains "Norm". ``config.use_distributed_optimizer`` makes it a DistributedOptimizer; the
    modules must then not be wrapped in DistributedDataParallel.

    Args:
        config: an :class:`OptimizerConfig`, or Megatron-Core's, whose unsupported fields are refused; see
            :mod:`megascale.megatron_config`. ``config.lr`` is required.
        modules: one model, or its chunks; with several, names are prefixed by the chunk's index.
        groups: see :class:`MixedPrecisionOptimizer`.
        overrides: shell-style name patterns (``fnmatch``, case matters) to options of their param group, applied in
            order on top of the default: ``{"*embed*": {"lr_mult": 0.1}, "*.bias": {"weight_decay": 0.01}}``. Options:
            lr, lr_mult (a factor on lr), weight_decay, betas, eps, momentum.
        grads_are_scaled, replicas_may_differ: see :class:`MixedPrecisionOptimizer`.

    Raises:
        ArgumentError, ArgumentTypeError: for a config without lr, a pattern that matches nothing, an unknown option.
    """
    if is_megatron_config(config):
        check_grouping(config)
        config = from_megatron_config(config)
    if not isinstance(config, OptimizerConfig):
        raise ArgumentTypeError(f"config must be an OptimizerConfig, got {type(config).__name__}")
    if config.lr is None:
        raise ArgumentError("config.lr is None; give the learning rate, e.g. OptimizerConfig(lr=1e-4)")
    param_groups = _param_groups(config, _named_parameters(modules), overrides or {})
    inner, grad_scaler = build_inner_optimizer(config, param_groups), build_grad_scaler(config)
    config = effective_config(config, inner, grad_scaler)
    if config.use_distributed_optimizer:
        return DistributedOptimizer(
            inner,
            config,
            grad_scaler,
            modules=modules,
            groups=groups,
            overlap_param_gather=config.overlap_param_gather,
            grads_are_scaled=grads_are_scaled,
        )
    return MixedPrecisionOptimizer(
        inner,
        config,
        grad_scaler,
        groups=groups,
        grads_are_scaled=grads_are_scaled,
        replicas_may_differ=replicas_may_differ,
    )


def effective_config(
    config: OptimizerConfig, inner: torch.optim.Optimizer, grad_scaler: MegatronGradScaler | None
) -> OptimizerConfig:
    """Return ``config`` without the fields that nothing was built from, such as ``hysteresis`` for a constant scale.

    One config may serve many runs: fields of another optimizer, or of a scale that bf16 does not need, are no error
    here.
    """
    unused = ineffective(config, inner, grad_scaler, sharded=config.use_distributed_optimizer)
    return replace(config, **{field.name: field.default for field in unused})


def build_grad_scaler(config: OptimizerConfig) -> MegatronGradScaler | None:
    """Return the scaler that ``config`` asks for: constant if ``loss_scale`` is given, dynamic for fp16, else None."""
    if config.loss_scale is not None:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        config.initial_loss_scale,
        config.min_loss_scale,
        config.loss_scale_growth_factor,
        config.loss_scale_backoff_factor,
        config.loss_scale_window,
        config.hysteresis,
        max_scale=config.max_loss_scale,
        hysteresis_reset=config.hysteresis_reset,
    )


def build_inner_optimizer(config: OptimizerConfig, param_groups: list[Options]) -> torch.optim.Optimizer:
    """Return the torch optimizer (or Lion) that ``config`` names, over ``param_groups`` of model params."""
    lr = validate.non_negative("lr", config.lr)
    if config.optimizer == "sgd":
        return torch.optim.SGD(param_groups, lr=lr, momentum=config.sgd_momentum, weight_decay=config.weight_decay)
    if config.optimizer == "lion":
        betas = (config.lion_beta1, config.lion_beta2)
        return Lion(param_groups, lr=lr, betas=betas, weight_decay=config.weight_decay)
    kind = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
    betas = (config.adam_beta1, config.adam_beta2)
    return kind(param_groups, lr=lr, betas=betas, eps=config.adam_eps, weight_decay=config.weight_decay)


def _named_parameters(modules: nn.Module | Sequence[nn.Module]) -> list[tuple[str, nn.Parameter, bool]]:
    """Return (name, parameter, exempt from weight decay) of every distinct parameter."""
    chunks = [modules] if isinstance(modules, nn.Module) else list(modules)
    if not chunks or not all(isinstance(chunk, nn.Module) for chunk in chunks):
        raise ArgumentTypeError(f"modules must be a module or a list of modules, got {modules!r}")
    named: list[tuple[str, nn.Parameter, bool]] = []
    seen: set[int] = set()
    for index, chunk in enumerate(chunks):
        prefix = f"{index}." if len(chunks) > 1 else ""
        for path, module in chunk.named_modules():
            is_norm = "Norm" in type(module).__name__
            for leaf, param in module.named_parameters(recurse=False):
                if id(param) not in seen:
                    seen.add(id(param))
                    name = f"{prefix}{path}.{leaf}" if path else f"{prefix}{leaf}"
                    named.append((name, param, is_norm or leaf.endswith("bias")))
    if not named:
        raise ArgumentError("modules have no parameters")
    return named


def _param_groups(
    config: OptimizerConfig, named: list[tuple[str, nn.Parameter, bool]], overrides: Overrides
) -> list[Options]:
    """Group parameters by their options, in the order of their first parameter."""
    _check_overrides(overrides, [name for name, _, _ in named])
    groups: dict[tuple[tuple[str, Any], ...], Options] = {}
    for name, param, exempt in named:
        options: Options = {"weight_decay": 0.0 if exempt else config.weight_decay}
        for pattern, changes in overrides.items():
            if fnmatchcase(name, pattern):
                options.update(changes)
        if "lr_mult" in options:
            options["lr"] = options.get("lr", config.lr) * options["lr_mult"]
        key = tuple(
            sorted((option, tuple(value) if isinstance(value, list) else value) for option, value in options.items())
        )
        groups.setdefault(key, {"params": [], **options})["params"].append((name, param))
    return list(groups.values())


def _check_overrides(overrides: Overrides, names: list[str]) -> None:
    for pattern, changes in overrides.items():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ArgumentError(
                f"overrides pattern {pattern!r} matches no parameter; names look like {', '.join(map(repr, names[:3]))}"
            )
        if not isinstance(changes, Mapping):
            raise ArgumentTypeError(f"overrides[{pattern!r}] must be a dict of options, got {changes!r}")
        for option, value in changes.items():
            where = f"overrides[{pattern!r}][{option!r}]"
            validate.one_of(f"option of overrides[{pattern!r}]", option, OVERRIDABLE)
            if option == "betas":
                if not isinstance(value, (tuple, list)) or len(value) != 2:
                    raise ArgumentError(f"{where} must be two numbers in [0, 1), got {value!r}")
                for beta in value:
                    validate.fraction(where, beta)
            else:
                validate.non_negative(where, value)
