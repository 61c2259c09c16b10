"""ModuleWatch: names the first module whose output, or whose output's gradient, was not finite."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from megascale.debug.gradients import remove_hooks, weakly
from megascale.errors import ArgumentTypeError
from megascale.step.overflow_report import NonFiniteModule, TensorStatistics
from megascale.step.overflows import LIVE, own_rank
from megascale.step.result import SeenModule
from megascale.utils.dtensors import to_local
from megascale.utils.transfer import to_device_async

NUM_STATISTICS = 4


@dataclass(frozen=True)
class _Site:
    """What the host knows of a row: which module, and the dtypes of what was measured."""

    module: str
    phase: str
    input_dtype: torch.dtype
    dtype: torch.dtype


Rows = dict[torch.device, Tensor]
"""On each device the numbers of its first event that was not finite: its number, site, call, and the statistics of
inputs and of what was found. fp32, shape [11]; a negative number: there was none."""


@dataclass(frozen=True)
class _Events:
    """What was seen between two steps: rows that no later event writes, and the sites that they refer to."""

    rows: Rows
    sites: dict[_Site, int]

    def first(self) -> NonFiniteModule | None:
        """Return where inf or NaN appeared first, or None. Waits for the device."""
        rows = [row.tolist() for row in self.rows.values()]
        found = min((row for row in rows if row[0] >= 0), default=None)
        if found is None:
            return None
        _, index, call, *numbers = found
        site = list(self.sites)[int(index)]
        inputs = _as_statistics(numbers[:NUM_STATISTICS], site.input_dtype)
        output = _as_statistics(numbers[NUM_STATISTICS:], site.dtype)
        return NonFiniteModule(site.module, site.phase, int(call), inputs, output, own_rank())


class ModuleWatch(AbstractContextManager["ModuleWatch"]):
    """Hooks on all modules of a model; :func:`watch` makes it. A context manager that removes them at its end.

    Each device keeps the numbers of the first event: nothing is read until :meth:`first`, or until a skipped step is
    reported. The hooks refer to this object weakly, and it to the model.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise ArgumentTypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        self._handles: list[RemovableHandle] = []
        self._removal = finalize(self, remove_hooks, self._handles)
        self._model = ref(model)
        self._see_grad = weakly(self._record)
        self.clear()
        LIVE[self] = None
        for name, module in model.named_modules():
            label = name or type(model).__name__
            see = partial(weakly(self.see_forward), label)
            self._handles.append(module.register_forward_hook(see, with_kwargs=True))

    def clear(self) -> None:
        """Forget what was seen."""
        self._rows: Rows = {}  # since the last step
        self._before: Rows = {}  # until then
        self._sites: dict[_Site, int] = {}
        self._calls: dict[str, int] = {}
        self._num_events = 0

    def first(self) -> NonFiniteModule | None:
        """Return where inf or NaN appeared first since the last :meth:`clear`, or None. Waits for the device."""
        return _Events(_earlier(self._before, self._rows), self._sites).first()

    def remove(self) -> None:
        """Remove the hooks. What was seen stays, and later steps do not report it."""
        LIVE.pop(self, None)
        self._removal()

    # Called by a step

    def has_param_of(self, ids: set[int]) -> bool:
        """Return whether the model has a parameter with one of these ids."""
        model = self._model()
        return model is not None and any(id(param) in ids for param in model.parameters())

    def take(self) -> SeenModule:
        """Return what tells of what was seen since the last call, without waiting for the device."""
        taken, self._rows = self._rows, {}
        self._before = _earlier(self._before, taken)
        return _Events(taken, self._sites).first

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()

    # Called by the hooks

    def see_forward(self, label: str, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record a module's call, and watch the gradients of its outputs."""
        call = self._calls.get(label, 0)
        self._calls[label] = call + 1
        inputs, outputs = list(_floating((args, kwargs))), list(_floating(output))
        if not outputs:
            return
        before = _statistics(inputs or outputs)
        input_dtype = (inputs or outputs)[0].dtype
        self._record(label, "forward", input_dtype, call, before, *outputs)
        see_grad = partial(self._see_grad, label, "backward", input_dtype, call, before)
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(see_grad)

    @torch.no_grad()
    def _record(
        self, label: str, phase: str, input_dtype: torch.dtype, call: int, inputs: Tensor, *tensors: Tensor
    ) -> None:
        """Keep an event's row if it is the first that is not finite, on the device.

        ``inputs``: statistics of the call's inputs. ``tensors``: its outputs, or the gradient of one.
        """
        site, found = _Site(label, phase, input_dtype, tensors[0].dtype), _statistics(tensors)
        index = self._sites.setdefault(site, len(self._sites))
        event = to_device_async(
            torch.tensor([self._num_events, index, call], dtype=found.dtype, device="cpu"), found.device
        )
        self._num_events += 1
        row = torch.cat([event, to_device_async(inputs, found.device), found])
        kept = self._rows.get(found.device)
        if kept is None:
            kept = torch.full_like(row, -1.0)
        is_first = (kept[0] < 0) & (found[-1] > 0)
        self._rows[found.device] = torch.where(is_first, row, kept)


def _earlier(before: Rows, rows: Rows) -> Rows:
    """Return the rows of the first events of two spans of time. Nothing is read."""
    merged = before | rows
    for device in before.keys() & rows.keys():
        merged[device] = torch.where(before[device][0] < 0, rows[device], before[device])
    return merged


def watch(model: nn.Module) -> ModuleWatch:
    """Watch all modules of ``model`` until :meth:`ModuleWatch.remove`; :meth:`ModuleWatch.first` tells what was seen.

    Hold on to what is returned: the hooks end with it. While they are there, the overflow reports of the optimizer of
    the model's parameters name the module, too. Each call of a module costs some passes over its inputs and
    outputs, and each backward over the gradients of its outputs; nothing waits for the device. Submodules come before
    the module that calls them. Watch the bare model, before ``torch.compile``.

    Raises ArgumentTypeError for anything but a module.
    """
    return ModuleWatch(model)


def _floating(tree: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of a nest; of a DTensor's backward the hook must be on the DTensor itself."""
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point())


def _as_statistics(numbers: list[float], dtype: torch.dtype) -> TensorStatistics:
    minimum, maximum, mean_abs, share_non_finite = numbers
    return TensorStatistics(minimum, maximum, mean_abs, share_non_finite, dtype)


@torch.no_grad()
def _statistics(tensors: Sequence[Tensor]) -> Tensor:
    """Return the numbers of :class:`TensorStatistics`, fp32, shape [4], on the first tensor's device."""
    device = tensors[0].device
    parts = [to_device_async(_of_one(tensor), device) for tensor in map(to_local, tensors) if tensor.numel()]
    if not parts:
        return torch.zeros(NUM_STATISTICS, device=device)
    table = torch.stack(parts)
    finite = table[:, 3].sum().clamp(min=1.0)
    share = table[:, 4].sum() / (table[:, 3] + table[:, 4]).sum()
    return torch.stack([table[:, 0].amin(), table[:, 1].amax(), table[:, 2].sum() / finite, share])


def _of_one(tensor: Tensor) -> Tensor:
    """Return minimum, maximum, sum of magnitudes, number of finite and of other elements: fp32, shape [5]."""
    values = tensor.detach().float()
    finite = torch.isfinite(values)
    count = finite.sum()
    low = values.masked_fill(~finite, torch.inf).amin()
    high = values.masked_fill(~finite, -torch.inf).amax()
    none = count == 0
    return torch.stack(
        [
            low.masked_fill(none, 0.0),
            high.masked_fill(none, 0.0),
            values.abs().masked_fill(~finite, 0.0).sum(),
            count.float(),
            (finite.numel() - count).float(),
        ]
    )
