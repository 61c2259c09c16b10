"""From Megatron-Core's ``OptimizerConfig`` to ours, by field names: nothing of Megatron is imported."""

import math
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Any

import torch

from megascale.config import OPTIMIZERS, OptimizerConfig
from megascale.errors import ArgumentError, ArgumentTypeError

OF_MEGATRON = tuple(name for name in OPTIMIZERS if name != "muon")
"""Optimizers that Megatron and this library name alike and compute alike. Its Muon scales updates in other ways."""
SAME = (
    "fp16",
    "bf16",
    "initial_loss_scale",
    "min_loss_scale",
    "hysteresis",
    "log_num_zeros_in_grad",
    "use_distributed_optimizer",
    "optimizer",
    "lr",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "decoupled_weight_decay",
    "sgd_momentum",
    "lion_beta1",
    "lion_beta2",
)
"""Fields that mean the same in both and are taken as they are."""

TRANSLATED = ("loss_scale", "loss_scale_window", "clip_grad", "grad_norm_skip_threshold", "overlap_param_gather")
"""Fields that mean the same but are written differently: see :func:`from_megatron_config`."""

PRECISION_AWARE = (
    "use_precision_aware_optimizer",
    "main_grads_dtype",
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
)
"""Fields of Megatron's precision-aware optimizer. 16-bit main params and grads are refused, bf16 moments are not."""

GROUPING = ("decoupled_lr", "decoupled_min_lr", "apply_wd_to_qk_layernorm")
"""Fields that say how parameters are grouped: the code that makes the groups obeys or refuses them."""

NO_EFFECT = (
    # read by Megatron's schedule, not by its optimizer
    "min_lr",
    # the parameters tell their dtype themselves
    "params_dtype",
    # a way of storing the same bits
    "store_param_remainders",
    # overlap and memory of Megatron's own machinery
    "overlap_param_gather_with_optimizer_step",
    "optimizer_offload_fraction",
    "use_torch_optimizer_for_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d",
    "pin_cpu_grads",
    "pin_cpu_params",
    # logging and timing
    "barrier_with_L1_time",
    "timers",
    "config_logger_dir",
    # of optimizers that are refused by their names
    "muon_momentum",
    "muon_split_qkv",
    "muon_use_nesterov",
    "muon_nesterov",
    "muon_coefficient_type",
    "muon_use_syrk",
    "muon_scalar_optimizer",
    "soap_shampoo_beta",
    "soap_use_kl_shampoo",
    "adaptive_muon_moment2_method",
    "adaptive_muon_beta2",
    "adaptive_muon_eps",
    "muon_scale_mode",
    "muon_fp32_matmul_prec",
    "muon_num_ns_steps",
    "muon_tp_mode",
    "muon_extra_scale_factor",
)
"""Fields that change no bit of what our optimizer computes."""

REMEDIES = {
    "optimizer_cpu_offload": "main params and state stay on the parameters' device: set it False, or shard them with "
    "use_distributed_optimizer=True",
    "fp8_recipe": "parameters are fp16, bf16 or fp32 here: leave it None",
    "optimizer_cuda_graph": "leave it False; megascale.StepGraph captures the step of any of our optimizers",
    "use_layer_wise_distributed_optimizer": "leave it False; use_distributed_optimizer=True shards by elements",
    "reuse_grad_buf_for_mxfp8_param_ag": "parameters are fp16, bf16 or fp32 here: leave it False",
}
"""Fields that are refused unless they have their default, and what to do."""

KNOWN = frozenset((*SAME, *TRANSLATED, *PRECISION_AWARE, *GROUPING, *NO_EFFECT, *REMEDIES))


def is_megatron_config(config: Any) -> bool:
    """Return whether ``config`` is an instance of ``megatron.core.optimizer.OptimizerConfig``, or of a subclass."""
    return any(
        kind.__name__ == "OptimizerConfig" and kind.__module__.partition(".")[0] == "megatron"
        for kind in type(config).__mro__
    )


