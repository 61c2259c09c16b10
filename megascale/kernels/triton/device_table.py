"""Tables of raw pointers on the device, through which one launch reaches every tensor of a call.

A row of a table describes one parameter, a chunk is a run of at most :data:`CHUNK` elements of one row, and a launch
has one program per chunk. Rows of one table share their dtypes: a call launches once per combination of dtypes present.

They do not hold the addresses of gradients, which move from step to step: these are a column that the kernels of a step
share, beside the tables. A missing gradient has address 0, an empty one address 1.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megascale.errors import ArgumentError, UsageError
from megascale.kernels.blocks import share_layout
from megascale.kernels.remainders import REMAINDER_DTYPE
from megascale.kernels.tensors.tensor_list import TensorList
from megascale.rules import CODE_DTYPES
from megascale.utils.transfer import hold, is_capturing

CHUNK = 1 << 14  # elements; a power of two, and a whole number of vectors
VECTOR = 16  # bytes of one access to a main param, or to a gradient alone; other tensors: the same number of elements
UPDATE_VECTOR = VECTOR // 4  # elements
CODES_VECTOR = 8  # elements, where a tensor of a row has 8 bits
PLANS = 8  # that are kept of the same operands, for gradients of other dtypes or layouts

# Columns of a row, all int64.
COLUMNS = NUMEL, FIRST_CHUNK, ALIGNED, STEP, START, GROUP, FIRST_SCALE, SECOND_SCALE, TENSORS = tuple(range(9))
SCALES = (FIRST_SCALE, SECOND_SCALE)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, REMAINDER_DTYPE, *CODE_DTYPES)
SAME, UNKNOWN = len(DTYPES), -1  # further codes: the row's first tensor again; a dtype not in DTYPES
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}

Dtypes = tuple[torch.dtype | None, ...]


@dataclass(frozen=True)
class DeviceTable:
    """Rows of one combination of dtypes.

    Attributes:
        dtypes: one per tensor of a row. None: the tensor is the row's first one again.
        grad_dtype: of the gradients; None: the call has none.
        rows: int64, shape [rows, TENSORS + len(dtypes)]: elements, first chunk, whether every
            pointer is aligned for vector access (1 or 0), pointer of the step count or 0, index of the first element in
            the whole parameter, index of the param group, pointers of scales or 0, then the tensors' pointers.
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


@dataclass
class Plan:
    """The tables of one call; none where kernels cannot read all of its tensors.

    Attributes:
        kind: of the newest update's hyperparameters, on which ``launches`` depend.
        launches: for each table, what its launch has beside tensors: numbers, constants, options, and its code,
            once it is found.
        places: what tells the addresses of the newest gradients apart from others.
        addresses: of these gradients, on the device.
    """

    tables: tuple[DeviceTable, ...]
    kind: object = None
    launches: list[tuple[tuple[float, ...], dict[str, Any], dict[str, Any], list[Any]]] = field(default_factory=list)
    places: bytes = b""
    addresses: Tensor | None = None

    def addresses_of(self, grads: TensorList) -> Tensor:
        """Return the addresses of gradients on the device: int64, shape [len(grads)]. The list's parts get theirs, too.

        Nothing is copied for gradients that lie where the newest ones did. Raises UsageError if their addresses are not
        on the device yet while a graph is captured.
        """
        device = grads.filled[0].device
        if grads.on_device is None:
            if self.addresses is None or self.places != grads.places:
                require_uncaptured(device)  # first: a refused copy must not count as made
                self.places, self.addresses = grads.places, copied(grads.addresses, device)
            grads.on_device = self.addresses
            if grads.parts:  # which are updated one after the other
                for part, piece in zip(grads.parts, self.addresses.split(list(map(len, grads.parts))), strict=True):
                    part.on_device = piece
        if is_capturing(device):
            hold(grads.on_device)
        return grads.on_device


