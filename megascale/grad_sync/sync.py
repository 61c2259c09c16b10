"""Gradient accumulation in fp32 and its reduction, bucket by bucket, overlapped with backward.

Hooks on plain parameters add each gradient to its main grad as soon as backward has made it, and free the 16-bit one. A
bucket's reduction starts when its last gradient has arrived. Every rank starts the buckets in the same order, in
whatever order its gradients come. :meth:`GradSync.finish` starts those that backward did not, so that unused parameters
stall no rank.

The hooks refer to their GradSync weakly: when it is freed, so are its hooks, main grads and thread.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from threading import Lock
from types import NoneType
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from megascale.errors import ArgumentError, GradientError, UsageError, sparse_gradient
from megascale.grad_sync.bucket import FlatBucket, SyncedBucket, tag_of
from megascale.grad_sync.clipping_by_hand import refuse_while_there
from megascale.grad_sync.construction import KIND, Construction, param_forms, ranks_by_field
from megascale.grad_sync.grad_hook import GradHook, check_syncable, remove
from megascale.grad_sync.layout import DEFAULT_BUCKET_NUMEL, Bucket, ParamSize, build_buckets
from megascale.grad_sync.owners import evened, update_cost
from megascale.grad_sync.reduction import Divisor, ReduceThread, bucket_reduction
from megascale.grad_sync.usable_grads import memory_error, why_not_taken
from megascale.parallel import GradGroup, ParallelGroups, is_expert
from megascale.utils import validate
from megascale.utils.autograd import without_grad
from megascale.utils.collectives import group_size, is_message_passing, runs_on_streams
from megascale.utils.transfer import is_capturing, to_device_async

ReducedHook = Callable[[Tensor], None]

REDUCTIONS = ("mean", "sum")

# An attrgetter, as map() then runs in C: at every step, over every parameter.
_GRAD = attrgetter("grad")


class GradSync:
    """Owns the main grads of a set of parameters and keeps them reduced over the data-parallel ranks.

    After backward and :meth:`finish`, :meth:`main_grad` is the reduced gradient, on every rank; ``param.grad`` is None.
    A parameter that no rank has used has a main grad of zeros. Main grads are undefined between :meth:`zero_` and
    :meth:`finish`. A gradient that the caller puts into ``param.grad`` counts before backward, or instead of it.

    A parameter belongs to one GradSync at a time, until that is freed or :meth:`detach` is called, which removes its
    hooks, main grads and thread. Detach or free it between steps only. After an exception on one rank, in forward or
    backward, first call :meth:`finish` and :meth:`zero_` on all ranks, also before another backward: otherwise the
    ranks that have already started a reduction wait for the others, a deadlock.

    Args:
        named_parameters: in the order of the forward pass, as ``model.named_parameters()`` gives them. Frozen ones are
            left out.
        groups: ``data_parallel`` ranks reduce, those of ``expert_data_parallel`` for experts; see
            :meth:`ParallelGroups.of`.
        grad_dtype: of the main grads; micro-batches add up in it. A parameter of a wider or another 16-bit type has
            main grads of its own type.
        reduce_dtype: of the messages. None: the main grads' type. A 16-bit type halves the traffic; gradients are
            divided by the number of ranks first, because 16-bit sums overflow.
        reduction: "mean" over the data-parallel ranks, or "sum". See :meth:`set_divisor` for any other divisor.
        bucket_numel: elements of a bucket, see :func:`megascale.grad_sync.layout.build_buckets`.
        overlap: start reductions during backward. False: all of them in :meth:`finish`.

    Backward raises GradientError for a sparse gradient and UsageError for one that comes after its bucket's reduction
    has started, naming the parameter.

    Raises:
        ArgumentError: for an argument that does not fit, naming it; also for a parameter that another live GradSync or
            DistributedOptimizer owns, or that has two names.
    """

    owner_kind = "GradSync"
    """The class name of the object that the user made, for messages."""
    is_sharded = False
    """Whether only this rank's shard of every bucket is reduced."""
    has_taken = False
    """Whether it has ever taken a gradient of this rank."""
    in_step_graph = False
    """Whether a StepGraph has rehearsed the step: a captured backward is followed by the step in the same graph."""

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
        self._groups = ParallelGroups.of(groups)
        self._grad_dtype = grad_dtype
        self._reduce_dtype = reduce_dtype
        self._reduction = validate.one_of("reduction", reduction, REDUCTIONS)
        self._usual_divisor = group_size(self._groups.data_parallel) if self._reduction == "mean" else 1
        self._bucket_numel = validate.integer("bucket_numel", bucket_numel, minimum=1)
        self._overlap = validate.flag("overlap", overlap)
        if not all(getattr(dtype, "is_floating_point", False) for dtype in (grad_dtype, reduce_dtype or grad_dtype)):
            raise ArgumentError(f"grad_dtype and reduce_dtype must be floating point, got {grad_dtype}, {reduce_dtype}")
        self.buckets: list[SyncedBucket] = []
        self._thread = ReduceThread()
        self._main_grads: dict[int, Tensor] = {}
        self._local_grads: dict[int, Tensor] = {}
        self._reduced_hooks: dict[int, OrderedDict[int, ReducedHook]] = {}
        self._sides: dict[torch.device, torch.Stream] = {}
        self._hooks: list[RemovableHandle] = []
        self._remove_hooks = finalize(self, remove, self._hooks)
        self._remove_hooks.atexit = False
        self._divisor: Divisor | None = None
        self._syncing = True
        self._error: GradientError | None = None  # of a gradient of this rank, found in backward
        self._next = 0
        self._starting = Lock()  # held to change `_next` in backward, which has a thread for each device
        self._finished = False
        self._is_away = self._pinned = False
        refuse_while_there(self)
        self.add(named_parameters)
        if not self.buckets and not self.is_sharded:
            raise ArgumentError("named_parameters has no parameter with requires_grad")

    def add(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], param_groups: Mapping[str, int] | None = None
    ) -> list[SyncedBucket]:
        """Add parameters, in new buckets after the others; returns the new buckets.

        Gradients that exist already count. ``param_groups``: by name; parameters of different groups do not share
        a bucket.

        Raises ArgumentError, ArgumentTypeError, or GradientError for a sparse gradient, before anything has changed.
        """
        params: dict[str, nn.Parameter] = {}
        named = validate.named("named_parameters", named_parameters)
        for name, param in named:
            if param.requires_grad and params.setdefault(name, param) is not param:
                raise ArgumentError(
                    f"two parameters are called {name!r}; give each a name of its own in named_parameters"
                )
        check_syncable(params)
        added = self._build(params, param_groups or {})
        for index, bucket in enumerate(added, start=len(self.buckets)):
            local = bucket.memory.parts(bucket.reduction.rank) if self.is_sharded else bucket.memory.views
            for name, param in bucket.params.items():
                self._main_grads[id(param)] = bucket.memory.views[name]
                self._local_grads[id(param)] = local[name]
                self._hooks.append(param.register_post_accumulate_grad_hook(GradHook(self, name, index)))
                if param.grad is not None:
                    self._accumulate(name, param, bucket)
        self.buckets += added
        return added

    def construction(self, *, experts: bool) -> Construction:
        """Return what must be alike on ranks that reduce with this one: see :mod:`megascale.grad_sync.construction`.

        ``experts``: list the parameters of experts; False: all others.
        """
        synced = (
            (name, param) for own in self.buckets for name, param in own.params.items() if is_expert(param) == experts
        )
        facts = {
            KIND: f"a {self.owner_kind}",
            **{name: str(value) for name, value in self._message_arguments().items()},
            **param_forms("the GradSync's buckets", synced),
        }
        return Construction(facts, ranks_by_field(self._groups), {})

    def _message_arguments(self) -> dict[str, object]:
        """Return the arguments that decide about messages, by name."""
        return {
            "grad_dtype": self._grad_dtype,
            "reduce_dtype": self._reduce_dtype,
            "reduction": repr(self._reduction),
            "bucket_numel": self._bucket_numel,
            "overlap": self._overlap,
        }

    @property
    def compares_replicas(self) -> bool:
        """Whether a step compares the reduced gradients of ranks that hold the same parameter: not where sharded."""
        return not self.is_sharded

    def main_grad(self, param: nn.Parameter) -> Tensor | None:
        """Return the main grad of ``param``, live, in its shape; None for a parameter that is not synced here."""
        return self._main_grads.get(id(param))

    def local_grad(self, param: nn.Parameter) -> Tensor | None:
        """Return what this rank keeps of the main grad of ``param``, live; None for one that is not synced here.

        Sharded, its piece: 1-D, empty where another rank owns all of it. Otherwise all of it, in its shape.
        """
        return self._local_grads.get(id(param))

    def register_reduced_hook(self, param: nn.Parameter, hook: ReducedHook) -> RemovableHandle:
        """Call ``hook`` with :meth:`local_grad` in backward, as soon as the reduction of its bucket was started.

        It runs on the stream that carries out reductions, so that backward does not wait: what it puts there reads a
        reduced main grad, which it must not write, and the next reductions and :meth:`finish` come behind it. Not
        called for reductions that begin in :meth:`finish`, or that a host carries out.
        """
        hooks = self._reduced_hooks.setdefault(id(param), OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def set_divisor(self, divisor: Divisor) -> None:
        """Divide this step's sum over all ranks by ``divisor``, instead of taking the mean: for example by tokens.

        Call it after :meth:`zero_` and before the step; it holds for one step. The host does not wait for a 0-d tensor,
        wherever it is.

        Raises:
            ArgumentError: for a number that is not above 0, or a tensor of more than one element.
        """
        if isinstance(divisor, Tensor):
            if divisor.numel() != 1:
                raise ArgumentError(f"divisor must be one number, got a tensor of shape {tuple(divisor.shape)}")
            self._divisor = divisor.detach().reshape(())
            if self.buckets:
                self._divisor = to_device_async(self._divisor, self.buckets[0].memory.flat.device)
        else:
            self._divisor = validate.positive("divisor", divisor)

    @property
    def divisor(self) -> Divisor | None:
        """What :meth:`set_divisor` was given for this step; None where it was not called. A tensor is 0-d."""
        return self._divisor

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backward only accumulates: for every backward of a step but the last."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @torch.no_grad()
    def finish(self) -> None:
        """Start what backward has not started, and wait until every main grad is reduced. A second call does nothing.

        Takes gradients that the caller has put into ``param.grad`` where backward left none.

        Raises:
            GradientError: for a gradient in ``param.grad`` that comes too late, or beside that of backward, naming the
                parameter. All reductions have ended then; its main grad is that of backward alone. Also for one of
                another shape than the parameter had, or without memory.
            UsageError: after :meth:`detach`.
        """
        if not self._remove_hooks.alive:
            raise UsageError("this GradSync was detached from its parameters; build another one, and its optimizer")
        if away := self._is_away:  # the step will be refused, but other ranks wait for these reductions
            self.come_back()
        error = self._take_assigned()
        self._finish_reductions()
        if away:  # also before an error: nobody else would free this memory again
            self.leave(pin=self._pinned)
        error, self._error = self._error or error, None
        if error is not None:
            raise error

    def _finish_reductions(self) -> None:
        if self._finished:
            return
        # Also buckets without a gradient here: another rank may have one. All start before the first one is awaited.
        while self._next < len(self.buckets):
            self._start_next()
        # The end of a shard's wait begins its sum over other copies: all begin before one is awaited, in finish().
        for bucket in self.buckets:
            bucket.reduction.wait()
        for bucket in self.buckets:
            bucket.reduction.finish(self._current_divisor())
        self._finished = True

    @torch.no_grad()
    def zero_(self) -> None:
        """Begin a new step. Waits for reductions that have started."""
        if self._next > 0:
            self._finish_reductions()
        for bucket in self.buckets:
            bucket.reset()
        self._divisor = None
        self._error = None
        self._next = 0
        self._finished = False

    def require_idle(self) -> None:
        """Raise UsageError if reductions have started and not all of them ended: memory cannot leave then."""
        if self._next > 0 and not self._finished:
            raise UsageError(
                "offload() came while gradients are being reduced: take the step with step() first, or drop them with "
                "zero_grad(); between micro-batches under no_sync() it is allowed"
            )

    @torch.no_grad()
    def leave(self, *, pin: bool) -> None:
        """Free the memory of main grads until :meth:`come_back`, which brings their values back.

        Backward raises UsageError meanwhile. See :meth:`megascale.MixedPrecisionOptimizer.offload`.
        """
        self._is_away, self._pinned = True, pin
        for bucket in self.buckets:
            bucket.memory.leave(pin=pin, keep=len(bucket.fresh) < len(bucket.params))

    @torch.no_grad()
    def come_back(self) -> None:
        """Allocate main grads again, with the values that they had."""
        if self._is_away:
            for bucket in self.buckets:
                bucket.memory.come_back()
        self._is_away = False

    def detach(self) -> None:
        """Release the parameters for good: gradients stay in ``param.grad`` again. Started reductions still end."""
        self._remove_hooks()
        self._thread.close()

    def _build(self, params: dict[str, nn.Parameter], param_groups: Mapping[str, int]) -> list[SyncedBucket]:
        """Return new buckets in the order in which backward is expected to fill them."""
        groups = {is_expert(param): self._groups.of_param(param) for param in params.values()}
        place = {name: index for index, name in enumerate(params)}
        built: list[SyncedBucket] = []
        for expert, group in groups.items():
            sizes = [
                ParamSize(
                    name,
                    param.numel(),
                    (param.dtype, param.device, param_groups.get(name)),
                    update_cost(param.shape),
                )
                for name, param in params.items()
                if is_expert(param) == expert
            ]
            for bucket in self.cut(sizes, group, expert=expert):
                own = {placement.name: params[placement.name] for placement in bucket.placements}
                first = next(iter(own.values()))
                if not is_message_passing(group.shard, first.device):  # messages may have any sizes
                    bucket = evened(bucket)
                # In the asked dtype where that can hold gradients of these parameters.
                fits = torch.promote_types(self._grad_dtype, first.dtype) == self._grad_dtype
                dtype = self._grad_dtype if fits else first.dtype
                memory, tag = FlatBucket(bucket, own, dtype, first.device), tag_of(own)
                side = None
                if memory.order.is_needed and runs_on_streams(group.holders, first.device):
                    side = self._sides[first.device] = self._sides.get(first.device) or torch.Stream(first.device)
                reduction = bucket_reduction(
                    memory.flat,
                    memory.order,
                    group,
                    self._reduce_dtype or dtype,
                    self._thread,
                    tag,
                    cuts=bucket.borders if self.is_sharded else None,
                    aside=side is not None,
                )
                built.append(SyncedBucket(memory, group, own, reduction, tag, side))
        # Backward fills a bucket when it reaches the bucket's earliest parameter, and reaches late layers first.
        built.sort(key=lambda synced: -min(place[name] for name in synced.params))
        return built

    def cut(self, sizes: Sequence[ParamSize], group: GradGroup, *, expert: bool) -> list[Bucket]:
        """Return the buckets of parameters that ``group`` reduces; ``expert``: whether they are experts'."""
        return build_buckets(sizes, 1, bucket_numel=self._bucket_numel)

    @without_grad
    def take_grad(self, param: nn.Parameter, name: str, bucket_index: int) -> None:
        """Add the gradient that backward has just made to the main grad; start reductions of complete buckets."""
        if self._is_away:
            raise UsageError(
                f"a gradient of {name!r} came while its main grad is in host memory, where offload() has moved it; "
                "call optimizer.reload() before backward"
            )
        if self._finished or bucket_index < self._next:
            raise UsageError(
                f"a gradient of {name!r} came after its bucket's reduction had begun: call zero_grad() before a "
                "new step (of the optimizer that was given this GradSync, or GradSync.zero_()), use no_sync() for all "
                "backward passes of a step but the last, and overlap=False (DistributedOptimizer: "
                "overlap_grad_reduce=False) with reentrant activation checkpointing"
            )
        self._accumulate(name, param, self.buckets[bucket_index], in_backward=True)
        # In the order of buckets, not of arrival: collectives must be called in one order on all ranks.
        if self._overlap and self._next_is_complete():
            with self._starting:
                while self._next_is_complete():
                    self._start_next()
                    self._call_reduced_hooks(self.buckets[self._next - 1])

    def _call_reduced_hooks(self, bucket: SyncedBucket) -> None:
        """Call the hooks of a bucket whose reduction was just started, on the stream that carries it out."""
        if bucket.side is not None and self._reduced_hooks:
            with bucket.side:
                for key in map(id, bucket.params.values()):
                    for hook in list(self._reduced_hooks.get(key, {}).values()):
                        hook(self._local_grads[key])

    def _next_is_complete(self) -> bool:
        """Whether all gradients of the next bucket to start have arrived."""
        return self._next < len(self.buckets) and not self.buckets[self._next].waiting

    def _accumulate(self, name: str, param: nn.Parameter, bucket: SyncedBucket, *, in_backward: bool = False) -> None:
        """Add ``param.grad`` to its main grad, and drop it: what this rank contributes to the reduced gradient.

        ``in_backward``: autograd has just made it, so that it has its memory and is of a kind that kernels read.
        """
        grad = param.grad
        if grad is not None:
            if grad.layout != torch.strided:
                raise sparse_gradient(name, grad.layout)
            main_grad = bucket.memory.views[name]
            wrong = None
            is_alike = type(grad) is Tensor and grad.shape == main_grad.shape and grad.device == main_grad.device
            if not (in_backward and is_alike):  # the whole check takes longer than all else here
                wrong = memory_error(repr(name), grad, main_grad)
            if wrong is not None:
                # Not raised in backward: other ranks wait for this bucket. finish() raises it.
                self._error = self._error or wrong
            else:
                # Backward has a stream for each that forward had; the reduction waits for all that have written.
                if bucket.memory.order.is_needed:
                    bucket.memory.order.write(name)
                # The first gradient of a step overwrites: zero_() clears no memory, which saves a pass over it.
                if name in bucket.fresh:
                    is_first = in_backward and len(bucket.fresh) == len(bucket.params)
                    if is_first and not self.in_step_graph and is_capturing(grad.device):
                        raise UsageError(
                            f"a graph captures the backward pass of {name!r}: its replays call no hook of "
                            f"{self.owner_kind}, which would then take no gradient and train on zeros; capture the "
                            "whole step, by StepGraph(optimizer, forward_backward)"
                        )
                    main_grad.copy_(grad)
                    bucket.fresh.discard(name)
                else:
                    main_grad.add_(grad)
            self.has_taken = True
            # So that a gradient that is there in finish() is one that the caller has put there.
            param.grad = None
        # Under no_sync() the bucket goes on waiting: its reduction starts in the last backward of a step.
        if self._syncing:
            bucket.waiting.discard(name)

    def _take_assigned(self) -> GradientError | None:
        """Take gradients that the caller put into ``param.grad``. Returns an error for one that cannot be taken.

        The hooks leave no gradient behind, so any gradient there is the caller's.
        """
        error: GradientError | None = None
        for bucket in self.buckets:
            if set(map(type, map(_GRAD, bucket.params.values()))) <= {NoneType}:
                continue
            for name, param in bucket.params.items():
                if param.grad is None:
                    continue
                wrong = why_not_taken(name, param, param.grad, bucket)
                if wrong is None:
                    self._accumulate(name, param, bucket)
                error = error or wrong
        return error

    def _start_next(self) -> None:
        """Start the next bucket's reduction. The order is the same on every rank: that of ``buckets``."""
        self.buckets[self._next].start(self._current_divisor())
        self._next += 1

    def _current_divisor(self) -> Divisor:
        return self._usual_divisor if self._divisor is None else self._divisor
