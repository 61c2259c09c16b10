"""Tables of raw pointers on the device, through which one launch reaches every tensor of a call.

A row of a table describes one parameter, a chunk is a run of at most :data:`CHUNK` elements of one row, and a launch
has one program per chunk. Rows of one table share their dtypes: a call launches once per combination of dtypes present.

Tables are cached by what they were made from. They do not hold the addresses of gradients, which move from step to
step: see :mod:`megascale.kernels.triton.grad_addresses`.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megascale.errors import ArgumentError, UsageError
from megascale.kernels.blocks import flat
from megascale.kernels.remainders import REMAINDER_DTYPE
from megascale.kernels.tensors.tensor_list import TensorList
from megascale.rules import CODE_DTYPES
from megascale.utils.transfer import is_capturing

CHUNK = 1 << 14  # elements; a power of two, and a whole number of vectors
VECTOR = 16  # bytes of one access to a main param, or to a gradient alone; other tensors: the same number of elements
UPDATE_VECTOR = VECTOR // 4  # elements
CODES_VECTOR = 8  # elements, where a tensor of a row has 8 bits
CACHE_BYTES = 1 << 26  # tables beyond that are dropped, least recently used first

# Columns of a row, all int64.
NUMEL, FIRST_CHUNK, SLOT, ALIGNED, STEP, START, FIRST_SCALE, SECOND_SCALE, TENSORS = range(9)
SCALES = (FIRST_SCALE, SECOND_SCALE)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, REMAINDER_DTYPE, *CODE_DTYPES)
IN_ORDER = (REMAINDER_DTYPE, *CODE_DTYPES)  # elements count from the parameter's first one, in row-major order
SAME, UNKNOWN = len(DTYPES), -1  # further codes: the row's first tensor again; a dtype not in DTYPES

Dtypes = tuple[torch.dtype | None, ...]


class _Codes(dict[torch.dtype, int]):
    """The index of a dtype in :data:`DTYPES`."""

    def __missing__(self, dtype: torch.dtype) -> int:
        return UNKNOWN


_CODES = _Codes((dtype, code) for code, dtype in enumerate(DTYPES))


NOTHING: Mapping[int, "TensorList | Numbers"] = MappingProxyType({})
"""Rows have nothing beside their tensors."""


class Numbers:
    """A column of numbers that are in the rows themselves."""

    def __init__(self, values: list[int]) -> None:
        self.pointers: NDArray[np.int64] = np.array(values, dtype=np.int64)
        self.signature: Hashable = self.pointers.tobytes()


@dataclass(frozen=True)
class DeviceTable:
    """Rows of one combination of dtypes.

    Attributes:
        dtypes: one per tensor of a row. None: the tensor is the row's first one again.
        grad_dtype: of the gradients; None: the call has none.
        rows: int64, shape [rows, TENSORS + len(dtypes)]: elements, first chunk, index in the call, whether every
            pointer is aligned for vector access (1 or 0), pointer of the step count or 0, index of the first element in
            the whole parameter, pointers of scales or 0, then the tensors' pointers.
        chunk_rows: int64, shape [chunks]: the row of each chunk, and in the high half that row's index in the call,
            with which a program loads its gradient's address without waiting for the row.
        counters: int64, shape [rows], 0 between launches.
        arrivals: int64, shape [chunks], 0 between launches.
        longest: elements of the longest row.
    """

    dtypes: Dtypes
    grad_dtype: torch.dtype | None
    rows: Tensor
    chunk_rows: Tensor
    counters: Tensor
    arrivals: Tensor
    longest: int

    @property
    def nbytes(self) -> int:
        """Return the bytes on the device."""
        return sum(tensor.nbytes for tensor in (self.rows, self.chunk_rows, self.counters, self.arrivals))


@dataclass(frozen=True)
class Plan:
    """The tables of one call, and the indices of the parameters that are in none of them."""

    tables: tuple[DeviceTable, ...]
    rest: tuple[int, ...]


class PlanCache:
    """A cache of plans by what they depend on: addresses, dtypes and layouts."""

    def __init__(self) -> None:
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()
        self._nbytes = 0
        self._captured: dict[Hashable, Plan] = {}

    def find(
        self,
        columns: Sequence[TensorList],
        beside: Mapping[int, TensorList | Numbers] = NOTHING,
        grads: TensorList | None = None,
    ) -> Plan:
        """Return the plan of a call, from the cache if it has it.

        Args:
            columns: of tensors on one device, whose addresses are in the rows; the tensors of a parameter share a
                shape. Where there are any, the first column holds main params, or remainders of the second one's.
            beside: what else is known of each parameter, by the column of a row: addresses of 0-d step counts, fp32,
                and of scales, and indices of the first elements.
            grads: gradients; the plan depends on their dtypes and layouts, not on their addresses.

        Raises UsageError if the plan is not in the cache while a graph is captured: replays would copy from host memory
        that is freed. Raises ArgumentError for tensors on several devices.
        """
        device = columns[0][0].device if grads is None else grads.filled[0].device
        capturing = is_capturing(device)
        key = (
            CHUNK,
            device,
            *((index, one.signature) for index, one in beside.items()),
            grads and grads.forms.key,
            *(one.signature for one in columns),
        )
        plan = self._captured.get(key)
        if plan is not None:
            return plan
        plan = self._plans.get(key)
        if plan is None:
            refuse_capture(device, capturing)
            plan = self._plans[key] = _make_plan(columns, beside, grads)
            self._nbytes += _nbytes(plan)
            while self._nbytes > CACHE_BYTES and len(self._plans) > 2:
                _, oldest = self._plans.popitem(last=False)
                self._nbytes -= _nbytes(oldest)
        elif capturing:
            self._captured[key] = plan  # replays read the table for as long as the graph lives
        else:
            self._plans.move_to_end(key)
        return plan


def refuse_capture(device: torch.device, capturing: bool) -> None:
    """Raise UsageError while a graph is captured: its replays would copy from host memory that is freed."""
    if capturing:
        raise UsageError(
            f"tensors of a step captured into a graph on {device} are not where they were in the steps before; run one "
            "step before capture, and keep gradients in place: zero_grad(set_to_none=False)"
        )


def _nbytes(plan: Plan) -> int:
    return sum(table.nbytes for table in plan.tables)


def _make_plan(
    columns: Sequence[TensorList], beside: Mapping[int, TensorList | Numbers], grads: TensorList | None
) -> Plan:
    every = [*columns] if grads is None else [*columns, grads]
    device, numels = every[0].filled[0].device, every[0].forms.numels
    for column in (*every, *(one for one in beside.values() if isinstance(one, TensorList))):
        for other in column.forms.devices - {device}:
            raise ArgumentError(f"tensors of one kernel call are on {device} and on {other}; put them on one")
    codes = np.stack([column.forms.dtype_codes(_CODES) for column in every], axis=1)
    takes = _takes(every, codes, has_main=len(columns) > 0)
    for scales in (one for index, one in beside.items() if index in SCALES and isinstance(one, TensorList)):
        takes &= (scales.forms.dtype_codes(_CODES) == _CODES[torch.float32]) & list(map(Tensor.is_contiguous, scales))
    columns_beside = {index: one.pointers for index, one in beside.items()}
    pointers = np.empty((len(codes), len(columns)), dtype=np.int64)
    for index, column in enumerate(columns):
        pointers[:, index] = column.pointers
        if index:
            codes[(pointers[:, index] == pointers[:, 0]) & (codes[:, index] == codes[:, 0]), index] = SAME
    tables = []
    for members in _alike(codes, np.flatnonzero(takes)):
        dtypes = tuple(None if code == SAME else DTYPES[code] for code in codes[members[0]].tolist())
        form = dtypes[: len(columns)], None if grads is None else dtypes[-1]
        rows_beside = {index: each[members] for index, each in columns_beside.items()}
        tables.append(_make_table(*form, members, pointers[members], numels[members], rows_beside, device))
    return Plan(tuple(tables), tuple(np.flatnonzero(~takes).tolist()))


def _takes(columns: Sequence[TensorList], codes: NDArray[np.int64], *, has_main: bool) -> NDArray[np.bool_]:
    """Return, for each row, whether the kernels support it. ``codes``: of all columns, shape [rows, columns]."""
    takes = (codes != UNKNOWN).all(axis=1)
    in_order = np.logical_or.reduce([(codes == _CODES[dtype]).any(axis=1) for dtype in IN_ORDER])
    if has_main:
        takes &= np.isin(codes[:, 0], [_CODES[torch.float32], _CODES[REMAINDER_DTYPE]])
    if not all(column.forms.contiguous for column in columns):
        for index in np.flatnonzero(takes).tolist():
            row = [column.filled[index] for column in columns]
            takes[index] = all(map(Tensor.is_contiguous, row)) or not (in_order[index] or flat(row) is None)
    return takes


def _alike(codes: NDArray[np.int64], rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Group rows by their codes: each list has all rows of one combination, in order."""
    if len(rows) == 0 or (codes[rows] == codes[rows[0]]).all():
        return [rows] if len(rows) else []
    _, kinds = np.unique(codes[rows], axis=0, return_inverse=True)
    return [rows[kinds.reshape(-1) == kind] for kind in range(int(kinds.max()) + 1)]


