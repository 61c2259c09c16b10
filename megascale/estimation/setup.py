"""How a run is set up, as far as an estimate needs it."""

from dataclasses import dataclass

import torch

from megascale.config import AUTO, check_moment_dtypes, check_offload
from megascale.errors import ArgumentError, ArgumentTypeError
from megascale.estimation.sizes import ParamSpec
from megascale.grad_sync.bucket import main_grad_dtype
from megascale.grad_sync.layout import DEFAULT_BUCKET_NUMEL
from megascale.kernels.remainders import REMAINDER_DTYPE
from megascale.rules import CODE_DTYPES, FIRST, SECOND, VARIANTS
from megascale.utils import validate
from megascale.utils.dtypes import HALF_DTYPES
from megascale.utils.spelling import names_arguments

SHARDINGS = ("replicated", "grad_sync", "distributed")
SHARDS = ("auto", "elements", "parameters")
COMMUNICATION = ("nccl", "gloo")
MOMENTS = {name: tuple(rule.state_names(variant.options)) for name, (rule, variant) in VARIANTS.items()}
"""Names of the moments that each optimizer keeps. "momentum" is SGD with momentum; "muon" is for hidden matrices."""
BESIDE_MUON = "adamw"
"""The optimizer of all other parameters where hidden matrices have Muon."""
_TAKERS = {
    dtype_field: tuple(
        name
        for name, (rule, _) in VARIANTS.items()
        if any(one.field == dtype_field and one.codes is not None and one.name in MOMENTS[name] for one in rule.moments)
    )
    for dtype_field in (FIRST, SECOND)
}
"""Optimizers that may hold moments as 8-bit codes."""
MOST_RANKS = 1 << 20


