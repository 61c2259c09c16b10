"""One loss scale for several optimizers that step separately, as for the networks of a GAN."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megascale.grad_scaler import MegatronGradScaler, ScalerState
from megascale.utils.dtensors import to_local
from megascale.utils.transfer import to_device_async


class PerBatchScaler(MegatronGradScaler):
    """A scaler shared by several optimizers, updated once for all their steps when the batch ends.

    A loss does not tell which optimizers its gradients are for, so there can be only one scale, and it must not change
    between an optimizer's backward and its step. As with torch.amp, a batch counts as one step of the scaler, with an
    overflow if any optimizer found one, while each optimizer skips only for its own gradients.

    Args:
        scaler: holds the scale; its state dict is used.
    """

    def __init__(self, scaler: MegatronGradScaler) -> None:
        self.scaler = scaler
        self.initial_scale = scaler.initial_scale
        self._found_inf: Tensor | None = None

    @property
    @override
    def scale(self) -> Tensor:
        return self.scaler.scale

    @property
    @override
    def live_scale(self) -> Tensor:
        return self.scaler.live_scale

    @override
    def times_asked(self) -> int:
        return self.scaler.times_asked()

    @property
    @override
    def needs_scaled_loss(self) -> bool:
        return self.scaler.needs_scaled_loss

    @override
    def settings(self) -> tuple[Any, ...]:
        return self.scaler.settings()

    @property
    @override
    def lowest_scale(self) -> float | None:
        return self.scaler.lowest_scale

    @property
    @override
    def inv_scale(self) -> Tensor:
        return self.scaler.inv_scale

    @property
    @override
    def device(self) -> torch.device:
        return self.scaler.device

    @override
    def to(self, device: torch.device | str) -> "PerBatchScaler":
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
    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    @override
    def parse_state_dict(self, state_dict: Mapping[str, Any]) -> ScalerState:
        return self.scaler.parse_state_dict(state_dict)

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.scaler.load_state_dict(state_dict)
        self._found_inf = None
