"""Estimate the memory that a run needs per rank, before it runs, from the sizes of its parameters alone."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megascale.builder import is_hidden_matrix
from megascale.config import OptimizerConfig
from megascale.errors import ArgumentError, ArgumentTypeError
from megascale.kernels.compact_moments import held_bytes
from megascale.rules import CODE_DTYPES, VARIANTS
from megascale.utils import validate
from megascale.utils.dtypes import HALF_DTYPES

PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
AS_IS = "as_is"
"""A precision: the dtypes that the module's parameters have."""
SHARDINGS = {
    "ddp": "MixedPrecisionOptimizer with DistributedDataParallel",
    "grad_sync": "MixedPrecisionOptimizer with GradSync",
    "zero1": "DistributedOptimizer",
    "fsdp2": "MixedPrecisionOptimizer with fully_shard",
}
"""How parameters, gradients and state are spread over data-parallel ranks, and by what."""
ELSEWHERE = {
    "ddp": ("NO_SHARD", "zero0", "replicate"),
    "zero1": ("optim", "distributed_optimizer"),
    "fsdp2": ("FULL_SHARD", "SHARD_GRAD_OP", "fsdp", "zero2", "zero3", "optim_grads", "optim_grads_params"),
}
"""Names of those in FSDP, DeepSpeed and Megatron-Core, in any case, with ``-`` or ``_`` or neither: ``ZeRO-3``."""
_BY_NAME = {name.replace("_", "").lower(): ours for ours, theirs in ELSEWHERE.items() for name in (ours, *theirs)}
OPTIMIZERS = tuple(VARIANTS)
"""Names that ``optimizer`` takes. "momentum": SGD with momentum. "muon": hidden matrices by Muon, all else by AdamW."""
OF_CONFIG = (
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "store_param_remainders",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
)
"""Fields that mean what those of an OptimizerConfig mean."""
TrainedParam = tuple[torch.Size, torch.dtype, bool]
"""Shape, dtype, and whether it is a hidden matrix, which Muon would update."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Ranks, sharding, optimizer and dtypes of a run. Every field is checked.

    Attributes:
        ranks: data-parallel ranks.
        sharding: a key of :data:`SHARDINGS`, or a name of one in :data:`ELSEWHERE`, in whose place ours is kept.
        optimizer: one of :data:`OPTIMIZERS`.
        exp_avg_dtype, exp_avg_sq_dtype, store_param_remainders, optimizer_cpu_offload, optimizer_offload_fraction: see
            :class:`megascale.OptimizerConfig`.
        grad_dtype: dtype of the main grads of GradSync and DistributedOptimizer.

    Raises:
        ArgumentError, ArgumentTypeError: naming the field, its value and what it may be.
    """

    ranks: int = 1
    sharding: str = "ddp"
    optimizer: str = "adamw"
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    store_param_remainders: bool = False
    grad_dtype: torch.dtype = torch.float32
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 1.0

    def __post_init__(self) -> None:
        validate.integer("ranks", self.ranks, minimum=1)
        bare = re.sub("[-_]", "", str(self.sharding)).lower()
        object.__setattr__(self, "sharding", _BY_NAME.get(bare, self.sharding))  # the class is frozen
        validate.one_of("sharding", self.sharding, tuple(SHARDINGS))
        validate.one_of("optimizer", self.optimizer, OPTIMIZERS)
        if not isinstance(self.grad_dtype, torch.dtype) or not self.grad_dtype.is_floating_point:
            raise ArgumentTypeError(f"grad_dtype must be a floating point torch.dtype, got {self.grad_dtype!r}")
        OptimizerConfig(**{name: getattr(self, name) for name in OF_CONFIG})  # raises what a run would
        rule, variant = VARIANTS[self.optimizer]
        names = rule.state_names(variant.options)
        coded = {moment.field for moment in rule.moments if moment.codes is not None and moment.name in names}
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
            if getattr(self, name) in CODE_DTYPES and name not in coded:
                raise ArgumentError(
                    f"{name}={getattr(self, name)} needs an optimizer that holds such moments as 8-bit codes, not "
                    f"{self.optimizer}; leave it at torch.float32"
                )

    def moment_bytes(self, dtype: torch.dtype, *, is_hidden: bool) -> float:
        """Return the bytes per element of all moments of a parameter of ``dtype``, with the scales of 8-bit codes."""
        rule, variant = VARIANTS["adamw" if self.optimizer == "muon" and not is_hidden else self.optimizer]
        moments = [moment for moment in rule.moments if moment.name in rule.state_names(variant.options)]
        if dtype == torch.float64:
            return len(moments) * dtype.itemsize
        return sum(held_bytes(moment.dtype(getattr(self, moment.field))) for moment in moments)


