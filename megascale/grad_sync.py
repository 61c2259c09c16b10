"""Gradient accumulation in fp32 and its reduction, bucket by bucket, hidden behind the rest of backward.

Hooks on plain parameters add each gradient to its main grad as soon as backward has made it, and free the 16-bit one. A
bucket's reduction starts when its last gradient has arrived. Every rank starts the buckets in the same order, whatever
order its own gradients come in; what backward did not start, :meth:`GradSync.finish` does, so that unused parameters
hang nobody.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh

from megascale import validate
from megascale.collectives import all_gather_object, all_reduce_sum_start, group_size
from megascale.errors import ArgumentError, UsageError
from megascale.grad_buffer import GradBuffer
from megascale.layout import DEFAULT_BUCKET_NUMEL, Bucket, ParamSize, build_layouts
from megascale.parallel import ParallelGroups

REDUCTIONS = ("mean", "sum")


@dataclass(eq=False)
class _Reduction:
    """One bucket: which gradients it still waits for, and its collective while that is under way."""

    buffer: GradBuffer
    bucket: Bucket
    names: frozenset[str]
    waiting: set[str]
    started: bool = False
    narrow: Tensor | None = None
    work: Work | None = None


class GradSync:
    """Owns the main grads of a set of parameters and keeps them reduced over the data-parallel ranks.

    After backward and :meth:`finish`, :meth:`main_grad` is the reduced gradient, on every rank; ``param.grad`` is None.
    A parameter that no rank has used has a main grad of zeros.

    Args:
        named_parameters: in the order of the forward pass, as ``model.named_parameters()`` gives them. Frozen ones are
            left out.
        groups: ``data_parallel`` ranks reduce; see :meth:`ParallelGroups.of`.
        grad_dtype: of the main grads; micro-batches add up in it.
        reduce_dtype: what travels. None: ``grad_dtype``. A 16-bit type halves the traffic; gradients are divided first,
            because 16-bit sums overflow.
        reduction: "mean" over the ranks, or "sum".
        bucket_numel: elements of a bucket, see :func:`megascale.layout.build_layouts`.
        overlap: start reductions during backward. False: all of them in :meth:`finish`.

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
    ) -> None:
        self._group = ParallelGroups.of(groups).data_parallel
        self._reduce_dtype = reduce_dtype or grad_dtype
        self._alone = group_size(self._group) == 1
        self._divisor = group_size(self._group) if validate.one_of("reduction", reduction, REDUCTIONS) == "mean" else 1
        self._overlap = validate.flag("overlap", overlap)
        self._params = {name: param for name, param in named_parameters if param.requires_grad}
        if not self._params:
            raise ArgumentError("named_parameters has no parameter with requires_grad")
        if not grad_dtype.is_floating_point or not self._reduce_dtype.is_floating_point:
            raise ArgumentError(f"grad_dtype and reduce_dtype must be floating point, got {grad_dtype}, {reduce_dtype}")
        self._reductions = self._build(grad_dtype, bucket_numel)
        self._reduction_of = {name: reduction for reduction in self._reductions for name in reduction.names}
        self._syncing = True
        self._next = 0
        self._finished = False
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._hook(name)) for name, param in self._params.items()
        ]

    def main_grad(self, param: nn.Parameter) -> Tensor | None:
        """Return the main grad of ``param``, live, in its shape; None for a parameter that is not synced here."""
        return self._main_grads.get(id(param))

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
        while self._next < len(self._reductions):
            self._start_next()
        for reduction in self._reductions:
            if reduction.work is not None:
                reduction.work.wait()
            if reduction.narrow is not None:
                reduction.buffer.bucket(reduction.bucket).copy_(reduction.narrow)
            reduction.work = reduction.narrow = None
        self._finished = True

    @torch.no_grad()
    def zero_(self) -> None:
        """Begin a new step: main grads are zero. A reduction still on its way ends first."""
        if self._next > 0:
            self.finish()
        for buffer in self._buffers:
            buffer.zero_()
        for reduction in self._reductions:
            reduction.waiting = set(reduction.names)
            reduction.started = False
        self._next = 0
        self._finished = False

    def detach(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _build(self, grad_dtype: torch.dtype, bucket_numel: int) -> list[_Reduction]:
        """Return all buckets in the order in which backward is expected to fill them."""
        sizes = [ParamSize(name, param.numel(), (param.dtype, param.device)) for name, param in self._params.items()]
        place = {name: index for index, name in enumerate(self._params)}
        self._buffers: list[GradBuffer] = []
        self._main_grads: dict[int, Tensor] = {}
        last_used: list[tuple[int, _Reduction]] = []
        for layout in build_layouts(sizes, 1, bucket_numel=bucket_numel):
            buffer = GradBuffer(layout, self._params, grad_dtype)
            self._buffers.append(buffer)
            self._main_grads.update({id(self._params[name]): view for name, view in buffer.main_grads.items()})
            for bucket in layout.buckets:
                inside = layout.placements[bucket.first_placement : bucket.last_placement]
                names = frozenset(placement.name for placement in inside)
                last_used.append((min(place[name] for name in names), _Reduction(buffer, bucket, names, set(names))))
        # Backward fills a bucket when it reaches the bucket's earliest parameter, and reaches late layers first.
        return [reduction for _, reduction in sorted(last_used, key=lambda entry: -entry[0])]

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        @torch.no_grad()
        def take(param: Tensor) -> None:
            reduction = self._reduction_of[name]
            if self._finished or reduction.started:
                raise UsageError(
                    f"a gradient of {name!r} came after its bucket's reduction had begun: call zero_grad() "
                    "before a new step, "
                    "use no_sync() for all backward passes of a step but the last, and overlap=False with reentrant "
                    "activation checkpointing"
                )
            if param.grad is not None:
                self._main_grads[id(param)].add_(param.grad)
                param.grad = None
            if self._syncing:
                reduction.waiting.discard(name)
                while self._overlap and self._next < len(self._reductions) and not self._reductions[self._next].waiting:
                    self._start_next()

        return take

    def _start_next(self) -> None:
        """Start the next bucket's reduction. The order is the same on every rank: that of ``_reductions``."""
        reduction = self._reductions[self._next]
        self._next += 1
        reduction.started = True
        part = reduction.buffer.bucket(reduction.bucket)
        if self._divisor != 1:
            part.div_(self._divisor)
        if self._alone:
            return
        if self._reduce_dtype != part.dtype:
            part = reduction.narrow = part.to(self._reduce_dtype)
        reduction.work = all_reduce_sum_start(part, self._group)


def find_differing(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    groups: ParallelGroups | ProcessGroup | DeviceMesh | None = None,
) -> list[str]:
    """Return the names of parameters that are not the same, bit for bit, on all data-parallel ranks.

    All ranks call it together and get the same answer. Costs one pass over the parameters and one small exchange.
    """
    group = ParallelGroups.of(groups).data_parallel
    mine = {name: _digest(param) for name, param in named_parameters}
    theirs = all_gather_object(mine, group)
    names = list(dict.fromkeys(name for digests in theirs for name in digests))
    return [name for name in names if any(digests.get(name) != theirs[0].get(name) for digests in theirs)]


@torch.no_grad()
def _digest(param: Tensor, chunk: int = 1 << 22) -> tuple[str, tuple[int, ...], int, int]:
    """Return dtype, shape, and two sums over the parameter's bits: plain, and weighted by position, modulo 2**64."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[param.element_size()]
    flat = param.detach().contiguous().view(-1).view(bits)
    plain = weighted = 0
    for start in range(0, flat.numel(), chunk):
        part = flat[start : start + chunk].long()
        places = torch.arange(start + 1, start + 1 + part.numel(), device=part.device)
        plain += int(part.sum())
        weighted += int((part * places).sum())
    return str(param.dtype), tuple(param.shape), plain % 2**64, weighted % 2**64
