"""Hooks of main grads, called in backward as soon as a bucket's reduction was started.

They run on a stream that waits for the reduction, so that backward does not: what they put there reads reduced main
grads, while backward goes on. :meth:`GradSync.finish` waits for that stream only as far as the reduction itself.
"""

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from megascale.grad_sync.synced_bucket import SyncedBucket
from megascale.utils.streams import new_stream

ReducedHook = Callable[[Tensor], None]
"""Takes what this rank keeps of a reduced main grad, live. It must not write it."""


class ReducedHooks:
    """The hooks of one GradSync, bucket by bucket.

    Buckets of which a parameter has a hook end their reductions in another order than others, so that all ranks
    register hooks of the same parameters.
    """

    def __init__(self) -> None:
        self._hooks: dict[int, OrderedDict[int, tuple[Tensor, ReducedHook]]] = {}
        self._streams: dict[torch.device, torch.Stream] = {}

    def register(self, bucket: SyncedBucket, grad: Tensor, hook: ReducedHook) -> RemovableHandle:
        """Call ``hook`` with ``grad``, of ``bucket``, until the handle is removed."""
        hooks = self._hooks.setdefault(bucket.index, OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = (grad, hook)
        return handle

    def call(self, bucket: SyncedBucket) -> None:
        """Call the hooks of a bucket whose reduction was just started, where a stream can wait for it."""
        hooks = self._hooks.get(bucket.index)
        if not hooks or not bucket.reduction.ends_aside:
            return
        device = bucket.memory.flat.device
        if device not in self._streams:
            self._streams[device] = new_stream(device)
        with self._streams[device]:
            bucket.reduction.end_aside()
            for grad, hook in list(hooks.values()):
                hook(grad)
