"""One loss scale for several optimizers that step separately, as for the networks of a GAN."""

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from megascale.grad_scaler import MegatronGradScaler
from megascale.utils.dtensors import to_local
from megascale.utils.transfer import to_device_async


def _of_scaler(name: str) -> Any:
    """Return a property that is ``self.scaler``'s value, or its method."""
    return property(attrgetter(f"scaler.{name}"))


class PerBatchScaler(MegatronGradScaler):
    """A scaler shared by several optimizers, updated once for all their steps when the batch ends.

    A loss does not tell which optimizers its gradients are for, so there can be only one scale, and it must not change
    between an optimizer's backward and its step. As with torch.amp, a batch counts as one step of the scaler, with an
    overflow if any optimizer found one, while each optimizer skips only for its own gradients.

    Args:
        scaler: holds the scale; its state dict is used.
    """

    may_be_shared = True

    scale = _of_scaler("scale")
    live_scale = _of_scaler("live_scale")
    lowest_scale = _of_scaler("lowest_scale")
    needs_scaled_loss = _of_scaler("needs_scaled_loss")
    times_asked = _of_scaler("times_asked")
    settings = _of_scaler("settings")
    state_dict = _of_scaler("state_dict")
    parse_state_dict = _of_scaler("parse_state_dict")

    def __init__(self, scaler: MegatronGradScaler) -> None:
        self.scaler = scaler
        self.initial_scale = scaler.initial_scale
        self._found_inf: Tensor | None = None

    @override
    def to(self, device: torch.device | str) -> Self:
        self.scaler.to(device)
        return self

    def update(self, found_inf: bool | Tensor) -> None:
        """Record one optimizer's step."""
        found = torch.as_tensor(found_inf, dtype=torch.float32, device=self.device).reshape(())
        self._found_inf = found if self._found_inf is None else torch.maximum(self._found_inf, found)

    @torch.no_grad()
    def end_batch(self, grads: Iterable[Tensor]) -> None:
        """Update the scale after the batch's steps, without a sync.

        ``grads``, which wait for a later step, are multiplied in place by new scale / old scale: exact for factors that
        are powers of two.
        """
        if self._found_inf is None:
            return
        before = self.scaler.live_scale.clone()
        self.scaler.update(self._found_inf)
        self._found_inf = None
        change = (self.scaler.live_scale / before).reshape(())
        for grad in map(to_local, grads):
            grad.mul_(to_device_async(change, grad.device))

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.scaler.load_state_dict(state_dict)
        self._found_inf = None
