"""Tables of raw pointers on the device, through which one launch reaches every tensor of a call.

A row of a table describes one parameter, a chunk is a run of at most :data:`CHUNK` elements of one row, and a launch
has one program per chunk. Rows of one table share their dtypes: a call launches once per combination of dtypes present.

Tables are kept and found again by what they were made from. A training loop whose tensors stay in place copies nothing.
"""

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megascale.capture import is_capturing
from megascale.errors import ArgumentError, UsageError
from megascale.kernels.blocks import flat

CHUNK = 1 << 14  # elements; a power of two, and a whole number of vectors
VECTOR = 16  # bytes that one access takes of the widest of a row's tensors; it takes as many elements of the others
CACHE_BYTES = 1 << 26  # tables beyond that are dropped, least recently used first

# Columns of a row, all int64.
NUMEL, FIRST_CHUNK, SLOT, ALIGNED, STEP, TENSORS = range(6)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

Dtypes = tuple[torch.dtype | None, ...]


@dataclass(frozen=True)
class DeviceTable:
    """Rows of one combination of dtypes.

    Attributes:
        dtypes: one per tensor of a row. None: the tensor is the row's first one again.
        rows: int64, shape [rows, TENSORS + len(dtypes)]: elements, first chunk, index in the call, whether every
            pointer is aligned for vector access (1 or 0), pointer of the step count or 0, then the tensors' pointers.
        chunk_rows: int64, shape [chunks]: the row of each chunk.
        counters: int64, shape [rows], 0 between launches.
        arrivals: int64, shape [chunks], 0 between launches.
        longest: elements of the longest row.
    """

    dtypes: Dtypes
    rows: Tensor
    chunk_rows: Tensor
    counters: Tensor
    arrivals: Tensor
    longest: int

    @property
    def nbytes(self) -> int:
        """Return the bytes that the table takes on the device."""
        return self.rows.nbytes + self.chunk_rows.nbytes + self.counters.nbytes + self.arrivals.nbytes


@dataclass(frozen=True)
class Plan:
    """The tables of one call, and the indices of the parameters that are in none of them."""

    tables: tuple[DeviceTable, ...]
    rest: tuple[int, ...]


class PlanCache:
    """Plans by what they were made from: addresses, dtypes and layouts. A plan depends on nothing else."""

    def __init__(self) -> None:
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()
        self._nbytes = 0
        self._captured: dict[Hashable, Plan] = {}

    def find(self, columns: Sequence[Sequence[Tensor]], steps: Sequence[Tensor] = ()) -> Plan:
        """Return the plan of a call, made now unless the cache has it.

        Args:
            columns: parallel lists of tensors on one device, one entry per parameter, which share a shape. Where there
                is more than one list, the first one holds main params.
            steps: 0-d fp32 step counts, one per parameter, or none.

        Raises UsageError where the plan is not in the cache and the current stream is capturing a graph: a graph would
        replay the copy from host memory that is gone. Raises ArgumentError for tensors on several devices.
        """
        device = columns[0][0].device
        capturing = is_capturing(device)
        key = _signature(columns, steps)
        plan = self._captured.get(key) or self._plans.get(key)
        if plan is None:
            if capturing:
                raise UsageError(
                    f"tensors of a step captured into a graph on {device} are not where they were in the steps before; "
                    "run one step before capture, and keep gradients in place: zero_grad(set_to_none=False)"
                )
            plan = _make_plan(columns, steps)
            self._plans[key] = plan
            self._nbytes += _nbytes(plan)
            self._evict()
        elif capturing:
            # Replays read the table for as long as the graph lives.
            self._captured[key] = plan
        elif key in self._plans:
            self._plans.move_to_end(key)
        return plan

    def _evict(self) -> None:
        while self._nbytes > CACHE_BYTES and len(self._plans) > 2:
            _, plan = self._plans.popitem(last=False)
            self._nbytes -= _nbytes(plan)


