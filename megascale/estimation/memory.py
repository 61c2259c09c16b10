"""Memory of one rank, by kind, and the size of a checkpoint: both in bytes."""

from collections.abc import Iterable

import torch

from megascale.estimation.partition import Partition, dtype_of
from megascale.estimation.sizes import ParamSpec
from megascale.grad_sync.layout import rounded_up
from megascale.grad_sync.reduction import MESSAGE
from megascale.grad_sync.sync import MOST_PENDING
from megascale.kernels.compact_moments import num_groups
from megascale.main_params.grad_memory import SLOTS
from megascale.main_params.slab import ALIGNMENT, SMALL
from megascale.rules import CODE_DTYPES
from megascale.utils.dtypes import HALF_DTYPES

STEP_BYTES = 4
"""A step count is one fp32 number."""
SCALE_BYTES = 4
"""A scale of a group of codes is one fp32 number."""
UPDATE_OF_A_MATRIX = "update of a matrix"
MUON_SCRATCH = 14
"""Bytes an element while a matrix is updated: new momentum (4), direction in bf16 (2), and in fp32 (4), new main
param (4)."""
PIECE_BYTES = 1900
"""Bytes of a saved piece beside its elements: torch.save's container 1,550, its rows in index and manifest 350."""


def held_bytes(partition: Partition) -> dict[str, int]:
    """Return the bytes that the rank holds between backward and the step, by kind, without activations.

    Kinds have the names of the glossary. "messages" is memory for messages that arrive, or the buckets of
    DistributedDataParallel.
    """
    sizes, setup = partition.sizes, partition.setup
    buckets = partition.buckets()
    bucketed = sum(bucket.numel * dtype.itemsize for dtype, bucket in buckets)
    whole = sum(param.nbytes for param in sizes.params)
    here = {name: kept - partition.there[name] for name, kept in partition.kept.items()}
    return {
        "model params": (bucketed if setup.is_sharded else whole) + sum(sizes.frozen),
        "model buffers": sum(sizes.buffers) + sum(sizes.other_buffers),
        "gradients": 0 if setup.has_main_grads else whole,
        "main grads": sum(bucket.numel * setup.grad_dtype_of(dtype).itemsize for dtype, bucket in buckets),
        "main params": _main_bytes(partition, here),
        "moments": sum(_moment_bytes(partition, p, here) for p in sizes.params if not partition.there[p.name]),
        "messages": _message_bytes(partition),
        **({"state on a visit": _visiting_bytes(partition)} if setup.state_visits_device else {}),
    }


def _visiting_bytes(partition: Partition) -> int:
    """Return the bytes of the device memory that main params and state in host memory visit: two slices."""
    each = max((moment_itemsize(partition, param) for param in partition.sizes.params), default=0)
    return 2 * max(partition.slices(), default=0) * (partition.setup.main_itemsize + each)


def host_bytes(partition: Partition) -> dict[str, int]:
    """Return the bytes that the rank holds in host memory, by kind; none without ``optimizer_cpu_offload``.

    Copies of weights and gradients are what travels; they are pinned where ``pin_cpu_params`` and ``pin_cpu_grads`` say
    so. torch's pinned allocator rounds each allocation up to a power of two, which is not counted.
    """
    setup, there = partition.setup, partition.there
    params = [param for param in partition.sizes.params if there[param.name]]
    if not params:
        return {}
    return {
        "main params": _main_bytes(partition, there),
        "moments": sum(_moment_bytes(partition, param, there) for param in params),
        "copies of weights": sum(there[param.name] * param.dtype.itemsize for param in params),
        "copies of gradients": 0 if setup.state_visits_device else _grad_copies_bytes(partition),
    }


def _grad_copies_bytes(partition: Partition) -> int:
    """Return the bytes of the host memory that gradients are copied into."""
    units, layout = partition.units(), partition.grad_layout()
    own = sum(partition.grad_bytes(name) for at in layout.own for name in units[at])
    return own + (SLOTS * layout.slot if layout.shared else 0)


def transient_bytes(partition: Partition) -> dict[str, int]:
    """Return the most bytes that backward, the reductions and the update hold for a time, by purpose.

    Backward makes one gradient after another and adds it to its main grad, while earlier buckets are being reduced. A
    bucket has a copy for that, its payload, if it is reduced in another dtype.
    """
    found = _backward_bytes(partition) if partition.setup.has_main_grads else {}
    update = max((_muon_bytes(partition, param) for param in partition.sizes.params), default=0)
    return found | ({UPDATE_OF_A_MATRIX: update} if update else {})


