"""Tables of raw pointers on the device, through which one launch reaches every tensor of a call.

A row of a table describes one parameter, a chunk is a run of at most :data:`CHUNK` elements of one row, and a launch
has one program per chunk. Rows of one table share their dtypes: a call launches once per combination of dtypes present.

Tables are kept and found again by what they were made from. A training loop whose tensors stay in place copies nothing.
Where only gradients have moved, their addresses are written beside the rest, which the host keeps, and one copy made.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megascale.errors import ArgumentError, UsageError
from megascale.kernels.blocks import flat
from megascale.kernels.tensors.tensor_list import TensorList
from megascale.utils.graph_capture import is_capturing

CHUNK = 1 << 14  # elements; a power of two, and a whole number of vectors
VECTOR = 16  # bytes that one access takes of the widest of a row's tensors; it takes as many elements of the others
CACHE_BYTES = 1 << 26  # tables beyond that are dropped, least recently used first

# Columns of a row, all int64.
NUMEL, FIRST_CHUNK, SLOT, ALIGNED, STEP, TENSORS = range(6)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SAME, UNKNOWN = len(DTYPES), -1  # codes beside the places in DTYPES: the row's first tensor again; none of them

Dtypes = tuple[torch.dtype | None, ...]


_NO_CHUNKS = np.empty(0, dtype=np.int64)


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

    @property
    def signature(self) -> Hashable:
        """What is the same for tensors that lie in the same places in the same way, and for no others."""
        return self._places, self.form

    @cached_property
    def _places(self) -> bytes:
        return self.pointers.tobytes()

    @cached_property
    def form(self) -> Hashable:
        """What is the same for tensors that lie in the same way, wherever that is, and for no others."""
        layouts: tuple[Hashable, ...] = ()
        if not self.tensors.contiguous:
            strided = [index for index, tensor in enumerate(self.tensors) if not tensor.is_contiguous()]
            layouts = tuple((index, self.tensors[index].shape, self.tensors[index].stride()) for index in strided)
        return self.tensors.numels.tobytes(), self.codes.tobytes(), layouts


@dataclass(frozen=True)
class _Sheet:
    """The rows of a table on the host. What they say of the tensors that move is filled in for each copy.

    Attributes:
        rows: as :attr:`DeviceTable.rows`, in memory that no copy to the device reads.
        column: of the rows, which has the addresses of the tensors that move.
        alignment: bytes that those must be aligned to for vector access.
        rest_aligned: whether all others of a row are aligned, shape [rows].
    """

    rows: NDArray[np.int64]
    column: int
    alignment: int
    rest_aligned: NDArray[np.bool_]

    def place(self, pointers: NDArray[np.int64], device: torch.device, chunk_rows: NDArray[np.int64]) -> Tensor:
        """Return the rows, filled in, and then ``chunk_rows`` on the device, in one copy, flat.

        ``pointers``: of all tensors of the call that move.
        """
        mine = pointers[self.rows[:, SLOT]]
        # Pinned memory that is dropped is not used again before the copy from it is done: torch's allocator waits for
        # it. So every copy has pinned memory of its own.
        count = self.rows.size
        host = torch.empty(count + len(chunk_rows), dtype=torch.int64, pin_memory=device.type != "cpu")
        host.numpy()[count:] = chunk_rows
        rows = host.numpy()[:count].reshape(self.rows.shape)
        rows[:] = self.rows
        rows[:, ALIGNED] = self.rest_aligned & (mine & (self.alignment - 1) == 0)
        rows[:, self.column] = mine
        return host.to(device, non_blocking=True)


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
        sheet: the rows on the host.
        owns_rest: whether all but the rows was made for this table, not for one that it is :meth:`moved` from.

    Tables that differ only in where one column's tensors lie share all but the rows.
    """

    dtypes: Dtypes
    rows: Tensor
    chunk_rows: Tensor
    counters: Tensor
    arrivals: Tensor
    longest: int
    sheet: _Sheet
    owns_rest: bool = True

    @property
    def nbytes(self) -> int:
        """Return the bytes on the device that were made for this table. What tables share is counted once."""
        rest = (self.chunk_rows, self.counters, self.arrivals) if self.owns_rest else ()
        return self.rows.nbytes + sum(tensor.nbytes for tensor in rest)

    def moved(self, pointers: NDArray[np.int64]) -> "DeviceTable":
        """Return the table for tensors of the same form elsewhere. ``pointers``: of all tensors of the call that move.

        Of several such tables, launches follow one another on one stream: they count in the same memory.
        """
        placed = self.sheet.place(pointers, self.rows.device, _NO_CHUNKS)
        return replace(self, rows=placed.view(self.rows.shape), owns_rest=False)


@dataclass(frozen=True)
class Plan:
    """The tables of one call, and the indices of the parameters that are in none of them."""

    tables: tuple[DeviceTable, ...]
    rest: tuple[int, ...]


