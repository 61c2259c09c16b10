"""HostTwin: what a model param has in host memory where its main param and state live there."""

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from megascale.kernels import TensorList
from megascale.utils.dtensors import to_local
from megascale.utils.host_memory import allocate


class HostTwin:
    """Host memory of one model param, or of this rank's part of it: its next weights, and its gradient.

    Attributes:
        weights: in the form of the model param; of a DTensor, in that of its local tensor. The update writes the main
            param's rounding into them; from there they travel to the device.
        grad: a copy of the gradient; None before the first one.
        pins_state: whether main param and state are in pinned memory, as the device copies them.
    """

    def __init__(self, weights: Tensor, *, pins_state: bool = False) -> None:
        self.weights, self.pins_state = weights, pins_state
        self.grad: Tensor | None = None


def host_twins(parts: Sequence[Tensor], *, pin: bool, pins_state: bool = False) -> list[HostTwin]:
    """Return twins of model params; of a DTensor, of this rank's part of it.

    ``pin``: pin the memory of the weights where these are on an accelerator; ``pins_state``: and of main params and
    state.

    Raises UsageError if there is too little host memory.
    """
    memory = _host_memory([to_local(part) for part in parts], pin=pin)
    pins = [pin and pins_state and part.device.type != "cpu" for part in parts]
    return [HostTwin(one, pins_state=pins_it) for one, pins_it in zip(memory, pins, strict=True)]


def host_grads(twins: Sequence[HostTwin], grads: TensorList, *, pin: bool) -> list[Tensor]:
    """Return the host memory of gradients, made where it is missing or does not fit. Nothing is copied."""
    for_all = [grads[at] for at in range(len(grads))]
    missing = [at for at, (twin, grad) in enumerate(zip(twins, for_all, strict=True)) if not fits(twin.grad, grad)]
    for at, memory in zip(missing, _host_memory([for_all[at] for at in missing], pin=pin), strict=True):
        twins[at].grad = memory
    return [twin.grad for twin in twins if twin.grad is not None]


def fits(memory: Tensor | None, grad: Tensor) -> TypeGuard[Tensor]:
    """Whether there is memory, and ``grad`` can be copied into it as it is."""
    return memory is not None and memory.dtype == grad.dtype and memory.shape == grad.shape


def _host_memory(likes: Sequence[Tensor], *, pin: bool) -> list[Tensor]:
    """Return uninitialised host tensors like ``likes``, with dense strides; small ones lie side by side."""
    pinned = pin and any(like.device.type != "cpu" for like in likes)
    made = []
    sizes = [like.numel() * like.element_size() for like in likes]
    for like, memory in zip(likes, allocate(sizes, pin=pinned), strict=True):
        strides = torch.empty_like(like, device="meta").stride()
        offset = memory.storage_offset() // like.element_size()
        empty = torch.empty(0, dtype=like.dtype, device="cpu")
        made.append(empty.set_(memory.untyped_storage(), offset, like.shape, strides))
    return made
