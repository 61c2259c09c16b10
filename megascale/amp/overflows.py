"""ScalerOverflows: which gradients overflowed in an iteration that a GradScaler skipped."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from typing_extensions import override

from megascale.host_view import HostView
from megascale.step.overflow_report import OverflowEntry, OverflowReport
from megascale.step.overflows import LastOverflow, describe_non_finite, described
from megascale.step.result import BetweenSteps
from megascale.step.stalls import ROUNDING, WHY_SKIPPED, raise_excess
from megascale.utils import validate
from megascale.utils.collectives import group_size
from megascale.utils.dtensors import to_local


class _Iteration(NamedTuple):
    """What is kept of one iteration: its number, `found_inf` by optimizer and device, fp32, 0-d, and what was seen."""

    step: int
    flags: list[Tensor]
    seen: BetweenSteps


class ScalerOverflows(LastOverflow):
    """Records the last iteration that a scaler skipped, as :class:`megascale.step.overflows.OverflowRecorder` does.

    It also counts skips in a row, and those at the smallest scale. A pickled or copied one knows of none.

    Args:
        most_skips: how many skips in a row are tolerated; None: any number.
        most_at_floor: how many overflows in a row at the smallest scale; None: any number.
        min_scale: that scale; None: the scale is constant.

    Raises ArgumentError or ArgumentTypeError for an argument out of range, naming it.

    Attributes:
        names: of parameters, by id, in their order. Others have the name in their param group, or their position.
    """

    def __init__(
        self, most_skips: int | None = None, most_at_floor: int | None = None, min_scale: float | None = None
    ) -> None:
        super().__init__(None)
        limits = {"max_consecutive_skips": most_skips, "max_overflows_at_min_scale": most_at_floor}
        for name, limit in limits.items():
            if limit is not None:
                validate.integer(name, limit, minimum=1)
        self._limits = most_skips, most_at_floor, min_scale
        self._skips = self._at_floor = 0
        self.names: dict[int, str] = {}
        self._optimizers: WeakKeyDictionary[torch.optim.Optimizer, None] = WeakKeyDictionary()
        self._num_updates = 0
        self._newest: _Iteration | None = None
        self._view = HostView()

    def __reduce__(self) -> tuple[type["ScalerOverflows"], tuple[Any, ...]]:
        return ScalerOverflows, self._limits

    # In an iteration

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Record an optimizer whose gradients are unscaled, or updated from."""
        self._optimizers[optimizer] = None

    def observe(self, flags: Sequence[Tensor], scale: Tensor) -> None:
        """Record the end of an iteration, before the scale changes.

        ``flags``: `found_inf`, by optimizer and device, fp32 and 0-d.
        """
        newest = _Iteration(self._num_updates, list(flags), self._take_seen(self._params))
        known, self._newest = self._newest, newest
        self._num_updates += 1
        most_skips, most_at_floor, lowest = self._limits
        at_once = scale.device.type == "cpu"
        if not (at_once or self.listener or most_skips or most_at_floor):
            return
        numbers = [*flags, scale]
        if at_once:
            *found, at = map(_number, numbers)
        else:
            named = {str(index): number for index, number in enumerate(numbers)}
            *found, at = (self._view.push(named) or {"": 0.0}).values()
        if not any(found):
            if found:
                self._skips = self._at_floor = 0
            return
        self._skips += 1
        self._at_floor = self._at_floor + 1 if lowest is not None and at <= lowest * ROUNDING else 0
        skipped = newest if at_once else known
        if skipped is not None and (at_once or self.listener is not None):
            self._read(skipped, at if at_once else None, grads_are_there=at_once)
            if self.listener is not None:
                self.listener.on_skip()

    def require_within_limits(self) -> None:
        """Raise where too many steps were skipped in a row, on every rank that has the same `found_inf`."""
        most_skips, most_at_floor, lowest = self._limits
        most = most_skips or math.inf, most_at_floor or math.inf
        raise_excess(self._skips, most[0], self._at_floor, most[1], lowest, WHY_SKIPPED, self.worst)

    # Asked by the host

    @override
    def last(self, *, gather: bool) -> OverflowReport | None:
        if self._newest is not None and any(map(_number, self._newest.flags)):
            self._read(self._newest, None)
        return self.last_known(gather=gather)

    def _read(self, record: _Iteration, scale: float | None, *, grads_are_there: bool = True) -> None:
        """Describe an iteration, once, from the gradients that there are."""
        if self._own is not None and self._own.step == record.step:
            return
        entries = tuple(self._entries()) if grads_are_there else ()
        self._tell(record.step, scale, record.seen, entries)

    @property
    @override
    def _may_be_reduced(self) -> bool:
        """Nobody may have named the ranks to this scaler."""
        return group_size(self.group) == 1 and torch.distributed.is_initialized()

    def _params(self) -> Iterator[Tensor]:
        return (
            param for optimizer in self._optimizers for group in optimizer.param_groups for param in group["params"]
        )

    def _entries(self) -> Iterator[OverflowEntry]:
        indices = {key: index for index, key in enumerate(self.names)}
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        for position, (name, param) in enumerate(named_params(groups), start=1):
            if param.grad is None:
                continue
            name, index = self.names.get(id(param), name), indices.get(id(param), position)
            grad = to_local(param.grad)
            grad = grad._values() if grad.is_sparse else grad
            entry = described(name, describe_non_finite(grad), index, None, grad.numel())
            if entry.num_non_finite:
                yield entry


def named_params(param_groups: Iterable[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name, as in its group's ``param_names``, else its position, and every parameter, in their order."""
    position = 0
    for group in param_groups:
        names = group.get("param_names") or [None] * len(group["params"])
        for param, name in zip(group["params"], names, strict=True):
            yield name or str(position), param
            position += 1


def _number(value: Tensor) -> float:
    """Return a 0-d tensor's value. On a CPU ``tolist()`` is no dispatched operator, unlike ``item()``."""
    number: Any = value.tolist()
    return float(number)
