"""Main params that are held as remainders, decoded for an update: some at a time, in memory that all of them share."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megascale.kernels import Backend, Decision, HeldParams
from megascale.main_params.main_param import MainParam
from megascale.utils.dtensors import local

DECODED_NUMEL = 1 << 20
"""Elements that are decoded at a time. A larger parameter is decoded alone, whole."""
ALIGNMENT = 16
"""Elements: each decoded main param begins at a multiple of it."""


class DecodedParams:
    """Parameters that are decoded together.

    Attributes:
        params: all on one device.
        mains: their main params, fp32, views of memory that other parameters are decoded into later.
    """

    def __init__(self, params: Sequence[MainParam], scratch: Tensor) -> None:
        self.params = list(params)
        models, starts = [param.part for param in params], _starts(params)
        self.mains = [_like(model, scratch[start:]) for model, start in zip(models, starts, strict=False)]
        self._held = held_params(params, models, self.mains)

    def decode(self, backend: Backend) -> None:
        """Write the main params."""
        backend.decode_(self._held)

    def encode(self, backend: Backend, decision: Decision) -> Tensor:
        """Write model params and remainders where the step lands. Returns what :meth:`Backend.encode_` does."""
        return backend.encode_(self._held, decision.found_inf)


def held_params(params: Sequence[MainParam], models: list[Tensor], mains: list[Tensor]) -> HeldParams:
    """Return what encodes main params: all of ``params`` are held as remainders. ``models``: their parts."""
    marks = [param.fingerprint for param in params if param.fingerprint is not None]
    return HeldParams(models, [local(param.memory) for param in params], marks, mains)


def decoded_together(params: Sequence[MainParam]) -> Iterator[list[int]]:
    """Yield the indices of parameters that are decoded together, in order."""
    together: list[int] = []
    starts, begin = _starts(params), 0
    for index, end in enumerate(starts[1:]):
        if together and end - begin > DECODED_NUMEL:
            yield together
            together, begin = [], starts[index]
        together.append(index)
    if together:
        yield together


def scratch_numel(params: Sequence[MainParam]) -> int:
    """Return the elements of memory that ``params`` take when they are decoded together."""
    return _starts(params)[-1]


def _starts(params: Sequence[MainParam]) -> list[int]:
    """Return where each is decoded to, and where the last one ends."""
    starts = [0]
    for param in params:
        starts.append(-(-(starts[-1] + local(param.memory).numel()) // ALIGNMENT) * ALIGNMENT)
    return starts


def _like(model: Tensor, memory: Tensor) -> Tensor:
    """Return a tensor in ``memory`` with the shape of ``model``, and its strides where these leave no gaps."""
    strides = torch.empty_like(model, device="meta").stride()
    return memory.as_strided(model.shape, strides, memory.storage_offset())