class PlanCache:
    """Plans by what they were made from: addresses, dtypes and layouts. A plan depends on nothing else."""

    def __init__(self) -> None:
        self._plans: OrderedDict[Hashable, tuple[Plan, Hashable]] = OrderedDict()
        self._latest: dict[Hashable, Plan] = {}  # of those plans, by all but where the tensors that move lie
        self._nbytes = 0
        self._captured: dict[Hashable, Plan] = {}

    def find(self, columns: Sequence[Column], steps: Column | None = None, moving: int = -1) -> Plan:
        """Return the plan of a call, made now unless the cache has it.

        Args:
            columns: of tensors on one device; the tensors of a parameter share a shape. Where there is more than one
                column, the first one holds main params.
            steps: 0-d fp32 step counts.
            moving: which column is the likeliest to lie elsewhere in the next call; of several not the first one.

        Raises UsageError where the plan is not in the cache and the current stream is capturing a graph: a graph would
        replay the copy from host memory that is gone. Raises ArgumentError for tensors on several devices.
        """
        device = columns[0].tensors[0].device
        capturing = is_capturing(device)
        key = (CHUNK, device, steps and steps.signature, *(column.signature for column in columns))
        plan = self._captured.get(key)
        if plan is not None:
            return plan
        if key in self._plans:
            plan, _ = self._plans[key]
            if capturing:
                # Replays read the table for as long as the graph lives.
                self._captured[key] = plan
            else:
                self._plans.move_to_end(key)
            return plan
        if capturing:
            raise UsageError(
                f"tensors of a step captured into a graph on {device} are not where they were in the steps before; "
                "run one step before capture, and keep gradients in place: zero_grad(set_to_none=False)"
            )
        return self._add(key, columns, steps, moving % len(columns))

    def _add(self, key: Hashable, columns: Sequence[Column], steps: Column | None, moving: int) -> Plan:
        """Make a plan: of the latest one that differs only in where the tensors lie that move, if there is one."""
        device, mover = columns[0].tensors[0].device, columns[moving]
        _check_devices([mover], device)
        still = tuple(column.signature for column in columns if column is not mover)
        # Which of them are the main params themselves is a matter of form.
        are_first = (mover.pointers == columns[0].pointers).tobytes() if moving > 0 else b""
        family = (CHUNK, device, steps and steps.signature, moving, mover.form, are_first, *still)
        latest = self._latest.get(family)
        if latest is None:
            plan = _make_plan(columns, steps, moving)
        else:
            plan = replace(latest, tables=tuple(table.moved(mover.pointers) for table in latest.tables))
        self._plans[key] = plan, family
        self._latest[family] = plan
        self._nbytes += _nbytes(plan)
        self._evict()
        return plan

    def _evict(self) -> None:
        while self._nbytes > CACHE_BYTES and len(self._plans) > 2:
            _, (plan, family) = self._plans.popitem(last=False)
            self._nbytes -= _nbytes(plan)
            if self._latest.get(family) is plan:
                del self._latest[family]


def _nbytes(plan: Plan) -> int:
    return sum(table.nbytes for table in plan.tables)


def _check_devices(columns: Sequence[Column], device: torch.device) -> None:
    for column in columns:
        for other in column.tensors.devices - {device}:
            raise ArgumentError(f"tensors of one kernel call are on {device} and on {other}; put them on one")


def _make_plan(columns: Sequence[Column], steps: Column | None, moving: int) -> Plan:
    _check_devices(columns if steps is None else (*columns, steps), columns[0].tensors[0].device)
    pointers = np.stack([column.pointers for column in columns], axis=1)
    codes = np.stack([column.codes for column in columns], axis=1)
    takes = _takes(columns, codes)
    is_first = (pointers == pointers[:, :1]) & (codes == codes[:, :1])
    codes[:, 1:][is_first[:, 1:]] = SAME
    tables = []
    for members in _alike(codes, np.flatnonzero(takes)):
        dtypes = tuple(None if code == SAME else DTYPES[code] for code in codes[members[0]].tolist())
        tables.append(_make_table(dtypes, members, pointers[members], columns, steps, moving))
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
    dtypes: Dtypes,
    members: NDArray[np.int64],
    pointers: NDArray[np.int64],
    columns: Sequence[Column],
    steps: Column | None,
    moving: int,
) -> DeviceTable:
    """Return the table of rows that share their dtypes.

    Args:
        members: their places in the call, shape [rows].
        pointers: shape [rows, len(dtypes)].
        columns, steps, moving: see :meth:`PlanCache.find`.
    """
    device = columns[0].tensors[0].device
    numels = columns[0].tensors.numels[members]
    # An empty parameter has a chunk, too: its step counts.
    num_chunks = np.maximum(-(-numels // CHUNK), 1)
    alignments = _alignments(dtypes)
    rows = np.zeros((len(members), TENSORS + len(dtypes)), dtype=np.int64)
    rows[:, NUMEL] = numels
    rows[:, FIRST_CHUNK] = np.cumsum(num_chunks) - num_chunks
    rows[:, SLOT] = members
    rows[:, STEP] = 0 if steps is None else steps.pointers[members]
    rows[:, TENSORS:] = pointers
    aligned = pointers % alignments == 0
    aligned[:, moving] = True
    sheet = _Sheet(rows, TENSORS + moving, int(alignments[moving]), aligned.all(axis=1))
    chunk_rows = np.repeat(np.arange(len(members)), num_chunks)
    placed = sheet.place(columns[moving].pointers, device, chunk_rows)
    counters = torch.zeros(len(members) + len(chunk_rows), dtype=torch.int64, device=device)
    return DeviceTable(
        dtypes=dtypes,
        rows=placed[: rows.size].view(rows.shape),
        chunk_rows=placed[rows.size :],
        counters=counters[: len(members)],
        arrivals=counters[len(members) :],
        longest=int(numels.max()),
        sheet=sheet,
    )
