"""A process group whose collectives travel between processes and end on streams, as NCCL's do.

A collective reads what the current stream, and what that was ordered behind, has written; what it gives is written on a
stream of the group's own, behind the current one. ``wait()`` lets the current stream wait for that, and not the host.
On streams that run late (late_streams.h) a missing wait gives wrong values: who reads results too early reads old ones,
who writes, or frees, what is still being sent makes the results NaN.

When it is called, a collective meets those of the other ranks, over gloo: on a GPU it would wait on its stream. A host
that never calls one makes the others wait until gloo's time is up, and what the current stream was ordered behind is
carried out earlier than it had to be. Sums are made in the order of ranks.

:meth:`tests.fake_device.process.OnDevice.ranks` has processes of such a group.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

BACKEND = "on_streams"
"""What ``init_process_group`` takes for it, once this module was imported."""

_REDUCED: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}

_BEFORE = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
"""The names of torch before 2.13, by the newer ones."""


class Given(distributed_c10d.Work):
    """A collective whose results are written on a stream. It keeps tensors until it was waited for, as NCCL's do."""

    def __init__(self, event: torch.Event | None, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._event = event
        self._tensors = tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Let the current stream wait for the results."""
        if self._event is not None:
            torch.accelerator.current_stream().wait_event(self._event)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        """Return whether the results are there."""
        return self._event is None or self._event.query()


class StreamGroup(dist.ProcessGroup):
    """The group of some ranks. As NCCL it carries tensors of a device alone, and none of the host."""

    def __init__(self, options: Any, backend_options: Any = None) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._name: str = options.group_id
        self._gloo: Any = dist.ProcessGroupGloo(options.store, self.rank(), self.size(), options.timeout)
        self._streams: dict[torch.device, torch.Stream] = {}

    def getBackendName(self) -> str:
        """Return what torch calls it."""
        return BACKEND

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name by which torch's functional collectives find it."""
        return self._name

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Given:  # type: ignore[override]
        """Reduce each tensor in place."""
        reduced = [_reduced(self._every(_read(one)), _operation(opts)) for one in tensors]
        return self._give(tensors, reduced, tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Given:
        """Reduce each tensor in place."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Given:  # type: ignore[override]
        """Give each tensor the root's values."""
        return self._give(tensors, [self._every(_read(one))[opts.rootRank] for one in tensors], tensors)

    def barrier(self, opts: Any = None) -> Given:
        """Wait for all ranks."""
        self._every(torch.zeros(1))
        return Given(None, ())

    def allgather(  # type: ignore[override]  # one of torch's two ways to call it
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Given:
        """Fill each list with every rank's tensor; those of a list need not be of one size."""
        places = [place for one in outputs for place in one]
        every = [
            self._every(_read(mine), [to.numel() for to in one]) for one, mine in zip(outputs, inputs, strict=True)
        ]
        return self._give(places, [value for one in every for value in one], inputs)

    def all_gather_single(self, output: Tensor, mine: Tensor, opts: Any = None) -> Given:
        """Fill ``output`` with every rank's tensor."""
        return self.all_gather_single_coalesced([output], [mine], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Given:
        """Fill each output with every rank's tensor."""
        every = [torch.cat([one.flatten() for one in self._every(_read(mine))]) for mine in inputs]
        return self._give(outputs, every, inputs)

    def reduce_scatter(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Given:
        """Reduce each list's tensor of this rank into an output; those of a list need not be of one size."""
        results = []
        for parts in inputs:
            own = slice(before := sum(one.numel() for one in parts[: self.rank()]), before + parts[self.rank()].numel())
            whole = torch.cat([_read(one).flatten() for one in parts])
            results.append(_reduced(self._every(whole), _operation(opts))[own])
        return self._give(outputs, results, [part for parts in inputs for part in parts])

    def reduce_scatter_single(self, output: Tensor, mine: Tensor, opts: Any = None) -> Given:
        """Reduce this rank's part of a tensor into ``output``."""
        return self.reduce_scatter_single_coalesced([output], [mine], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Given:
        """Reduce this rank's part of each tensor into an output."""
        return self.reduce_scatter(outputs, [list(one.flatten().chunk(self.size())) for one in inputs], opts)

    def _every(self, mine: Tensor, numels: Sequence[int] = ()) -> list[Tensor]:
        """Return every rank's tensor of the host, in the order of ranks, each flat. ``numels``: where they differ."""
        numels = numels or [mine.numel()] * self.size()
        sent = mine.new_zeros(max(numels))
        sent[: mine.numel()] = mine.flatten()
        every = [torch.empty_like(sent) for _ in numels]
        if sent.numel() > 0:
            self._gloo.allgather([[one.view(torch.uint8) for one in every]], [sent.view(torch.uint8)]).wait()
        return [one[:numel] for one, numel in zip(every, numels, strict=True)]

    def _give(self, outputs: Sequence[Tensor], results: Sequence[Tensor], inputs: Sequence[Tensor]) -> Given:
        """Write results, behind what the current stream has, on this group's stream."""
        shaped = [value.view(to.shape) for value, to in zip(results, outputs, strict=True)]
        device = outputs[0].device
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        stream = self._streams[device]
        torch.ops.fake_device.write(outputs, shaped, inputs, [_read(one) for one in inputs], stream.stream_id)
        return Given(stream.record_event(), [*outputs, *inputs])


def _read(tensor: Tensor) -> Tensor:
    """Return a copy on the host of what the current stream would find there."""
    detached = tensor.detach()
    return detached.clone() if detached.device.type == "cpu" else torch.ops.fake_device.read(detached)


def _operation(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


def _reduced(every: list[Tensor], operation: Any) -> Tensor:
    total = every[0]
    for reduce in (_REDUCED[known] for known in _REDUCED if operation == known):
        for one in every[1:]:
            total = reduce(total, one)
        return total / len(every) if operation == dist.ReduceOp.AVG else total
    raise NotImplementedError(f"{BACKEND} has no {operation}")


for _name, _before in _BEFORE.items():
    setattr(StreamGroup, _before, getattr(StreamGroup, _name))
dist.Backend.register_backend(BACKEND, StreamGroup, extended_api=True, devices=["cuda"])
