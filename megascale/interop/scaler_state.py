"""FoundScaler: a scaler that was read from another system's checkpoint, and its continuation by megascale's."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from megascale.errors import ArgumentError, InteropError
from megascale.grad_scaler import LARGEST_TRACKER, ConstantGradScaler, DynamicGradScaler, MegatronGradScaler
from megascale.interop.deepspeed_scaler import DeepSpeedGradScaler
from megascale.utils import validate

NO_FLOOR = (
    f"{{system}} lets the scale fall without end; megascale stops at {validate.SMALLEST_SCALE:.0e}, "
    "the smallest with a finite reciprocal, or at the min_scale that you give"
)
NO_CEILING = (
    f"{{system}} lets the scale grow past {validate.LARGEST_SCALE:.0e}, where its reciprocal is no normal fp32 "
    "number; megascale stops there"
)


@dataclass(frozen=True)
class ScalerConfig:
    """The peer's scaling rule, in :class:`DynamicGradScaler`'s terms. None: not recorded in the checkpoint.

    Attributes:
        growth_factor, backoff_factor: factors of the scale.
        growth_interval: clean steps between two growths.
        hysteresis: overflows before the scale backs off.
        min_scale, max_scale: bounds; if the peer has none, the widest that ours supports.
        hysteresis_reset: "growth" or "clean_step".
        late_first_growth: the first growth after an overflow needs one more clean step (DeepSpeed).
    """

    growth_factor: float | None = 2.0
    backoff_factor: float | None = 0.5
    growth_interval: int | None = None
    hysteresis: int | None = 1
    min_scale: float | None = validate.SMALLEST_SCALE
    max_scale: float | None = validate.LARGEST_SCALE
    hysteresis_reset: str = "growth"
    late_first_growth: bool = False


@dataclass(frozen=True)
class FoundScaler:
    """A scaler's state and configuration, read from another system.

    Attributes:
        system: name of the other system.
        state: with megascale's keys: ``{"scale": fp32 tensor of shape [1], "growth_tracker": int,
            "hysteresis_tracker": int}`` of a dynamic scale, ``{"scale": ...}`` of a constant one, ``{}`` if the scale
            is not recorded.
        config: the rule, from the checkpoint or the peer's source.
        dynamic: False for a constant scale.
        mapped: one line for each thing that was taken over.
        not_mapped: one line, with the reason, for each thing that was not taken over or differs.
    """

    system: str
    state: dict[str, Any]
    config: ScalerConfig = field(default_factory=ScalerConfig)
    dynamic: bool = True
    mapped: tuple[str, ...] = ()
    not_mapped: tuple[str, ...] = ()

    @property
    def scale(self) -> float | None:
        """The loss scale; None if the checkpoint does not record it."""
        return float(self.state["scale"]) if self.state else None

    def build_grad_scaler(self, **config: Any) -> MegatronGradScaler:
        """Return megascale's scaler in the peer's state; it continues the peer's scale step for step.

        Where none does exactly with what the checkpoint records, ``not_mapped`` says so, and this is the nearest.

        Args:
            config: fields of :class:`ScalerConfig` that the checkpoint does not record, or to be changed; for a
                constant scale that is not recorded: ``initial_scale``.

        Raises:
            InteropError: the checkpoint lacks a needed value, or its state does not go on exactly with ``config``.
            ArgumentError: for a value out of range, or an unknown field.
        """
        if not self.dynamic:
            return self._build_constant(**config)
        known = {item.name for item in fields(ScalerConfig)}
        if unknown := sorted(set(config) - known):
            raise ArgumentError(f"unknown configuration {', '.join(unknown)}; there are {', '.join(sorted(known))}")
        rule = replace(self.config, **config)
        if missing := [name for name in sorted(known) if getattr(rule, name) is None]:
            raise InteropError(
                f"{self.system}'s checkpoint does not record {', '.join(missing)}; pass what the run was configured "
                f"with: build_grad_scaler({', '.join(f'{name}=...' for name in missing)})"
            )
        factors: Any = (rule.growth_factor, rule.backoff_factor, rule.growth_interval, rule.hysteresis)
        low, high = validate.scale("min_scale", rule.min_scale), validate.scale("max_scale", rule.max_scale)
        scale = min(max(float(self.state["scale"]), low), high)
        kind = DeepSpeedGradScaler if rule.late_first_growth else DynamicGradScaler
        scaler = kind(scale, low, *factors, max_scale=high, hysteresis_reset=rule.hysteresis_reset)
        if caused := [reason for reason in discontinuities(self.state, rule) if reason not in self.not_mapped]:
            raise InteropError(f"{self.system}: {'; '.join(caused)}; pass what the run was configured with")
        scaler.load_state_dict(self.state | {"scale": scale})
        return scaler

    def _build_constant(self, **config: Any) -> ConstantGradScaler:
        if unknown := sorted(set(config) - {"initial_scale"}):
            raise ArgumentError(f"a constant scale has no {', '.join(unknown)}; it has initial_scale")
        initial = config.get("initial_scale", self.scale)
        if initial is None:
            raise InteropError(
                f"{self.system}'s checkpoint does not record its constant scale; pass what the run was configured "
                "with: build_grad_scaler(initial_scale=...)"
            )
        return ConstantGradScaler(initial)


def dynamic(
    system: str,
    scale: Any,
    growth_tracker: Any,
    hysteresis_tracker: Any,
    config: ScalerConfig,
    *,
    mapped: Sequence[str] = (),
    not_mapped: Sequence[str] = (),
) -> FoundScaler:
    """Return the FoundScaler of a dynamic scale, with checked numbers.

    Raises:
        InteropError: a number has the wrong type or is out of range.
    """
    number = checked_scale(system, scale)
    state: dict[str, Any] = {
        "scale": torch.tensor([number], dtype=torch.float32),
        "growth_tracker": as_int(system, "growth tracker", growth_tracker),
        "hysteresis_tracker": as_int(system, "hysteresis tracker", hysteresis_tracker),
    }
    notes = [*not_mapped, *fp32_rounding_notes(number), *discontinuities(state, config), *inexact_factor_notes(config)]
    return FoundScaler(system, state, config, mapped=tuple(mapped), not_mapped=tuple(notes))


def discontinuities(state: dict[str, Any], rule: ScalerConfig) -> list[str]:
    """Return why no scaler of ours with ``rule`` continues a peer's state exactly. None in it gives no reason."""
    scale, growth, hysteresis = float(state["scale"]), state["growth_tracker"], state["hysteresis_tracker"]
    reasons, interval = [], rule.growth_interval
    if interval is not None and not rule.late_first_growth and growth >= interval:
        reasons.append(
            f"the growth tracker is {growth}, at or above the growth_interval of {interval}: the peer compares with == "
            "and would not grow until the next overflow, megascale's grows at the next clean step"
        )
    if rule.hysteresis is not None and hysteresis > rule.hysteresis:
        reasons.append(
            f"the hysteresis tracker is {hysteresis}, above the hysteresis of {rule.hysteresis}: megascale cuts it to "
            "that"
        )
    if rule.min_scale is not None and scale < rule.min_scale:
        reasons.append(f"the scale is {scale}, below the min_scale of {rule.min_scale}, where megascale's begins")
    if rule.max_scale is not None and scale > rule.max_scale:
        reasons.append(f"the scale is {scale}, above the max_scale of {rule.max_scale}, where megascale's begins")
    return reasons


