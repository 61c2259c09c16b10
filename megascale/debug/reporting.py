"""report_overflows: what made a step skip, from all ranks, as a line in the log and as JSON lines."""

import json
import logging
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from megascale.amp.grad_scaler import GradScaler
from megascale.amp.overflows import ScalerOverflows
from megascale.base_optimizer import MegascaleOptimizer
from megascale.debug.gradients import GradWatch, WatchedParam
from megascale.errors import ArgumentError, ArgumentTypeError, MegascaleError, UsageError
from megascale.step.misuse import BUILD_LAST
from megascale.step.overflow_report import OverflowReport
from megascale.step.overflows import OverflowRecorder
from megascale.step.result import SeenGrads
from megascale.utils import validate
from megascale.utils.collectives import group_rank, raise_together
from megascale.utils.dtensors import is_dtensor

LOGGER = logging.getLogger("megascale")

Recorder = OverflowRecorder | ScalerOverflows


class OverflowReporter:
    """Reports every skipped step; :func:`report_overflows` makes it.

    Attributes:
        num_skips: skipped steps that it has reported.
    """

    def __init__(self, recorder: Recorder, model: nn.Module | None, path: Path | None, log: bool) -> None:
        self.num_skips = 0
        self._recorder = recorder
        self._model = model
        self._path = path
        self._log = log
        named = _named_params(recorder, model)
        self._is_first = group_rank(recorder.group) == 0
        self._check()
        self._watch = self._begin(recorder, named)

    def _begin(self, recorder: Recorder, named: list[tuple[str, nn.Parameter]]) -> GradWatch:
        """Look at the gradients of parameters, and listen to their recorder."""
        watched = {id(param): WatchedParam(name, index) for index, (name, param) in enumerate(named)}
        watch = GradWatch(watched, [param for _, param in named], self._model)
        recorder.listener = self
        return watch

    def remove(self) -> None:
        """End the reports, and remove the hooks."""
        self._watch.remove()
        if self._recorder.listener is self:
            self._recorder.listener = None

    def _check(self) -> None:
        """Raise, on every rank alike, where reports exist already or cannot be written."""
        error: MegascaleError | None = None
        if self._recorder.listener is not None:
            error = UsageError(
                "report_overflows() reports on this optimizer already; call remove() of what it returned"
            )
        elif self._path is not None and self._is_first:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.open("a", encoding="utf-8").close()
            except OSError as caught:
                error = ArgumentError(f"path={str(self._path)!r} cannot be written: {caught}; name another file")
        raise_together(error, self._recorder.group)

    def take(self) -> SeenGrads:
        """Take what was seen of gradients since the last step; called by the recorder."""
        return self._watch.take().entries

    def on_skip(self) -> None:
        """Report a skipped step; called by the recorder, on every rank alike."""
        report = self._recorder.last_known(gather=True)
        self.num_skips += 1
        if report is None or not self._is_first:
            return
        if self._log and self.num_skips.bit_count() == 1:
            LOGGER.warning("%s", line_of(report, self.num_skips))
        if self._path is not None:
            self._write(self._path, report)

    def _write(self, path: Path, report: OverflowReport) -> None:
        """Append the report. Training goes on where the disk is full: other ranks know nothing of it."""
        try:
            with path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, allow_nan=False) + "\n" for row in report.rows())
        except OSError as error:
            LOGGER.error("overflows are no longer written to %s: %s", path, error)
            self._path = None


def report_overflows(
    optimizer: MegascaleOptimizer | GradScaler,
    *,
    model: nn.Module | None = None,
    path: str | Path | None = None,
    log: bool = True,
) -> OverflowReporter:
    """Look at every gradient as backward makes it, and report each skipped step: parameters, ranks, micro-batches.

    ``last_overflow()`` then tells of all ranks, of gradients before any reduction. While steps are clean this costs one
    pass over each gradient, on an accelerator about nine operators for each, and sends, reads and waits for nothing.
    After a skipped step, one step late on an accelerator, the ranks exchange what they have seen. The reports end with
    :meth:`OverflowReporter.remove`.

    All ranks that skip together call it together, after the model is wrapped.

    Args:
        optimizer: whose parameters. A member of a ChainedOptimizer stands for the whole chain, whether it is chained
            before or after.
        model: as it is called, with its wrapper. The order of its parameters, which tells the likely origin, should be
            that of forward. None: the optimizer's order; FSDP2 and a GradScaler need the model.
        path: a file to which the first rank appends one JSON object a line for each parameter of a skipped step. Keys:
            ``step``, ``scale``, ``rank``, ``parameter``, ``kind``, ``num_inf``, ``num_nan``, ``numel``,
            ``largest_finite``, ``micro_batch``, ``origin``, ``loss_finite``, and ``module``,
            ``module_phase``, ``module_rank`` of :func:`megascale.debug.watch`; null: unknown, and for the rank: all
            ranks alike.
        log: write a line into the log "megascale" of the first rank at the 1st, 2nd, 4th, 8th, ... skipped step.

    Raises:
        ArgumentError, ArgumentTypeError: for an argument that does not fit, naming it.
        UsageError: if this optimizer has a reporter already.
    """
    if isinstance(optimizer, GradScaler):
        recorder: Recorder = optimizer.overflows
        if model is None:
            raise ArgumentError("model is None, but a GradScaler does not know its parameters; pass the model")
    elif isinstance(optimizer, MegascaleOptimizer):
        recorder = optimizer._recipe.overflows
    else:
        raise ArgumentTypeError(
            "optimizer must be a MixedPrecisionOptimizer, DistributedOptimizer, ChainedOptimizer or "
            f"megascale.amp.GradScaler, got {type(optimizer).__name__}"
        )
    return OverflowReporter(recorder, model, None if path is None else Path(path), validate.flag("log", log))


def line_of(report: OverflowReport, num_skips: int) -> str:
    """Return a report as one line."""
    head, *_ = str(report).splitlines()
    origin = report.origin
    if origin is not None:
        counted = f"{origin.num_non_finite} of {origin.numel} {origin.kind or 'inf or nan'}"
        head += f", likely from {origin.parameter!r} ({origin.where}: {counted})"
    if report.module is not None:
        head += f", first in the {report.module.phase} of {report.module.module!r} on rank {report.module.rank}"
    return f"{head}; skip {num_skips}, the next line is about skip {2 * num_skips}"


def _named_params(recorder: Recorder, model: nn.Module | None) -> list[tuple[str, nn.Parameter]]:
    """Return names and parameters, in the order of the model if there is one. A scaler learns names and group."""
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    if isinstance(recorder, ScalerOverflows):
        named = [(name, param) for name, param in bare.named_parameters() if param.requires_grad] if bare else []
        recorder.names = {id(param): name for name, param in named}
        recorder.group = recorder.group or _group_of(model, named)
        return named
    own = list(recorder.named_params())
    order = {id(param): index for index, param in enumerate(bare.parameters() if bare is not None else ())}
    if bare is not None and own and not any(id(param) in order for _, param in own):
        raise ArgumentError(f"model has no parameter of the optimizer; pass the one that it trains; {BUILD_LAST}")
    return sorted(own, key=lambda one: order.get(id(one[1]), len(order)))


def _group_of(model: nn.Module | None, named: list[tuple[str, nn.Parameter]]) -> ProcessGroup | None:
    """Return the ranks that have the same gradients, and so skip together without a process group of the scaler."""
    if isinstance(model, DistributedDataParallel):
        return model.process_group
    mesh = next((param.device_mesh for _, param in named if is_dtensor(param)), None)
    if mesh is None:
        return None
    return mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
