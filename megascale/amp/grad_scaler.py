"""GradScaler: torch.amp.GradScaler's API, with a decision that all ranks share."""

import inspect
from collections import defaultdict
from collections.abc import Mapping
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.cuda.amp.common import amp_definitely_not_available
from torch.distributed import ProcessGroup

from megascale.amp import fused_sgd, limits
from megascale.amp.agreement import Agreement, Squares
from megascale.amp.errors import ScalerArgumentError, ScalerOrderError
from megascale.amp.local_grads import LocalGrads, found_in
from megascale.amp.overflows import ScalerOverflows
from megascale.base_optimizer import MegascaleOptimizer
from megascale.errors import ArgumentError, ArgumentTypeError, UsageError
from megascale.kernels import Backend, select_backend
from megascale.kernels.compact_moments import SCALE_SUFFIX
from megascale.rules import ADAM, MOMENT_CODES
from megascale.step.overflow_report import OverflowReport
from megascale.utils import call_site, validate, wording
from megascale.utils.calls import methods_outside_of_graphs
from megascale.utils.transfer import to_device_async

_TAKE_SCALERS: WeakKeyDictionary[torch.optim.Optimizer, bool] = WeakKeyDictionary()


def takes_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its ``step()`` takes the scaler: torch's older contract. A look takes as long as some launches."""
    if optimizer not in _TAKE_SCALERS:
        _TAKE_SCALERS[optimizer] = "grad_scaler" in inspect.signature(optimizer.step).parameters
    return _TAKE_SCALERS[optimizer]


