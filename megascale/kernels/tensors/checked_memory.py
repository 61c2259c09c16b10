"""What kernels assume of tensors, and the checks that ensure it.

native.c and Triton's kernels get addresses. In each step they assume of all tensors in their tables:

1. Its address is current. Tables are kept from step to step: :class:`MemoryRecord` tells whether a tensor has moved. If
   one has, the table is made anew.
2. Its storage holds all its elements. It was not freed (``untyped_storage().resize_(0)``), or cut short.
3. Number of elements, dtype and device are those of the table, and all tensors of a row have the same number of
   elements on the same device. Gradients and state have the parameter's shape, a step count is 0-d and fp32.
4. Elements lie densely, in the same order in all tensors of a row: contiguous, or permuted alike. Other layouts never
   enter a table: plain tensor code handles them.
5. No two elements of a tensor share memory, as in ``expand()``: an update would write them twice.
6. The bytes are the values: no negative bit is set (as in ``x.conj().imag``), and it was not made in
   ``torch.inference_mode()``, whose tensors torch lets nobody write.
7. It is strided and a plain tensor: not sparse, quantized or meta, and no wrapper subclass without memory of its own.
8. Its dtype is one of those that the backend has a code for. Plain tensor code handles others, or they are refused.
9. Of optimizer state, no byte is also one of other state, of a parameter or of a gradient. This is checked where tables
   are made anew.

These check, in every step, before the ranks agree on it: :meth:`megascale.main_params.base.MainParams.sync_from_model`
model params, :class:`megascale.step.local_grads.ReadyGrads` gradients and main grads,
:mod:`megascale.step.kernel_state` main params, optimizer state and step counts. Of a torch optimizer in a loop of amp
:mod:`megascale.amp.local_grads` checks parameters and gradients, and :mod:`megascale.amp.fused_adam` state.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megascale.kernels.tensors.forms import Forms, Places, has_zero_strides


class MemoryRecord:
    """Tensors, and the memory that they have at construction."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._forms, self._places = Forms(self._tensors), Places.once_per_storage(self._tensors)

    def holds(self) -> bool:
        """Whether each tensor still has the same address and form. False also if that can no longer be read."""
        return self._forms.places(self._tensors, self._places.asked) == self._places


def memory_fault(tensor: Tensor) -> str | None:
    """Return why neither kernels nor torch can use a tensor's memory; None if they can."""
    if tensor.layout != torch.strided:
        return f"has layout {tensor.layout}"
    if tensor.is_meta:
        return "is on the meta device"
    if not tensor.numel():
        return None
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    needed = (tensor.storage_offset() + reach) * tensor.element_size()
    storage = tensor.untyped_storage()
    try:
        address = storage.data_ptr()
    except RuntimeError:  # a tensor that only stands for others, as in tracing
        return f"is a {type(tensor).__name__} without memory of its own"
    if storage.nbytes() < needed or address == 0:
        return f"has lost its memory: its storage has {storage.nbytes()} bytes, {needed} are needed"
    return None


def tensor_fault(tensor: Tensor) -> str | None:
    """Return why no kernel can read or write a tensor, in words that follow its name, with the remedy; None if it can.

    Beside what :func:`memory_fault` finds: elements that share memory, bytes that are not the values, and tensors that
    torch lets nobody write. The one place that refuses these, of weights, gradients, states and rates alike.
    """
    fault = memory_fault(tensor)
    if fault is not None:
        return fault
    if tensor.is_inference():
        return "was made in torch.inference_mode(), where nobody may write it: replace it by its clone(), made outside"
    if tensor.is_neg():
        return "has torch's negative bit set: replace it by its resolve_neg()"
    if has_zero_strides(tensor.shape, tensor.stride()):
        return "has elements that share memory, as expand() makes them: replace it by its clone()"
    return None


def overlapping(tensors: Sequence[Tensor]) -> list[int]:
    """Return the indices of tensors whose memory, from first to last element, meets that of another of them."""
    chosen = [index for index, tensor in enumerate(tensors) if tensor.numel()]
    starts = np.array([tensors[index].data_ptr() for index in chosen], dtype=np.int64)
    ends = starts + np.array([_extent(tensors[index]) for index in chosen], dtype=np.int64)
    order = np.argsort(starts, kind="stable")
    reached = np.maximum.accumulate(ends[order])
    if not (starts[order][1:] < reached[:-1]).any():
        return []
    found: set[int] = set()
    furthest = int(order[0])  # whose end lies furthest of those before
    for at in map(int, order[1:]):
        if starts[at] < ends[furthest]:
            found |= {chosen[at], chosen[furthest]}
        if ends[at] > ends[furthest]:
            furthest = at
    return sorted(found)


def sharing(tensors: Sequence[Tensor], others: Sequence[Tensor] = ()) -> list[int]:
    """Return the indices of two tensors that share a byte, none if no two do.

    Unlike :func:`overlapping` it tells interleaved views, as the columns of a matrix, from those that share elements.
    ``others`` may share memory with one another; their indices go on where those of ``tensors`` end. If several
    pairs overlap, it is the smallest one by (second index, first index).
    """
    every = [*tensors, *others]
    met = sorted(overlapping(every), key=lambda index: every[index].data_ptr(), reverse=True)
    found = []
    while met:
        # Those that are connected: each begins before the end of one before it.
        cluster = [met.pop()]
        first = every[cluster[0]].data_ptr()
        end = first + _extent(every[cluster[0]])
        while met and every[met[-1]].data_ptr() < end:
            cluster.append(met.pop())
            end = max(end, every[cluster[-1]].data_ptr() + _extent(every[cluster[-1]]))
        pair = _pair_of(sorted(cluster), every, len(tensors), first, end)
        if pair:
            found.append(pair)
    return min(found, key=lambda pair: pair[1], default=[])


def _pair_of(cluster: Sequence[int], every: Sequence[Tensor], apart: int, first: int, end: int) -> list[int]:
    """Return which two of ``cluster`` share a byte, of which the first has an index below ``apart``.

    Their memory lies between the addresses ``first`` and ``end``.
    """
    if cluster[0] >= apart:
        return []
    is_taken = np.zeros(end - first, dtype=np.bool_)
    for at, index in enumerate(cluster):
        own = _bytes_of(every[index], is_taken, first)
        if own.any():
            return [_met_by(cluster[:at], index, every, is_taken, first), index]
        if index < apart:
            own[...] = True
    return []


def _met_by(
    earlier: Sequence[int], index: int, tensors: Sequence[Tensor], is_taken: NDArray[np.bool_], first: int
) -> int:
    """Return which of ``earlier`` shares a byte with the tensor at ``index``: one of them does."""
    for other in earlier:
        is_taken[...] = False
        _bytes_of(tensors[other], is_taken, first)[...] = True
        if _bytes_of(tensors[index], is_taken, first).any():
            break
    return other


def _bytes_of(tensor: Tensor, is_taken: NDArray[np.bool_], first: int) -> NDArray[np.bool_]:
    """Return the view of ``is_taken``, one element for each byte from address ``first``, that a tensor's bytes are."""
    size = tensor.element_size()
    steps = (*(stride * size for stride in tensor.stride()), 1)
    return np.lib.stride_tricks.as_strided(is_taken[tensor.data_ptr() - first :], (*tensor.shape, size), steps)


def _extent(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to its last. It is not empty."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()
