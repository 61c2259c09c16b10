"""GradMemory: the host memory that gradients are copied into: memory of its own for each, or slots that units share.

Without a limit each gradient has memory of its own, made when it first needs it. With one, memory is assigned to all
units of an optimizer at once. Where it does not suffice for all, the units that are updated first share two slots in
turn, because forward needs their weights first, so that the host has updated them soon after the step has begun; the
last ones, whose gradients backward makes first, have memory of their own. So has a unit that is larger than a slot,
such as a large embedding, for which both slots would have to be as large.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain
from typing import NamedTuple
from weakref import WeakMethod, WeakSet, ref

import torch
from torch import Tensor

from megascale.errors import UsageError
from megascale.kernels import TensorList
from megascale.main_params.host_twin import HostTwin, fits, host_memory
from megascale.main_params.update_unit import UpdateUnit
from megascale.utils.host_memory import SLAB, aligned, allocate, allocated_bytes, dense
from megascale.utils.identity import are_same

SLOTS = 2
"""Units whose gradients share memory are copied into these in turn: one is updated while the next travels."""

Gradients = tuple[Sequence[HostTwin], TensorList]
"""Local gradients of one step's unit, with the twins of their parameters."""


SLABS = (SLAB, 1 << 30)
"""Bytes that are allocated at once for many gradients: the larger ones hold tensors of some 100 MB side by side, each
of which alone would be rounded up to a power of two."""


class Layout(NamedTuple):
    """Which of some units have memory of their own, and which share the slots.

    Attributes:
        own: indices, in the order in which memory is allocated.
        shared: indices, in the order of the update; the first of them uses the first slot.
        slot: bytes of one slot; 0 where no unit needs one.
        slab: bytes that are allocated at once for those in ``own``.
    """

    own: list[int]
    shared: list[int]
    slot: int = 0
    slab: int = SLAB


def layout_of(units: Sequence[Sequence[int]], limit: int, *, pin: bool) -> Layout:
    """Return how gradients lie in at most ``limit`` bytes, so that the fewest bytes are in units that share slots.

    What the allocator rounds up counts, see :func:`megascale.utils.host_memory.allocated_bytes`.

    Args:
        units: the bytes of each gradient of each unit, in the order of the update.
        limit: in bytes.
        pin: the memory is pinned.

    Raises UsageError, naming the bytes that would do, if ``limit`` is too small.
    """
    nbytes = [sum(map(aligned, sizes)) for sizes in units]
    slots = {size.bit_length(): size for size in sorted(nbytes) if size}
    found = [_layout(units, nbytes, slot, slab, limit, pin) for slot in (0, *slots.values()) for slab in SLABS]
    least = min(needed for needed, _ in found)
    if least > limit:
        raise UsageError(
            f"optimizer_offload_grad_bytes={limit} is too little: copies of gradients take at least {least} bytes of "
            f"host memory here; give {least} or more, or None for memory of its own for each gradient"
        )
    fitting = [layout for needed, layout in found if needed <= limit]
    return min(fitting, key=lambda layout: sum(nbytes[at] for at in layout.shared))


def _layout(
    units: Sequence[Sequence[int]], nbytes: Sequence[int], slot: int, slab: int, limit: int, pin: bool
) -> tuple[int, Layout]:
    """Return the bytes that slots of ``slot`` bytes need at least, and the layout with them, for ``limit`` bytes.

    ``nbytes``: of each unit in a slot.
    """
    larger = [at for at, size in enumerate(nbytes) if size > slot or not size]
    order = [*larger, *(at for at in reversed(range(len(units))) if 0 < nbytes[at] <= slot)]
    taken = allocated_bytes([slot] * SLOTS, pin=pin)[-1]
    totals = [taken, *(taken + one for one in allocated_bytes(chain(*(units[at] for at in order)), pin=pin, slab=slab))]
    ends = [0, *accumulate(len(units[at]) for at in order)]
    own = sum(totals[end] <= limit for end in ends[1:])
    return totals[ends[len(larger)]], Layout(order[:own], sorted(order[own:]), slot if own < len(order) else 0, slab)