@dataclass(frozen=True, repr=False)
class Estimate:
    """What a run needs, in bytes. Activations, and what backward and collectives hold for a time, come on top.

    Attributes:
        numel: trained parameters, in elements.
        setup: what was estimated.
        held: on the device of the rank that holds most, between backward and the step, by kind.
        host: in that rank's share of host memory, by kind; empty without ``optimizer_cpu_offload``.
        checkpoint: model and optimizer on disk, of all ranks together.
    """

    numel: int
    setup: Setup
    held: dict[str, int]
    host: dict[str, int]
    checkpoint: int

    @property
    def total(self) -> int:
        """Bytes on the device between backward and the step."""
        return sum(self.held.values())

    def __repr__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        setup = self.setup
        yield (
            f"{self.numel:,} parameters, {setup.optimizer}, {setup.ranks:,} rank{'s' * (setup.ranks > 1)}, "
            f"{setup.sharding} ({SHARDINGS[setup.sharding]})"
        )
        for where, kinds in (("on the device", self.held), ("in host memory", self.host)):
            if kinds:
                yield f"\nBytes per rank {where}, without activations"
                yield from (self._row(kind, nbytes) for kind, nbytes in kinds.items() if nbytes)
                yield self._row("total", sum(kinds.values()))
        yield f"\n{self._row('checkpoint, all ranks', self.checkpoint)}"

    def _row(self, kind: str, nbytes: int) -> str:
        return f"  {kind:<24}{nbytes:>22,}{nbytes / 1e9:>12,.3f} GB{nbytes / self.numel:>10.2f} per parameter"


def estimate(model: nn.Module | int, *, precision: str = "fp16", **setup: Any) -> Estimate:
    """Estimate the memory of a rank by kind, on device and host, and the size of a checkpoint. Allocates no tensor.

    Args:
        model: a module, best built under ``torch.device("meta")``; or a number of parameters.
        precision: of the parameters: "fp16", "bf16" or "fp32"; for a module also "as_is".
        setup: fields of :class:`Setup`, such as ``ranks=8, sharding="zero1", optimizer="lion"``.

    Raises:
        ArgumentError, ArgumentTypeError: naming the argument, its value and what it may be.
    """
    for name in setup:
        validate.one_of("argument of estimate()", name, tuple(Setup.__dataclass_fields__))
    chosen = Setup(**setup)
    validate.one_of("precision", precision, (*PRECISIONS, AS_IS))
    dtype = PRECISIONS.get(precision)
    if isinstance(model, nn.Module):
        kinds = {id(param): type(module).__name__ for module in model.modules() for param in module.parameters(False)}
        named = [(name, param, dtype or param.dtype) for name, param in model.named_parameters()]
        trained = [
            (param.shape, kept, is_hidden_matrix(name, param.shape, kinds[id(param)]))
            for name, param, kept in named
            if param.requires_grad
        ]
        if not trained:
            raise ArgumentError("model has no parameter that is trained; an estimate needs at least one")
        frozen = sum(param.numel() * kept.itemsize for _, param, kept in named if not param.requires_grad)
        return _added_up(trained, frozen, sum(buffer.nbytes for buffer in model.buffers()), chosen)
    if isinstance(model, bool) or not isinstance(model, int):
        raise ArgumentTypeError(f"model must be a torch.nn.Module or a number of parameters, got {model!r}")
    if dtype is None:
        raise ArgumentError(f"precision={AS_IS!r} needs a module, which has dtypes; choose {', '.join(PRECISIONS)}")
    numel = validate.integer("number of parameters", model, minimum=1)
    return _added_up([(torch.Size([numel]), dtype, True)], 0, 0, chosen)


def _added_up(trained: Sequence[TrainedParam], frozen: int, buffers: int, setup: Setup) -> Estimate:
    """Return the sums over all parameters. ``frozen``, ``buffers``: bytes of parameters not trained, and of buffers."""
    held = dict.fromkeys(("model params", "gradients", "main grads", "main params", "moments", "buckets of DDP"), 0.0)
    host = dict.fromkeys(("main params", "moments", "copies of weights", "copies of gradients"), 0.0)
    fsdp2, reduces = setup.sharding == "fsdp2", setup.sharding in ("grad_sync", "zero1")
    held["frozen and buffers"] = buffers + (-(-frozen // setup.ranks) if fsdp2 else frozen)
    checkpoint = float(frozen + buffers)
    for shape, dtype, is_hidden in trained:
        numel, is_half = shape.numel(), dtype in HALF_DTYPES
        # The first rank's shard is the largest. FSDP2 cuts between rows, ZeRO-1 between elements.
        row = math.prod(shape[1:]) if fsdp2 and numel else 1
        shard = -(-(numel // row) // setup.ranks) * row if fsdp2 or setup.sharding == "zero1" else numel
        gradient = setup.grad_dtype if reduces and is_half else dtype
        main = (torch.int16 if setup.store_param_remainders else torch.float32).itemsize if is_half else 0
        moments = setup.moment_bytes(dtype, is_hidden=is_hidden)
        there = shard * setup.optimizer_offload_fraction if setup.optimizer_cpu_offload and is_half else 0.0
        held["model params"] += (shard if fsdp2 else numel) * dtype.itemsize
        held["main grads" if reduces else "gradients"] += (shard if fsdp2 else numel) * gradient.itemsize
        held["buckets of DDP"] += numel * dtype.itemsize if setup.sharding == "ddp" and setup.ranks > 1 else 0
        held["main params"] += (shard - there) * main
        held["moments"] += (shard - there) * moments
        host["main params"] += there * main
        host["moments"] += there * moments
        host["copies of weights"] += there * dtype.itemsize
        host["copies of gradients"] += there * gradient.itemsize
        checkpoint += numel * (dtype.itemsize + main + moments)
    return Estimate(
        numel=sum(shape.numel() for shape, _, _ in trained),
        setup=setup,
        held={kind: round(nbytes) for kind, nbytes in held.items()},
        host={kind: round(nbytes) for kind, nbytes in host.items()} if any(host.values()) else {},
        checkpoint=round(checkpoint),
    )
