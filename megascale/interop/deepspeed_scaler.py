"""DeepSpeedGradScaler: a scaler with DeepSpeed's rule of growth."""

import torch
from torch import Tensor

from megascale.grad_scaler import DynamicGradScaler


class DeepSpeedGradScaler(DynamicGradScaler):
    """DeepSpeed's rule: after an overflow, and at the start, the first growth needs one more clean step.

    DeepSpeed counts ``k`` clean steps since the last overflow and grows at a clean step that finds ``k > 0`` and ``k %
    scale_window == 0`` (``runtime/fp16/loss_scaler.py``): after ``scale_window + 1`` clean steps, then after every
    ``scale_window``. All else is :class:`DynamicGradScaler`'s rule. The growth tracker counts clean steps as there, but
    is 1 after a growth. For an overflow at ``min_scale`` DeepSpeed raises an error; here the scale stays.

    Args:
        initial_scale, min_scale, growth_factor, backoff_factor, hysteresis, max_scale, hysteresis_reset, device: see
            :class:`DynamicGradScaler`; hysteresis is DeepSpeed's ``delayed_shift``, "clean_step" its
            ``consecutive_hysteresis``.
        scale_window: clean steps between two growths. The attribute ``growth_interval`` is one more: the steps from an
            overflow to the first growth.
    """

    def __init__(
        self,
        initial_scale: float,
        min_scale: float,
        growth_factor: float,
        backoff_factor: float,
        scale_window: int,
        hysteresis: int,
        *,
        max_scale: float | None = None,
        hysteresis_reset: str = "growth",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            initial_scale,
            min_scale,
            growth_factor,
            backoff_factor,
            scale_window,
            hysteresis,
            max_scale=max_scale,
            hysteresis_reset=hysteresis_reset,
            device=device,
        )
        self.growth_interval = scale_window + 1

    @torch.no_grad()
    def update(self, found_inf: bool | Tensor) -> None:
        """Apply the rule to one step. A tensor `found_inf` is never read on the host."""
        super().update(found_inf)
        clean = (torch.as_tensor(found_inf, device=self.device) == 0).reshape(1)
        grew = clean & (self._growth_tracker == 0)
        self._growth_tracker.copy_(torch.where(grew, 1, self._growth_tracker))
