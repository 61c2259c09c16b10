"""NCCL without NCCL: a process group whose collectives travel between processes and end on streams, by NCCL's rules.

Once this module was imported, it is what torch takes for its own ``"nccl"``.

A collective reads what the current stream, and what that was ordered behind, has written; what it gives is written on a
stream of the group's own, behind the current one. ``wait()`` lets the current stream wait for that, and not the host.
On streams that run late (late_streams.h) it ends at a point that the seed draws between the call and the wait, and a
missing wait gives wrong values: who reads results too early reads old ones, who writes, or frees, what is still being
sent makes the results NaN.

When it is called, a collective meets those of the other ranks, over gloo: on a GPU it would wait on its stream. What
the current stream was ordered behind is therefore carried out earlier than it had to be. Each rank tells the others
what it calls. What would hang a GPU, or give wrong values there, is a DistBackendError that names the calls,

- if ranks call in different orders, or with other sizes, dtypes, reductions or roots;
- if a tensor is the host's, on another device than the rest, or on one that another rank uses, too;
- if a rank does not call before the group's timeout, or is lost.

Sums are made in the order of ranks. :meth:`tests.fake_device.process.OnDevice.ranks` has processes of such a group.
"""

import functools
import pickle
from collections.abc import Sequence
from datetime import timedelta
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes

