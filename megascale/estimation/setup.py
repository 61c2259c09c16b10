"""How a run is set up, as far as an estimate needs it."""

from dataclasses import dataclass

import torch

from megascale.config import check_moment_dtypes
from megascale.errors import ArgumentError, ArgumentTypeError
from megascale.grad_sync.bucket import main_grad_dtype
from megascale.grad_sync.layout import DEFAULT_BUCKET_NUMEL
from megascale.kernels.compact_moments import CODE_DTYPES
from megascale.utils import validate

SHARDINGS = ("replicated", "grad_sync", "distributed")
COMMUNICATION = ("nccl", "gloo")
MOMENTS = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "amsgrad": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "lion": ("exp_avg",),
}
"""Names of the moments that each optimizer keeps; "momentum" is SGD with momentum."""
COUNTS_STEPS = ("adamw", "adam", "amsgrad")
"""Optimizers that keep a step count for each parameter."""
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")
MOST_RANKS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Ranks, sharding, optimizer and dtypes of a run. Every field is checked.

    Attributes:
        ranks: data-parallel ranks.
        sharding: "replicated" (MixedPrecisionOptimizer; on several ranks under DistributedDataParallel), "grad_sync"
            (MixedPrecisionOptimizer with GradSync) or "distributed" (DistributedOptimizer).
        optimizer: a key of :data:`MOMENTS`.
        exp_avg_dtype, exp_avg_sq_dtype: of the first (or the momentum) and the second moment.
        grad_dtype, reduce_dtype: of main grads, and of their messages (None: the same); see GradSync.
        bucket_numel: elements of a bucket.
        communication: "nccl" or "gloo", which sends shards as messages from rank to rank.
        rank: whose memory is estimated. Rank 0 holds the most.
    """

    ranks: int = 1
    sharding: str = "replicated"
    optimizer: str = "adamw"
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype | None = None
    bucket_numel: int = DEFAULT_BUCKET_NUMEL
    communication: str = "nccl"
    rank: int = 0

    def __post_init__(self) -> None:
        validate.integer("ranks", self.ranks, minimum=1, maximum=MOST_RANKS)
        validate.one_of("sharding", self.sharding, SHARDINGS)
        validate.one_of("optimizer", self.optimizer, tuple(MOMENTS))
        validate.one_of("communication", self.communication, COMMUNICATION)
        validate.integer("bucket_numel", self.bucket_numel, minimum=1)
        validate.integer("rank", self.rank, minimum=0, maximum=self.ranks - 1)
        check_moment_dtypes(self)
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
            if getattr(self, name) in CODE_DTYPES and "exp_avg_sq" not in MOMENTS[self.optimizer]:
                raise ArgumentError(
                    f"{name}={getattr(self, name)} needs Adam or AdamW, not {self.optimizer}; leave it at torch.float32"
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
    def has_main_grads(self) -> bool:
        """Whether gradients are added to main grads, and dropped."""
        return self.sharding != "replicated"

    @property
    def sends_messages(self) -> bool:
        """Whether shards travel as messages from rank to rank."""
        return self.is_sharded and self.communication == "gloo" and self.ranks > 1

    def moment_dtypes(self, main_dtype: torch.dtype) -> list[torch.dtype]:
        """Return the dtype of each moment of a main param of ``main_dtype``."""
        if main_dtype == torch.float64:
            return [main_dtype] * len(MOMENTS[self.optimizer])
        names = MOMENTS[self.optimizer]
        second = self.exp_avg_sq_dtype
        dtypes = {name: second if name in SECOND_MOMENTS else self.exp_avg_dtype for name in names}
        if second in CODE_DTYPES and "max_exp_avg_sq" in dtypes:
            dtypes["max_exp_avg_sq"] = main_dtype
        return list(dtypes.values())

    def grad_dtype_of(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the gradients that the step reads, for model params of ``model_dtype``."""
        return main_grad_dtype(self.grad_dtype, model_dtype) if self.has_main_grads else model_dtype

    def travel_dtype_of(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of gradients in messages, for model params of ``model_dtype``."""
        grad_dtype = self.grad_dtype_of(model_dtype)
        return (self.reduce_dtype or grad_dtype) if self.has_main_grads else grad_dtype