def constant(system: str, scale: Any, *, mapped: Sequence[str] = (), not_mapped: Sequence[str] = ()) -> FoundScaler:
    """Return the FoundScaler of a constant scale (None: not recorded). Raises InteropError for a bad scale."""
    state: dict[str, Any] = {}
    notes = list(not_mapped)
    if scale is not None:
        number = checked_scale(system, scale)
        state = {"scale": torch.tensor([number], dtype=torch.float32)}
        notes += fp32_rounding_notes(number)
    return FoundScaler(system, state, dynamic=False, mapped=tuple(mapped), not_mapped=tuple(notes))


def checked_scale(system: str, scale: Any) -> float:
    """Return a scale as a float. Raises InteropError for a bad one."""
    if isinstance(scale, torch.Tensor) and scale.numel() == 1:
        scale = scale.item()
    try:
        return validate.scale(f"{system}'s scale", scale)
    except ArgumentError as error:
        fallen = isinstance(scale, float) and scale == 0
        hint = "; it has fallen to where no step is taken any more" if fallen else ""
        raise InteropError(f"{error}{hint}") from None


def as_int(system: str, what: str, value: Any, minimum: int = 0) -> int:
    """Return an integer. Raises InteropError for a bad one, naming ``what``."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    try:
        return validate.integer(f"{system}'s {what}", value, minimum=minimum, maximum=LARGEST_TRACKER)
    except ArgumentError as error:
        raise InteropError(str(error)) from None


def fp32_rounding_notes(scale: float) -> list[str]:
    """Return the note that fp32 cannot represent ``scale``; empty if it can."""
    kept = as_fp32(scale)
    return [] if kept == scale else [f"the scale is {scale!r}, which fp32 rounds to {kept!r}"]


def inexact_factor_notes(config: ScalerConfig) -> list[str]:
    """Return a note for each factor that fp32 cannot represent: the peer may round products differently."""
    factors = {"growth_factor": config.growth_factor, "backoff_factor": config.backoff_factor}
    return [
        f"{name} is {value!r}, which fp32 does not hold: the scale may differ from the peer's in the last bit"
        for name, value in factors.items()
        if value is not None and as_fp32(value) != value
    ]


def as_fp32(value: float) -> float:
    """Return ``value`` rounded to fp32."""
    return float(torch.tensor(value, dtype=torch.float32))
