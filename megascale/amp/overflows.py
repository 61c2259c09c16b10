"""ScalerOverflows: which gradients overflowed in an iteration that a GradScaler skipped."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megascale.host_view import HostView
from megascale.step import non_finite_module
from megascale.step.losses import non_finite_losses
from megascale.step.non_finite_module import ModuleEvents
from megascale.step.observers import SeenGrads
from megascale.step.overflow_report import OverflowEntry, OverflowReport, OwnOverflows, holds_only_nan
from megascale.step.overflows import Entries, LastOverflow, described, own_rank
from megascale.utils.collectives import group_size
from megascale.utils.dtensors import to_local


@dataclass(frozen=True)
class _Iteration:
    """What is kept of one iteration.

    Attributes:
        step: its number.
        flags: `found_inf`, by optimizer and device, fp32 and 0-d.
        seen: what the listener saw in backward; None without a listener.
        modules: what each watch of the model's modules saw.
        losses: that were scaled in it; None: unknown.
    """

    step: int
    flags: list[Tensor]
    seen: SeenGrads | None
    modules: list[ModuleEvents]
    losses: list[Tensor] | None


class ScalerOverflows(LastOverflow):
    """Records the last iteration that a scaler skipped, as :class:`megascale.step.overflows.OverflowRecorder` does.

    A pickled or copied one knows of none.

    Attributes:
        names: of parameters, by id, in their order. Others have the name in their param group, or their position.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self.names: dict[int, str] = {}
        self._optimizers: WeakKeyDictionary[torch.optim.Optimizer, None] = WeakKeyDictionary()
        self._num_updates = 0
        self._newest: _Iteration | None = None
        self._view = HostView()

    def __reduce__(self) -> tuple[type["ScalerOverflows"], tuple[()]]:
        return ScalerOverflows, ()

    # In an iteration

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Record an optimizer whose gradients are unscaled, or updated from."""
        self._optimizers[optimizer] = None

    def observe(self, flags: Sequence[Tensor], scale: Tensor) -> None:
        """Record the end of an iteration, before the scale changes.

        ``flags``: `found_inf`, by optimizer and device, fp32 and 0-d.
        """
        seen = None if self.listener is None else self.listener.take()
        modules = non_finite_module.take(self._params)
        newest = _Iteration(self._num_updates, list(flags), seen, modules, self.losses.take())
        known, self._newest = self._newest, newest
        self._num_updates += 1
        if scale.device.type == "cpu":
            if _is_set(flags):
                self._read(_number(scale))
                self._call()
        elif self.listener is not None:
            late = self._view.push({str(index): flag for index, flag in enumerate(flags)})
            if late is not None and known is not None and any(late.values()):
                self._keep(known, None, () if known.seen is None else known.seen(), ())
                self._call()

    def _call(self) -> None:
        if self.listener is not None:
            self.listener.on_skip()

    # Asked by the host

    def last(self, *, gather: bool) -> OverflowReport | None:
        """Return the report of the last skipped iteration, None before the first. Waits for the device."""
        if self._newest is not None and _is_set(self._newest.flags):
            self._read(None)
        return self.last_known(gather=gather)

    def _read(self, scale: float | None) -> None:
        """Describe the newest iteration, once, from the gradients that there are."""
        newest = self._newest
        if newest is None or (self._own is not None and self._own.step == newest.step):
            return
        entries = tuple(self._entries())
        seen = None if newest.seen is None else newest.seen()
        if seen is None and group_size(self.group) == 1 and not self._may_be_reduced:
            seen = entries
        self._keep(newest, scale, seen, entries)

    def _keep(self, known: _Iteration, scale: float | None, seen: Entries | None, entries: Entries) -> None:
        module = non_finite_module.first_of(known.modules)
        losses = non_finite_losses(known.losses, own_rank())
        if not losses and self._may_be_reduced:
            losses = None  # those of ranks that this scaler does not know of
        num_grads = sum(param.grad is not None for param in self._params())
        only_nan = holds_only_nan(entries, num_grads)
        self._own = OwnOverflows(known.step, scale, seen, entries, module, losses, only_nan)
        self._report = None

    @property
    def _may_be_reduced(self) -> bool:
        """Whether gradients may be sums over ranks that nobody has named to this scaler."""
        return group_size(self.group) == 1 and torch.distributed.is_initialized()

    def _params(self) -> Iterator[Tensor]:
        return (param for group in self._param_groups() for param in group["params"])

    def _param_groups(self) -> Iterator[dict[str, Any]]:
        return (group for optimizer in self._optimizers for group in optimizer.param_groups)

    def _entries(self) -> Iterator[OverflowEntry]:
        indices = {key: index for index, key in enumerate(self.names)}
        position = 0
        for group in self._param_groups():
            given = group.get("param_names") or [None] * len(group["params"])
            for param, name in zip(group["params"], given, strict=True):
                name = self.names.get(id(param)) or name or str(position)
                position += 1
                if param.grad is None:
                    continue
                grad = to_local(param.grad)
                grad = grad._values() if grad.is_sparse else grad
                entry = described(name, grad, indices.get(id(param), position), None, grad.numel())
                if entry.num_non_finite:
                    yield entry


def _is_set(flags: Sequence[Tensor]) -> bool:
    """Return whether any flag is not 0. Waits for an accelerator."""
    return any(_number(flag) != 0 for flag in flags)


def _number(value: Tensor) -> float:
    """Return a 0-d tensor's value. On a CPU ``tolist()`` is no dispatched operator, unlike ``item()``."""
    number: Any = value.tolist()
    return float(number)
