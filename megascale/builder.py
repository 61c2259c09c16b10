"""build_optimizer: from a config and modules to a ready optimizer, in one call."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megascale.chained import ChainedOptimizer
from megascale.config import SCALER_FIELDS, OptimizerConfig
from megascale.distributed_optimizer import DistributedOptimizer, chunks_of
from megascale.errors import ArgumentError, ArgumentTypeError
from megascale.grad_scaler import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler
from megascale.grad_sync.layout import DEFAULT_BUCKET_NUMEL
from megascale.optimizer import MixedPrecisionOptimizer
from megascale.parallel import ParallelGroups
from megascale.rules import BY_NAME, MUON
from megascale.step.arguments import ineffective
from megascale.utils import validate

Overrides = Mapping[str, Mapping[str, Any]]
Options = dict[str, Any]

OVERRIDABLE = ("lr", "lr_mult", "weight_decay", "betas", "eps", "momentum", "optimizer")
NOT_HIDDEN = ("*embed*", "*wte*", "*wpe*", "*head*", "*output_layer*", "*classifier*")
"""Names of matrices that Muon leaves to Adam, beside those of embedding modules: a model's first and last layers."""

MULTIHEAD = re.compile("multi[-_]?head")
"""What is no head of a model, although its name says so: attention of several heads."""


class NamedParam(NamedTuple):
    """A parameter, and what follows from where it is.

    Attributes:
        is_exempt: from weight decay.
        is_hidden_matrix: whether Muon updates it, unless ``overrides`` say otherwise.
    """

    name: str
    param: nn.Parameter
    is_exempt: bool
    is_hidden_matrix: bool


