"""What kernels take for granted of tensors, and the looks at tensors that make it so.

native.c, tensor_reader.cpp and Triton's kernels are handed addresses. Whatever they read or write there, in any step,
they assume of each tensor in their tables:

1. Its address is the one that it has now. Tables are kept from step to step: :class:`MemoryRecord` tells whether each
   tensor is where it was. Where one is not, the table is made anew.
2. Its storage holds all its elements. It was not freed (``untyped_storage().resize_(0)``), or cut short.
3. Number of elements, dtype and device are those of the table, and all tensors of a row have the same number of
   elements on the same device. Gradients and state have the parameter's shape, a step count is 0-d and fp32.
4. Elements lie densely, in the same order in all tensors of a row: contiguous, or permuted alike. Other layouts never
   enter a table, they take plain tensor code.
5. No two elements of a tensor share memory, as in ``expand()``: what is written would be written twice.
6. The bytes are the values: no negative or conjugate bit is set (as in ``x.conj().imag``), and it is no tensor of zeros
   without memory (``torch._efficientzerotensor``).
7. It is strided and a plain tensor: not sparse, quantized or meta, and no subclass that shows what it does not hold.
8. Its dtype is one of those that the backend has a code for. Others take plain tensor code, or are refused.

Who looks, in every step, before the ranks agree on it: :meth:`megascale.main_params.base.MainParams.follow` at model
params, :class:`megascale.step.local_grads.ReadyGrads` at gradients and main grads, :mod:`megascale.step.kernel_state`
at main params, optimizer state and step counts; :mod:`megascale.amp.local_grads` at the gradients that a GradScaler
unscales.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megascale.kernels.tensors.tensor_reader import expect_memory


class MemoryRecord:
    """Tensors, with the memory that they have when this is made."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._holds = expect_memory(list(tensors))

    def holds(self) -> bool:
        """Whether each tensor still is where it was, and what it was. Also where it can no longer be told: False."""
        try:
            return self._holds()
        except RuntimeError:  # a tensor that has become one without memory of its own
            return False


def memory_fault(tensor: Tensor) -> str | None:
    """Return what is wrong with a tensor's memory, so that neither kernels nor torch could use it; None: nothing is."""
    if tensor.layout != torch.strided:
        return f"has layout {tensor.layout}"
    if tensor.is_meta:
        return "is on the meta device"
    if not tensor.numel() or tensor._is_zerotensor():
        return None
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    needed = (tensor.storage_offset() + reach) * tensor.element_size()
    storage = tensor.untyped_storage()
    if storage.nbytes() < needed or storage.data_ptr() == 0:
        return f"has lost its memory: its storage has {storage.nbytes()} bytes, {needed} are needed"
    return None


def shares_elements(tensor: Tensor) -> bool:
    """Return whether several elements of a tensor lie in the same place, as in ``expand()``."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def is_plain(tensor: Tensor) -> bool:
    """Return whether the bytes of a tensor are its values. :func:`plain` makes it so."""
    return not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor())


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor with the same values, the bytes of which are these: itself, or a copy."""
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.resolve_neg().resolve_conj()