def _muon_bytes(partition: Partition, param: ParamSpec) -> int:
    """Return what Muon's update of one matrix holds for a time on this rank; 0 where another rank owns it."""
    return MUON_SCRATCH * partition.kept[param.name] if partition.setup.optimizer_of(param) == "muon" else 0


def _backward_bytes(partition: Partition) -> dict[str, int]:
    """Return the largest sum of a gradient and of the payloads that are being reduced when backward makes it."""
    setup = partition.setup
    payloads, gradients = [0], []
    for layout in partition.layouts:
        dtype = dtype_of(layout)
        travel = setup.travel_dtype_of(dtype)
        converts = setup.ranks > 1 and travel != setup.grad_dtype_of(dtype)
        for bucket in layout.buckets:
            payloads.append(bucket.numel * travel.itemsize * converts)
            gradients.append(max(place.stop - place.start for place in bucket.placements) * dtype.itemsize)
    pending = 1 if setup.sends_messages else MOST_PENDING
    held = [sum(payloads[max(0, last - pending + 1) : last + 1]) for last in range(len(payloads))]
    reducing, gradient = max(zip(held, [*gradients, 0], strict=True), key=sum)
    return {"one gradient": gradient, "payloads of reductions": reducing}


def checkpoint_bytes(partition: Partition) -> int:
    """Return the bytes of a checkpoint of model and optimizer on disk, of all ranks together."""
    sizes, setup = partition.sizes, partition.setup
    other = [*sizes.frozen, *sizes.buffers]
    total = sum(other) + PIECE_BYTES * len(other)
    for param in sizes.params:
        copies = 1 if param.dtype in HALF_DTYPES else 0
        moments = setup.moment_dtypes(param)
        scales = _scales(moments)
        total += param.nbytes + param.numel * (setup.main_itemsize * copies + sum(dtype.itemsize for dtype in moments))
        total += scales * SCALE_BYTES * num_groups(param.numel)
        total += PIECE_BYTES * partition.num_pieces[param.name] * (1 + copies + len(moments) + scales)
        if setup.counts_steps(param):
            total += STEP_BYTES + PIECE_BYTES
    return total


def moment_itemsize(partition: Partition, param: ParamSpec) -> int:
    """Return the bytes of all moments of one element of ``param``."""
    return sum(dtype.itemsize for dtype in partition.setup.moment_dtypes(param))


def _scales(moments: Iterable[torch.dtype]) -> int:
    """Return how many of these moments have scales: those that are held as 8-bit codes."""
    return sum(dtype in CODE_DTYPES for dtype in moments)


def _main_bytes(partition: Partition, numels: dict[str, int]) -> int:
    """Return the bytes of main params that are copies. ``numels``: their elements, by name."""
    halves = [param.name for param in partition.sizes.params if param.dtype in HALF_DTYPES]
    return partition.setup.main_itemsize * sum(_slot(numels[name]) for name in halves)


def _moment_bytes(partition: Partition, param: ParamSpec, numels: dict[str, int]) -> int:
    """Return the bytes of all moments of ``param``, with its step count and the scales of those that are codes."""
    moments = partition.setup.moment_dtypes(param)
    scales = _scales(moments) * SCALE_BYTES * num_groups(numels[param.name])
    counted = STEP_BYTES * partition.setup.counts_steps(param)
    return _slot(numels[param.name]) * moment_itemsize(partition, param) + scales + counted


def _slot(numel: int) -> int:
    """Return the elements that the rank's part of a main param or moment takes. Small ones lie aligned in slabs."""
    return rounded_up(numel, ALIGNMENT) if ALIGNMENT <= numel <= SMALL else numel


def _message_bytes(partition: Partition) -> int:
    """Return the bytes of memory for messages, see :func:`held_bytes`."""
    setup = partition.setup
    if setup.ranks == 1:
        return 0
    if not setup.has_main_grads:
        return sum(param.nbytes for param in partition.sizes.params)
    if not setup.sends_messages:
        return 0
    return max(
        2 * (setup.ranks - 1) * min(MESSAGE, shards[setup.rank]) * setup.travel_dtype_of(dtype).itemsize
        for dtype, shards in partition.shards()
    )