def _signature(columns: Sequence[Sequence[Tensor]], steps: Sequence[Tensor]) -> Hashable:
    parts: list[Hashable] = [CHUNK, columns[0][0].device, array("Q", [step.data_ptr() for step in steps]).tobytes()]
    parts.append(array("Q", [tensor.numel() for tensor in columns[0]]).tobytes())
    for column in columns:
        parts.append(array("Q", [tensor.data_ptr() for tensor in column]).tobytes())
        parts.append(tuple([tensor.dtype for tensor in column]))
        strided = [index for index, tensor in enumerate(column) if not tensor.is_contiguous()]
        parts.append(tuple((index, column[index].shape, column[index].stride()) for index in strided))
    return tuple(parts)


def _nbytes(plan: Plan) -> int:
    return sum(table.nbytes for table in plan.tables)


def _make_plan(columns: Sequence[Sequence[Tensor]], steps: Sequence[Tensor]) -> Plan:
    device = columns[0][0].device
    for tensor in (*(tensor for column in columns for tensor in column), *steps):
        if tensor.device != device:
            raise ArgumentError(f"tensors of one kernel call are on {device} and on {tensor.device}; put them on one")
    members: dict[Dtypes, list[int]] = {}
    rest = []
    for index, row in enumerate(zip(*columns, strict=True)):
        dtypes = _dtypes_of(list(row))
        if dtypes is None:
            rest.append(index)
        else:
            members.setdefault(dtypes, []).append(index)
    return Plan(tuple(_make_table(dtypes, of, columns, steps) for dtypes, of in members.items()), tuple(rest))


def _dtypes_of(row: list[Tensor]) -> Dtypes | None:
    """Return the dtypes of a row's tensors, or None if the kernels cannot take the row."""
    first = row[0]
    fits = all(tensor.dtype in DTYPES for tensor in row) and (len(row) == 1 or first.dtype == torch.float32)
    if not fits or flat(row) is None:
        return None
    return (first.dtype, *(None if _same_memory(tensor, first) else tensor.dtype for tensor in row[1:]))


def _alignments(dtypes: Dtypes) -> NDArray[np.uint64]:
    """Return how many bytes each tensor of a row must be aligned to for vector access."""
    sizes = [dtype.itemsize if dtype is not None else torch.float32.itemsize for dtype in dtypes]
    return np.array([VECTOR * size // max(sizes) for size in sizes], dtype=np.uint64)


def _same_memory(tensor: Tensor, first: Tensor) -> bool:
    return tensor.dtype == first.dtype and tensor.data_ptr() == first.data_ptr()


def _make_table(
    dtypes: Dtypes, members: list[int], columns: Sequence[Sequence[Tensor]], steps: Sequence[Tensor]
) -> DeviceTable:
    numels = np.array([columns[0][index].numel() for index in members], dtype=np.int64)
    # An empty parameter has a chunk, too: its step counts.
    num_chunks = np.maximum(-(-numels // CHUNK), 1)
    pointers = np.array([[column[index].data_ptr() for column in columns] for index in members], dtype=np.uint64)
    device = columns[0][0].device
    width = TENSORS + len(columns)
    host = torch.empty(len(members) * width + int(num_chunks.sum()), dtype=torch.int64, pin_memory=device.type != "cpu")
    rows = host[: len(members) * width].view(len(members), width).numpy()
    rows[:, NUMEL] = numels
    rows[:, FIRST_CHUNK] = np.cumsum(num_chunks) - num_chunks
    rows[:, SLOT] = members
    rows[:, ALIGNED] = (pointers % _alignments(dtypes) == 0).all(axis=1)
    rows[:, STEP] = [steps[index].data_ptr() for index in members] if steps else 0
    rows[:, TENSORS:] = pointers.view(np.int64)
    host[len(members) * width :].numpy()[:] = np.repeat(np.arange(len(members)), num_chunks)
    placed = host.to(device, non_blocking=True)
    counters = torch.zeros(len(members) + int(num_chunks.sum()), dtype=torch.int64, device=device)
    return DeviceTable(
        dtypes=dtypes,
        rows=placed[: len(members) * width].view(len(members), width),
        chunk_rows=placed[len(members) * width :],
        counters=counters[: len(members)],
        arrivals=counters[len(members) :],
        longest=int(numels.max()),
    )
