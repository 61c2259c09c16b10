"""The rules of update that megascale's step is timed with, and what each has to move."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megascale import Lion
from megascale.kernels.compact_moments import held_bytes
from peers.given import EPS, LR, WEIGHT_DECAY
from peers.work import Traffic

DECAY = {"weight_decay": WEIGHT_DECAY}
Moments = tuple[torch.dtype, torch.dtype]
"""Dtypes of the first moment, or the momentum, and of the second."""
FP32_MOMENTS = (torch.float32, torch.float32)


@dataclass(frozen=True)
class Rule:
    """An inner optimizer with its options.

    Attributes:
        states: how many tensors of each parameter's state have the first and the second moment's dtype.
    """

    kind: Callable[..., torch.optim.Optimizer]
    states: tuple[int, int]
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, params: Sequence[Tensor]) -> torch.optim.Optimizer:
        """Return the inner optimizer."""
        return self.kind(params, lr=LR, **self.options)

    def used(self, moments: Moments) -> Moments:
        """Return the dtypes with fp32, the default, for the moment that the rule does not have."""
        first, second = (dtype if count else torch.float32 for count, dtype in zip(self.states, moments, strict=True))
        has_codes = self.states[1] > 0  # of 8 bits are Adam's moments only
        return (torch.float32 if first == torch.int8 and not has_codes else first), second

    def traffic(self, grad: int, model: int, moments: Moments, remainders: bool = False) -> Traffic:
        """Return bytes per parameter, for gradients and model params of so many bytes.

        An fp32 model param is its own main param. A remainder is read and written, and the model param with it.
        """
        states = sum(count * held_bytes(dtype) for count, dtype in zip(self.states, moments, strict=True))
        copy = model if model < 4 else 0
        main = 2 * 2 + 2 * model if remainders and copy else 2 * 4 + copy
        return {"statistics": grad, "update and write back": grad + main + math.ceil(2 * states)}


ADAMW = "adamw"
RULES = {
    ADAMW: Rule(torch.optim.AdamW, (1, 1), {"eps": EPS, **DECAY}),
    "adam": Rule(torch.optim.Adam, (1, 1), {"eps": EPS}),
    "adam-l2": Rule(torch.optim.Adam, (1, 1), {"eps": EPS, **DECAY}),
    "amsgrad": Rule(torch.optim.AdamW, (1, 2), {"eps": EPS, "amsgrad": True, **DECAY}),
    "sgd": Rule(torch.optim.SGD, (0, 0)),
    "momentum": Rule(torch.optim.SGD, (1, 0), {"momentum": 0.9, **DECAY}),
    "nesterov": Rule(torch.optim.SGD, (1, 0), {"momentum": 0.9, "nesterov": True, **DECAY}),
    "lion": Rule(Lion, (1, 0), DECAY),
}
"""By the names that the command line takes."""
