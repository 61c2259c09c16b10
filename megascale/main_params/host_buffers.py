"""HostBuffers: what a model param has in host memory where its main param and state live there."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megascale.kernels import TensorList
from megascale.utils.host_memory import allocate, dense


@dataclass(eq=False)
class HostBuffers:
    """Host memory of one model param, or of this rank's part of it: its next weights, and its gradient.

    Attributes:
        weights: in the form of the model param; of a DTensor, in that of its local tensor. The update writes the main
            param's rounding into them; from there they travel to the device.
        grad: the memory that the gradient is copied into; None before the first one.
    """

    weights: Tensor
    grad: Tensor | None = None

    def memory_for(self, grad: Tensor) -> Tensor | None:
        """Return :attr:`grad` if a gradient can be copied into it as it is, else None."""
        here = self.grad
        return here if here is not None and here.dtype == grad.dtype and here.shape == grad.shape else None


def make_grad_memory(buffers: Sequence[HostBuffers], grads: TensorList, *, pin: bool) -> TensorList:
    """Return the memory of gradients, which is made where there is none that fits. Nothing is copied.

    Raises UsageError if there is too little host memory.
    """
    pairs = list(zip(buffers, grads, strict=True))
    wanting = [(one, grad) for one, grad in pairs if grad is not None and one.memory_for(grad) is None]
    for (one, _), memory in zip(wanting, host_memory([grad for _, grad in wanting], pin=pin), strict=True):
        one.grad = memory
    return TensorList(None if grad is None else one.grad for one, grad in pairs)


def host_memory(likes: Sequence[Tensor], *, pin: bool) -> list[Tensor]:
    """Return uninitialised host tensors like ``likes``, with dense strides; small ones lie side by side.

    ``pin``: pin them where one of ``likes`` is on an accelerator.

    Raises UsageError if there is too little host memory.
    """
    pinned = pin and any(like.device.type != "cpu" for like in likes)
    sizes = [like.numel() * like.element_size() for like in likes]
    return [dense(memory, like) for like, memory in zip(likes, allocate(sizes, pin=pinned), strict=True)]