def main_dtype_of(model_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the main params of model params of ``model_dtype``."""
    return torch.float32 if model_dtype in HALF_DTYPES else model_dtype


@names_arguments
@dataclass(frozen=True, kw_only=True)
class Setup:
    """Ranks, sharding, optimizer and dtypes of a run. Every field is checked.

    Attributes:
        ranks: data-parallel ranks.
        sharding: "replicated" (MixedPrecisionOptimizer; on several ranks under DistributedDataParallel), "grad_sync"
            (MixedPrecisionOptimizer with GradSync) or "distributed" (DistributedOptimizer).
        shard: with "distributed": "elements", "parameters" (each whole on one rank), or "auto": as
            DistributedOptimizer decides, which keeps matrices whole for Muon.
        optimizer: a key of :data:`MOMENTS`. "muon": hidden matrices by Muon and all else by AdamW, in one
            ChainedOptimizer, see :func:`megascale.build_optimizer`.
        exp_avg_dtype, exp_avg_sq_dtype: of the first (or the momentum) and the second moment.
        store_param_remainders: main params are held as remainders, see :class:`megascale.OptimizerConfig`.
        grad_dtype, reduce_dtype: of main grads, and of their messages (None: the same); see GradSync.
        bucket_numel: elements of a bucket.
        optimizer_cpu_offload: main params and state of 16-bit parameters are in host memory and updated there.
        optimizer_offload_fraction: the share of their elements that goes there.
        optimizer_offload_compute: "host", or "device", which main params and state then visit.
        optimizer_offload_grad_bytes: most bytes that copies of gradients take in host memory; None: all that they have.
        overlap_cpu_optimizer_d2h_h2d: the update overlaps the next forward pass; a timeline of a sharded run
            leaves that out.
        communication: "nccl" or "gloo", which sends shards as messages from rank to rank.
        rank: whose memory is estimated. Of shards of elements rank 0 has the most; whole parameters are balanced by the
            cost of their updates, and any rank may hold the most.
    """

    ranks: int = 1
    sharding: str = "replicated"
    shard: str = "auto"
    optimizer: str = "adamw"
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    store_param_remainders: bool = False
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 1.0
    optimizer_offload_compute: str = "host"
    optimizer_offload_grad_bytes: int | None = None
    overlap_cpu_optimizer_d2h_h2d: bool = False
    grad_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype | None = None
    bucket_numel: int = DEFAULT_BUCKET_NUMEL
    communication: str = "nccl"
    rank: int = 0

    def __post_init__(self) -> None:
        validate.integer("ranks", self.ranks, minimum=1, maximum=MOST_RANKS)
        validate.one_of("sharding", self.sharding, SHARDINGS)
        validate.one_of("shard", self.shard, SHARDS)
        validate.one_of("optimizer", self.optimizer, tuple(MOMENTS))
        if self.optimizer == "muon" and self.shard == "elements":
            raise ArgumentError('shard="elements" cuts matrices, which Muon reads whole; leave it at "auto"')
        validate.one_of("communication", self.communication, COMMUNICATION)
        validate.integer("bucket_numel", self.bucket_numel, minimum=1)
        validate.integer("rank", self.rank, minimum=0, maximum=self.ranks - 1)
        for name in ("store_param_remainders", "optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d"):
            validate.flag(name, getattr(self, name))
        if self.optimizer_offload_compute == AUTO:
            raise ArgumentError(
                'optimizer_offload_compute="auto" is measured in a run; give the estimate "host" or "device"'
            )
        if str(self.optimizer_offload_fraction) == AUTO:
            raise ArgumentError('optimizer_offload_fraction="auto" is measured in a run; give the estimate a number')
        check_offload(self)
        if self.optimizer_cpu_offload and self.optimizer == "muon":
            raise ArgumentError(
                'optimizer_cpu_offload=True is not estimated for optimizer="muon", whose matrices stay on the device; '
                "leave it False"
            )
        check_moment_dtypes(self)
        for name, takers in _TAKERS.items():
            if getattr(self, name) in CODE_DTYPES and self.optimizer not in takers:
                raise ArgumentError(
                    f"{name}={getattr(self, name)} needs one of {', '.join(takers)}, not {self.optimizer}; leave it at "
                    "torch.float32"
                )
        for name in ("grad_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is None and name == "reduce_dtype":
                continue
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise ArgumentTypeError(f"{name} must be a floating point torch.dtype, got {dtype!r}")

    @property
    def is_sharded(self) -> bool:
        """Whether each rank keeps only its shard of main params and moments."""
        return self.sharding == "distributed"

    @property
    def main_itemsize(self) -> int:
        """Bytes that hold an element of a main param which is a copy: fp32, or a remainder."""
        return REMAINDER_DTYPE.itemsize if self.store_param_remainders else torch.float32.itemsize

    @property
    def state_visits_device(self) -> bool:
        """Whether main params and state live in host memory, and the device updates them."""
        return self.optimizer_cpu_offload and self.optimizer_offload_compute == "device"

    @property
    def copies_in_backward(self) -> bool:
        """Whether gradients travel to host memory while backward runs, and not when the step begins.

        Those that are averaged behind backward, or by the host, do not.
        """
        are_late = self.ranks > 1 and (self.sharding == "replicated" or self.communication == "gloo")
        return self.optimizer_cpu_offload and self.overlap_cpu_optimizer_d2h_h2d and not are_late

    @property
    def has_main_grads(self) -> bool:
        """Whether gradients are added to main grads, and dropped."""
        return self.sharding != "replicated"

    @property
    def sends_messages(self) -> bool:
        """Whether shards travel as messages from rank to rank."""
        return self.is_sharded and self.communication == "gloo" and self.ranks > 1

    def optimizer_of(self, param: ParamSpec) -> str:
        """Return the optimizer of one parameter: a key of :data:`MOMENTS`."""
        return BESIDE_MUON if self.optimizer == "muon" and not param.is_hidden else self.optimizer

    def keeps_whole(self, optimizer: str) -> bool:
        """Whether shards hold whole parameters of ``optimizer``, a key of :data:`MOMENTS`."""
        return self.is_sharded and (self.shard == "parameters" or optimizer == "muon")

    def counts_steps(self, param: ParamSpec) -> bool:
        """Whether a step count is kept for one parameter: 8-bit codes depend on it, too."""
        rule, variant = VARIANTS[self.optimizer_of(param)]
        return rule.counts_steps(variant.options) or any(dtype in CODE_DTYPES for dtype in self.moment_dtypes(param))

    def moment_dtypes(self, param: ParamSpec) -> list[torch.dtype]:
        """Return the dtype of each moment of a parameter."""
        rule, variant = VARIANTS[self.optimizer_of(param)]
        names = rule.state_names(variant.options)
        main_dtype = main_dtype_of(param.dtype)
        if main_dtype == torch.float64:
            return [main_dtype] * len(names)
        moments = {moment.name: moment for moment in rule.moments}
        return [moments[name].dtype(getattr(self, moments[name].field)) for name in names]

    def grad_dtype_of(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the gradients that the step reads, for model params of ``model_dtype``."""
        return main_grad_dtype(self.grad_dtype, model_dtype) if self.has_main_grads else model_dtype

    def travel_dtype_of(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of gradients in messages, for model params of ``model_dtype``."""
        grad_dtype = self.grad_dtype_of(model_dtype)
        return (self.reduce_dtype or grad_dtype) if self.has_main_grads else grad_dtype
