"""What kernels assume of tensors, and the checks that ensure it.

native.c and Triton's kernels get addresses. In each step they assume of all tensors in their tables:

1. Its address is current. Tables are kept from step to step, and made anew where a tensor, or the storage of main
   params or state, has moved.
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

Main params and optimizer state are made so, in memory of our own: :mod:`megascale.main_params.segments`. These check
the others, in every step, before the ranks agree on it: :meth:`megascale.main_params.base.MainParams.sync_from_model`
model params, :class:`megascale.step.local_grads.ReadyGrads` gradients and main grads. Of a torch optimizer in a loop of
amp :mod:`megascale.amp.local_grads` checks parameters and gradients, and :mod:`megascale.amp.fused_adam` state.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megascale.kernels.tensors.forms import has_zero_strides, reach


def memory_fault(tensor: Tensor) -> str | None:
    """Return why neither kernels nor torch can use a tensor's memory; None if they can."""
    if tensor.layout != torch.strided:
        return f"has layout {tensor.layout}"
    if tensor.is_meta:
        return "is on the meta device"
    if not tensor.numel():
        return None
    needed = (tensor.storage_offset() + reach(tensor.shape, tensor.stride())) * tensor.element_size()
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


def sharing(tensors: Sequence[Tensor]) -> list[int]:
    """Return the indices of two tensors that share a byte, none if no two do.

    Views that interleave, as the columns of a matrix, share none. If several pairs share, it is the smallest one by
    (second index, first index). The tensors have memory: see :func:`memory_fault`.
    """
    # In the order of their addresses, so that one is compared only with those that reach beyond its first element.
    order = sorted(
        (index for index, tensor in enumerate(tensors) if tensor.numel()), key=lambda at: tensors[at].data_ptr()
    )
    found: list[list[int]] = []
    reaching: list[tuple[int, int]] = []
    for index in order:
        begin = tensors[index].data_ptr()
        reaching = [(other, end) for other, end in reaching if end > begin]
        for other, _ in reaching:
            if np.shares_memory(_Bytes(tensors[other]), _Bytes(tensors[index])):
                found.append(sorted((other, index)))
        extent = reach(tensors[index].shape, tensors[index].stride()) * tensors[index].element_size()
        reaching.append((index, begin + extent))
    return min(found, key=lambda pair: pair[::-1], default=[])


class _Bytes:
    """What numpy needs to know of an array of the same bytes. Nobody may read its elements: it may be on a device."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        strides = tuple(stride * size for stride in tensor.stride())
        place = {"data": (tensor.data_ptr(), True), "shape": tuple(tensor.shape), "strides": strides}
        self.__array_interface__ = {"version": 3, "typestr": f"|V{size}", **place}
