"""A model of an accelerator's streams, on CPU tensors: what one stream writes and another reads must be ordered.

Operators run at once, one after the other, so that values are always right. The model looks at what a device would be
free to do: work of one stream keeps its order, work of two streams has none but for events and waits. Each stream has
a vector clock; each operator is noted with the bytes that it reads and writes. An error is

- a read or a write that is not ordered behind an earlier write of the same bytes, or a write not behind earlier reads;
- memory that is freed while a stream may still use it, on which it was not allocated and which it was not kept for.

    with StreamModel() as model:
        side = model.stream("side")
        with model.on(side):
            tensor.add_(1)
        model.main.wait_stream(side)      # without it:
        tensor.sum()                      # StreamError
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megascale.grad_sync import reduction, sync
from megascale.main_params import gather
from megascale.utils import collectives, streams

Clock = dict[str, int]


class StreamError(AssertionError):
    """Two streams use the same bytes in no order."""


class Event:
    """What a stream had been given when it was recorded."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock


class Stream:
    """A stream of the model, with the methods of torch.Stream that are used."""

    def __init__(self, name: str, model: "StreamModel | None" = None) -> None:
        self.name = name
        self.clock: Clock = {name: 0}
        self._model = model
        self._open = ExitStack()

    def __enter__(self) -> "Stream":
        assert self._model is not None
        self._open.enter_context(self._model.on(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def record_event(self) -> Event:
        """Return all that was put on this stream so far."""
        return Event(dict(self.clock))

    def wait_event(self, event: Event) -> None:
        """Let what comes next wait for ``event``."""
        for name, time in event.clock.items():
            self.clock[name] = max(self.clock.get(name, 0), time)

    def wait_stream(self, other: "Stream") -> None:
        """Let what comes next wait for all that was put on ``other``."""
        self.wait_event(other.record_event())

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class _Use:
    stream: str
    time: int
    begin: int
    end: int
    writes: bool
    what: str


@dataclass
class _Memory:
    """One storage: the stream on which it was allocated, those it is kept for, and its uses."""

    home: Stream
    uses: list[_Use] = field(default_factory=list)
    kept_for: set[Stream] = field(default_factory=set)


class StreamModel(TorchDispatchMode):
    """The streams of one process. See the module's docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.main = Stream("main")
        self.comm = Stream("comm")
        """On which collectives run."""
        self.current = self.main
        self.used: set[str] = set()
        """Names of the streams that were given work."""
        self.errors: list[str] = []
        self._memory: dict[int, _Memory] = {}
        self._open = ExitStack()

    def stream(self, name: str) -> Stream:
        """Return a new stream."""
        return Stream(name, self)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Put work on ``stream``."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def use(self, reads: Iterable[Tensor], writes: Iterable[Tensor], what: str) -> None:
        """Note that the current stream reads and writes tensors."""
        stream = self.current
        stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
        self.used.add(stream.name)
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                self._use(tensor, is_write, what)

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """Model of ``Tensor.record_stream``."""
        self._memory_of(tensor).kept_for.add(stream)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and note what it uses."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = func._schema  # type: ignore[attr-defined]
        is_view = any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments)
        if is_view or func is torch.ops.aten._local_scalar_dense.default:
            return result  # the host's reads are not the model's matter
        reads_values = not schema.name.endswith("_like")
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        given = [*args, *(kwargs.get(a.name) for a in schema.arguments[len(args) :])]
        for value, argument in zip(given, schema.arguments, strict=True):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written or reads_values:
                (writes if is_written else reads).extend(t for t in tree_leaves(value) if isinstance(t, Tensor))
        known = {id(tensor) for tensor in writes}
        writes += [t for t in tree_leaves(result) if isinstance(t, Tensor) and id(t) not in known]
        self.use(reads, writes, str(func))
        return result

    def __enter__(self) -> "StreamModel":
        patch = self._open.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(streams, "has_streams", lambda device: True)
        patch.setattr(streams, "current_stream", lambda device: self.current)
        patch.setattr(streams, "keep", self.keep)
        patch.setattr(sync, "new_stream", lambda _: self.stream("reduced"))
        patch.setattr(reduction, "runs_on_streams", lambda *_: True)
        patch.setattr(reduction, "is_message_passing", lambda *_: False)
        patch.setattr(gather, "is_message_passing", lambda *_: False)
        patch.setattr(collectives, "is_message_passing", lambda *_: False)
        patch.setattr(collectives, "_reduce_scatter", self._collective(collectives._reduce_scatter))
        patch.setattr(collectives, "_all_gather", self._collective(collectives._all_gather))
        patch.setattr(dist, "all_reduce", self._collective(dist.all_reduce))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._open.close()
        self._memory.clear()
        if error[0] is None and self.errors:
            raise StreamError("\n".join(self.errors))

    def _collective(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """As NCCL does it: on a stream of its own, behind what the current one was given."""

        def begin(*tensors: Tensor, async_op: bool = False, **options: Any) -> Any:
            with _disable_current_modes():
                work = real(*tensors, async_op=async_op, **options)
            self.comm.wait_stream(self.current)
            with self.on(self.comm):
                self.use(tensors, tensors[:1], real.__name__)
            if work is None:
                self.current.wait_stream(self.comm)
                return None
            return _Work(self, work, tensors)

        return begin

    def _use(self, tensor: Tensor, is_write: bool, what: str) -> None:
        if tensor.numel() == 0:
            return
        begin = int(tensor.storage_offset()) * tensor.element_size()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = begin + int(last + 1) * tensor.element_size()
        stream = self.current
        new = _Use(stream.name, stream.clock[stream.name], begin, end, is_write, what)
        memory = self._memory_of(tensor)
        for old in memory.uses:
            overlaps = old.begin < end and begin < old.end
            if overlaps and (old.writes or is_write) and stream.clock.get(old.stream, 0) < old.time:
                self.errors.append(f"{_told(new)}, not behind {_told(old)}")
        covered = [old for old in memory.uses if is_write and begin <= old.begin and old.end <= end]
        memory.uses = [old for old in memory.uses if old not in covered or old.stream != stream.name]
        memory.uses.append(new)

    def _memory_of(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory:
            self._memory[key] = _Memory(self.current)
            weakref.finalize(storage, self._free, key).atexit = False
        return self._memory[key]

    def _free(self, key: int) -> None:
        memory = self._memory.pop(key, None)
        if memory is None:
            return
        known = Stream("allocator")
        for stream in (memory.home, *memory.kept_for):
            known.wait_stream(stream)
        for use in memory.uses:
            if known.clock.get(use.stream, 0) < use.time:
                self.errors.append(f"memory of {memory.home} is freed, not behind {_told(use)}")


class _Work:
    """A collective under way. It holds its tensors until somebody waits, as torch's NCCL does."""

    def __init__(self, model: StreamModel, work: Any, tensors: tuple[Tensor, ...]) -> None:
        self._model = model
        self._work = work
        self._tensors = tensors
        self._end = model.comm.record_event()

    def wait(self) -> None:
        """Let the current stream wait. The host does not."""
        with _disable_current_modes():
            self._work.wait()
        self._model.current.wait_event(self._end)
        self._tensors = ()


def _told(use: _Use) -> str:
    return f"{'write' if use.writes else 'read'} of bytes {use.begin} to {use.end} by {use.what} on {use.stream}"