def build_optimizer(
    config: OptimizerConfig | Any,
    modules: nn.Module | Sequence[nn.Module],
    *,
    clip_grad: float | None = None,
    groups: ParallelGroups | ProcessGroup | DeviceMesh | None = None,
    overrides: Overrides | None = None,
    grad_scaler: MegatronGradScaler | None = None,
    bucket_numel: int = DEFAULT_BUCKET_NUMEL,
    grads_are_scaled: bool = False,
    replicas_may_differ: bool = False,
) -> MixedPrecisionOptimizer | ChainedOptimizer:
    """Build param groups, torch optimizer, grad scaler and wrapper: Megatron-Core's ``get_megatron_optimizer``.

    Biases and the parameters of norm layers get no weight decay: names that end in "bias", and parameters owned by a
    module whose class name contains "Norm". ``config.use_distributed_optimizer`` makes it a DistributedOptimizer; the
    modules must then not be wrapped in DistributedDataParallel.

    ``config.optimizer="muon"`` gives hidden matrices to torch.optim.Muon and all else to Adam or AdamW, in one
    ChainedOptimizer: one scaler, one decision, one norm. Not hidden are parameters without two dimensions, those of
    modules whose class name contains "Embedding", and names that match :data:`NOT_HIDDEN`, :data:`MULTIHEAD` aside.

    Args:
        config: an :class:`OptimizerConfig`, or Megatron-Core's, whose unsupported fields are refused; see
            :mod:`megascale.integrations.megatron_config`. ``config.lr`` is required.
        clip_grad: largest global L2 norm of the unscaled gradients, in place of ``config.clip_grad``; 0: not clipped.
        modules: one model, or its chunks; with several, names are prefixed by the chunk's index.
        groups: see :class:`MixedPrecisionOptimizer`.
        overrides: shell-style name patterns (``fnmatch``, case matters) to options of their param group, applied in
            order on top of the default: ``{"*embed*": {"lr_mult": 0.1}, "*.bias": {"weight_decay": 0.01}}``. Options:
            lr, lr_mult (a factor on lr), weight_decay, betas, eps, momentum; and optimizer, "muon" or "adam", where
            the config's is "muon".
        grad_scaler: None: the one that the config asks for. The config must not ask for another.
        bucket_numel: see :class:`DistributedOptimizer`.
        grads_are_scaled, replicas_may_differ: see :class:`MixedPrecisionOptimizer`.

    Raises:
        ArgumentError, ArgumentTypeError: for a config without lr, a pattern that matches nothing, an unknown option;
            for "muon" without a hidden matrix; for a config that asks for another scaler than ``grad_scaler``.
    """
    checked = _checked(config)
    if clip_grad is not None:
        checked = replace(checked, clip_grad=clip_grad)
    named, overrides = _named_parameters(modules), overrides or {}
    _check_overrides(overrides, [one.name for one in named], checked.optimizer)
    scaler = build_grad_scaler(checked) if grad_scaler is None else grad_scaler
    kinds = [_kind_of(checked, one, overrides) for one in named]
    if checked.optimizer == "muon" and "muon" not in kinds:
        raise ArgumentError(
            "config.optimizer='muon', but modules have no hidden matrix: every parameter is an embedding, a head, or "
            'has not two dimensions; take "adam", or name matrices in overrides: {"*.weight": {"optimizer": "muon"}}'
        )
    wrapper: type[MixedPrecisionOptimizer] = MixedPrecisionOptimizer
    options: dict[str, Any] = {"groups": groups, "grads_are_scaled": grads_are_scaled}
    if checked.use_distributed_optimizer:
        wrapper = DistributedOptimizer
        options |= {
            "modules": modules,
            "bucket_numel": bucket_numel,
            "overlap_param_gather": checked.overlap_param_gather,
        }
    else:
        options["replicas_may_differ"] = replicas_may_differ
    built: list[MixedPrecisionOptimizer] = []
    for kind in dict.fromkeys(kinds):
        own = checked
        if kind == "muon":  # a host orthogonalizes matrices too slowly: they stay on the device
            own = replace(
                checked,
                optimizer_cpu_offload=False,
                optimizer_offload_fraction=1.0,
                overlap_cpu_optimizer_d2h_h2d=False,
            )
        elif kind != checked.optimizer:  # beside Muon
            lr = checked.lr if checked.muon_adam_lr is None else checked.muon_adam_lr
            own = replace(checked, optimizer=kind, lr=lr)
        chosen = [one for one, its_kind in zip(named, kinds, strict=True) if its_kind == kind]
        inner = build_inner_optimizer(own, _param_groups(own, chosen, overrides))
        for field in ineffective(own, inner, scaler):
            if grad_scaler is not None and field.name in SCALER_FIELDS:
                raise field.error
        built.append(wrapper(inner, effective_config(own, inner, scaler), scaler, **options))
    return ChainedOptimizer(built) if checked.optimizer == "muon" else built[0]


def _checked(config: Any) -> OptimizerConfig:
    """Return our form of a config, ours or Megatron-Core's. Raises as :func:`build_optimizer` does."""
    if any(kind.__module__.partition(".")[0] == "megatron" for kind in type(config).__mro__):
        megatron = import_module("megascale.integrations.megatron_config")  # a leaf: the core imports no integration
        megatron.check_grouping(config)
        config = megatron.from_megatron_config(config)
    if not isinstance(config, OptimizerConfig):
        raise ArgumentTypeError(f"config must be an OptimizerConfig, got {type(config).__name__}")
    if config.lr is None:
        raise ArgumentError("config.lr is None; give the learning rate, e.g. OptimizerConfig(lr=1e-4)")
    return config


def _kind_of(config: OptimizerConfig, param: NamedParam, overrides: Overrides) -> str:
    """Return the optimizer of a parameter: "muon" or "adam" where the config says "muon", else what the config says."""
    if config.optimizer != "muon":
        return config.optimizer
    kind = "muon" if param.is_hidden_matrix else "adam"
    for pattern, changes in overrides.items():
        if fnmatchcase(param.name, pattern):
            kind = changes.get("optimizer", kind)
    if kind == "muon" and param.param.dim() != 2:
        raise ArgumentError(
            f"overrides give parameter {param.name!r} of shape {tuple(param.param.shape)} to Muon, which takes matrices"
        )
    return kind


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
    arguments = {SCALER_FIELDS[name]: getattr(config, name) for name in SCALER_FIELDS if name != "loss_scale"}
    return DynamicGradScaler(**arguments)