_BEFORE = {
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
"""The names of torch before 2.13, by the newer ones."""


class Given(distributed_c10d.Work):
    """A collective whose results are written on a stream. It keeps tensors until it was waited for, as NCCL's do."""

    def __init__(
        self, event: torch.Event | None = None, outputs: Sequence[Tensor] = (), inputs: Sequence[Tensor] = ()
    ) -> None:
        super().__init__()
        self._event = event
        self._tensors = list(outputs), list(inputs)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors, as DDP's reducer takes it: who waits for it lets a stream wait."""
        outputs = self._tensors[0]
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[one.device for one in outputs[:1]])
        self.wait()
        future.set_result(outputs)
        return future

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Let the current stream, of the device of the tensors, wait for the results."""
        if self._event is not None:
            torch.accelerator.current_stream(self._event.device).wait_event(self._event)
        self._tensors = [], []
        return True

    def is_completed(self) -> bool:
        """Return whether the results are there."""
        return self._event is None or self._event.query()


class StreamGroup(dist.ProcessGroup):
    """The group of some ranks. As NCCL it carries tensors of a device alone, and none of the host."""

    class Options(SimpleNamespace):
        """What torch tells of a group."""

    def __init__(self, store: Any, rank: int, size: int, options: Any, _device: torch.device | None = None) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.options = options
        self._name: str = options.group_name
        self._ranks = list(options.global_ranks_in_group) or list(range(size))
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, options._timeout)
        self._streams: dict[torch.device, torch.Stream] = {}
        self._calls = 0
        self._calling = Lock()

    def getBackendName(self) -> str:
        """Return what torch calls it."""
        return "nccl"

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: calls are counted from the first on."""

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name by which torch's functional collectives find it."""
        return self._name

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Given:  # type: ignore[override]
        """Reduce each tensor in place."""
        every = self._exchange("all_reduce", tensors, tensors, _operation(opts))
        return self._give(tensors, [_reduced(ranks, _operation(opts)) for ranks in zip(*every, strict=True)], tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Given:
        """Reduce each tensor in place."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Given:  # type: ignore[override]
        """Give each tensor the root's values."""
        every = self._exchange("broadcast", tensors, tensors, f"from {self._ranks[opts.rootRank]}")
        return self._give(tensors, every[opts.rootRank], tensors)

    def barrier(self, opts: Any = None) -> Given:
        """Wait for all ranks."""
        self._exchange("barrier", [], [])
        return Given()

    def allgather(  # type: ignore[override]  # one of torch's two ways to call it
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Given:
        """Fill each list with every rank's tensor; those of a list need not be of one size."""
        places = [place for one in outputs for place in one]
        every = self._exchange("all_gather", places, inputs)
        return self._give(places, [one for ranks in zip(*every, strict=True) for one in ranks], inputs)

    def all_gather_single(self, output: Tensor, mine: Tensor, opts: Any = None) -> Given:
        """Fill ``output`` with every rank's tensor."""
        return self.all_gather_single_coalesced([output], [mine], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Given:
        """Fill each output with every rank's tensor."""
        every = self._exchange("all_gather_single", inputs, inputs)
        return self._give(outputs, [torch.cat(ranks) for ranks in zip(*every, strict=True)], inputs)

    def reduce_scatter(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Given:
        """Reduce each list's tensor of this rank into an output; those of a list need not be of one size."""
        parts = [part for one in inputs for part in one]
        every = self._exchange("reduce_scatter", parts, parts, _operation(opts))
        own = [ranks[self.rank() :: self.size()] for ranks in every]
        return self._give(outputs, [_reduced(ranks, _operation(opts)) for ranks in zip(*own, strict=True)], parts)

    def reduce_scatter_single(self, output: Tensor, mine: Tensor, opts: Any = None) -> Given:
        """Reduce this rank's part of a tensor into ``output``."""
        return self.reduce_scatter_single_coalesced([output], [mine], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Given:
        """Reduce this rank's part of each tensor into an output."""
        return self.reduce_scatter(outputs, [list(one.flatten().chunk(self.size())) for one in inputs], opts)

    def all_to_all_single(
        self, output: Tensor, mine: Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> Given:
        """Send each rank its rows of a tensor."""
        rows = mine.split(sent or mine.shape[0] // self.size())
        every = self._exchange("all_to_all_single", [], rows, f"{mine.dtype}")
        return self._give([output], [torch.cat([ranks[self.rank()] for ranks in every])], [mine])

    def gather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Given:
        """Give the root every rank's tensor."""
        every = self._exchange("gather", inputs, inputs, f"to {self._ranks[opts.rootRank]}")
        places = [place for one in outputs for place in one]
        return self._give(places, [mine for [mine] in every], inputs) if places else Given()

    def scatter(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Given:
        """Give each rank its one of the root's tensors."""
        parts = [part for one in inputs for part in one]
        every = self._exchange("scatter", outputs, parts, f"from {self._ranks[opts.rootRank]}")
        return self._give(outputs, [every[opts.rootRank][self.rank()]], parts)

    def _exchange(
        self, name: str, shown: Sequence[Tensor], sent: Sequence[Tensor], same: str = ""
    ) -> list[list[Tensor]]:
        """Let this call meet that of every rank. Returns what each of them sends, flat, in the host's memory.

        Args:
            shown: tensors whose sizes and dtypes are the same on all ranks.
            sent: by this rank.
            same: what else is the same on all ranks.

        Raises DistBackendError.
        """
        sizes = [f"{str(tensor.dtype).removeprefix('torch.')}[{tensor.numel()}]" for tensor in shown]
        call = " ".join(filter(None, [name, *sizes, same]))
        # What the calling program counts, or has on its device, is not what carries a call.
        with self._calling, _disable_current_modes(), torch.device("cpu"):
            self._calls += 1
            story = f"call {self._calls} of ranks {self._ranks}: "
            try:
                places = sorted({str(tensor.device) for tensor in (*shown, *sent)})
                told = [pickle.loads(one) for one in self._gather(pickle.dumps((call, places)))]
                if not (wrong := self._wrong(told)):
                    sent = [_read(tensor).flatten() for tensor in sent]
                    return [pickle.loads(one) for one in self._gather(pickle.dumps(sent))]
            except RuntimeError as error:
                raise dist.DistBackendError(f"{story}rank {dist.get_rank()} calls {call}: {error}") from error
        raise dist.DistBackendError(story + wrong)

    def _wrong(self, told: Sequence[tuple[str, list[str]]]) -> str:
        """Return what is wrong where ranks do not make the same call, or not each on a device of its own."""
        first, [call, _] = self._ranks[0], told[0]
        for rank, (other, _) in zip(self._ranks, told, strict=True):
            if other != call:
                return f"rank {first} calls {call}, rank {rank} calls {other}"
        devices = [device for _, devices in told for device in devices]
        if "cpu" in devices or len(set(devices)) < len(devices) or any(len(devices) > 1 for _, devices in told):
            every = [f"rank {rank} has {' and '.join(on)}" for rank, (_, on) in zip(self._ranks, told, strict=True)]
            return f"{call}: {', '.join(every)}, but tensors of a rank are on a device of its own"
        return ""

    def _gather(self, mine: bytes) -> list[bytes]:
        """Return every rank's bytes."""
        sizes = [torch.empty(1, dtype=torch.int64) for _ in self._ranks]
        self._gloo.allgather([sizes], [torch.tensor([len(mine)])]).wait()
        every = [torch.empty(int(max(sizes)), dtype=torch.uint8) for _ in self._ranks]
        self._gloo.allgather(
            [every], [torch.frombuffer(bytearray(mine.ljust(len(every[0]))), dtype=torch.uint8)]
        ).wait()
        return [one[: int(size)].numpy().tobytes() for one, size in zip(every, sizes, strict=True)]

    def _give(self, outputs: Sequence[Tensor], results: Sequence[Tensor], inputs: Sequence[Tensor]) -> Given:
        """Write results, behind what the current stream has, on this group's stream."""
        shaped = [value.view(to.shape) for value, to in zip(results, outputs, strict=True)]
        device = outputs[0].device
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        stream = self._streams[device]
        torch.ops.fake_device.write(outputs, shaped, inputs, [_read(one) for one in inputs], stream.stream_id)
        return Given(stream.record_event(), outputs, inputs)


def _read(tensor: Tensor) -> Tensor:
    """Return a copy on the host of what the current stream would find there."""
    return torch.ops.fake_device.read(tensor.detach())


def _operation(opts: Any) -> str:
    given = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    return next(name for name in ("SUM", "AVG", "MAX", "MIN") if given == getattr(dist.ReduceOp, name))


def _reduced(every: Sequence[Tensor], operation: str) -> Tensor:
    if operation == "AVG":  # as NCCL does it
        every = [one * (1 / len(every)) for one in every]
    reduce = {"MAX": torch.maximum, "MIN": torch.minimum}.get(operation, torch.add)
    return functools.reduce(reduce, every)


# What torch finds in the place of NCCL.
for _name, _before in _BEFORE.items():
    setattr(StreamGroup, _before, getattr(StreamGroup, _name))
_torch: Any = distributed_c10d
_torch.ProcessGroupNCCL = _torch.ProcessGroupNCCL2 = StreamGroup  # the second one from torch 2.15 on
_torch._maybe_attach_flight_recorder = lambda *_: None  # of torch 2.15: it knows torch's own classes alone
_torch._NCCL_AVAILABLE = True
_torch.default_pg_nccl_timeout = _torch.default_pg_timeout
torch.cuda.nccl.version = lambda: (2, 28, 9)
_logger: Any = torch._C._distributed_c10d.Logger
_logger.set_runtime_stats_and_log = lambda _: None  # DDP's timer of a device is in a build with CUDA alone
