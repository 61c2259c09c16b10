"""Loss scalers. Their state lives in device tensors and follows a device `found_inf` without a host sync.

The rule is Megatron-Core's (``core/optimizer/grad_scaler.py``), bounded on both sides; see :class:`DynamicGradScaler`.
A scaler knows no process groups: pass :meth:`MegatronGradScaler.update` the `found_inf` that all ranks agreed on.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from megascale.config import HYSTERESIS_RESETS, OptimizerConfig
from megascale.errors import ArgumentError, ArgumentTypeError, StateDictError
from megascale.kernels import ScaleRule, TorchDecisions, inverse
from megascale.utils import validate, wording
from megascale.utils.spelling import told
from megascale.utils.transfer import to_device_async

T = TypeVar("T")

LARGEST_TRACKER = 2**62  # int64 with room to count on


class ScalerState(NamedTuple):
    """A scaler's state as host numbers, validated. A constant scale has no trackers: they are 0."""

    scale: float
    growth_tracker: int = 0
    hysteresis_tracker: int = 0


class MegatronGradScaler(ABC):
    """Base of the loss scalers: a scale, its reciprocal, an update and a state dict.

    Args:
        initial_scale: the first loss scale, positive and finite.
        device: where the state lives. None is the CPU; an optimizer moves the scaler to its parameters' device.

    Attributes:
        live_scale: the tensor :attr:`scale`. Reading it here does not count as scaling a loss.
        times_asked: how many times :attr:`scale` was read.
    """

    backend = TorchDecisions()
    """Computes the update; an optimizer replaces it by its own backend."""

    may_be_shared = False
    """Whether several optimizers that step one after the other may be given this scaler.

    False where :meth:`update` changes the scale at once: after the first optimizer's step it would no longer be the
    scale that multiplied the second one's loss.
    """

    times_asked = 0

    def __init__(self, initial_scale: float, *, device: torch.device | str | None = None) -> None:
        self.initial_scale = validate.scale("initial_scale", initial_scale)
        self.live_scale = torch.full((1,), self.initial_scale, dtype=torch.float32, device=device or "cpu")
        self._begun_from = ScalerState(self.initial_scale)

    @property
    def scale(self) -> Tensor:
        """The loss scale: fp32, shape [1], on the scaler's device. The live tensor: clone it to keep a value.

        Read it in every step whose loss you scale by hand: the optimizer takes the read as the sign that gradients are
        scaled.
        """
        self.times_asked += 1
        return self.live_scale

    @property
    def needs_scaled_loss(self) -> bool:
        """Whether the loss must be scaled: False only where the host knows that the scale is 1."""
        return True

    def settings(self) -> tuple[Any, ...]:
        """Return what the host knows of the scale: its rule, and what was loaded. Ranks that agree on it share it."""
        return (type(self).__name__, *self._begun_from)

    @property
    def lowest_scale(self) -> float | None:
        """The scale never falls below it; None: it never falls."""
        return None

    @property
    def inv_scale(self) -> Tensor:
        """The reciprocal of the scale, taken in fp64 and rounded once: fp32, shape [1]."""
        return inverse(self.live_scale)

    @property
    def device(self) -> torch.device:
        """Where the state lives."""
        return self.live_scale.device

    def to(self, device: torch.device | str) -> Self:
        """Move the state to ``device`` and return self."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        vars(self).update({name: to_device_async(value, torch.device(device)) for name, value in tensors.items()})
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Not the backend, whose kernels cannot be copied. Values on the host as arrays: torch.multiprocessing hands on
        # a tensor's memory, and all ranks that it starts with this scaler would update one scale.
        state = {name: value for name, value in vars(self).items() if name != "backend"}
        on_host = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.is_cpu}
        return state | {name: value.numpy().copy() for name, value in on_host.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
        vars(self).update(state | {name: torch.from_numpy(value) for name, value in arrays.items()})

    @abstractmethod
    def update(self, found_inf: bool | Tensor) -> None:
        """Update the scale after one step. ``found_inf``: a bool, or a one-element tensor (non-zero or NaN: found)."""

    def rehearse(self, found_inf: Tensor) -> None:
        """Run the device work of :meth:`update` on a copy of the state."""
        copied = copy.copy(self)
        clones = {name: value.clone() for name, value in vars(self).items() if isinstance(value, Tensor)}
        vars(copied).update(vars(self) | clones)
        copied.update(found_inf)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors and primitives only, not aliasing the live state."""

    @abstractmethod
    def parse_state_dict(self, state_dict: Mapping[str, Any]) -> ScalerState:
        """Validate ``state_dict`` against this scaler and return what it holds. Changes nothing.

        Raises StateDictError naming the key, the value and the remedy.
        """

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state. On StateDictError nothing has changed."""
        self._begun_from = self.parse_state_dict(state_dict)
        self.live_scale.fill_(self._begun_from.scale)


class ConstantGradScaler(MegatronGradScaler):
    """A scale that never changes."""

    def __repr__(self) -> str:
        return wording.call(type(self).__name__, self._begun_from.scale)

    @property
    @override
    def needs_scaled_loss(self) -> bool:
        return self._begun_from.scale != 1.0

    def update(self, found_inf: bool | Tensor) -> None:
        """Check the argument; the scale does not change."""
        _require_flag(found_inf)

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"scale": fp32 tensor of shape [1]}``."""
        return {"scale": self.live_scale.detach().clone()}

    def parse_state_dict(self, state_dict: Mapping[str, Any]) -> ScalerState:
        """Accept Megatron's ``{}`` (the scale stays as configured) and any state with a valid ``scale``."""
        check_mapping(state_dict)
        if not state_dict:
            return ScalerState(float(self.live_scale))
        return ScalerState(entry(state_dict, "scale", validate.scale))