def _make_table(
    dtypes: Dtypes,
    grad_dtype: torch.dtype | None,
    members: NDArray[np.int64],
    pointers: NDArray[np.int64],
    numels: NDArray[np.int64],
    beside: Mapping[int, NDArray[np.int64]],
    device: torch.device,
) -> DeviceTable:
    """Return the table of rows that share their dtypes.

    Args:
        members: their indices in the call, shape [rows].
        pointers: shape [rows, len(dtypes)].
        numels: elements, shape [rows].
        beside: further columns of the rows, shape [rows] each; see :meth:`PlanCache.find`.
    """
    # An empty parameter has a chunk too, because its step is counted.
    num_chunks = np.maximum(-(-numels // CHUNK), 1)
    rows = np.zeros((len(members), TENSORS + len(dtypes)), dtype=np.int64)
    rows[:, NUMEL] = numels
    rows[:, FIRST_CHUNK] = np.cumsum(num_chunks) - num_chunks
    rows[:, SLOT] = members
    for index, values in beside.items():
        rows[:, index] = values
    # For vector access each tensor of a row must be aligned to that many bytes.
    vector = CODES_VECTOR if set(CODE_DTYPES) & set(dtypes) else UPDATE_VECTOR
    sizes = [dtype.itemsize if dtype is not None else torch.float32.itemsize for dtype in dtypes]
    alignments = np.array([min(vector * size, VECTOR) for size in sizes], dtype=np.int64)
    rows[:, ALIGNED] = (pointers % alignments == 0).all(axis=1)
    rows[:, TENSORS:] = pointers
    chunk_rows = np.repeat(np.arange(len(members)) | members << 32, num_chunks)
    placed = copied(np.concatenate([rows.reshape(-1), chunk_rows]), device)
    counters = torch.zeros(len(members) + len(chunk_rows), dtype=torch.int64, device=device)
    return DeviceTable(
        dtypes=dtypes,
        grad_dtype=grad_dtype,
        rows=placed[: rows.size].view(rows.shape),
        chunk_rows=placed[rows.size :],
        counters=counters[: len(members)],
        arrivals=counters[len(members) :],
        longest=int(numels.max()),
    )


def copied(values: NDArray[np.int64], device: torch.device) -> Tensor:
    """Return a copy of ``values`` on a device, without a host sync: shape [len(values)].

    Every copy has its own pinned memory, which torch's allocator does not reuse before the copy is done.
    """
    host = torch.empty(len(values), dtype=torch.int64, device="cpu", pin_memory=device.type != "cpu")
    host.numpy()[:] = values
    return host.to(device, non_blocking=True)
