"""StreamedUpdate: main params and state live in host memory, and the device updates them, slice by slice.

A slice's main params and state are copied to the device, updated there beside gradients and model params that never
leave it, and copied back, while the next slice arrives and the one before leaves. The bits are those of the host's
update, as every backend has the reference's. A device with a slow host takes this way.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from typing_extensions import override

from megascale.kernels import Decision, Operands
from megascale.main_params.main_param import MainParam
from megascale.step.host_update import HostUpdate
from megascale.step.update import KernelCall, MarkWritten, OverflowFlags, PendingUpdate, Prepared
from megascale.utils.host_memory import aligned, dense
from megascale.utils.streams import current_stream, has_streams, keep

SLOTS = 2
"""Slices that are on the device at once: one is updated while the next arrives, and leaves while that is updated."""


class _Slot:
    """Device memory for the main params and state of one slice."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)
        self.left: torch.Event | None = None
        """Behind the copies to the host of what was in it last."""


class _Mirror(NamedTuple):
    """Operands in a slot, and each of their tensors that travels: in host memory, and in the slot."""

    operands: Operands
    pairs: list[tuple[Tensor, Tensor]]


class StreamedUpdate(HostUpdate):
    """See the module. Nobody waits for a copy but the device's streams, and whoever reads main params or state."""

    @override
    def _set_up(self) -> None:
        self._slots = [_Slot(self._device) for _ in range(SLOTS)]
        self._mirrors: WeakKeyDictionary[Operands, _Mirror] = WeakKeyDictionary()
        streams = has_streams(self._device)
        self._inwards = torch.Stream(self._device) if streams else None
        self._outwards = torch.Stream(self._device) if streams else None
        self._left: torch.Event | None = None

    @override
    def update_signature(self) -> str:
        return f"{self._beside.update_signature()}, with state in host memory"

    @override
    def why_not_capturable(self) -> str | None:
        return "optimizer_cpu_offload=True: main params and state travel"

    @override
    def release_scratch(self) -> None:
        super().release_scratch()
        self._mirrors.clear()
        for slot in self._slots:
            slot.memory = torch.empty(0, dtype=torch.uint8, device=self._device)

    @override
    def _wait_for_last(self) -> None:
        """Nothing: the streams do."""

    @override
    def _as_computed(self, updates: Sequence[PendingUpdate]) -> list[PendingUpdate]:
        return list(updates)

    @override
    def prepare(self, updates: Sequence[PendingUpdate]) -> list[PendingUpdate]:
        """See :class:`HostUpdate`. Makes the slots' memory, before anything has changed."""
        ready = super().prepare(updates)
        there = [prepared for pending in ready if self._is_there(pending) for prepared in _prepared(pending.call)]
        needed = max((_nbytes(prepared.operands) for prepared in there), default=0)
        if any(slot.memory.numel() < needed for slot in self._slots):
            self._mirrors.clear()
            for slot in self._slots:
                slot.memory = torch.empty(needed, dtype=torch.uint8, device=self._device)
                for stream in filter(None, (self._inwards, self._outwards)):
                    keep(slot.memory, stream)
            if self._inwards is not None:
                # The allocator gives memory that work queued before on this stream may still use.
                self._inwards.wait_event(current_stream(self._device).record_event())
        return ready

    @override
    def apply(
        self, updates: Sequence[PendingUpdate], decision: Decision, mark_written: MarkWritten
    ) -> list[OverflowFlags]:
        here = [pending for pending in updates if not self._is_there(pending)]
        flags = self._beside.apply(here, decision, mark_written) if here else []
        if self._inwards is not None and self._left is not None:
            self._inwards.wait_event(self._left)  # what the step before has sent to the host comes back now
        at = 0
        for pending in filter(self._is_there, updates):
            for prepared in _prepared(pending.call):
                flags += prepared.flagged(self._update(pending, prepared, self._slots[at % SLOTS], decision))
                at += 1
            mark_written(pending.unit)
        if self._left is not None:
            self._arrivals.owe(self._left)
        return flags

    def _update(self, pending: PendingUpdate, prepared: Prepared, slot: _Slot, decision: Decision) -> Tensor:
        """Bring a slice's state to the device, update it, and send it back. Returns which main params overflowed."""
        mirror = self._mirror(prepared, slot)
        stream = current_stream(self._device) if self._inwards is not None else None
        # Into the slot once the slice before has left it.
        with _on(self._inwards):
            if self._inwards is not None and slot.left is not None:
                self._inwards.wait_event(slot.left)
            for there, here in mirror.pairs:
                here.copy_(there, non_blocking=True)
        if self._inwards is not None and stream is not None:
            stream.wait_event(self._inwards.record_event())
        whole = len(prepared.indices) == len(pending.unit.params)
        grads = pending.grads if whole else [pending.grads[index] for index in prepared.indices]
        mirror.operands.grad = grads
        hyper = None if pending.call is None else pending.call.hyper
        flags = self._host.run(prepared._replace(operands=mirror.operands), hyper, decision.to(self._device))
        mirror.operands.grad = ()  # kept for the next step, which has other gradients
        if self._outwards is not None and stream is not None:
            self._outwards.wait_event(stream.record_event())
        with _on(self._outwards):
            for there, here in (*mirror.pairs, *_weights(prepared.params)):
                there.copy_(here, non_blocking=True)
        if self._outwards is not None:
            self._left = slot.left = self._outwards.record_event()
        return flags

    def _mirror(self, prepared: Prepared, slot: _Slot) -> _Mirror:
        """Return operands in ``slot`` for those in host memory; model params are the device's own."""
        known = self._mirrors.get(prepared.operands)
        if known is not None and _is_in(known, slot):
            return known
        operands, begin, pairs = prepared.operands, 0, []

        def in_slot(there: Tensor) -> Tensor:
            nonlocal begin
            here = dense(slot.memory[begin:], there)
            begin += aligned(there.nbytes)
            pairs.append((there, here))
            return here

        # The kernel decodes main params that are held as remainders: those have no memory, here or there.
        is_held = bool(operands.remainder)
        made = Operands(
            model=[param.part for param in prepared.params],
            main=[_without_memory(main, self._device) if is_held else in_slot(main) for main in operands.main],
            state={name: [in_slot(one) for one in column] for name, column in operands.state.items()},
            step=[in_slot(one) for one in operands.step],
            start=operands.start,
            remainder=[in_slot(one) for one in operands.remainder],
        )
        self._mirrors[prepared.operands] = found = _Mirror(made, pairs)
        return found


