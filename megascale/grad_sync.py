"""Gradient accumulation in fp32 and its reduction, bucket by bucket, hidden behind the rest of backward.

Hooks on plain parameters add each gradient to its main grad as soon as backward has made it, and free the 16-bit one. A
bucket's reduction starts when its last gradient has arrived. Every rank starts the buckets in the same order, whatever
order its own gradients come in; what backward did not start, :meth:`GradSync.finish` does, so that unused parameters
hang nobody.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megascale import validate
from megascale.bucket_reduction import BucketReduction, Courier, Divisor, bucket_reduction
from megascale.collectives import group_rank, group_size
from megascale.dtensors import is_dtensor
from megascale.errors import ArgumentError, ArgumentTypeError, UsageError, sparse_gradient
from megascale.flat_buffer import FlatBucket
from megascale.layout import DEFAULT_BUCKET_NUMEL, ParamSize, build_layouts
from megascale.parallel import GradGroup, ParallelGroups, is_expert

REDUCTIONS = ("mean", "sum")
MOST_UNSETTLED = 2
"""Buckets on their way at the same time, where each holds scratch of its own size."""


@dataclass(eq=False)
class SyncedBucket:
    """One bucket: its parameters, its main grads, its reduction, and which gradients it still waits for."""

    index: int
    memory: FlatBucket
    group: GradGroup
    params: dict[str, nn.Parameter]
    reduction: BucketReduction
    tag: int
    waiting: set[str] = field(init=False)
    fresh: set[str] = field(init=False)
    started: bool = field(init=False)

    def __post_init__(self) -> None:
        self.reset()

    @property
    def rank(self) -> int:
        """Which shard of the bucket is this rank's."""
        return group_rank(self.group.shard)

    def reset(self) -> None:
        """Begin a new step: every first gradient overwrites what the step before has left."""
        self.waiting = set(self.params)
        self.fresh = set(self.params)
        self.started = False

    def start(self, divisor: Divisor) -> None:
        """Begin the reduction. Parameters that had no gradient take part with zeros."""
        for name in self.fresh:
            self.memory.views[name].zero_()
        self.fresh = set()
        self.started = True
        self.reduction.start(divisor)


def tag_of(names: Iterable[str]) -> int:
    """Return the tag of a bucket's messages: a checksum of its parameters' names, so that all ranks have the same.

    Several optimizers' buckets may be under way over one group, started in another order on each rank.
    """
    return zlib.crc32("\n".join(names).encode()) & 0x3FFF_FFFF


def check_plain(params: Mapping[str, nn.Parameter]) -> None:
    """Raise ArgumentTypeError, naming it, for a parameter whose gradient cannot be synced here."""
    for name, param in params.items():
        if is_dtensor(param):
            raise ArgumentTypeError(
                f"parameter {name!r} is a DTensor, whose own mesh reduces its gradient; use MixedPrecisionOptimizer "
                "without grad_sync"
            )


