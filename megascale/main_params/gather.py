"""Model params as views of flat buckets, gathered after each rank has updated its shard.

All gathers start during the step, in the order in which forward needs them. Without overlap the step ends when all have
ended. With overlap, modules wait for a bucket just before forward uses its parameters, unless compiled code calls them:
:mod:`megascale.main_params.gather_hooks`.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from weakref import finalize

import torch
from torch import Tensor, nn

from megascale.grad_sync.bucket import GATHER_BIT, FlatBucket, SyncedBucket
from megascale.main_params.gather_hooks import GatherHooks
from megascale.main_params.write_tracker import WriteWatch
from megascale.utils.collectives import all_gather_start, group_size
from megascale.utils.streams import Arrival


class GatheredBucket:
    """One bucket of model params, whole on every rank once gathered."""

    def __init__(self, synced: SyncedBucket, written_too_early: list[str]) -> None:
        self.synced = synced
        dtype = next(iter(synced.params.values())).dtype
        self.memory = FlatBucket(synced.memory.bucket, synced.params, dtype, synced.memory.flat.device)
        self._shards = [self.memory.flat[begin:end] for begin, end in pairwise(self.memory.bucket.borders)]
        self._uneven = None if len(set(map(Tensor.numel, self._shards))) == 1 else self._shards
        self._arrival: Arrival | None = None
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

    def start(self) -> None:
        """Start the gather of this rank's shard, behind the work of the current stream, and those of others."""
        self.was_started = True
        shard, tag = self._shards[self.synced.reduction.rank], self.synced.tag | GATHER_BIT
        gather = all_gather_start(self.memory.flat, shard, self.synced.group.shard, tag, self._uneven)
        self._arrival = Arrival(gather.wait, self.memory.flat.device)

    def watch(self) -> None:
        """Find out, when the gather is first waited for, which params were written meanwhile, and so replaced."""
        if group_size(self.synced.group.shard) > 1:  # else nothing is replaced
            self._watch = WriteWatch(self.synced.params)

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
        bucket_of: by id of a parameter, the bucket that holds it.
        written_too_early: names of params that a program wrote between a step and the arrival of their weights, which
            replaced them.
    """

    def __init__(self, modules: Sequence[nn.Module], *, overlap: bool) -> None:
        self.buckets: list[GatheredBucket] = []
        self.written_too_early: list[str] = []
        self.overlap = overlap
        self._modules = modules
        self.bucket_of: dict[int, GatheredBucket] = {}
        self._hooks = GatherHooks(self)
        # When this object is freed the model is whole. This only waits for gathers that every rank has started.
        finalize(self, _wait, self.buckets).atexit = False

    def add(self, synced: SyncedBucket) -> GatheredBucket:
        """Move the parameters of a new bucket into flat memory."""
        gathered = GatheredBucket(synced, self.written_too_early)
        self.buckets.append(gathered)
        for name, param in synced.params.items():
            gathered.point(name, param)
            self.bucket_of[id(param)] = gathered
        if self.overlap:
            self._hooks.add(self._modules)
        return gathered

    def start_all(self) -> None:
        """Start the gathers that this step has not started: all ranks gather every bucket, updated or not.

        Without overlap, and where compiled code reads weights, wait for them.
        """
        for bucket in reversed(self.buckets):
            if not bucket.was_started:
                bucket.start()
            bucket.was_started = False
            if self.overlap:
                bucket.watch()
        if not self.overlap or self._hooks.are_compiled:
            # On behalf of all streams that wait for the current one later: the gather is a part of the step.
            for bucket in self.buckets:
                bucket.end()

    def wait(self) -> None:
        """Wait until every parameter is whole."""
        _wait(self.buckets)

    def wait_for(self, params: Iterable[nn.Parameter]) -> None:
        """Wait until these parameters are whole."""
        for param in params:
            bucket = self.bucket_of.get(id(param))
            if bucket is not None:
                bucket.wait()

    def detach(self) -> None:
        """Remove the hooks from the modules; parameters stay in the buckets."""
        self.wait()
        self._hooks.remove()


def _wait(buckets: Sequence[GatheredBucket]) -> None:
    for bucket in buckets:
        bucket.wait()