def find_plan(kept: dict[Hashable, Any], key: Hashable, device: torch.device, make: Callable[[], Plan]) -> Plan:
    """Return the plan that is kept for ``key``. Else make one: the first of more than PLANS is dropped for it."""
    if key not in kept:
        kept[key] = make()
        if len(kept) > PLANS:
            del kept[next(iter(kept))]
    plan: Plan = kept[key]
    if is_capturing(device):
        hold(plan)
    return plan


def require_uncaptured(device: torch.device) -> None:
    """Raise UsageError while a graph is captured: its replays would copy from host memory that is freed."""
    if is_capturing(device):
        raise UsageError(
            f"tensors of a step captured into a graph on {device} are not where they were in the steps before; run one "
            "step before capture, and keep gradients in place: zero_grad(set_to_none=False)"
        )


def make_plan(
    columns: Sequence[TensorList],
    beside: Mapping[int, TensorList],
    numbers: Mapping[int, Sequence[int]] | None = None,
    grads: TensorList | None = None,
) -> Plan:
    """Return the plan of a call.

    Args:
        columns: of tensors on one device, whose addresses are in the rows; the tensors of a parameter share a shape.
            Where there are any, the first column holds main params, or remainders of the second one's.
        beside: what else is known of each parameter, by the column of a row: 0-d step counts, fp32, and scales.
        numbers: likewise, indices of first elements and of param groups; none: 0.
        grads: gradients; the plan depends on their forms, not on their addresses.

    Raises UsageError while a graph is captured. Raises ArgumentError for tensors on several devices.
    """
    every = [*columns] if grads is None else [*columns, grads]
    device, numels = every[0].filled[0].device, every[0].forms.numels
    require_uncaptured(device)
    for column in (*every, *beside.values()):
        for other in column.forms.devices - {device}:
            raise ArgumentError(f"tensors of one kernel call are on {device} and on {other}; put them on one")
    codes = np.stack([column.forms.dtype_codes(_CODES) for column in every], axis=1)
    scales = [one for index, one in beside.items() if index in SCALES]
    has_codes = any(not column.forms.kinds.isdisjoint(CODE_DTYPES) for column in columns)
    # A kernel counts elements in memory, and those of codes from the parameter's first one, in row-major order.
    fits = (codes != UNKNOWN).all() and share_layout(every, in_order=has_codes)
    fits = fits and all(one.forms.contiguous and one.forms.kinds == {torch.float32} for one in scales)
    if not (fits and all(one.forms.kinds <= {torch.float32, REMAINDER_DTYPE} for one in columns[:1])):
        return Plan(())
    columns_beside = {index: one.pointers for index, one in beside.items()}
    columns_beside |= {index: np.array(one, dtype=np.int64) for index, one in (numbers or {}).items() if one}
    pointers = np.empty((len(codes), len(columns)), dtype=np.int64)
    for index, column in enumerate(columns):
        pointers[:, index] = column.pointers
        if index:
            codes[(pointers[:, index] == pointers[:, 0]) & (codes[:, index] == codes[:, 0]), index] = SAME
    tables = []
    kinds = np.unique(codes, axis=0, return_inverse=True)[1].reshape(-1)
    for members in (np.flatnonzero(kinds == kind) for kind in range(int(kinds.max()) + 1)):
        dtypes = tuple(None if code == SAME else DTYPES[code] for code in codes[members[0]].tolist())
        form = dtypes[: len(columns)], None if grads is None else dtypes[-1]
        rows_beside = {index: each[members] for index, each in columns_beside.items()}
        tables.append(_make_table(*form, members, pointers[members], numels[members], rows_beside, device))
    return Plan(tuple(tables))


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
        beside: further columns of the rows, shape [rows] each; see :func:`make_plan`.
    """
    # An empty parameter has a chunk too, because its step is counted.
    num_chunks = np.maximum(-(-numels // CHUNK), 1)
    rows = np.zeros((len(members), TENSORS + len(dtypes)), dtype=np.int64)
    rows[:, NUMEL] = numels
    rows[:, FIRST_CHUNK] = np.cumsum(num_chunks) - num_chunks
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
