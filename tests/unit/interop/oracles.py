"""The peers' scalers, from their sources' rules, in plain Python: what a found scaler must follow step for step."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass
class DeepSpeed:
    """``deepspeed/runtime/fp16/loss_scaler.py``, DynamicLossScaler. It grows at k > 0, k % window == 0."""

    cur_scale: float
    scale_window: int
    delayed_shift: int
    consecutive_hysteresis: bool
    min_scale: float = 2.0**-100
    cur_iter: int = 0
    last_overflow_iter: int = -1
    cur_hysteresis: int = field(init=False)

    def __post_init__(self) -> None:
        self.cur_hysteresis = self.delayed_shift

    def grows(self) -> bool:
        """Whether a clean step grows the scale now."""
        clean = self.cur_iter - self.last_overflow_iter - 1
        return clean > 0 and clean % self.scale_window == 0

    def update(self, overflow: bool) -> float:
        """Take one step; return the scale."""
        if overflow:
            if self.delayed_shift == 1 or self.cur_hysteresis == 1:
                self.cur_scale = max(self.cur_scale / 2, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            if self.grows():
                self.cur_hysteresis = self.delayed_shift
                self.cur_scale *= 2
        self.cur_iter += 1
        return self.cur_scale

    def attributes(self) -> dict[str, Any]:
        """Return what is pickled."""
        return vars(self) | {"dynamic": True, "scale_factor": 2.0, "raise_error_at_min_scale": True}

    def saved(self) -> Any:
        """Return an object of the peer's class, as a live one is."""
        return _object("deepspeed.runtime.fp16.loss_scaler", self.attributes())


class OldMegatron(DeepSpeed):
    """``megatron/fp16_deprecated/loss_scaler.py``: DeepSpeed's ancestor grows a step earlier after an overflow."""

    def grows(self) -> bool:
        """Whether a clean step grows the scale now."""
        return (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0

    def saved(self) -> Any:
        """Return an object of the peer's class, as a live one is."""
        return _object("megatron.fp16_deprecated.loss_scaler", self.attributes())


def _object(module: str, attributes: dict[str, Any]) -> Any:
    kind = type("DynamicLossScaler", (SimpleNamespace,), {"__module__": module})
    return kind(**attributes)


@dataclass
class Megatron:
    """``megatron/core/optimizer/grad_scaler.py``, DynamicGradScaler: the tracker goes below 0, growth needs ==."""

    scale: float
    interval: int
    hysteresis: int
    min_scale: float = 2.0**-100
    growth_tracker: int = 0
    hysteresis_tracker: int = field(init=False)

    def __post_init__(self) -> None:
        self.hysteresis_tracker = self.hysteresis

    def update(self, overflow: bool) -> float:
        """Take one step; return the scale."""
        if overflow:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.scale = max(self.scale * 0.5, self.min_scale)
        else:
            self.growth_tracker += 1
            if self.growth_tracker == self.interval:
                self.growth_tracker = 0
                self.hysteresis_tracker = self.hysteresis
                self.scale *= 2
        return self.scale

    def saved(self) -> dict[str, Any]:
        """Return its state dict."""
        keys = ("scale", "growth_tracker", "hysteresis_tracker")
        return {key: getattr(self, key) for key in keys}


@dataclass
class Torch:
    """torch's ``_amp_update_scale_``."""

    scale: float
    interval: int
    tracker: int = 0

    def update(self, overflow: bool) -> float:
        """Take one step; return the scale."""
        if overflow:
            self.scale, self.tracker = self.scale * 0.5, 0
        else:
            self.tracker += 1
            if self.tracker == self.interval:
                self.scale, self.tracker = self.scale * 2, 0
        return self.scale

    def saved(self) -> dict[str, Any]:
        """Return its state dict."""
        return {
            "scale": self.scale,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": self.interval,
            "_growth_tracker": self.tracker,
        }
