"""From Megatron-Core's ``OptimizerConfig`` to ours, by field names: nothing of Megatron is imported."""

import math
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from megascale.config import OptimizerConfig
from megascale.errors import ArgumentError, ArgumentTypeError
from megascale.rules import CONFIGURABLE

OF_MEGATRON = tuple(name for name in CONFIGURABLE if name != "muon")
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

LATER = ("lion_beta1", "lion_beta2", "grad_norm_skip_threshold")
"""Of those, fields that Megatron-Core 0.16.1 lacks. Without them it does what our defaults do."""

REQUIRED = tuple(name for name in (*SAME, *TRANSLATED) if name not in (*LATER, "overlap_param_gather"))
"""Fields that every version has. A version without one has renamed it, perhaps with another default. Without
``overlap_param_gather`` it is off."""

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
    "soap_precondition_frequency",
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
    "optimizer_cpu_offload": "host memory takes all main params and state here, not a fraction: set it False, or build "
    "an OptimizerConfig of megascale's with optimizer_cpu_offload=True",
    "fp8_recipe": "parameters are fp16, bf16 or fp32 here: leave it None",
    "optimizer_cuda_graph": "leave it False; megascale.StepGraph captures the step of any of our optimizers",
    "use_layer_wise_distributed_optimizer": "leave it False; use_distributed_optimizer=True shards by elements",
    "reuse_grad_buf_for_mxfp8_param_ag": "parameters are fp16, bf16 or fp32 here: leave it False",
}
"""Fields that are refused unless they are off (None or False), and what to do. Their default does not count: a later
version, or a subclass, may switch one on."""

KNOWN = frozenset((*SAME, *TRANSLATED, *PRECISION_AWARE, *GROUPING, *NO_EFFECT, *REMEDIES))


def _is_megatrons(kind: type) -> bool:
    """Return whether ``kind`` is ``megatron.core.optimizer.OptimizerConfig``."""
    return kind.__name__ == "OptimizerConfig" and kind.__module__.partition(".")[0] == "megatron"


def from_megatron_config(config: Any) -> OptimizerConfig:
    """Return the OptimizerConfig that steps as Megatron-Core's optimizer does with ``config``.

    A known field whose effect we do not reproduce is refused unless it is off. A field that this module does not know,
    of a newer Megatron-Core or a subclass, is accepted at the default of the class that declared it first: a new
    feature is off until it is asked for. :data:`NO_EFFECT` lists fields that are ignored, :data:`GROUPING` those that
    :func:`check_grouping` is for.

    Args:
        config: an instance of Megatron's dataclass; source: its ``core/optimizer/optimizer_config.py``, 0.16.1 to 0.20.

    Raises:
        ArgumentTypeError: for anything else.
        ArgumentError: naming the field, its value and the remedy.
    """
    if not any(map(_is_megatrons, type(config).__mro__)):
        raise ArgumentTypeError(f"config must be a Megatron-Core OptimizerConfig, got {type(config).__name__}")
    for name in REQUIRED:
        if not hasattr(config, name):
            raise ArgumentError(
                f"config has no field {name}, which Megatron-Core had from 0.16.1 to 0.20: this version says it in "
                "another way, which megascale does not know; pass a megascale.OptimizerConfig"
            )
    for name, remedy in REMEDIES.items():
        _refuse_if_on(config, name, remedy)
    _refuse_unknown(config)
    if config.optimizer not in OF_MEGATRON:
        raise ArgumentError(
            f"config.optimizer is {config.optimizer!r}, which has no counterpart here; choose one of "
            f"{', '.join(map(repr, OF_MEGATRON))}"
        )
    taken = {name: getattr(config, name) for name in SAME if hasattr(config, name)}
    return OptimizerConfig(**taken, **_translated(config), **_moments(config))


def check_grouping(config: Any) -> None:
    """Raise ArgumentError for a field of Megatron's ``config`` that asks for param groups which only Megatron makes."""
    for name in GROUPING:
        _refuse_if_on(
            config,
            name,
            "group parameters with overrides={pattern: {...}}, or use "
            "megascale.integrations.megatron.get_megatron_optimizer, which makes Megatron's groups",
        )


def _refuse_if_on(config: Any, name: str, remedy: str) -> None:
    value = getattr(config, name, None)
    if value not in (None, False):
        raise ArgumentError(f"config.{name} is {value!r}, which megascale does not do; {remedy}")


def _refuse_unknown(config: Any) -> None:
    """Raise ArgumentError for a field that is not in :data:`KNOWN`, and not at its default.

    That is the one of the first class that declares the field: one that inherits it may switch it on by another.
    """
    declared = {one.name: one for kind in type(config).__mro__ if is_dataclass(kind) for one in fields(kind)}
    for one in (one for name, one in declared.items() if name not in KNOWN):
        default = one.default if one.default_factory is MISSING else one.default_factory()
        value = getattr(config, one.name, default)
        by_elements = isinstance(value, Tensor) or isinstance(default, Tensor)
        changed = repr(value) != repr(default) if by_elements else value != default
        if changed and value is not default:  # a NaN is not equal to itself
            remedy = "pass a megascale.OptimizerConfig" if default is MISSING else f"leave it at {default!r}"
            raise ArgumentError(
                f"config.{one.name} is {value!r}, which megascale does not do; megascale does not know this field: "
                f"{remedy}"
            )


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
        # From 0.19.2 on. Megatron skips where it is finite.
        "grad_norm_skip_threshold": threshold if math.isfinite(threshold) else math.inf,
        "overlap_param_gather": bool(
            getattr(config, "overlap_param_gather", False) and config.use_distributed_optimizer
        ),
    }


def _moments(config: Any) -> dict[str, Any]:
    """Return the moments' dtypes. Raises ArgumentError for what the precision-aware optimizer does otherwise."""
    if not getattr(config, "use_precision_aware_optimizer", False):
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