def _prepared(call: KernelCall | None) -> list[Prepared]:
    return [] if call is None else call.prepared


def _on(stream: torch.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else stream


def _travelling(operands: Operands) -> Iterator[Tensor]:
    """Yield the tensors of operands in host memory that travel."""
    yield from operands.remainder or operands.main
    for column in operands.state.values():
        yield from column
    yield from operands.step


def _nbytes(operands: Operands) -> int:
    """Return the bytes of a slot that these operands need."""
    return sum(aligned(one.nbytes) for one in _travelling(operands))


def _without_memory(main: Tensor, device: torch.device) -> Tensor:
    """Return a main param that a remainder stands for: its form, and no memory."""
    made = torch.empty_strided(main.shape, main.stride(), dtype=main.dtype, device=device)
    made.untyped_storage().resize_(0)
    return made


def _is_in(mirror: _Mirror, slot: _Slot) -> bool:
    begin, end = slot.memory.data_ptr(), slot.memory.data_ptr() + slot.memory.numel()
    return all(begin <= here.data_ptr() <= end for _, here in mirror.pairs[:1])


def _weights(params: Sequence[MainParam]) -> list[tuple[Tensor, Tensor]]:
    """Return the weights beside which remainders in host memory count: there, and on the device."""
    held = [param for param in params if param.remainder is not None]
    return [(param.twin.weights, param.part) for param in held if param.twin is not None]
