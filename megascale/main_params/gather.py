"""Model params as views of flat buckets, gathered after each rank has updated its shard.

All gathers start during the step, in the order in which forward needs them. Without overlap the step ends when all have
ended. With overlap, modules wait for a bucket just before forward uses its parameters, unless compiled code calls them:
:mod:`megascale.main_params.gather_hooks`.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from weakref import finalize

import torch
from torch import Tensor, nn

from megascale.grad_sync.bucket import GATHER_BIT, FlatBucket, SyncedBucket
from megascale.grad_sync.message_thread import MessageThread
from megascale.main_params.gather_hooks import GatherHooks
from megascale.main_params.write_tracker import WriteWatch
from megascale.utils.collectives import Pending, all_gather_start, group_size, is_message_passing
from megascale.utils.streams import Arrival, has_streams


class GatheredBucket:
    """One bucket of model params, whole on every rank once gathered."""

    def __init__(self, synced: SyncedBucket, thread: MessageThread, written_too_early: list[str]) -> None:
        self.synced = synced
        dtype = next(iter(synced.params.values())).dtype
        self.memory = FlatBucket(synced.memory.bucket, synced.params, dtype, synced.memory.flat.device)
        self._thread = thread
        shards = [self.memory.flat[begin:end] for begin, end in pairwise(self.memory.bucket.borders)]
        self._uneven = None if len(set(map(Tensor.numel, shards))) == 1 else shards
        self._arrival: Arrival | None = None
        self.behind: Callable[[], None] | None = None
        """Waits for this rank's shard; the gather is yet to be started, by :meth:`begin`."""
        self._is_replaced = False
        self._watch: WriteWatch | None = None
        self._written_too_early = written_too_early
        self.was_started = False
        """In this step."""

    @torch.no_grad()
    def point(self, name: str, param: nn.Parameter) -> None:
        """Make ``param`` a view of this bucket, with the values that it has."""
        view = self.memory.views[name]
        # param may be another view of the same memory, such as its own transpose.
        is_in_bucket = param.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
        view.copy_(param.clone() if is_in_bucket else param)
        param.data = view

    def is_view(self, name: str, param: nn.Parameter) -> bool:
        """Return whether ``param`` still lies in this bucket."""
        view = self.memory.views[name]
        return param.data_ptr() == view.data_ptr() and param.stride() == view.stride()

    def start(self, behind: Callable[[], None] | None = None) -> None:
        """Start the gather.

        ``behind``: waits until this rank's shard has come from host memory, to start the gather then: in the thread
        where its messages carry tags; else in :meth:`begin`, as collectives must be called in one order on all ranks.
        """
        self.was_started = True
        self._is_replaced = behind is not None or group_size(self.synced.group.shard) > 1
        device = self.memory.flat.device
        if behind is None:
            self._arrival = Arrival(self._gathering().wait, device)
        elif is_message_passing(self.synced.group.shard, device) and not has_streams(device):
            arrival = self._thread.submit(partial(self._gather_behind, behind))
            self._arrival = Arrival(partial(self._thread.result, arrival), device)
        else:
            self.behind = behind

    def watch(self) -> None:
        """Find out, when the gather is first waited for, which params were written meanwhile, and so replaced."""
        self._watch = WriteWatch(self.synced.params) if self._is_replaced else None

    def begin(self) -> None:
        """Start a gather that waits for this rank's shard: the host waits until that is on its way."""
        behind, self.behind = self.behind, None
        if behind is not None:
            behind()
            self._arrival = Arrival(self._gathering().wait, self.memory.flat.device)

    def _gather_behind(self, behind: Callable[[], None]) -> None:
        behind()
        self._gathering().wait()

    def _gathering(self) -> Pending:
        shard, tag = self.memory.shard(self.synced.rank), self.synced.tag | GATHER_BIT
        return all_gather_start(self.memory.flat, shard, self.synced.group.shard, tag, self._uneven)

    def wait(self) -> None:
        """Let the current stream wait for the gather, if one is under way. Raises where a rank is lost."""
        if self._arrival is not None and self._arrival.wait():
            self._arrival = None
        if self._watch is not None:
            self._written_too_early += self._watch.written()
            self._watch = None

    def end(self) -> None:
        """Wait for the gather; streams that wait for the current one later need not wait themselves."""
        self.wait()
        self._arrival = None


class ParamGather:
    """All buckets of model params.

    Attributes:
        buckets: in the order of their gradients' buckets, the reverse of that in which forward needs them.
        written_too_early: names of params that a program wrote between a step and the arrival of their weights, which
            replaced them.
    """

    def __init__(self, modules: Sequence[nn.Module], *, overlap: bool) -> None:
        self.buckets: list[GatheredBucket] = []
        self.written_too_early: list[str] = []
        self.overlap = overlap
        self._modules = modules
        self._thread = MessageThread()
        self._bucket_of: dict[int, GatheredBucket] = {}
        self._hooks = GatherHooks(self)
        # When this object is freed the model is whole. This only waits for gathers that every rank has started.
        finalize(self, _wait, self.buckets).atexit = False

    def add(self, synced: SyncedBucket) -> GatheredBucket:
        """Move the parameters of a new bucket into flat memory."""
        gathered = GatheredBucket(synced, self._thread, self.written_too_early)
        self.buckets.append(gathered)
        for name, param in synced.params.items():
            gathered.point(name, param)
            self._bucket_of[id(param)] = gathered
        if self.overlap:
            self._hooks.add(self._modules)
        return gathered

    def bucket_of(self, param: Tensor) -> GatheredBucket:
        """Return the bucket that holds ``param``, which is gathered."""
        return self._bucket_of[id(param)]

    def start_all(self) -> None:
        """Start the gathers that this step has not started: all ranks gather every bucket, updated or not.

        Without overlap, and where compiled code reads weights, wait for them.
        """
        for bucket in reversed(self.buckets):
            if not bucket.was_started:
                bucket.start()
            bucket.was_started = False
            if self.overlap:  # after start(), which says whether what arrives replaces anything
                bucket.watch()
        if not self.overlap or self._hooks.are_compiled:
            # On behalf of all streams that wait for the current one later: the gather is a part of the step.
            _begin(self.buckets)
            for bucket in self.buckets:
                bucket.end()

    def wait(self) -> None:
        """Wait until every parameter is whole."""
        _wait(self.buckets)

    def wait_for(self, params: Iterable[nn.Parameter]) -> None:
        """Wait until these parameters are whole."""
        for param in params:
            bucket = self._bucket_of.get(id(param))
            if bucket is not None:
                # One lookup per parameter of each forward, where nothing is in host memory.
                if bucket.behind is not None:
                    _begin(self.buckets)
                bucket.wait()

    def detach(self) -> None:
        """Remove the hooks from the modules; parameters stay in the buckets."""
        self.wait()
        self._hooks.remove()
        self._thread.close()


def _begin(buckets: Sequence[GatheredBucket]) -> None:
    """Start all gathers that wait for shards, in the order of forward: each rank does so when it first needs one."""
    for bucket in reversed(buckets):
        bucket.begin()


def _wait(buckets: Sequence[GatheredBucket]) -> None:
    _begin(buckets)
    for bucket in buckets:
        bucket.wait()
