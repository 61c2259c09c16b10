"""Main params held as remainders, decoded for an update: some at a time, into scratch memory that all of them share."""

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megascale.kernels import Backend, Decision, HeldParams
from megascale.main_params.main_param import MainParam
from megascale.utils.dtensors import to_local

DECODED_NUMEL = 1 << 20
"""Elements that are decoded at a time. A larger parameter is decoded alone, whole."""
ALIGNMENT = 16
"""In elements: each decoded main param begins at a multiple of it in the scratch memory."""


class DecodedParams:
    """Parameters that are decoded together.

    Attributes:
        params: all on one device.
        mains: their main params, fp32: views of the scratch memory, which the next parameters are decoded into.
    """

    def __init__(self, params: Sequence[MainParam], scratch: Tensor) -> None:
        self.params = list(params)
        models, starts = [param.rounded for param in params], _starts(params)
        self.mains = [_like(model, scratch[start:]) for model, start in zip(models, starts, strict=False)]
        self._held = held_params(params, models, self.mains)

    def pick(self, indices: Sequence[int]) -> "DecodedParams":
        """Return those at ``indices``, in the same places of the scratch memory."""
        picked = copy.copy(self)
        picked.params = [self.params[index] for index in indices]
        picked.mains = [self.mains[index] for index in indices]
        picked._held = self._held.pick(indices)
        return picked

    def decode(self, backend: Backend) -> None:
        """Compute the main params from model params and remainders."""
        backend.decode_(self._held)

    def encode(self, backend: Backend, decision: Decision) -> Tensor:
        """Write model params and remainders, unless the step is skipped. Returns what :meth:`Backend.encode_` does."""
        return backend.encode_(self._held, decision.found_inf)


def held_params(params: Sequence[MainParam], models: list[Tensor], mains: list[Tensor]) -> HeldParams:
    """Return the tensors that a backend decodes or encodes.

    Args:
        params: all held as remainders.
        models: this rank's parts of their model params, or their weights in host memory.
        mains: memory of the decoded main params.
    """
    return HeldParams(models, [to_local(param.memory) for param in params], mains)


def decoded_together(params: Sequence[MainParam]) -> Iterator[list[int]]:
    """Yield lists of indices: the parameters of each are decoded together. All are in order."""
    indices: list[int] = []
    starts, begin = _starts(params), 0
    for index, end in enumerate(starts[1:]):
        if indices and end - begin > DECODED_NUMEL:
            yield indices
            indices, begin = [], starts[index]
        indices.append(index)
    if indices:
        yield indices


def scratch_numel(params: Sequence[MainParam]) -> int:
    """Return how many elements of scratch memory ``params`` take when they are decoded together."""
    return _starts(params)[-1]


def _starts(params: Sequence[MainParam]) -> list[int]:
    """Return the element of the scratch memory at which each parameter begins, and the one at which the last ends."""
    starts = [0]
    for param in params:
        starts.append(-(-(starts[-1] + to_local(param.memory).numel()) // ALIGNMENT) * ALIGNMENT)
    return starts


def _like(model: Tensor, memory: Tensor) -> Tensor:
    """Return a view of ``memory`` with the shape of ``model``, and with its strides if these leave no gaps."""
    strides = torch.empty_like(model, device="meta").stride()
    return memory.as_strided(model.shape, strides, memory.storage_offset())