@told
class DynamicGradScaler(MegatronGradScaler):
    """A scale that backs off at overflows and grows after clean steps.

    One step, exactly (``g`` growth tracker, ``h`` hysteresis tracker)::

        found_inf:  g = 0; h = max(h - 1, 0); if h == 0: scale = max(scale * backoff_factor, min_scale)
        clean:      g += 1; if hysteresis_reset == "clean_step": h = hysteresis
                    if g >= growth_interval: g = 0; h = hysteresis
                        scale = min(scale * growth_factor, max_scale) if that product is finite

    Every argument defaults to what :class:`megascale.OptimizerConfig` has for it: 2**16, 1, 2, 0.5, 1000 and 2.

    Args:
        initial_scale: first scale, between ``min_scale`` and ``max_scale``.
        min_scale: the scale never falls below it.
        growth_factor: above 1.
        backoff_factor: between 0 and 1, exclusive.
        growth_interval: clean steps before the scale grows.
        hysteresis: at which overflow the scale backs off; then it does so at each, until hysteresis is replenished.
        max_scale: the scale never grows above it. None: as long as fp32 holds it and its reciprocal.
        hysteresis_reset: when hysteresis is replenished: "growth" (only when the scale grows; Megatron-Core) or
            "clean_step" (by every clean step, so that it counts overflows in a row; apex, DeepSpeed's consecutive
            mode).
        device: where the state lives; see :class:`MegatronGradScaler`.
        init_scale: torch.amp's name of ``initial_scale``; both together are an error.

    Raises:
        ArgumentError, ArgumentTypeError: naming the argument and its value.
    """

    def __init__(
        self,
        initial_scale: float | None = None,
        min_scale: float = OptimizerConfig.min_loss_scale,
        growth_factor: float = OptimizerConfig.loss_scale_growth_factor,
        backoff_factor: float = OptimizerConfig.loss_scale_backoff_factor,
        growth_interval: int = OptimizerConfig.loss_scale_window,
        hysteresis: int = OptimizerConfig.hysteresis,
        *,
        max_scale: float | None = None,
        hysteresis_reset: str = "growth",
        device: torch.device | str | None = None,
        init_scale: float | None = None,
    ) -> None:
        given = [value for value in (initial_scale, init_scale) if value is not None]
        if len(given) > 1:
            raise ArgumentError("initial_scale and init_scale are one argument under two names; give one of them")
        super().__init__(*(given or [OptimizerConfig.initial_loss_scale]), device=device)
        self.min_scale = validate.scale("min_scale", min_scale)
        self.max_scale = validate.LARGEST_SCALE if max_scale is None else validate.scale("max_scale", max_scale)
        if not self.min_scale <= self.initial_scale <= self.max_scale:
            raise ArgumentError(
                f"min_scale <= initial_scale <= max_scale must hold, got {self.min_scale} <= "
                f"{self.initial_scale} <= {self.max_scale}"
            )
        self.growth_factor = validate.positive("growth_factor", growth_factor, above=1)
        self.backoff_factor = validate.positive("backoff_factor", backoff_factor, below=1)
        self.growth_interval = validate.integer("growth_interval", growth_interval, minimum=1, maximum=LARGEST_TRACKER)
        self.hysteresis = validate.integer("hysteresis", hysteresis, minimum=1, maximum=LARGEST_TRACKER)
        self.hysteresis_reset = validate.one_of("hysteresis_reset", hysteresis_reset, HYSTERESIS_RESETS)
        self._growth_tracker = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._hysteresis_tracker = torch.full_like(self._growth_tracker, self.hysteresis)
        self._begun_from = ScalerState(self.initial_scale, 0, self.hysteresis)

    def __repr__(self) -> str:
        live = (self.live_scale, self._growth_tracker, self._hysteresis_tracker)
        began = [f"{value!r} when it was made or loaded" for value in self._begun_from]
        scale, growth, hysteresis = map(wording.number, live, began)
        return wording.call(
            type(self).__name__,
            scale=scale,
            growth_tracker=growth,
            hysteresis_tracker=hysteresis,
            min_scale=self.min_scale,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            hysteresis=self.hysteresis,
            **({} if self.max_scale == validate.LARGEST_SCALE else {"max_scale": self.max_scale}),
            **({} if self.hysteresis_reset == "growth" else {"hysteresis_reset": self.hysteresis_reset}),
        )

    @override
    def settings(self) -> tuple[Any, ...]:
        rule = (self.min_scale, self.max_scale, self.growth_factor, self.backoff_factor, self.growth_interval)
        return (*super().settings(), *rule, self.hysteresis, self.hysteresis_reset)

    @property
    @override
    def lowest_scale(self) -> float:
        return self.min_scale

    def update(self, found_inf: bool | Tensor) -> None:
        """Apply the rule to one step. A tensor `found_inf` is never read on the host."""
        rule = ScaleRule(
            min_scale=self.min_scale,
            max_scale=self.max_scale,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            hysteresis=self.hysteresis,
            each_clean_step=self.hysteresis_reset == "clean_step",
        )
        _require_flag(found_inf)
        if isinstance(found_inf, bool):
            found = torch.full((1,), found_inf, dtype=torch.float32, device=self.device)
        else:
            flag = found_inf if found_inf.dtype == torch.float32 else (found_inf != 0).float()
            found = to_device_async(flag, self.live_scale.device)
        self.backend.rescale_(found, self.live_scale, self._growth_tracker, self._hysteresis_tracker, rule)

    def state_dict(self) -> dict[str, Any]:
        """Return ``scale`` (fp32 tensor [1]), ``growth_tracker``, ``hysteresis_tracker`` (ints): Megatron's keys."""
        return {
            "scale": self.live_scale.detach().clone(),
            "growth_tracker": int(self._growth_tracker),
            "hysteresis_tracker": int(self._hysteresis_tracker),
        }

    def parse_state_dict(self, state_dict: Mapping[str, Any]) -> ScalerState:
        """Accept the state of megascale, of Megatron-Core, and of torch.amp.GradScaler (which has no hysteresis).

        Factors, interval and bounds are configuration and stay as constructed; torch's copies of them are ignored.
        Megatron's trackers may be below zero (it does not stop at 0) and count as 0; a hysteresis above this
        scaler's is cut to it.
        """
        check_mapping(state_dict)
        is_torchs = "_growth_tracker" in state_dict
        left = self.hysteresis
        if not is_torchs:
            left = min(max(_parse_tracker(state_dict, "hysteresis_tracker", -LARGEST_TRACKER), 0), left)
        scale = entry(state_dict, "scale", validate.scale)
        growth = _parse_tracker(state_dict, "_growth_tracker" if is_torchs else "growth_tracker")
        if not self.min_scale <= scale <= self.max_scale:
            raise StateDictError(
                f"grad scaler state 'scale' is {scale}, outside [min_scale={self.min_scale}, "
                f"max_scale={self.max_scale}]; "
                "construct the scaler with bounds that hold it"
            )
        return ScalerState(scale, growth, left)

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._growth_tracker.fill_(self._begun_from.growth_tracker)
        self._hysteresis_tracker.fill_(self._begun_from.hysteresis_tracker)


