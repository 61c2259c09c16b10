"""Checks a constructor's arguments: their types, and that every field of the config has an effect."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megascale.config import MOMENT_DTYPES, SCALER_FIELDS, OptimizerConfig
from megascale.errors import ArgumentError, ArgumentTypeError
from megascale.grad_scaler import ConstantGradScaler, MegatronGradScaler
from megascale.grad_sync.sync import GradSync
from megascale.rules import ADAM, BY_KIND, BY_NAME, RULES, SECOND, kinds_without
from megascale.rules.options import values_of
from megascale.step.misuse import BUILD_LAST
from megascale.utils.dtensors import is_dtensor
from megascale.utils.dtypes import HALF_DTYPES
from megascale.utils.live_objects import objects_of
from megascale.utils.wording import either


def check_arguments(optimizer: Any, config: Any, grad_scaler: Any, *, sharded: bool) -> None:
    """Raise ArgumentTypeError or ArgumentError for a constructor's arguments that do not fit.

    Args:
        optimizer, config, grad_scaler: as given.
        sharded: whether they are a DistributedOptimizer's.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentTypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if hasattr(optimizer, "step_with_ready_grads"):
        raise ArgumentTypeError(f"optimizer is a {type(optimizer).__name__} already; wrap the torch optimizer once")
    if config is not None and not isinstance(config, OptimizerConfig):
        is_scaler = isinstance(config, MegatronGradScaler | torch.amp.GradScaler)
        raise ArgumentTypeError(
            f"config must be an OptimizerConfig or None, got {type(config).__name__}"
            + ("; pass a scaler by its name, grad_scaler=" if is_scaler else "")
        )
    check_grad_scaler(grad_scaler)
    check_meta(optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    # Whole, or as views (use_orig_params=True). Each rank has other elements of them, which nothing but FSDP1 can tell:
    # they look like replicas.
    position = next((index for index, param in enumerate(params) if getattr(param, "_fsdp_flattened", False)), None)
    if position is not None:
        raise ArgumentError(
            f"parameter {position} (of {len(params)}) was flattened by FullyShardedDataParallel (FSDP1), which does "
            "not say what of it this rank holds; shard the model with torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    if config is not None:
        if config.optimizer_cpu_offload:
            _check_offload(optimizer)
        for field in ineffective(config, optimizer, grad_scaler, sharded=sharded):
            raise field.error


def check_belongs(optimizer: torch.optim.Optimizer, names: Mapping[int, str] | None, grad_sync: object) -> None:
    """Raise an error where names or main grads are not those of the optimizer's parameters.

    ``names``: by id of the parameter, as they were given; None: none were.
    """
    if grad_sync is not None and not hasattr(grad_sync, "main_grad"):
        raise ArgumentTypeError(
            f"grad_sync must be a GradSync, as GradSync(model.named_parameters()), got a {type(grad_sync).__name__}"
        )
    params = [param for group in optimizer.param_groups for param in group["params"]]
    nameless = [index for index, param in enumerate(params) if names is not None and id(param) not in names]
    if nameless:
        raise ArgumentError(
            f"named_parameters have not parameter {nameless[0]} of the optimizer (and {len(nameless) - 1} more); pass "
            f"those of every module whose parameters it updates; {BUILD_LAST}"
        )
    trained = [param for param in params if param.requires_grad]
    if isinstance(grad_sync, GradSync) and trained and all(grad_sync.main_grad(param) is None for param in trained):
        raise ArgumentError(
            f"grad_sync has the gradient of no parameter of the optimizer; give it those that the optimizer updates; "
            f"{BUILD_LAST}"
        )


def check_policy(optimizer: torch.optim.Optimizer, grad_scaler: MegatronGradScaler | None) -> None:
    """Raise ArgumentError where FSDP2's policy computes in another 16-bit format than that of the parameters.

    Or fp16 gradients of fp32 parameters, and no scale keeps them from zero. The parameters do not tell: torch keeps the
    policy with the modules, for which this goes through all Python objects.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    dtypes = {*HALF_DTYPES} if grad_scaler is not None else {*HALF_DTYPES, torch.float32}
    ours = {id(param) for param in params if is_dtensor(param) and param.dtype in dtypes}
    if not ours:
        return
    from torch.distributed.fsdp import FSDPModule

    sharded: list[Any] = [one for one in objects_of(FSDPModule) if isinstance(one, nn.Module)]
    for root in sharded:
        computed = getattr(getattr(root._get_fsdp_state(), "_mp_policy", None), "param_dtype", None)
        if computed not in HALF_DTYPES:
            continue
        # Modules below it that were sharded by themselves have a policy of their own.
        others = [part for part in root.modules() if part is not root and part in sharded]
        below = {id(param) for part in others for param in part.parameters()}
        for name, param in root.named_parameters():
            if id(param) not in ours - below or param.dtype == computed:
                continue
            if param.dtype in HALF_DTYPES:
                raise ArgumentError(
                    f"fully_shard's MixedPrecisionPolicy(param_dtype={computed}) rounds {name!r}, which is "
                    f"{param.dtype}, to {computed} before it computes; leave param_dtype out, or cast the model to "
                    f"{computed}"
                )
            if computed == torch.float16:
                raise ArgumentError(
                    f"grad_scaler is None, but fully_shard's MixedPrecisionPolicy(param_dtype=torch.float16) computes "
                    f"the gradient of {name!r}, an fp32 parameter, in fp16, where small gradients become zero; pass a "
                    "DynamicGradScaler (or ConstantGradScaler), or set param_dtype=torch.bfloat16"
                )


def check_grad_scaler(grad_scaler: Any) -> None:
    """Raise ArgumentTypeError for what is neither one of our scalers nor None."""
    if isinstance(grad_scaler, torch.amp.GradScaler):
        kind = f"{type(grad_scaler).__module__.partition('.')[0]}.amp.GradScaler"
        raise ArgumentTypeError(
            f"grad_scaler is a {kind}, which drives a bare torch optimizer by scaler.step(optimizer); pass "
            "megascale.DynamicGradScaler() (or ConstantGradScaler), or keep it and leave the optimizer unwrapped"
        )
    if grad_scaler is not None and not isinstance(grad_scaler, MegatronGradScaler):
        raise ArgumentTypeError(f"grad_scaler must be a MegatronGradScaler or None, got {type(grad_scaler).__name__}")


def check_meta(optimizer: torch.optim.Optimizer) -> None:
    """Raise ArgumentError if some parameters have values while others are on the meta device.

    All parameters on the meta device are no error: so an optimizer's memory can be estimated.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    position = next((index for index, param in enumerate(params) if param.is_meta), None)
    if position is not None and not all(param.is_meta for param in params):
        raise ArgumentError(
            f"parameter {position} (of {len(params)}) is on the meta device and has no values; call "
            "module.to_empty(device=...), load or initialise the weights, then build both optimizers"
        )


def _check_offload(optimizer: torch.optim.Optimizer) -> None:
    """Raise ArgumentError for an optimizer that has no kernels, or whose kernels a host is too slow for."""
    rule, name = BY_KIND.get(type(optimizer)), type(optimizer).__name__
    if rule is None or rule.kernel is None:
        kinds = either([kind.__name__ for kind, one in BY_KIND.items() if one.kernel is not None])
        raise ArgumentError(
            f"optimizer_cpu_offload=True needs {kinds}, which have kernels for the host, got {name}; leave it False, "
            "and move what the optimizer keeps by optimizer.offload() and reload() where steps do not need it. "
            "build_optimizer() with optimizer='muon' moves the state of all parameters but Muon's"
        )


class IneffectiveField(NamedTuple):
    """A config field that contradicts the given optimizer or scaler.

    Attributes:
        name, default: of the field.
        error: names it, the value that the given object has, and what to do.
    """

    name: str
    default: Any
    error: ArgumentError


def ineffective(
    config: OptimizerConfig,
    optimizer: torch.optim.Optimizer,
    grad_scaler: MegatronGradScaler | None,
    *,
    sharded: bool = False,
) -> Iterator[IneffectiveField]:
    """Yield the fields of ``config`` that differ both from their default and from what the given objects have."""
    for field in fields(config):
        name, value = field.name, getattr(config, field.name)
        if value == field.default:
            continue
        if name in _OF_OPTIMIZER:
            found, holder = _OF_OPTIMIZER[name](optimizer), f"the {type(optimizer).__name__}"
            remedy = "build the optimizer with it"
        elif name in SCALER_FIELDS:
            found, holder = list[Any](), f"the {type(grad_scaler).__name__}"
            if grad_scaler is None:
                holder = "an optimizer without a grad_scaler"
            if name != "loss_scale" or isinstance(grad_scaler, ConstantGradScaler):  # of that alone it is the scale
                found = [getattr(grad_scaler, one) for one in (SCALER_FIELDS[name],) if hasattr(grad_scaler, one)]
            kind = "ConstantGradScaler" if name == "loss_scale" else "DynamicGradScaler"
            remedy = f"pass a {kind} that has it"
        elif name == "use_distributed_optimizer":
            found, holder, remedy = [sharded], "a MixedPrecisionOptimizer", "build a DistributedOptimizer"
        else:
            continue
        if not any(_same(value, one) for one in found):
            has = " and ".join(dict.fromkeys(repr(one) for one in found)) or "no such option"
            error = ArgumentError(
                f"config.{name}={value!r} has no effect: {holder} has {has}; {remedy}, leave the field at its default, "
                "or let megascale.build_optimizer(config, model) build everything from the config"
            )
            yield IneffectiveField(name, field.default, error)


def _kind(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the rule that a class's name has in it: Adam's last, as in MuonWithAuxAdam."""
    name = type(optimizer).__name__.lower()
    known = sorted(BY_NAME, key=lambda rule: rule == ADAM.name)
    return [next((rule for rule in known if rule in name), name)]


_DECOUPLED = tuple(kind for rule in RULES for kind in rule.decoupled)
_OF_OPTIMIZER: dict[str, Callable[[torch.optim.Optimizer], list[Any]]] = {
    "optimizer": _kind,
    # A schedule that was built first has changed the rate already.
    "lr": lambda optimizer: [*values_of("lr")(optimizer), *values_of("initial_lr")(optimizer)],
    "weight_decay": values_of("weight_decay"),
    "decoupled_weight_decay": lambda optimizer: [
        bool(optimizer.defaults.get("decoupled_weight_decay", isinstance(optimizer, _DECOUPLED)))
    ],
    # The dtypes that a second moment may have, where there is one: others check what they support.
    SECOND: lambda optimizer: [] if isinstance(optimizer, kinds_without(SECOND)) else list(MOMENT_DTYPES[SECOND]),
    **{name: values for rule in RULES for name, values in rule.fields.items()},
}


def _same(value: Any, other: Any) -> bool:
    """Whether two values of an option are equal, up to the rounding of a number kept in fp32."""
    if isinstance(value, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(value, other, rel_tol=1e-6)
    return bool(value == other)


def config_for(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig | None, clip_grad: float | None
) -> OptimizerConfig:
    """Return ``config`` checked against the parameters' dtypes, or one made from them; with ``clip_grad``, if given."""
    dtypes = {param.dtype for group in optimizer.param_groups for param in group["params"]}
    fp16, bf16 = torch.float16 in dtypes, torch.bfloat16 in dtypes
    if config is None:
        config = OptimizerConfig(fp16=fp16, bf16=bf16 and not fp16)
    if fp16 and not config.fp16:
        raise ArgumentError(
            "config.fp16 is False, but the optimizer has fp16 parameters; set fp16=True, and bf16=False"
        )
    if bf16 and not (config.bf16 or config.fp16):
        raise ArgumentError("config.bf16 is False, but the optimizer has bf16 parameters; set bf16=True")
    return config if clip_grad is None else replace(config, clip_grad=clip_grad)


def device_of(optimizer: torch.optim.Optimizer) -> torch.device:
    """Return where decisions live: the first parameter's device."""
    params: list[Tensor] = [param for group in optimizer.param_groups for param in group["params"]]
    return params[0].device if params else torch.device("cpu")