class GradMemory:
    """Gives twins memory for gradients. Those that share a slot have the slot's index: :attr:`HostTwin.slot`.

    Args:
        pin: pin it where gradients are on an accelerator.
        limit: bytes that all of it takes at most; None: as many as all gradients have. While memory is assigned anew,
            torch's allocator may keep pinned memory from before beside it.
        units: a method that returns all units of the optimizer in the order of their updates, which is not kept alive;
            needed with ``limit``.
    """

    def __init__(
        self, *, pin: bool, limit: int | None = None, units: Callable[[], list[UpdateUnit]] | None = None
    ) -> None:
        self._pin = pin
        self._limit = limit
        self._units = None if units is None else WeakMethod(units)
        self._assigned: list[ref[UpdateUnit]] = []
        self._given: WeakSet[HostTwin] = WeakSet()

    def make(self, gradients: Sequence[Gradients]) -> bool:
        """Let all gradients of a step have memory. Nothing is copied, and no update may be under way.

        Returns whether memory was assigned anew: what was copied before is lost then.

        Raises UsageError for too little host memory, or a limit that is too small: no value has changed.
        """
        units = None if self._units is None else self._units()
        if self._limit is None or units is None:
            for twins, grads in gradients:
                self._make_missing(twins, [grads[at] for at in range(len(grads))])
            return False
        every = units()
        pairs = [(twin, grads[at]) for twins, grads in gradients for at, twin in enumerate(twins)]
        if are_same([unit() for unit in self._assigned], every) and all(fits(twin.grad, grad) for twin, grad in pairs):
            return False
        self._assign(every, dict(pairs), self._limit)
        return True

    def _make_missing(self, twins: Sequence[HostTwin], grads: Sequence[Tensor]) -> None:
        """Give each twin memory of its own, where it has none that fits."""
        missing = [at for at, (twin, grad) in enumerate(zip(twins, grads, strict=True)) if not fits(twin.grad, grad)]
        for at, memory in zip(missing, host_memory([grads[at] for at in missing], pin=self._pin), strict=True):
            twins[at].grad = memory

    def _assign(self, units: Sequence[UpdateUnit], grads: dict[HostTwin, Tensor], limit: int) -> None:
        """Assign memory to all twins of ``units`` anew. ``grads``: of this step."""
        twins = [[param.twin for param in unit.params if param.twin is not None] for unit in units]
        dtypes = {twin.weights.dtype: grad.dtype for twin, grad in grads.items()}
        likes = [[_form(twin, grads.get(twin), dtypes) for twin in own] for own in twins]
        pin = self._pin and any(grad.device.type != "cpu" for grad in grads.values())
        layout = layout_of([[like.nbytes for like in own] for own in likes], limit, pin=pin)
        for twin in self._given:
            twin.grad = twin.slot = None
        self._assigned = []
        slots = allocate([layout.slot] * SLOTS, pin=pin) if layout.shared else []
        sizes = [like.nbytes for at in layout.own for like in likes[at]]
        own = iter(allocate(sizes, pin=pin, slab=layout.slab))
        for at in layout.own:
            for twin, like in zip(twins[at], likes[at], strict=True):
                twin.grad = dense(next(own), like)
        for turn, at in enumerate(layout.shared):
            begin = 0
            for twin, like in zip(twins[at], likes[at], strict=True):
                twin.slot = turn % SLOTS
                twin.grad = dense(slots[twin.slot][begin:], like)
                begin += aligned(like.nbytes)
        self._given = WeakSet(chain.from_iterable(twins))
        self._assigned = list(map(ref, units))


def copies_in(twins: Iterable[HostTwin]) -> TensorList:
    """Return the memory of gradients, which :meth:`GradMemory.make` has made."""
    return TensorList(twin.grad for twin in twins if twin.grad is not None)


def _form(twin: HostTwin, grad: Tensor | None, dtypes: dict[torch.dtype, torch.dtype]) -> Tensor:
    """Return a tensor without memory in the form of a gradient; of one that was never there, as it is expected."""
    known = twin.grad if grad is None else grad
    if known is not None:
        return torch.empty_like(known, device="meta")
    dtype = dtypes.get(twin.weights.dtype, twin.weights.dtype)
    return torch.empty_like(twin.weights, dtype=dtype, device="meta")