def from_megatron_config(config: Any) -> OptimizerConfig:
    """Return the OptimizerConfig that steps as Megatron-Core's optimizer does with ``config``.

    A field whose effect we do not reproduce is refused unless it has its default; so is a field that this module does
    not know, of a newer Megatron-Core. :data:`NO_EFFECT` lists those that are ignored, :data:`GROUPING` those that
    :func:`check_grouping` is for.

    Args:
        config: an instance of Megatron's dataclass; source: its ``core/optimizer/optimizer_config.py``, 0.16.1 to 0.20.

    Raises:
        ArgumentTypeError: for anything else.
        ArgumentError: naming the field, its value and the remedy.
    """
    if not is_megatron_config(config):
        raise ArgumentTypeError(f"config must be a Megatron-Core OptimizerConfig, got {type(config).__name__}")
    declared = {field.name: field for field in fields(config)}
    for name, field in declared.items():
        if name not in KNOWN or name in REMEDIES:
            _refuse_unless_default(config, field)
    if config.optimizer not in OF_MEGATRON:
        raise ArgumentError(
            f"config.optimizer is {config.optimizer!r}, which has no counterpart here; choose one of "
            f"{', '.join(map(repr, OF_MEGATRON))}"
        )
    taken = {name: getattr(config, name) for name in SAME if name in declared}
    return OptimizerConfig(**taken, **_translated(config), **_moments(config))


def check_grouping(config: Any) -> None:
    """Raise ArgumentError for a field of Megatron's ``config`` that asks for param groups which only Megatron makes."""
    for field in fields(config):
        if field.name in GROUPING:
            _refuse_unless_default(
                config,
                field,
                "group parameters with overrides={pattern: {...}}, or use "
                "megascale.integrations.megatron.get_megatron_optimizer, which makes Megatron's groups",
            )


def _refuse_unless_default(config: Any, field: "Field[Any]", remedy: str | None = None) -> None:
    value, default = getattr(config, field.name), _default(field)
    if value is not default and value != default:
        remedy = remedy or REMEDIES.get(field.name, f"megascale does not know this field: leave it at {default!r}")
        raise ArgumentError(f"config.{field.name} is {value!r}, which megascale does not do; {remedy}")


def _default(field: "Field[Any]") -> Any:
    factory: Callable[[], Any] | Any = field.default_factory
    return field.default if factory is MISSING else factory()


def _translated(config: Any) -> dict[str, Any]:
    """Return the fields of :data:`TRANSLATED` in our form."""
    scales = config.fp16 or config.bf16 or config.use_distributed_optimizer
    window = config.loss_scale_window
    threshold = getattr(config, "grad_norm_skip_threshold", math.inf)
    return {
        # Megatron: any false value is "dynamic", and its FP32Optimizer never scales.
        "loss_scale": float(config.loss_scale) if config.loss_scale and scales else None,
        # Megatron declares a float and compares an integer with it.
        "loss_scale_window": int(window) if isinstance(window, float) and window.is_integer() else window,
        # Megatron clips where it is above 0.
        "clip_grad": max(config.clip_grad, 0.0),
        # 0.20's. Megatron skips where it is finite.
        "grad_norm_skip_threshold": threshold if math.isfinite(threshold) else math.inf,
        "overlap_param_gather": bool(config.overlap_param_gather and config.use_distributed_optimizer),
    }


def _moments(config: Any) -> dict[str, Any]:
    """Return the moments' dtypes. Raises ArgumentError for what the precision-aware optimizer does otherwise."""
    if not config.use_precision_aware_optimizer:
        return {}
    for name in ("main_params_dtype", "main_grads_dtype"):
        if getattr(config, name) != torch.float32:
            raise ArgumentError(f"config.{name} is {getattr(config, name)}; it is torch.float32 here: set that")
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if getattr(config, name) not in (torch.float32, torch.bfloat16):
            raise ArgumentError(
                f"config.{name} is {getattr(config, name)}, which TransformerEngine stores with a scale of its own; "
                "choose torch.float32 or torch.bfloat16"
            )
    return {"exp_avg_dtype": config.exp_avg_dtype, "exp_avg_sq_dtype": config.exp_avg_sq_dtype}