def build_inner_optimizer(config: OptimizerConfig, param_groups: list[Options]) -> torch.optim.Optimizer:
    """Return the torch optimizer (or Lion) that ``config`` names, over ``param_groups`` of model params."""
    return BY_NAME[config.optimizer].build(config, param_groups, validate.non_negative("lr", config.lr))


def is_hidden_matrix(name: str, shape: Sequence[int], module_kind: str = "") -> bool:
    """Return whether Muon updates a parameter, unless overrides say otherwise. ``module_kind``: its module's class."""
    lowered = MULTIHEAD.sub("", name.lower())
    is_outer = "Embedding" in module_kind or any(fnmatchcase(lowered, pattern) for pattern in NOT_HIDDEN)
    return len(shape) == 2 and not is_outer


def _named_parameters(modules: nn.Module | Sequence[nn.Module]) -> list[NamedParam]:
    """Return every distinct parameter."""
    chunks = chunks_of(modules)
    named: list[NamedParam] = []
    seen: set[int] = set()
    for index, chunk in enumerate(chunks):
        prefix = f"{index}." if len(chunks) > 1 else ""
        for path, module in chunk.named_modules():
            kind = type(module).__name__
            for leaf, param in module.named_parameters(recurse=False):
                if id(param) not in seen:
                    seen.add(id(param))
                    name = f"{prefix}{path}.{leaf}" if path else f"{prefix}{leaf}"
                    is_exempt = "Norm" in kind or leaf.endswith("bias")
                    named.append(NamedParam(name, param, is_exempt, is_hidden_matrix(name, param.shape, kind)))
    if not named:
        raise ArgumentError("modules have no parameters")
    return named


def _param_groups(config: OptimizerConfig, named: Sequence[NamedParam], overrides: Overrides) -> list[Options]:
    """Group parameters by their options, in the order of their first parameter."""
    groups: dict[tuple[tuple[str, Any], ...], Options] = {}
    for name, param, is_exempt, _ in named:
        options: Options = {"weight_decay": 0.0 if is_exempt else config.weight_decay}
        for pattern, changes in overrides.items():
            if fnmatchcase(name, pattern):
                options.update((option, value) for option, value in changes.items() if option != "optimizer")
        if "lr_mult" in options:
            options["lr"] = options.get("lr", config.lr) * options["lr_mult"]
        key = tuple(
            sorted((option, tuple(value) if isinstance(value, list) else value) for option, value in options.items())
        )
        groups.setdefault(key, {"params": [], **options})["params"].append((name, param))
    return list(groups.values())


def _check_overrides(overrides: Overrides, names: list[str], optimizer: str) -> None:
    if not isinstance(overrides, Mapping):
        raise ArgumentTypeError(
            f"overrides must be a dict of name patterns to options, as {{'*.bias': {{'lr': 0.1}}}}, got {overrides!r}"
        )
    rules = [BY_NAME[optimizer], *([BY_NAME[MUON.beside]] if optimizer == MUON.name else [])]
    known = {"lr", "lr_mult", "optimizer"}.union(*(rule.numbers for rule in rules))
    allowed = [option for option in OVERRIDABLE if option in known]
    for pattern, changes in overrides.items():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ArgumentError(
                f"overrides pattern {pattern!r} matches no parameter; names look like {', '.join(map(repr, names[:3]))}"
            )
        if not isinstance(changes, Mapping):
            raise ArgumentTypeError(f"overrides[{pattern!r}] must be a dict of options, got {changes!r}")
        for option, value in changes.items():
            where = f"overrides[{pattern!r}][{option!r}]"
            validate.one_of(f"option of overrides[{pattern!r}]", option, allowed)
            if option == "optimizer":
                if optimizer != "muon":
                    raise ArgumentError(f"{where} needs config.optimizer='muon', got {optimizer!r}; leave it out")
                validate.one_of(where, value, (MUON.name, MUON.beside))
            elif option == "betas":
                validate.betas(where, value)
            else:
                validate.non_negative(where, value)
