"""HostTwin: what a model param has in host memory where its main param and state live there; and which ones do."""

from collections.abc import Sequence
from typing import TypeGuard

from torch import Tensor

from megascale.kernels import TensorList
from megascale.utils.dtensors import to_local
from megascale.utils.host_memory import allocate, dense


class HostTwin:
    """Host memory of one model param, or of this rank's part of it: its next weights, and its gradient.

    Attributes:
        weights: in the form of the model param; of a DTensor, in that of its local tensor. The update writes the main
            param's rounding into them; from there they travel to the device.
        grad: the memory that the gradient is copied into; None before the first one.
    """

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights
        self.grad: Tensor | None = None


def goes(numels: Sequence[int], fraction: float) -> list[bool]:
    """Return which runs of elements go to host memory: at least ``fraction`` of all, the last ones in forward.

    What forward needs first stays on the device.

    Args:
        numels: elements of parameters that leave or stay together, in the order of forward, the same on all ranks.
        fraction: above 0, up to 1.
    """
    left = (1 - fraction) * sum(numels)
    found = []
    for numel in numels:
        left -= numel
        found.append(left < 0 or fraction == 1.0)
    return found


def host_twins(parts: Sequence[Tensor], *, pin: bool) -> list[HostTwin]:
    """Return twins of model params; of a DTensor, of this rank's part of it.

    ``pin``: pin their memory where the model params are on an accelerator.

    Raises UsageError if there is too little host memory.
    """
    return list(map(HostTwin, host_memory(list(map(to_local, parts)), pin=pin)))


def fits(memory: Tensor | None, grad: Tensor) -> TypeGuard[Tensor]:
    """Whether there is memory, and ``grad`` can be copied into it as it is."""
    return memory is not None and memory.dtype == grad.dtype and memory.shape == grad.shape


def make_grad_memory(twins: Sequence[HostTwin], grads: TensorList, *, pin: bool) -> None:
    """Give each twin memory for its gradient, where it has none that fits. Nothing is copied.

    Raises UsageError if there is too little host memory.
    """
    missing = [at for at, twin in enumerate(twins) if not fits(twin.grad, grads[at])]
    for at, memory in zip(missing, host_memory([grads[at] for at in missing], pin=pin), strict=True):
        twins[at].grad = memory


def copies_in(twins: Sequence[HostTwin]) -> TensorList:
    """Return the memory of gradients, which :func:`make_grad_memory` has made."""
    return TensorList(twin.grad for twin in twins if twin.grad is not None)


def host_memory(likes: Sequence[Tensor], *, pin: bool) -> list[Tensor]:
    """Return uninitialised host tensors like ``likes``, with dense strides; small ones lie side by side."""
    pinned = pin and any(like.device.type != "cpu" for like in likes)
    sizes = [like.numel() * like.element_size() for like in likes]
    return [dense(memory, like) for like, memory in zip(likes, allocate(sizes, pin=pinned), strict=True)]
