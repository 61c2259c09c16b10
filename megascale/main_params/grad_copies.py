"""GradCopies: gradients travel to host memory while backward runs, each as soon as it is final.

A gradient in ``param.grad`` is final when backward has made it; a main grad of a GradSync, when its bucket is reduced.
A copy counts if its gradient is the one that the step then measures: the same tensor, which torch has counted no write
to since. Any other one is made again by the step: after another pass of backward, a clip, a hook of the user. So when
bytes travel changes, and not which. A write that torch counts nowhere, through ``grad.data``, by a kernel of others or
a collective, is seen on the device, by a sum of the gradient's bits: nothing is updated then, and the user is told.
"""

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megascale.grad_sync.grad_hook import owner_of, remove
from megascale.main_params.host_buffers import HostBuffers
from megascale.main_params.main_param import MainParam
from megascale.main_params.weight_arrivals import WeightArrivals
from megascale.utils.calls import outside_of_graphs
from megascale.utils.collectives import is_alone_in_world
from megascale.utils.dtensors import held, is_dtensor

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""An integer type, by the bytes of an element."""


class GradCopies:
    """Copies gradients of parameters whose main params live in host memory, on a stream of its own.

    A gradient travels with the pass of backward that was the step's last one the step before: once, whatever the number
    of micro-batches. A GradSync knows the last one: its main grads travel with that. Nothing travels where the thread
    still reads, or to memory that is not there yet.

    Where there are other processes, gradients in ``param.grad`` do not travel, except those of DTensors: their averages
    come after backward, uncounted.

    Args:
        device: of the model params; it has streams.
        arrivals: knows which updates are under way.
    """

    def __init__(self, device: torch.device, arrivals: WeightArrivals) -> None:
        self._device = device
        self._arrivals = arrivals
        self._stream = torch.Stream(device)
        self._slots: WeakKeyDictionary[HostBuffers, int] = WeakKeyDictionary()
        self._sums = torch.zeros(0, dtype=torch.int64, device=device)
        self._passes: WeakKeyDictionary[HostBuffers, int] = WeakKeyDictionary()
        self._usual_passes: WeakKeyDictionary[HostBuffers, int] = WeakKeyDictionary()
        # What was copied: a gradient, its address, and its versions when its copy began.
        self._copied: dict[HostBuffers, tuple[ref[Tensor], int, tuple[int, int]]] = {}
        self._hooks: dict[int, RemovableHandle] = {}
        finalize(self, remove, self._hooks.values()).atexit = False  # of a view: those that are there by then

    def follow(self, params: Iterable[MainParam]) -> None:
        """Copy the gradients of those of ``params`` that are in host memory from now on."""
        for param in params:
            before = self._hooks.pop(id(param.model), None)
            if before is not None:
                before.remove()
            if param.on_host is not None:
                self._slots[param.on_host] = len(self._slots)
                owner = owner_of(param.model)
                if owner is not None:
                    # The GradSync may live longer than the copies.
                    reduced = _weakly(self, GradCopies.copy, param.on_host, param.model)
                    self._hooks[id(param.model)] = owner.register_reduced_hook(param.model, reduced)
                elif param.model.requires_grad:  # else torch takes no hook; once it is trained, steps copy its gradient
                    hook = _weakly(self, GradCopies.take, param.on_host)
                    self._hooks[id(param.model)] = param.model.register_post_accumulate_grad_hook(hook)
        self._slots = WeakKeyDictionary({buffers: at for at, buffers in enumerate(self._slots)})  # some may be gone
        self._copied.clear()
        self._sums = torch.zeros(len(self._slots), dtype=torch.int64, device=self._device)
        self._sums.record_stream(self._stream)  # this object may be dropped meanwhile

    @torch.no_grad()
    def take(self, buffers: HostBuffers, model: nn.Parameter) -> None:
        """Copy the gradient that backward has just made."""
        passes = self._passes[buffers] = self._passes.get(buffers, 0) + 1
        is_final = passes >= self._usual_passes.get(buffers, 1) and (is_dtensor(model) or is_alone_in_world())
        if model.grad is not None and is_final:
            self.copy(buffers, model, model.grad)

    @torch.no_grad()
    def copy(self, buffers: HostBuffers, model: nn.Parameter, grad: Tensor) -> None:
        """Copy a gradient, or what this rank keeps of a main grad, behind the work of the current stream, where its
        memory is free.

        If its memory is freed before the step it needs not be kept for the stream: its copy does not count.
        """
        local = held(grad)
        memory = buffers.memory_for(local)
        if memory is None or not local.numel() or self._arrivals.is_updating(model):
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            # First the sum: a write between the two is then seen.
            torch.sum(_bits(local), tuple(range(local.dim())), dtype=torch.int64, out=self._sums[self._slots[buffers]])
            memory.copy_(local, non_blocking=True)
        self._copied[buffers] = ref(grad), local.data_ptr(), _versions(grad)

    def join(self, measured: Iterable[tuple[HostBuffers, Tensor]]) -> tuple[frozenset[HostBuffers], Tensor]:
        """Let the current stream wait for all copies. The next step begins.

        Returns what holds the gradient as the step has measured it, and whether one of these gradients was written,
        uncounted, after its copy: one element, on the device.

        ``measured``: local gradients, with the host memory of their parameters.
        """
        self._usual_passes, self._passes = self._passes, WeakKeyDictionary()
        copied, self._copied = self._copied, {}
        # Also for copies that do not count: the step writes into the same memory.
        torch.accelerator.current_stream(self._device).wait_stream(self._stream)
        if not copied:
            return frozenset(), torch.zeros((), device=self._device)
        sums = list(self._sums.unbind())
        there = set()
        for buffers, local in measured:
            if buffers in copied:
                reference, address, versions = copied[buffers]
                grad = reference()  # while it lives nothing else can be at its address
                if grad is not None and local.data_ptr() == address and _versions(grad) == versions:
                    there.add(buffers)
                    sums[self._slots[buffers]] = torch.sum(_bits(local), dtype=torch.int64)
        return frozenset(there), (torch.stack(sums) != self._sums).any()


def _weakly(copies: GradCopies, method: Callable[..., None], *first: Any) -> Callable[..., None]:
    """Return a hook that calls a method of ``copies`` while these live: torch keeps it where no cycle is seen.

    ``first``: arguments before those that the hook is given.
    """
    there = ref(copies)

    @outside_of_graphs  # as GradHook
    def hook(*given: Any) -> None:
        own = there()
        if own is not None:
            method(own, *first, *given)

    return hook


def _bits(grad: Tensor) -> Tensor:
    return grad.view(BITS[grad.element_size()])


def _versions(grad: Tensor) -> tuple[int, int]:
    """Return how often torch has counted a write, to a DTensor and to its local tensor."""
    return grad._version, held(grad)._version
