"""WeightArrivals: weights that a thread computes in host memory and sends to the device, and who waits for them."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet, finalize, ref

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from megascale.grad_sync.message_thread import MessageThread
from megascale.main_params.gather_hooks import GatherHooks, params_read_by
from megascale.main_params.main_param import MainParam
from megascale.main_params.write_tracker import WriteWatch
from megascale.utils.streams import Arrival, has_streams


class _Sent(NamedTuple):
    """The newest update of one unit, whose weights have not been awaited by all yet.

    Attributes:
        done: ends when the thread has updated and queued the copies.
        arrival: lets each stream wait for the copies, once.
        watch: of the params, while nobody has waited.
    """

    done: "Future[None]"
    arrival: Arrival
    watch: list[WriteWatch]

    def wait_for_arrival(self, written_too_early: list[str]) -> None:
        """Let the current stream wait. Adds to the list the names of params that were written before the first wait."""
        self.arrival.wait()
        while self.watch:
            written_too_early += self.watch.pop().written()


class WeightArrivals:
    """Runs updates in a thread, one after the other, and lets their weights travel; readers wait for their own.

    Modules wait in forward: each that owns or reads such parameters gets the hooks of an overlapping gather, when it
    is first called. A parameter that no called module has read, or that compiled code may read, is not awaited by
    anybody: see :meth:`unawaited`.

    Args:
        device: of the model params.
        written_too_early: gets the names of params that were written while their weights were on their way.
        are_gathered: shards travel, and the step waits for them, to gather them: modules need no hooks.
    """

    def __init__(self, device: torch.device, written_too_early: list[str], *, are_gathered: bool = False) -> None:
        self.device = device
        self._are_gathered = are_gathered
        self._thread = MessageThread()
        self._hooks = GatherHooks(self)
        self._awaited: set[int] = set()
        self._sent: dict[int, _Sent] = {}
        self._written_too_early = written_too_early
        self._tracked: set[int] = set()
        self._seen: WeakSet[nn.Module] = WeakSet()
        self._stream: torch.Stream | None = torch.Stream(device) if has_streams(device) else None
        self._finder: RemovableHandle | None = None
        # When this object is freed the model is whole; where the thread itself frees it, once its tasks are done.
        finalize(self, _wait_for_all, self._sent, []).atexit = False

    def find_modules(self, params: Iterable[MainParam]) -> None:
        """Hook the modules that read ``params``, each when it is called for the first time."""
        if self._are_gathered:
            return
        self._tracked.update(id(param.model) for param in params)
        self._seen.clear()
        if self._finder is None:
            there = ref(self)

            # Of all modules: it goes with the first call after the arrivals are freed, not when they are freed, as the
            # compiler may be reading the list of hooks then. In compiled code it finds nothing: it would cut the graphs
            # of models that have nothing to do with the arrivals.
            def find(module: nn.Module, _inputs: Any) -> None:
                if torch.compiler.is_compiling() or not (module._parameters or module._modules):
                    return
                arrivals = there()
                if arrivals is not None:
                    arrivals.found(module)
                else:
                    handle.remove()

            self._finder = handle = register_module_forward_pre_hook(find)

    def unawaited(self, params: Sequence[MainParam]) -> bool:
        """Whether the step waits for ``params``: there may be one that no module waits for."""
        return (
            self._are_gathered
            or self._hooks.are_compiled
            or any(id(param.model) not in self._awaited for param in params)
        )

    def start(self, params: Sequence[MainParam], update: Callable[[], bool]) -> None:
        """Run ``update`` in the thread, after those before it. Where it returns True, send the weights."""
        stream = self._stream
        event = torch.Event(self.device) if stream is not None else None

        def task() -> None:
            if update():
                _send(params, stream)
            if event is not None:
                event.record(stream)

        done = self._thread.submit(task)
        wait = partial(_wait, self._thread, done, event, self.device)
        watch = WriteWatch({param.name: param.model for param in params})
        sent = _Sent(done, Arrival(wait, self.device), [watch])
        self._sent.update((id(param.model), sent) for param in params)

    def wait(self) -> None:
        """Let the current stream wait for all weights. The host waits for the thread."""
        _wait_for_all(self._sent, self._written_too_early)

    def is_updating(self, param: nn.Parameter) -> bool:
        """Whether the thread may still read what the newest update of ``param`` reads."""
        sent = self._sent.get(id(param))
        return sent is not None and not sent.done.done()

    def wait_for(self, params: Iterable[nn.Parameter]) -> None:
        """Let the current stream wait for the weights of ``params``."""
        for param in params if self._sent else ():
            sent = self._sent.get(id(param))
            if sent is not None:
                sent.wait_for_arrival(self._written_too_early)

    def found(self, module: nn.Module) -> None:
        """Take note of a module that is about to run forward."""
        if module in self._hooks and module in self._seen:
            return  # its own hook waits
        self._seen.add(module)
        read = [param for param in params_read_by(module) if id(param) in self._tracked]
        if read:
            self._hooks.add([module])
            self._awaited.update(map(id, read))
            self.wait_for(read)


@torch.no_grad()
def _send(params: Sequence[MainParam], stream: torch.Stream | None) -> None:
    """Copy the weights of ``params`` from host memory to the device, on ``stream``."""
    if stream is not None:
        torch.accelerator.set_stream(stream)  # of this thread
    for param in params:
        if param.on_host is not None:
            # .data: a write of our own, which no version counts.
            param.part.data.copy_(param.on_host.weights, non_blocking=stream is not None)
            if stream is not None:
                param.part.record_stream(stream)  # the model may be dropped meanwhile


def _wait(thread: MessageThread, done: "Future[None]", sent: torch.Event | None, device: torch.device) -> None:
    """Wait until the thread has sent weights, and let the current stream wait until they are there."""
    thread.result(done)
    if sent is not None:
        torch.accelerator.current_stream(device).wait_event(sent)


def _wait_for_all(sent: "dict[int, _Sent]", written_too_early: list[str]) -> None:
    for one in {id(one): one for one in sent.values()}.values():
        one.wait_for_arrival(written_too_early)
    sent.clear()
