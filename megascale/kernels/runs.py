"""Rows that lie side by side in memory, as one long row.

Flat buffers hold many parameters back to back. A kernel that is called once for each row is called once for a whole
buffer, where the gradients, main params, model params and states of neighbours are all neighbours.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megascale.kernels.blocks import Row


@dataclass(frozen=True)
class Run:
    """One row, or several merged.

    Attributes:
        row: 1-D views of all elements.
        members: the indices of the rows that it is made of, in memory order.
    """

    row: Row
    members: list[int]


def runs_of(rows: Sequence[Row], keys: Sequence[Hashable]) -> list[Run]:
    """Merge rows that lie side by side. Every element of every row is in one run, once; empty rows are in none.

    Two rows merge where their keys and dtypes are equal and, for each tensor of the one, the tensor in the same place
    of the other begins in the same storage where it ends. The order of ``rows`` does not matter. Reads no element.

    Args:
        rows: 1-D contiguous tensors on one device; rows are equally long lists, the tensors of one row equally long.
        keys: one per row: what rows of one run have in common, such as a step count.
    """
    order = sorted((row[0].data_ptr(), index) for index, row in enumerate(rows) if row[0].numel())
    runs: list[Run] = []
    group: list[int] = []
    ends: list[int] = []
    limits: list[int] = []
    for _, index in order:
        row = rows[index]
        starts = [tensor.data_ptr() for tensor in row]
        if group and starts == ends and keys[index] == keys[group[0]] and _same_dtypes(row, rows[group[0]]):
            limits = limits or [_storage_end(tensor) for tensor in rows[group[0]]]
            new_ends = list(_ends(row, starts))
            if all(end <= limit for end, limit in zip(new_ends, limits, strict=True)):
                group.append(index)
                ends = new_ends
                continue
        if group:
            runs.append(_run(rows, group))
        group, ends, limits = [index], list(_ends(row, starts)), []
    if group:
        runs.append(_run(rows, group))
    return runs


def _same_dtypes(row: Row, other: Row) -> bool:
    return all(left.dtype == right.dtype for left, right in zip(row, other, strict=True))


def _ends(row: Row, starts: list[int]) -> Iterator[int]:
    numel = row[0].numel()
    return (start + numel * tensor.element_size() for start, tensor in zip(starts, row, strict=True))


def _storage_end(tensor: torch.Tensor) -> int:
    """Return the address after the tensor's storage: whatever begins before it and after the tensor is in it."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() + storage.nbytes()


def _run(rows: Sequence[Row], group: list[int]) -> Run:
    row = rows[group[0]]
    if len(group) > 1:
        numel = sum(rows[index][0].numel() for index in group)
        row = [tensor.as_strided((numel,), (1,)) for tensor in row]
    return Run(row, group)
