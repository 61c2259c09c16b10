"""Tables of raw pointers on the device, through which one launch reaches every tensor of a call.

A row of a table describes one parameter, a chunk is a run of at most :data:`CHUNK` elements of one row, and a launch
has one program per chunk. Rows of one table share their dtypes: a call launches once per combination of dtypes present.

Tables are kept and found again by what they were made from. A training loop whose tensors stay in place copies nothing.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megascale.capture import is_capturing
from megascale.errors import ArgumentError, UsageError
from megascale.kernels.blocks import flat
from megascale.kernels.tensor_list import TensorList

CHUNK = 1 << 14  # elements; a power of two, and a whole number of vectors
VECTOR = 16  # bytes that one access takes of the widest of a row's tensors; it takes as many elements of the others
CACHE_BYTES = 1 << 26  # tables beyond that are dropped, least recently used first

# Columns of a row, all int64.
NUMEL, FIRST_CHUNK, SLOT, ALIGNED, STEP, TENSORS = range(6)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SAME, UNKNOWN = len(DTYPES), -1  # codes beside the places in DTYPES: the row's first tensor again; none of them

Dtypes = tuple[torch.dtype | None, ...]


class _Codes(dict[torch.dtype, int]):
    """The place of a dtype in :data:`DTYPES`."""

    def __missing__(self, dtype: torch.dtype) -> int:
        return UNKNOWN


_CODES = _Codes((dtype, code) for code, dtype in enumerate(DTYPES))


class Column:
    """One tensor of every parameter of a call. What is looked up in them is kept: of those that stay in place, once.

    Args:
        tensors: neither they nor their memory change while the column is in use.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = TensorList.of(tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def pointers(self) -> NDArray[np.int64]:
        """Addresses, shape [len(self)]."""
        return self.tensors.pointers

    @cached_property
    def codes(self) -> NDArray[np.int64]:
        """Places of the dtypes in :data:`DTYPES`, or :data:`UNKNOWN`, shape [len(self)]."""
        return self.tensors.dtype_codes(_CODES)

    @cached_property
    def signature(self) -> Hashable:
        """What is the same for tensors that lie in the same places in the same way, and for no others."""
        layouts: tuple[Hashable, ...] = ()
        if not self.tensors.contiguous:
            strided = [index for index, tensor in enumerate(self.tensors) if not tensor.is_contiguous()]
            layouts = tuple((index, self.tensors[index].shape, self.tensors[index].stride()) for index in strided)
        return self.pointers.tobytes(), self.tensors.numels.tobytes(), self.codes.tobytes(), layouts


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

    def find(self, columns: Sequence[Column], steps: Column | None = None) -> Plan:
        """Return the plan of a call, made now unless the cache has it.

        Args:
            columns: of tensors on one device; the tensors of a parameter share a shape. Where there is more than one
                column, the first one holds main params.
            steps: 0-d fp32 step counts.

        Raises UsageError where the plan is not in the cache and the current stream is capturing a graph: a graph would
        replay the copy from host memory that is gone. Raises ArgumentError for tensors on several devices.
        """
        device = columns[0].tensors[0].device
        capturing = is_capturing(device)
        key = (CHUNK, device, steps and steps.signature, *(column.signature for column in columns))
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


def _nbytes(plan: Plan) -> int:
    return sum(table.nbytes for table in plan.tables)


def _make_plan(columns: Sequence[Column], steps: Column | None) -> Plan:
    device = columns[0].tensors[0].device
    for column in columns if steps is None else (*columns, steps):
        for other in column.tensors.devices - {device}:
            raise ArgumentError(f"tensors of one kernel call are on {device} and on {other}; put them on one")
    pointers = np.stack([column.pointers for column in columns], axis=1)
    codes = np.stack([column.codes for column in columns], axis=1)
    takes = _takes(columns, codes)
    is_first = (pointers == pointers[:, :1]) & (codes == codes[:, :1])
    codes[:, 1:][is_first[:, 1:]] = SAME
    tables = []
    for members in _alike(codes, np.flatnonzero(takes)):
        dtypes = tuple(None if code == SAME else DTYPES[code] for code in codes[members[0]].tolist())
        tables.append(_make_table(dtypes, members, pointers[members], columns[0], steps))
    return Plan(tuple(tables), tuple(np.flatnonzero(~takes).tolist()))


def _takes(columns: Sequence[Column], codes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return, for each row, whether the kernels can take it. ``codes``: of all columns, shape [rows, columns]."""
    takes = (codes != UNKNOWN).all(axis=1)
    if len(columns) > 1:
        takes &= codes[:, 0] == _CODES[torch.float32]
    if not all(column.tensors.contiguous for column in columns):
        for index in np.flatnonzero(takes).tolist():
            takes[index] = flat([column.tensors[index] for column in columns]) is not None
    return takes


def _alike(codes: NDArray[np.int64], rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Sort rows by their codes: each list has all rows of one combination, in order."""
    if len(rows) == 0 or (codes[rows] == codes[rows[0]]).all():
        return [rows] if len(rows) else []
    _, kinds = np.unique(codes[rows], axis=0, return_inverse=True)
    return [rows[kinds.reshape(-1) == kind] for kind in range(int(kinds.max()) + 1)]


def _alignments(dtypes: Dtypes) -> NDArray[np.int64]:
    """Return how many bytes each tensor of a row must be aligned to for vector access."""
    sizes = [dtype.itemsize if dtype is not None else torch.float32.itemsize for dtype in dtypes]
    return np.array([VECTOR * size // max(sizes) for size in sizes], dtype=np.int64)


def _make_table(
    dtypes: Dtypes, members: NDArray[np.int64], pointers: NDArray[np.int64], lengths: Column, steps: Column | None
) -> DeviceTable:
    """Return the table of rows that share their dtypes.

    Args:
        members: their places in the call, shape [rows].
        pointers: shape [rows, len(dtypes)].
        lengths: a column of the call.
    """
    device = lengths.tensors[0].device
    numels = lengths.tensors.numels[members]
    # An empty parameter has a chunk, too: its step counts.
    num_chunks = np.maximum(-(-numels // CHUNK), 1)
    width = TENSORS + len(dtypes)
    # Pinned memory that is dropped is not used again before the copy from it is done: torch's allocator waits for it.
    host = torch.empty(len(members) * width + int(num_chunks.sum()), dtype=torch.int64, pin_memory=device.type != "cpu")
    rows = host[: len(members) * width].view(len(members), width).numpy()
    rows[:, NUMEL] = numels
    rows[:, FIRST_CHUNK] = np.cumsum(num_chunks) - num_chunks
    rows[:, SLOT] = members
    rows[:, ALIGNED] = (pointers % _alignments(dtypes) == 0).all(axis=1)
    rows[:, STEP] = 0 if steps is None else steps.pointers[members]
    rows[:, TENSORS:] = pointers
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
