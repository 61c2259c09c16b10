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
    """Return the indices of two tensors that share a byte, none if no two do. The tensors have memory.

    Those with gaps between their elements are not looked at: the columns of a matrix interleave, and share none.
    """
    dense = [at for at, one in enumerate(tensors) if one.numel() and reach(one.shape, one.stride()) == one.numel()]
    last, end = -1, 0
    for index in sorted(dense, key=lambda at: tensors[at].data_ptr()):
        begin = tensors[index].data_ptr()
        if begin < end:
            return sorted((last, index))
        last, end = index, begin + tensors[index].nbytes
    return []