@methods_outside_of_graphs
class GradScaler(torch.amp.GradScaler):
    """Scales losses, unscales gradients, and skips steps whose gradients overflowed: torch.amp.GradScaler, and more.

    In one process, on fp32 gradients, results have the same bits as torch's. It is a subclass because libraries check
    for and annotate ``torch.amp.GradScaler``, and because optimizers that take a ``grad_scaler`` call torch's own
    methods; every decision is made here. Differences from torch's:

    - Ranks agree on each optimizer's step: those of ``process_group``, and those of its DTensor parameters' meshes,
      whatever the placements, also if a rank has no gradient. It takes one small all-reduce. (More only if no group
      spans all: one per dimension of a mesh that is not the whole world, one per mesh if several are slices of one.)
      Ranks that share a loss, but none of an optimizer's groups and meshes, need a ``process_group`` that spans them,
      else their scales diverge.
    - With an optimizer that reads `found_inf` on the device (torch's with ``fused=True``), :meth:`step` has no host
      sync and does not write gradients before the update. Any other costs one host read a step.
    - fp16 gradients are accepted. A fused optimizer unscales them in fp32, without loss. :meth:`unscale_`, and with it
      the step of any other optimizer, rounds them to fp16 in place: values below 2**-24 after division by the scale are
      lost. Values beyond fp16's range count as overflow.
    - The scale stays within ``min_scale`` and ``max_scale``, where torch's falls to 0 and never recovers. A growth
      tracker above the interval, as from a state dict or after :meth:`set_growth_interval`, grows at the next clean
      step, where torch's never grows again.

    Args:
        device: device type of scale and losses. As in torch, "cuda" without CUDA disables the scaler, with a warning.
        init_scale: the first scale.
        growth_factor: above 1.
        backoff_factor: between 0 and 1, exclusive.
        growth_interval: clean steps before the scale grows.
        enabled: False: :meth:`step` calls the optimizer's, everything else does nothing.
        loss_scale: "dynamic" or None: the scale follows overflows. A number: the constant scale, in place of
            ``init_scale``; steps that overflow are skipped (Cerebras's argument).
        hysteresis: at which overflow the scale backs off; see :class:`megascale.DynamicGradScaler`.
        hysteresis_reset: what replenishes it: "growth", or "clean_step", so that it counts overflows in a row.
        min_scale: the scale never falls below it. The default, 2**-126, is the smallest normal fp32 number: a smaller
            scale, and then its gradients, would be subnormal. Above it torch's scale is the same.
        max_scale: the scale never grows above it. None: only fp32 limits it, as in torch.
        max_consecutive_skips: more skipped steps in a row than this raise SkippedStepsError in :meth:`update`, when the
            scale has been updated; on an accelerator one step later. None: no limit.
        max_overflows_at_min_scale: more steps in a row than this that overflow while the scale is ``min_scale`` raise
            MinScaleError, likewise. Give a ``min_scale``: the default is reached after 142 overflows in a row from
            2**16. A constant scale is no minimum. None: no limit.
        process_group: ranks that decide together. None: this rank alone, except that the ranks of a DTensor's mesh
            always agree. DistributedDataParallel needs none; FSDP1 (as with ShardedGradScaler), pipeline stages and
            different losses on different ranks need one.

    Raises:
        ArgumentError, ArgumentTypeError: for an argument out of range, naming it. Also an AssertionError where torch
            raises one.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        loss_scale: str | float | None = None,
        hysteresis: int = 1,
        hysteresis_reset: str = "growth",
        min_scale: float = validate.SMALLEST_SCALE,
        max_scale: float | None = None,
        max_consecutive_skips: int | None = None,
        max_overflows_at_min_scale: int | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        if enabled and device == "cuda" and amp_definitely_not_available():
            call_site.warn("GradScaler is enabled, but CUDA is not available. Disabling.")
            enabled = False
        self.process_group = process_group
        if enabled:
            factors = growth_factor, backoff_factor, growth_interval
            self._rule = limits.rule_of(min_scale, max_scale, *factors, hysteresis, hysteresis_reset)
            if isinstance(loss_scale, str) and loss_scale != "dynamic":
                raise ArgumentError(f"loss_scale must be 'dynamic', a number or None, got {loss_scale!r}")
            self._is_constant = loss_scale is not None and loss_scale != "dynamic"
            name, first = ("loss_scale", loss_scale) if self._is_constant else ("init_scale", init_scale)
            init_scale = limits.scale_within(self._rule, name, first)
            validate.process_group("process_group", process_group)
            self._init_hysteresis_tracker = hysteresis
            self._hysteresis_tracker: Tensor | None = None
            self._backends: dict[torch.device, Backend] = {}
            floor = None if self._is_constant else self._rule.min_scale
            self.overflows = ScalerOverflows(max_consecutive_skips, max_overflows_at_min_scale, floor)
            self.overflows.group = process_group
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def __repr__(self) -> str:
        if not self._enabled:
            return "GradScaler(enabled=False)"
        scale = self.get_scale() if self._scale is None else wording.number(self._scale, "get_scale() reads it")
        factors = {name: getattr(self, f"_{name}") for name in ("growth_factor", "backoff_factor", "growth_interval")}
        return wording.call("GradScaler", scale=scale, **factors)

    # A step

    def scale(self, outputs: Any) -> Any:
        """Return ``outputs``, a tensor or an iterable of tensors, times the scale, as torch does.

        Losses that were not finite are told of by :meth:`last_overflow`.
        """
        if self._enabled:
            self.overflows.losses.add(outputs)
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place, so that they can be read and clipped.

        Call it at most once per optimizer and :meth:`update`, when all its gradients are there. No host sync. A sparse
        or Partial gradient may be replaced.

        Raises:
            UsageError: a RuntimeError: it was called already, or after :meth:`step`.
            ScalerOrderError: an AssertionError: nothing has been scaled yet.
        """
        if self._enabled:
            self._unscale(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step with unscaled gradients, or skip where any gradient of any rank that agrees is not finite.

        Args:
            optimizer: its gradients are unscaled first, unless :meth:`unscale_` was called.
            args, kwargs: for ``optimizer.step()``. No closure.

        Returns:
            What ``optimizer.step()`` returned; None where it was skipped on the host. A fused optimizer skips on the
            device: its ``step()`` is always called.

        Raises:
            UsageError: a RuntimeError: for a closure, or a second call since :meth:`update`.
            ScalerOrderError: an AssertionError: nothing has been scaled yet, or there is no gradient on any rank.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or any(map(callable, args[:1])):
            raise UsageError("step() takes no closure while GradScaler is enabled: run forward and backward first")
        self._check_scale_growth_tracker("step")
        state = self._state_of(optimizer)
        if state["stage"] is OptState.STEPPED:
            raise UsageError("step() has already been called since the last update().")
        result: float | None
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            result = self._step_on_device(optimizer, state, *args, **kwargs)
        else:
            if state["stage"] is OptState.READY:
                self._unscale(optimizer)
            if not state["found_inf_per_device"]:
                raise ScalerOrderError("No inf checks were recorded for this optimizer: it has no gradients.")
            result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End the iteration: the scale backs off if any optimizer's gradients overflowed, and may grow otherwise.

        Args:
            new_scale: the next scale, instead of that: a number, or a tensor of one element on this scaler's kind
                of device. A tensor is not read: it is clamped to ``min_scale`` and ``max_scale`` on the device, and one
                that is not finite leaves the scale as it is.

        Raises:
            ScalerOrderError: an AssertionError: no step was taken, or nothing was scaled.
            ArgumentError: for a number outside the limits, or a tensor that does not fit.
            SkippedStepsError: for more skips in a row than ``max_consecutive_skips``.
            MinScaleError: for more overflows in a row at ``min_scale`` than ``max_overflows_at_min_scale``.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("update")
        found_infs = [flag for state in self._per_optimizer_states.values() for flag in _flags(state)]
        self.overflows.observe(found_infs, scale)
        if new_scale is not None:
            self._set_scale(scale, new_scale)
        else:
            if not found_infs:
                raise ScalerOrderError("No inf checks were recorded prior to update.")
            if not self._is_constant:
                self._rescale_(_any(found_infs, scale.device))
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self.overflows.require_within_limits()

    def last_overflow(self, *, gather: bool = False) -> OverflowReport | None:
        """Return which gradients held inf or NaN in the last iteration that was skipped; None if none was.

        Call it after :meth:`update`, before gradients change; on an accelerator it waits. Parameters have the names
        with which the optimizer was built, else their positions. Gradients that were unscaled in place are reported so.

        Args:
            gather: report the gradients of all ranks of ``process_group``, which call it together.
        """
        return self.overflows.last(gather=validate.flag("gather", gather)) if self._enabled else None

    # For optimizer_step(), beyond torch's API

    @torch.no_grad()
    def _measure(self, optimizer: torch.optim.Optimizer, grads: LocalGrads) -> Tensor:
        """Measure the optimizer's scaled gradients and agree with the other ranks; :meth:`step` does not repeat it.

        Call it instead of :meth:`unscale_`, or before :meth:`_unscale`; gradients must not change in between. Returns
        the sum of squares of this rank's plain gradients and of whole DTensors, each element once: 0-d, of
        fp64, on the scale's device, without a sync.

        ``grads``: they, coalesced.
        """
        scale, _ = self._check_scale_growth_tracker("unscale_")
        state = self._state_of(optimizer)
        _check_unscaled(state)
        stats = grads.measure(self._backend)
        agreement = Agreement(_params(optimizer), self.process_group)
        nothing = torch.zeros((), dtype=torch.float64, device=scale.device)
        squares: Squares = dict.fromkeys([None, *agreement.meshes], nothing)
        for location, found in stats.items():
            share = found.sum_squares.sum().to(torch.float64) / location.holders
            squares[location.mesh] = squares[location.mesh] + to_device_async(share, scale.device).to(nothing)
        flags = [found_in(found) for found in stats.values()]
        found_inf, squares = agreement.agree(_any(flags, scale.device), squares)
        if flags or not agreement.is_alone:
            state["found_inf_per_device"] = {scale.device: found_inf}
        return sum(squares.values(), start=nothing)

    @torch.no_grad()
    def _unscale(
        self, optimizer: torch.optim.Optimizer, multiplier: Tensor | None = None, grads: LocalGrads | None = None
    ) -> None:
        """Unscale in place; ``multiplier``, 0-d fp32, such as a clip coefficient, goes into the same pass."""
        factor = self._inv_scale()
        state = self._state_of(optimizer)
        _check_unscaled(state)
        if multiplier is not None:
            factor = factor * to_device_async(multiplier, factor.device)
        if grads is None or not grads.are_aliases:
            grads = LocalGrads(optimizer)
        found_infs = grads.unscale_(factor, self._backend)
        # Only fp16 gradients can overflow in this pass, after _measure() found them finite. All ranks know the dtypes.
        if not state["found_inf_per_device"] or any(param.dtype == torch.float16 for param in _params(optimizer)):
            state["found_inf_per_device"] = self._agreed(optimizer, found_infs)
        state["stage"] = OptState.UNSCALED

    def _inv_scale(self) -> Tensor:
        """Return the reciprocal of the scale, taken in fp64 and rounded once: fp32, 0-d."""
        scale, _ = self._check_scale_growth_tracker("unscale_")
        return scale.to(torch.float64).reciprocal().float()

    # Called by torch's methods, and by optimizers that take a grad_scaler

    @torch.no_grad()
    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Find non-finite gradients in a pass that writes nothing, and agree on them. Returns flags by device."""
        self._check_scale_growth_tracker("_check_inf_per_device")
        found_infs: dict[torch.device, Tensor] = {}
        for location, stats in LocalGrads(optimizer).measure(self._backend).items():
            flag = found_in(stats)
            found_infs[location.device] = torch.maximum(found_infs.get(location.device, flag), flag)
        flags: dict[Any, Any] = self._agreed(optimizer, found_infs)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = flags
        return flags

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        flags = _flags(optimizer_state)
        found_inf = _any(flags, flags[0].device)
        return None if found_inf.item() else optimizer.step(*args, **kwargs)  # the one host read

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        if self._scale is None or self._growth_tracker is None:
            raise ScalerOrderError(
                f"Attempted {funcname} but _scale is None.  "
                "This may indicate your script did not use scaler.scale(loss or outputs) earlier in the iteration."
            )
        return self._scale, self._growth_tracker

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        _, growth_tracker = self._check_scale_growth_tracker("scale")
        self._growth_tracker = growth_tracker.long()  # int32 in torch; a backend's rule has int64
        self._hysteresis_tracker = torch.full((), self._init_hysteresis_tracker, dtype=torch.int64, device=dev)

    @torch.no_grad()
    def _rescale_(self, found_inf: Tensor) -> None:
        """Update the scale and trackers after one step."""
        numbers: list[Any] = [self._scale, self._growth_tracker, self._hysteresis_tracker]
        scale, growth_tracker, hysteresis_tracker = (number.view(1) for number in numbers)
        rule = self._rule._replace(
            growth_factor=self._growth_factor,
            backoff_factor=self._backoff_factor,
            growth_interval=self._growth_interval,
        )
        self._backend(scale.device).rescale_(found_inf, scale, growth_tracker, hysteresis_tracker, rule)

    def _step_on_device(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        """Call a ``step()`` that unscales and skips by itself, given two attributes or this scaler."""
        if takes_scaler(optimizer):
            return optimizer.step(*args, **{**kwargs, "grad_scaler": self})
        scale, _ = self._check_scale_growth_tracker("step")
        if not state["found_inf_per_device"]:
            self._check_inf_per_device(optimizer)
        fused: Any = optimizer
        set_by_user = getattr(fused, "grad_scale", None)
        if state["stage"] is OptState.UNSCALED:
            fused.grad_scale = set_by_user
        else:
            fused.grad_scale = scale if set_by_user is None else scale * set_by_user
        fused.found_inf = found_inf = _any(_flags(state), scale.device)
        fresh = fused_sgd.params_without_momentum(optimizer)
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            del fused.grad_scale, fused.found_inf
            fused_sgd.fill_momentum_(optimizer, fresh, found_inf)

    def _state_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if isinstance(optimizer, MegascaleOptimizer):
            raise ArgumentTypeError(
                f"optimizer is a {type(optimizer).__name__}, which scales by itself; call its scale_loss() and step(), "
                "or pass the torch optimizer"
            )
        self.overflows.add(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY and not state["found_inf_per_device"]:  # an iteration begins
            _require_no_codes(optimizer)
        return state

    def _agreed(
        self, optimizer: torch.optim.Optimizer, found_infs: dict[torch.device, Tensor]
    ) -> dict[torch.device, Tensor]:
        """Return the agreed flag for each device of ``found_infs``. A rank without gradients takes part too."""
        scale, _ = self._check_scale_growth_tracker("unscale_")
        agreement = Agreement(_params(optimizer), self.process_group)
        if agreement.is_alone:
            return found_infs
        found_inf, _ = agreement.agree(_any(list(found_infs.values()), scale.device))
        return {device: to_device_async(found_inf, device) for device in found_infs or [scale.device]}

    def _backend(self, device: torch.device) -> Backend:
        if device not in self._backends:
            self._backends[device] = select_backend("auto", device)
        return self._backends[device]

    def _set_scale(self, scale: Tensor, new_scale: Any) -> None:
        if not isinstance(new_scale, Tensor):
            scale.fill_(limits.scale_within(self._rule, "new_scale", new_scale))
            return
        fits = new_scale.device.type == self._device and new_scale.numel() == 1 and not new_scale.requires_grad
        if not fits:
            raise ScalerArgumentError(
                f"new_scale should be a float or a tensor of one element on a {self._device} device with "
                f"requires_grad=False, got shape {tuple(new_scale.shape)} on {new_scale.device}, "
                f"requires_grad={new_scale.requires_grad}"
            )
        asked = new_scale.to(scale).reshape(())
        scale.copy_(torch.where(asked.isfinite(), asked, scale))
        scale.clamp_(self._rule.min_scale, self._rule.max_scale)

    # Settings and state

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor, above 1."""
        super().set_growth_factor(limits.growth("growth_factor", new_factor))

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor, between 0 and 1."""
        super().set_backoff_factor(limits.backoff("backoff_factor", new_factor))

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the clean steps before the scale grows."""
        super().set_growth_interval(limits.interval("growth_interval", new_interval))

    def state_dict(self) -> dict[str, Any]:
        """Return torch's five entries, as Python numbers, and ``hysteresis_tracker`` if hysteresis is above 1.

        torch's scaler can load it. Empty if disabled. Call it after :meth:`update`; it reads the device.
        """
        state = super().state_dict()
        if self._enabled and self._rule.hysteresis > 1:
            state[limits.HYSTERESIS] = self._get_hysteresis_tracker()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict`, ours or torch's, returned. Limits stay as constructed. Disabled: does nothing.

        Raises:
            StateDictError: naming the entry; nothing has changed. For an empty dict it is a RuntimeError, too.
        """
        if not self._enabled:
            return
        state = limits.parse_state(state_dict, self._rule)
        super().load_state_dict(state)
        self._init_hysteresis_tracker = state[limits.HYSTERESIS]
        if self._hysteresis_tracker is not None:
            self._hysteresis_tracker.fill_(self._init_hysteresis_tracker)

    def _get_hysteresis_tracker(self) -> int:
        tracker = self._hysteresis_tracker
        return self._init_hysteresis_tracker if tracker is None else int(tracker)

    def __getstate__(self) -> dict[str, Any]:
        if not self._enabled:
            return super().__getstate__()
        if self.process_group is not None:
            raise UsageError("a GradScaler with a process_group cannot be pickled or deep-copied; use state_dict()")
        if self._per_optimizer_states:
            raise ScalerOrderError(
                "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after "
                "scaler.update()."
            )
        state = super().__getstate__()
        state |= {
            "_init_hysteresis_tracker": self._get_hysteresis_tracker(),
            "_hysteresis_tracker": None,
            "_backends": {},
            "overflows": copy(self.overflows),
        }
        return state


def _require_no_codes(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError for moments that are 8-bit codes, as a MixedPrecisionOptimizer leaves them when it is dropped.

    The scales of any parameter that has state tell, also where torch's ``load_state_dict`` has cast codes to fp32.
    """
    states = optimizer.state.values() if isinstance(optimizer, ADAM.kinds) else ()
    entry = next((state for state in states if isinstance(state, dict) and state), {})
    if coded := [name for name in MOMENT_CODES if name + SCALE_SUFFIX in entry]:
        raise UsageError(
            f"the state of the {type(optimizer).__name__} holds {' and '.join(coded)} as 8-bit codes, which its own "
            "step() cannot read: wrap the optimizer in a MixedPrecisionOptimizer again, or load fp32 moments"
        )


def _check_unscaled(state: dict[str, Any]) -> None:
    if state["stage"] is OptState.UNSCALED:
        raise UsageError("unscale_() has already been called on this optimizer since the last update().")
    if state["stage"] is OptState.STEPPED:
        raise UsageError("unscale_() is being called after step().")


def _params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _flags(state: dict[str, Any]) -> list[Tensor]:
    """Return an optimizer's `found_inf` of each device."""
    return list(state["found_inf_per_device"].values())


def _any(flags: list[Tensor], device: torch.device) -> Tensor:
    """Return whether any of the flags is set: fp32, 0-d, exactly 0 or 1: a fused optimizer would not skip at 2."""
    if not flags:
        return torch.zeros((), device=device)
    found_inf = to_device_async(flags[0], device)
    for flag in flags[1:]:
        found_inf = torch.maximum(found_inf, to_device_async(flag, device))
    return found_inf
