"""StepMetrics: what a step did, recorded in any loop and read late, so that the host never waits for the device."""

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import TracebackType

from torch import Tensor

from megascale.base_optimizer import MegascaleOptimizer
from megascale.errors import ArgumentError, ArgumentTypeError, MegascaleError
from megascale.host_view import HostView
from megascale.metrics.rows import (
    GRAD_NORM,
    LR,
    PHASE,
    SCALE,
    SECONDS,
    SKIPPED,
    STEP,
    SUCCESS,
    ZERO_FRACTION,
    ZEROS,
    row_of,
)
from megascale.metrics.sinks import Sink, close_all
from megascale.parallel import ParallelGroups
from megascale.utils import call_site, validate
from megascale.utils.collectives import group_rank, raise_together
from megascale.utils.spelling import names_arguments

OWN = (STEP, SECONDS)
OF_OPTIMIZER = (GRAD_NORM, SCALE, SUCCESS, ZEROS, SKIPPED, ZERO_FRACTION, LR)
"""Names that StepMetrics itself gives, always and with an optimizer."""


@names_arguments
class StepMetrics:
    """Records one row for each optimizer step, and hands it to its sinks one step late.

    A row has `step`, the values that you pass, and of an optimizer of megascale

    - `grad_norm`: of the unscaled gradients, before clipping; not finite where they were not;
    - `scale`: the loss scale of this step; 1 without a scaler;
    - `skipped`: 1 where the step was skipped, else 0;
    - `zero_grad_fraction`: zero elements of the gradients, as a share; with ``config.log_num_zeros_in_grad`` only;
    - `lr`: of the first param group;
    - `seconds`: wall time since the row before, or since this object was made;
    - `seconds/NAME`: wall time of the blocks under ``phase(NAME)``. The host's: an accelerator may still be at work.

    Values go through a :class:`HostView`: the host learns of a step when the next one is recorded. All ranks make this
    object together, and call the same methods; the first one alone reads, and has sinks. Values are those of that rank,
    so reduce what should be a mean over ranks. A sink that fails later is warned of and gets nothing more: training
    continues, on every rank alike.

    Args:
        optimizer: whose steps are recorded. None: only what you pass is recorded.
        sinks: take the rows. They are opened here.
        start: the number of the first step, such as that of a loaded checkpoint. Make this object after loading.
        num_params: gradient elements in all, of which zeros are a share. None: elements of the optimizer's parameters,
            which tensor parallel ranks must add up themselves.

    Raises:
        ArgumentError, ArgumentTypeError: for an argument that does not fit, or a sink that cannot be opened; on all
            ranks alike.
    """

    def __init__(
        self,
        optimizer: MegascaleOptimizer | None = None,
        sinks: Sequence[Sink] = (),
        *,
        start: int = 0,
        num_params: int | None = None,
    ) -> None:
        if optimizer is not None and not isinstance(optimizer, MegascaleOptimizer):
            raise ArgumentTypeError(
                f"optimizer must be one of megascale's, or None, got {type(optimizer).__name__}; pass None, and "
                "record(grad_norm=..., scale=...) what you know of its steps"
            )
        self.step = validate.integer("start", start, minimum=0)
        self._optimizer = optimizer
        self._group = ParallelGroups.of(None).grad_stats if optimizer is None else optimizer.recipe.groups.grad_stats
        self._is_first = group_rank(self._group) == 0
        self._numel = num_params if num_params is not None else _numel(optimizer)
        self._taken = OWN if optimizer is None else OWN + OF_OPTIMIZER
        self._view = HostView()
        self._later: dict[str, float] = {}
        self._phases: dict[str, float] = {}
        self._sinks: list[Sink] = []
        self._open(sinks)
        self._scale = self._current_scale()
        self._recorded_at = time.perf_counter()

    def record(self, **values: Tensor | float) -> dict[str, float] | None:
        """Record the step just taken; call it after ``optimizer.step()`` and before the schedule's.

        Args:
            values: one-element tensors on any device, or numbers, by name. Without an optimizer, ``success`` (a bool
                tensor) is written as `skipped`.

        Returns:
            The row before, as given to the sinks; None at the first call, and on ranks other than the first.

        Raises:
            ArgumentError: a value has more elements than one, or a name that rows have already.
        """
        now = time.perf_counter()
        _check(values, self._taken)
        row: dict[str, Tensor | float] = {STEP: float(self.step), **values}
        row |= self._of_optimizer()
        row[SECONDS] = now - self._recorded_at
        row |= {PHASE + name: seconds for name, seconds in self._phases.items()}
        self._phases, self._recorded_at = {}, now
        self.step += 1
        return self._write(self._view.push(row)) if self._is_first else None

    def add(self, **values: float) -> None:
        """Add numbers to the row recorded last, such as an evaluation after that step."""
        _check(values, self._taken)
        self._later |= values

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Return a context whose wall time is added to this step's `seconds/NAME`."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - begun

    def flush(self) -> None:
        """Wait for the row recorded last, hand it out, and let sinks write to disk, as before a checkpoint."""
        self._write(self._view.flush())
        for sink in self._sinks:
            sink.flush()

    def close(self) -> None:
        """Hand out the last row and close all sinks."""
        self._write(self._view.flush())
        close_all(self._sinks)
        self._sinks = []

    def __enter__(self) -> "StepMetrics":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, sinks: Sequence[Sink]) -> None:
        """Open the sinks on the first rank. Raises its error on all ranks."""
        error: MegascaleError | None = None
        try:
            for sink in sinks if self._is_first else ():
                sink.open(self.step)
                self._sinks.append(sink)
        except MegascaleError as caught:
            error = caught
        except OSError as caught:
            error = ArgumentError(f"sinks: {type(sink).__name__} cannot be opened: {caught}")
        if error is not None:
            close_all(self._sinks)
        raise_together(error, self._group)

    def _current_scale(self) -> Tensor | float:
        """Return a copy of the scale. This does not count as scaling a loss."""
        scaler = None if self._optimizer is None else self._optimizer.grad_scaler
        return 1.0 if scaler is None else scaler.live_scale.clone()

    def _of_optimizer(self) -> dict[str, Tensor | float]:
        """Return what the optimizer's last step left, still on the device."""
        if self._optimizer is None:
            return {}
        result, scale = self._optimizer.recipe.last_result, self._scale
        self._scale = self._current_scale()
        if result is None:
            return {}
        lr: Tensor | float = self._optimizer.param_groups[0]["lr"]
        read: dict[str, Tensor | float] = {GRAD_NORM: result.grad_norm, SCALE: scale, SUCCESS: result.success}
        if self._optimizer.recipe.members[0].config.log_num_zeros_in_grad:
            read[ZEROS] = result.num_zeros_in_grad
        return read | {LR: lr}

    def _write(self, seen: dict[str, float] | None) -> dict[str, float] | None:
        """Make a row of values that the host has now, and hand it to the sinks."""
        if seen is None:
            return None
        row = row_of(seen, self._numel) | self._later
        self._later = {}
        for sink in list(self._sinks):
            try:
                sink.write(row)
            except OSError as error:
                self._sinks.remove(sink)
                call_site.warn(
                    f"{type(sink).__name__} cannot write step {row[STEP]:.0f}: {error}; it gets no more metrics in "
                    "this process",
                    RuntimeWarning,
                )
        return row


def _check(values: Mapping[str, Tensor | float], taken: Collection[str]) -> None:
    """Raise for values that are no numbers, and for names in ``taken``."""
    for name, value in values.items():
        if name in taken:
            raise ArgumentError(f"{name} is recorded already, found by itself; pass yours under another name")
        if not isinstance(value, (Tensor, int, float)):
            raise ArgumentTypeError(f"{name} must be a tensor of one element or a number, got {type(value).__name__}")
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ArgumentError(f"{name} must have one element, got shape {tuple(value.shape)}; pass its mean or sum")


def _numel(optimizer: MegascaleOptimizer | None) -> int:
    groups = [] if optimizer is None else optimizer.param_groups
    return sum(param.numel() for group in groups for param in group["params"] if param.requires_grad)