def _require_flag(found_inf: bool | Tensor) -> None:
    """Raise ArgumentError unless `found_inf` is a bool or a tensor of one element, which is not read."""
    if isinstance(found_inf, Tensor):
        if found_inf.numel() != 1:
            raise ArgumentError(f"found_inf must have one element, got shape {tuple(found_inf.shape)}")
    elif not isinstance(found_inf, bool):
        raise ArgumentTypeError(
            f"found_inf must be a bool or a tensor, got {found_inf!r} of type {type(found_inf).__name__}"
        )


def check_mapping(state_dict: Any) -> None:
    """Raise StateDictError for anything but a dict."""
    if not isinstance(state_dict, Mapping):
        raise StateDictError(f"grad scaler state must be a dict, got {type(state_dict).__name__}")


def entry(state_dict: Mapping[str, Any], key: str, check: Callable[[str, Any], T]) -> T:
    """Return ``check(name, value)`` of the value at ``key``, which may be a number or a one-element tensor.

    Raises StateDictError for an entry that is missing, or that ``check`` refuses.
    """
    name = f"grad scaler state '{key}'"
    if key not in state_dict:
        raise StateDictError(f"grad scaler state lacks '{key}'; it has {sorted(map(str, state_dict)) or 'no keys'}")
    value = state_dict[key]
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise StateDictError(f"{name} must have one element, got shape {tuple(value.shape)}")
        if value.is_meta:
            raise StateDictError(f"{name} is on the meta device and has no value; save the live one")
        value = value.item()
    try:
        return check(name, value)
    except ArgumentError as error:
        raise StateDictError(str(error)) from None


def _parse_tracker(state_dict: Mapping[str, Any], key: str, minimum: int = 0) -> int:
    return entry(state_dict, key, partial(validate.integer, minimum=minimum, maximum=LARGEST_TRACKER))
