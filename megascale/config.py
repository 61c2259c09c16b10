"""OptimizerConfig: Megatron-Core's field names, validated once, frozen."""

import math
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, fields
from functools import partial
from typing import Any

import torch

from megascale.errors import ArgumentError
from megascale.rules import CONFIGURABLE, FIRST, FIRST_DTYPE, SECOND, SECOND_DTYPE, muon
from megascale.utils import validate
from megascale.utils.spelling import told

BACKENDS = ("auto", "reference", "torch", "native", "triton", "apex")
HYSTERESIS_RESETS = ("growth", "clean_step")
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOMENT_DTYPES = {
    FIRST: (*STATE_DTYPES, FIRST_DTYPE),
    SECOND: (*STATE_DTYPES, SECOND_DTYPE),
}
COMPACT_STATE: dict[str, Any] = {FIRST: FIRST_DTYPE, SECOND: SECOND_DTYPE, "store_param_remainders": True}
"""What ``compact_state=True`` stands for."""


def _checked(default: Any, check: Callable[..., Any], *, scaler: str = "", **bounds: Any) -> Any:
    """Return a field whose values ``check`` must pass, a function of :mod:`megascale.utils.validate` with ``bounds``.

    None passes where it is the default. ``scaler``: the argument and attribute of a scaler that the field is for.
    """
    return field(default=default, metadata={"check": partial(check, **bounds), "scaler": scaler})


@dataclass(frozen=True, kw_only=True)
class DecisionConfig:
    """How a step is decided: the same for every optimizer of a chain. :class:`OptimizerConfig` explains the fields."""

    log_num_zeros_in_grad: bool = False
    grad_norm_skip_threshold: float = math.inf
    max_consecutive_skips: int | None = _checked(None, validate.integer, minimum=1)
    max_overflows_at_min_scale: int | None = _checked(None, validate.integer, minimum=1)

    def __post_init__(self) -> None:
        for one in fields(self):  # those of an OptimizerConfig, too
            value = getattr(self, one.name)
            check = validate.flag if one.type is bool else one.metadata.get("check")
            if check is not None and (value is not None or one.default is not None):
                check(one.name, value)
        if self.grad_norm_skip_threshold != math.inf:
            validate.positive("grad_norm_skip_threshold", self.grad_norm_skip_threshold)


@dataclass(frozen=True, kw_only=True)
class StepConfig(DecisionConfig):
    """All that a step reads of a config, and so what ranks compare. :class:`OptimizerConfig` explains the fields.

    The other fields of an OptimizerConfig say what is built: an optimizer, a scaler, a backend. A step meets these.
    """

    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    store_param_remainders: bool = False
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 1.0
    overlap_cpu_optimizer_d2h_h2d: bool = False
    pin_cpu_grads: bool = True
    pin_cpu_params: bool = True
    muon_ns_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < validate.non_negative("optimizer_offload_fraction", self.optimizer_offload_fraction) <= 1:
            raise ArgumentError(
                f"optimizer_offload_fraction must be above 0 and at most 1, got {self.optimizer_offload_fraction!r}; "
                "optimizer_cpu_offload=False keeps all on the device"
            )
        if self.optimizer_offload_fraction != 1.0 and not self.optimizer_cpu_offload:
            raise ArgumentError("optimizer_offload_fraction needs optimizer_cpu_offload=True: nothing goes to the host")
        if self.overlap_cpu_optimizer_d2h_h2d and not self.optimizer_cpu_offload:
            raise ArgumentError("overlap_cpu_optimizer_d2h_h2d=True needs optimizer_cpu_offload=True: nothing travels")
        for name, dtypes in MOMENT_DTYPES.items():
            given = getattr(self, name)
            dtype = getattr(torch, given, given) if isinstance(given, str) else given
            if dtype not in dtypes:
                raise ArgumentError(f"{name} must be one of {', '.join(map(str, dtypes))}, got {given!r}")
            object.__setattr__(self, name, dtype)  # the class is frozen
        if (self.exp_avg_dtype, self.exp_avg_sq_dtype) == (torch.int8, torch.float16):
            raise ArgumentError(
                "exp_avg_dtype=torch.int8 holds first moments as parts of the second ones' roots, and these are inf or "
                "0 in exp_avg_sq_dtype=torch.float16 where gradients are large or small; give "
                "exp_avg_sq_dtype=torch.uint8, torch.bfloat16 or torch.float32"
            )
        if self.muon_ns_dtype not in muon.NS_DTYPES:
            raise ArgumentError(
                f"muon_ns_dtype must be torch.bfloat16, torch.float32 or None, got {self.muon_ns_dtype!r}"
            )