class GradSync:
    """Owns the main grads of a set of parameters and keeps them reduced over the data-parallel ranks.

    After backward and :meth:`finish`, :meth:`main_grad` is the reduced gradient, on every rank; ``param.grad`` is None.
    A parameter that no rank has used has a main grad of zeros. Main grads are undefined between :meth:`zero_` and
    :meth:`finish`.

    Args:
        named_parameters: in the order of the forward pass, as ``model.named_parameters()`` gives them. Frozen ones are
            left out.
        groups: ``data_parallel`` ranks reduce, those of ``expert_data_parallel`` for experts; see
            :meth:`ParallelGroups.of`.
        grad_dtype: of the main grads; micro-batches add up in it. A parameter of a wider or another 16-bit type has
            main grads of its own type.
        reduce_dtype: what travels. None: the main grads' type. A 16-bit type halves the traffic; gradients are divided
            by the number of ranks first, because 16-bit sums overflow.
        reduction: "mean" over the data-parallel ranks, or "sum". See :meth:`set_divisor` for any other divisor.
        bucket_numel: elements of a bucket, see :func:`megascale.layout.build_layouts`.
        overlap: start reductions during backward. False: all of them in :meth:`finish`.
        sharded: reduce-scatter: only this rank's shard of every bucket is reduced. DistributedOptimizer sets it.

    Backward raises GradientError for a sparse gradient and UsageError for one that is too late, naming the parameter.

    Raises:
        ArgumentError: for an argument that does not fit, naming it.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        groups: ParallelGroups | ProcessGroup | DeviceMesh | None = None,
        grad_dtype: torch.dtype = torch.float32,
        reduce_dtype: torch.dtype | None = None,
        reduction: str = "mean",
        bucket_numel: int = DEFAULT_BUCKET_NUMEL,
        overlap: bool = True,
        sharded: bool = False,
    ) -> None:
        self._groups = ParallelGroups.of(groups)
        self._grad_dtype = grad_dtype
        self._reduce_dtype = reduce_dtype
        is_mean = validate.one_of("reduction", reduction, REDUCTIONS) == "mean"
        self._usual_divisor = group_size(self._groups.data_parallel) if is_mean else 1
        self._bucket_numel = validate.integer("bucket_numel", bucket_numel, minimum=1)
        self._overlap = validate.flag("overlap", overlap)
        self._sharded = validate.flag("sharded", sharded)
        if not all(dtype.is_floating_point for dtype in (grad_dtype, reduce_dtype or grad_dtype)):
            raise ArgumentError(f"grad_dtype and reduce_dtype must be floating point, got {grad_dtype}, {reduce_dtype}")
        self.buckets: list[SyncedBucket] = []
        self._courier = Courier()
        self._bucket_of: dict[int, SyncedBucket] = {}
        self._main_grads: dict[int, Tensor] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._divisor: Divisor | None = None
        self._syncing = True
        self._next = 0
        self._settled = 0
        self._finished = False
        named = list(named_parameters)
        self.add(named)
        if not self.buckets and not sharded:
            raise ArgumentError("named_parameters has no parameter with requires_grad")

    def add(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], param_groups: Mapping[str, int] | None = None
    ) -> list[SyncedBucket]:
        """Take in more parameters, in buckets of their own behind the others; returns those buckets.

        A gradient that is there already counts. ``param_groups``: by name; parameters of different groups do not share
        a bucket.
        """
        params = {name: param for name, param in named_parameters if param.requires_grad}
        check_plain(params)
        added = self._build(params, param_groups or {})
        self.buckets += added
        for bucket in added:
            for name, param in bucket.params.items():
                self._bucket_of[id(param)] = bucket
                self._main_grads[id(param)] = bucket.memory.views[name]
                self._hooks.append(param.register_post_accumulate_grad_hook(self._hook(name, bucket)))
                if param.grad is not None:
                    self._accumulate(name, param, bucket)
        return added

    def main_grad(self, param: nn.Parameter) -> Tensor | None:
        """Return the main grad of ``param``, live, in its shape; None for a parameter that is not synced here."""
        return self._main_grads.get(id(param))

    def set_divisor(self, divisor: Divisor) -> None:
        """Divide this step's sum over all ranks by ``divisor``, in place of the mean: by tokens, say.

        Call it after :meth:`zero_` and before the step; the next step has the usual divisor again. A 0-d device tensor
        is not read by the host.

        Raises:
            ArgumentError: for a number that is not above 0, or a tensor of more than one element.
        """
        if isinstance(divisor, Tensor):
            if divisor.numel() != 1:
                raise ArgumentError(f"divisor must be one number, got a tensor of shape {tuple(divisor.shape)}")
            self._divisor = divisor.detach().reshape(())
        else:
            self._divisor = validate.positive("divisor", divisor)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate only: for every backward of a step but the last."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @torch.no_grad()
    def finish(self) -> None:
        """Start what backward has not started, and wait until every main grad is reduced. Again: nothing happens."""
        if self._finished:
            return
        while self._next < len(self.buckets):
            self._start_next()
        for bucket in self.buckets:
            bucket.reduction.settle()
        for bucket in self.buckets:
            bucket.reduction.finish(self._current_divisor())
        self._finished = True

    @torch.no_grad()
    def zero_(self) -> None:
        """Begin a new step. A reduction still on its way ends first."""
        if self._next > 0:
            self.finish()
        for bucket in self.buckets:
            bucket.reset()
        self._divisor = None
        self._next = self._settled = 0
        self._finished = False

    def detach(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _build(self, params: dict[str, nn.Parameter], param_groups: Mapping[str, int]) -> list[SyncedBucket]:
        """Return new buckets in the order in which backward is expected to fill them."""
        groups = {is_expert(param): self._groups.of_param(param) for param in params.values()}
        place = {name: index for index, name in enumerate(params)}
        shapes = {name: param.shape for name, param in params.items()}
        built: list[tuple[int, SyncedBucket]] = []
        for expert, group in groups.items():
            sizes = [
                ParamSize(name, param.numel(), (param.dtype, param.device, param_groups.get(name)))
                for name, param in params.items()
                if is_expert(param) == expert
            ]
            num_shards = group_size(group.shard) if self._sharded else 1
            for layout in build_layouts(sizes, num_shards, bucket_numel=self._bucket_numel):
                first = params[layout.placements[0].name]
                dtype = self._dtype_for(first)
                for bucket in layout.buckets:
                    memory = FlatBucket(layout, bucket, shapes, dtype, first.device)
                    own = {name: params[name] for name in memory.views}
                    travel = self._reduce_dtype or dtype
                    tag = tag_of(own)
                    reduction = bucket_reduction(memory.flat, group, travel, self._courier, tag, sharded=self._sharded)
                    synced = SyncedBucket(0, memory, group, own, reduction, tag)
                    built.append((min(place[name] for name in own), synced))
        # Backward fills a bucket when it reaches the bucket's earliest parameter, and reaches late layers first.
        built.sort(key=lambda entry: -entry[0])
        for index, (_, synced) in enumerate(built, start=len(self.buckets)):
            synced.index = index
        return [synced for _, synced in built]

    def _dtype_for(self, param: nn.Parameter) -> torch.dtype:
        """Return the dtype of a main grad: ``grad_dtype`` where it can hold the parameter's gradients."""
        asked = self._grad_dtype
        return asked if torch.promote_types(asked, param.dtype) == asked else param.dtype

    def _hook(self, name: str, bucket: SyncedBucket) -> Callable[[nn.Parameter], None]:
        @torch.no_grad()
        def take(param: nn.Parameter) -> None:
            if self._finished or bucket.started:
                raise UsageError(
                    f"a gradient of {name!r} came after its bucket's reduction had begun: call zero_grad() before a "
                    "new step, use no_sync() for all backward passes of a step but the last, and overlap=False "
                    "(DistributedOptimizer: overlap_grad_reduce=False) with reentrant activation checkpointing"
                )
            self._accumulate(name, param, bucket)
            while self._overlap and self._next < len(self.buckets) and not self.buckets[self._next].waiting:
                self._start_next()

        return take

    @torch.no_grad()
    def _accumulate(self, name: str, param: nn.Parameter, bucket: SyncedBucket) -> None:
        if param.grad is not None:
            if param.grad.layout != torch.strided:
                raise sparse_gradient(name, param.grad.layout)
            main_grad = bucket.memory.views[name]
            if name in bucket.fresh:
                main_grad.copy_(param.grad)
                bucket.fresh.discard(name)
            else:
                main_grad.add_(param.grad)
            param.grad = None
        if self._syncing:
            bucket.waiting.discard(name)

    def _start_next(self) -> None:
        """Start the next bucket's reduction. The order is the same on every rank: that of ``buckets``."""
        while self._next - self._settled >= MOST_UNSETTLED and self.buckets[self._settled].reduction.has_scratch:
            self.buckets[self._settled].reduction.settle()
            self._settled += 1
        self.buckets[self._next].start(self._current_divisor())
        self._next += 1

    def _current_divisor(self) -> Divisor:
        return self._usual_divisor if self._divisor is None else self._divisor
