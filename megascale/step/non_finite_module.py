"""NonFiniteModule: the module in which inf or NaN appeared first; and which watches of models tell it to a step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of a module's inputs, or of its outputs, over all their floating-point tensors.

    Attributes:
        minimum, maximum, mean_abs: of the finite elements; 0 without any.
        share_non_finite: inf and NaN among all elements.
        dtype: of the first tensor.
    """

    minimum: float
    maximum: float
    mean_abs: float
    share_non_finite: float
    dtype: torch.dtype

    def __str__(self) -> str:
        return (
            f"{str(self.dtype).removeprefix('torch.')} between {self.minimum:g} and {self.maximum:g}, mean magnitude "
            f"{self.mean_abs:g}, {self.share_non_finite:.3%} not finite"
        )


@dataclass(frozen=True)
class NonFiniteModule:
    """Where inf or NaN appeared first.

    Attributes:
        module: its name in the model; the model itself has its class's name.
        phase: "forward": its output was not finite. "backward": the gradient of its output was not, which the modules
            after it in forward have computed.
        call: which of the module's calls, from 0, since the watch was made or cleared.
        inputs: of the module, in that call.
        found: of its output, or of its output's gradient.
        rank: global, of the process that saw it.
    """

    module: str
    phase: str
    call: int
    inputs: TensorStatistics
    found: TensorStatistics
    rank: int = 0

    def __str__(self) -> str:
        what = "output" if self.phase == "forward" else "gradient of the output"
        return f"{what} of {self.module!r} (call {self.call}): {self.found}; inputs: {self.inputs}"


class ModuleEvents(Protocol):
    """What a watch saw between two steps."""

    def first(self) -> NonFiniteModule | None:
        """Return where inf or NaN appeared first, or None. Waits for the device."""


class WatchedModules(Protocol):
    """A watch of a model's modules: :class:`megascale.debug.ModuleWatch`."""

    def has_param_of(self, ids: set[int]) -> bool:
        """Return whether the model has a parameter with one of these ids."""

    def take(self) -> ModuleEvents:
        """Return what was seen since the last call, without waiting for the device."""


LIVE: WeakKeyDictionary[WatchedModules, None] = WeakKeyDictionary()
"""Watches, oldest first: steps of optimizers of the watched model's parameters take what they see."""


def take(params: Callable[[], Iterable[Tensor]]) -> list[ModuleEvents]:
    """Return what live watches of a model saw since the last step. ``params``: returns an optimizer's; asked rarely."""
    if not LIVE:
        return []
    ids = {id(param) for param in params()}
    return [watch.take() for watch in LIVE if watch.has_param_of(ids)]


def first_module(found: Iterable[NonFiniteModule | None]) -> NonFiniteModule | None:
    """Return the likely origin among what watches, or ranks, saw: forward comes before backward."""
    return min(
        (module for module in found if module is not None),
        key=lambda module: (module.phase != "forward", module.call, module.rank),
        default=None,
    )