@told
@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(StepConfig):
    """How the step scales, clips and counts, and (for :func:`megascale.build_optimizer`) which optimizer it wraps.

    Names and defaults are those of ``megatron.core.optimizer.OptimizerConfig`` where it has them. Exceptions:
    ``initial_loss_scale`` is ``2**16`` here (Megatron: ``2**32``, which skips 16 steps first), ``clip_grad`` is 0, as a
    torch optimizer does not clip unless it is asked to (Megatron: 1.0), and Lion's betas are 0.9 and 0.99, as in its
    paper (Megatron: 0.95 and 0.98). Fields that Megatron lacks are marked "megascale's".

    An optimizer clips to the ``clip_grad`` that it is given: the constructor's keyword, or else its config's. The
    config of Megatron-Core, which :func:`megascale.build_optimizer` takes too, brings Megatron's 1.0.

    An optimizer that gets a torch optimizer or scaler beside a config refuses fields that contradict them, such as
    another ``lr`` or ``initial_loss_scale``. ``build_optimizer`` builds both from the config.

    Attributes: Precision and loss scale
        fp16: Whether 16-bit parameters and gradients are fp16; then a grad scaler is required. Default: False.
        bf16: Whether 16-bit parameters and gradients are bf16; then a grad scaler is optional. Both False: all
            parameters are fp32. Default: False.
        loss_scale: A constant loss scale. None, or DeepSpeed's 0: dynamic for fp16, none for bf16 and fp32. Default:
            None.
        initial_loss_scale: First value of the dynamic loss scale. Default: 2.0**16.
        min_loss_scale: The dynamic loss scale never falls below it. Default: 1.0.
        max_loss_scale: The dynamic loss scale never grows above it (megascale's). None: as long as fp32 holds
            it. Default: None.
        loss_scale_window: Clean steps before the dynamic loss scale grows. Default: 1000.
        hysteresis: At which overflow the dynamic loss scale backs off, and at each later one, until it is replenished.
            Default: 2.
        hysteresis_reset: When hysteresis is replenished: "growth", with the growth of the scale, or
            "clean_step", after each clean step (megascale's). Default: "growth".
        loss_scale_growth_factor: What the dynamic loss scale is multiplied by when it grows (megascale's; a
            constant 2.0 in Megatron). Default: 2.0.
        loss_scale_backoff_factor: What the dynamic loss scale is multiplied by when it backs off (megascale's;
            a constant 0.5 in Megatron). Default: 0.5.

    Attributes: Clipping
        clip_grad: Largest global L2 norm of the unscaled gradients. 0: no clipping. The optimizer's
            ``clip_grad=`` replaces it. Default: 0.0.
        log_num_zeros_in_grad: Count zero elements of the gradients. Otherwise ``num_zeros_in_grad`` is NaN.
            Default: False.

    Attributes: Skipping
        grad_norm_skip_threshold: Skip a step whose gradient norm, unscaled and not clipped, is above it
            (Megatron-Core from 0.19.2 on). inf: none. The loss scale moves as after a clean step. Default:
            math.inf.
        max_consecutive_skips: More skips in a row than this raise SkippedStepsError (megascale's). None: only
            warnings, after 32 and at each doubling. Default: None.
        max_overflows_at_min_scale: More overflows in a row than this, while the dynamic loss scale is at its
            minimum, raise MinScaleError (megascale's). None: only warnings, after 8 and at each doubling.
            Default: None.

    Attributes: Kernels, memory and sharding
        backend: Kernels (megascale's): a name of :data:`megascale.config.BACKENDS`. "auto": the environment
            variable MEGASCALE_BACKEND, else what is fastest here, see :func:`megascale.kernels.select_backend`.
            Default: "auto".
        compact_state (bool): 8-bit moments and 16-bit remainders: the three fields that follow, as torch.int8,
            torch.uint8 and True (megascale's). Default: False.
        exp_avg_dtype: Dtype, or its name, of Adam's and Lion's first moment and of SGD's momentum buffer: float32,
            bfloat16 or float16; of Adam's and AdamW's int8, too. Arithmetic is fp32; fp64 parameters keep fp64
            moments. int8, and uint8 for the second moment, are codes (megascale's), see
            :mod:`megascale.kernels.compact_moments`. Default: torch.float32.
        exp_avg_sq_dtype: Dtype of Adam's second moment. bfloat16 cannot follow changes below 0.4%, which
            beta2=0.999 makes; float16 loses gradients below 2.4e-4. Measure before you train with either. uint8
            follows both. Default: torch.float32.
        store_param_remainders: Hold each main param as an int16 remainder beside its fp16 or bf16 model param:
            2 bytes in place of 4, see :mod:`megascale.kernels.remainders`. fp32 parameters are their own main
            params, with or without it. Default: False.
        optimizer_cpu_offload: Keep main params and state of 16-bit parameters in host memory and update them
            there, with the same bits. The device keeps weights and gradients. fp32 parameters are updated on the
            device. Default: False.
        optimizer_offload_fraction: With ``optimizer_cpu_offload``, the share of their elements that goes to host
            memory, at least: above 0, up to 1. Parameters that come first in the param groups, whose weights
            forward needs first, stay on the device. A checkpoint loads into a run with any other. The page *Memory*
            chooses it from two timed runs. Default: 1.0.
        overlap_cpu_optimizer_d2h_h2d: With ``optimizer_cpu_offload``, ``step()`` returns at once, and every
            module waits for its own weights in forward. False, and of a DistributedOptimizer, ``step()`` waits for
            the update. Default: False.
        pin_cpu_grads: With ``optimizer_cpu_offload``, copy gradients into pinned host memory. False: pageable,
            which is slower. Default: True.
        pin_cpu_params: With ``optimizer_cpu_offload``, copy 16-bit weights from pinned host memory. False:
            pageable, which is slower. Default: True.
        use_distributed_optimizer: Shard main params and optimizer state over data-parallel ranks: a
            DistributedOptimizer. Default: False.
        overlap_param_gather: DistributedOptimizer: the gather of parameters may overlap the next forward.
            Default: False.
        muon_ns_dtype: Dtype of Muon's iterations: bfloat16, torch's, or float32 (megascale's). None: bfloat16,
            but float32 on a CPU that has neither AVX512-BF16 nor AMX. Default: None.

    Attributes: The optimizer, which build_optimizer makes
        optimizer: "adam" (AdamW where ``decoupled_weight_decay``, and so "adamw" is the same), "sgd", "lion", or
            "muon": hidden matrices by Muon, all else by adam, in one ChainedOptimizer. Default: "adam".
        lr: Learning rate. build_optimizer requires it. Default: None.
        weight_decay: Weight decay. build_optimizer exempts biases and the parameters of norm layers. Default:
            0.01.
        adam_beta1: Weight of the old first moment in the new one. Default: 0.9.
        adam_beta2: Weight of the old second moment in the new one. Default: 0.999.
        adam_eps: Added to the root of the bias-corrected second moment. Default: 1e-8.
        decoupled_weight_decay: AdamW, which shrinks the weights. False: Adam, to whose gradients weight decay
            is added. Default: True.
        sgd_momentum: Weight of the old momentum in the new one. 0: no momentum buffer. Default: 0.9.
        lion_beta1: Weight of the old momentum in the step's direction. Default: 0.9.
        lion_beta2: Weight of the old momentum in the new one. Default: 0.99.
        muon_momentum: Weight of the old momentum in the new one. Default: 0.95.
        muon_nesterov: Orthogonalize the mean of gradient and momentum (Megatron-Core from 0.19.2 on), not the
            momentum. Default: True.
        muon_num_ns_steps: Newton-Schulz iterations. Default: 5.
        muon_coefficient_type: Coefficients of the iterations: "quintic" (torch's) or "polar_express" (arXiv
            2505.16932). Default: "quintic".
        muon_adjust_lr_fn: How lr follows a matrix's shape, by torch's names: "original", or "match_rms_adamw",
            which takes AdamW's lr and weight decay (megascale's). Default: "original".
        muon_adam_lr: Learning rate of what Muon does not update. None: ``lr`` (megascale's). Default: None.

    Raises:
        ArgumentError, ArgumentTypeError: naming the field and its value.
    """

    # Precision and loss scale
    fp16: bool = False
    bf16: bool = False
    loss_scale: float | None = _checked(None, validate.scale, scaler="initial_scale")
    initial_loss_scale: float = _checked(2.0**16, validate.scale, scaler="initial_scale")
    min_loss_scale: float = _checked(1.0, validate.scale, scaler="min_scale")
    max_loss_scale: float | None = _checked(None, validate.scale, scaler="max_scale")
    loss_scale_window: int = _checked(1000, validate.integer, minimum=1, scaler="growth_interval")
    hysteresis: int = _checked(2, validate.integer, minimum=1, scaler="hysteresis")
    hysteresis_reset: str = _checked("growth", validate.one_of, choices=HYSTERESIS_RESETS, scaler="hysteresis_reset")
    loss_scale_growth_factor: float = _checked(2.0, validate.positive, above=1, scaler="growth_factor")
    loss_scale_backoff_factor: float = _checked(0.5, validate.positive, below=1, scaler="backoff_factor")

    # What builds the wrapper
    clip_grad: float = _checked(0.0, validate.non_negative)
    backend: str = _checked("auto", validate.one_of, choices=BACKENDS)
    use_distributed_optimizer: bool = False
    overlap_param_gather: bool = False

    # The optimizer, which build_optimizer makes
    optimizer: str = _checked("adam", validate.one_of, choices=CONFIGURABLE)
    lr: float | None = _checked(None, validate.non_negative)
    weight_decay: float = _checked(0.01, validate.non_negative)
    adam_beta1: float = _checked(0.9, validate.fraction)
    adam_beta2: float = _checked(0.999, validate.fraction)
    adam_eps: float = _checked(1e-8, validate.positive)
    decoupled_weight_decay: bool = True
    sgd_momentum: float = _checked(0.9, validate.non_negative)
    lion_beta1: float = _checked(0.9, validate.fraction)
    lion_beta2: float = _checked(0.99, validate.fraction)
    muon_momentum: float = _checked(0.95, validate.non_negative)
    muon_nesterov: bool = True
    muon_num_ns_steps: int = _checked(5, validate.integer, minimum=1, maximum=muon.MOST_ITERATIONS)
    muon_coefficient_type: str = _checked("quintic", validate.one_of, choices=muon.COEFFICIENTS)
    muon_adjust_lr_fn: str = _checked("original", validate.one_of, choices=muon.ADJUST_LR_FNS)
    muon_adam_lr: float | None = _checked(None, validate.non_negative)

    compact_state: InitVar[bool] = False

    def __post_init__(self, compact_state: bool) -> None:
        # Other libraries' words become ours first, so that checks, ranks and messages know one only.
        if self.loss_scale == 0 and self.loss_scale is not False:
            object.__setattr__(self, "loss_scale", None)
        if self.optimizer == "adamw" and self.decoupled_weight_decay:
            object.__setattr__(self, "optimizer", "adam")
        super().__post_init__()
        for name, value in COMPACT_STATE.items() if validate.flag("compact_state", compact_state) else ():
            if getattr(self, name) not in (value, getattr(OptimizerConfig, name)):
                raise ArgumentError(
                    f"compact_state=True sets {name}={value}, got {getattr(self, name)!r}; leave one of them out"
                )
            object.__setattr__(self, name, value)
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            raise ArgumentError("overlap_param_gather=True needs use_distributed_optimizer=True: nothing is gathered")
        if self.fp16 and self.bf16:
            raise ArgumentError("fp16 and bf16 are both True; choose one")
        lowest, initial = float(self.min_loss_scale), float(self.initial_loss_scale)
        highest = validate.LARGEST_SCALE if self.max_loss_scale is None else float(self.max_loss_scale)
        if not lowest <= initial <= highest:
            raise ArgumentError(
                "min_loss_scale <= initial_loss_scale <= max_loss_scale must hold, "
                f"got {lowest} <= {initial} <= {highest}"
            )


SCALER_FIELDS = {one.name: one.metadata["scaler"] for one in fields(OptimizerConfig) if one.metadata.get("scaler")}
"""The fields that say what the scaler is, and the scaler's argument and attribute for each."""
