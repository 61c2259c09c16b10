"""GradWatch: looks at each parameter's gradient as backward makes it, before micro-batches and ranks are added up."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from megascale.step.overflow_report import Entries
from megascale.step.overflows import describe_non_finite, described
from megascale.utils.dtensors import is_dtensor, to_local


@dataclass(frozen=True)
class WatchedParam:
    """A parameter's name, and its index in the order of the parameters."""

    name: str
    index: int


class SeenInBackward:
    """What was seen of the gradients of one step, in numbers that the host has not read."""

    def __init__(self) -> None:
        self._found: list[tuple[WatchedParam, int, int, Tensor]] = []

    def add(self, at: WatchedParam, micro_batch: int, grad: Tensor) -> None:
        """Look at one gradient. The host waits for nothing."""
        if grad.device.type != "cpu" or not _is_finite(grad):
            self._found.append((at, micro_batch, grad.numel(), describe_non_finite(grad)))

    def entries(self) -> Entries:
        """Return the gradients that held inf or NaN. Waits for the device."""
        found = [described(at.name, numbers, at.index, batch, numel) for at, batch, numel, numbers in self._found]
        return tuple(entry for entry in found if entry.num_non_finite)


def _is_finite(grad: Tensor) -> bool:
    """Return whether all elements are finite, on a CPU. One operator of torch, whose threads are awake in backward."""
    if not grad.numel():
        return True
    extremes: list[Any] = [extreme.tolist() for extreme in torch.aminmax(grad)]  # NaN wins; no dispatched host read
    return all(map(math.isfinite, extremes))


class GradWatch:
    """Hooks that look at the gradient of each parameter, once a backward.

    They see what this rank's own backward has made: before accumulation, DistributedDataParallel, GradSync or FSDP2.
    On a CPU the cost is one pass over the gradient while it may still be in cache, on an accelerator the operators of
    :func:`describe_non_finite`. The hooks refer to this object weakly.

    Args:
        watched: by id of the parameter.
        params: plain parameters, to hook now.
        model: under FSDP2: whose modules own the parameters; they are hooked when a forward has gathered them.
    """

    def __init__(
        self, watched: Mapping[int, WatchedParam], params: Iterable[nn.Parameter], model: nn.Module | None = None
    ) -> None:
        self._seen = SeenInBackward()
        self._fired: set[str] = set()
        self._micro_batch = 0
        self._hooked = WeakIdKeyDictionary()
        self._handles: list[RemovableHandle] = []
        self._removal = finalize(self, remove_hooks, self._handles)
        gathered = _gathered_by_fsdp(watched, model) if model is not None else {}
        late = {id(getattr(holder, attribute)) for all_of in gathered.values() for holder, attribute, _ in all_of}
        for param in params:
            if id(param) not in late:
                self._hook(param, watched[id(param)])
        for module, owned in gathered.items():
            # FSDP2's own hooks come first, so that parameters are whole.
            self._handles.append(module.register_forward_pre_hook(partial(weakly(self.hook_gathered), owned)))

    def take(self) -> SeenInBackward:
        """Return what was seen since the last call, and begin a new step."""
        seen, self._seen = self._seen, SeenInBackward()
        self._fired.clear()
        self._micro_batch = 0
        return seen

    def remove(self) -> None:
        """Remove the hooks."""
        self._removal()

    def hook_gathered(self, owned: "Owned", *_: Any) -> None:
        """Hook the parameters that FSDP2 has put in the place of its shards."""
        for holder, attribute, at in owned:
            param = getattr(holder, attribute)
            if not is_dtensor(param):
                self._hook(param, at)

    def see(self, grad: Tensor, at: WatchedParam) -> None:
        """Look at a gradient that backward has just made."""
        if at.name in self._fired:
            self._micro_batch += 1
            self._fired.clear()
        self._fired.add(at.name)
        if type(grad) is not Tensor or grad.requires_grad or grad.is_sparse:
            with torch.no_grad():
                grad = to_local(grad)
            grad = grad._values() if grad.is_sparse else grad
        self._seen.add(at, self._micro_batch, grad)

    def _hook(self, param: Tensor, at: WatchedParam) -> None:
        if param in self._hooked or not param.requires_grad:
            return
        self._hooked[param] = True
        self._handles.append(param.register_hook(partial(weakly(self.see), at=at)))


Owned = list[tuple[nn.Module, str, WatchedParam]]
"""Modules, the names of their attributes, and which parameters these are."""


def _gathered_by_fsdp(watched: Mapping[int, WatchedParam], model: nn.Module) -> dict[nn.Module, Owned]:
    """Return the parameters that each module under ``fully_shard`` gathers: its own, and its children's."""
    found: dict[nn.Module, Owned] = {}

    def visit(module: nn.Module, gatherer: nn.Module | None) -> None:
        gatherer = module if isinstance(module, FSDPModule) else gatherer
        if gatherer is not None:
            for attribute, param in module.named_parameters(recurse=False):
                if id(param) in watched:
                    found.setdefault(gatherer, []).append((module, attribute, watched[id(param)]))
        for child in module.children():
            visit(child, gatherer)

    visit(model, None)
    return found


def weakly(method: Any) -> Callable[..., None]:
    """Return a hook that calls a bound method while its object is alive, and does not keep the object alive."""
    weak, function = ref(method.__self__), method.__func__

    def hook(*args: Any, **kwargs: Any) -> None:
        alive = weak()
        if alive is not None:
            function(alive, *args, **kwargs)

    return hook


def remove_hooks(handles: list[RemovableHandle]) -> None:
    """Remove hooks. A finalizer of watches: it must not refer to one."""
    for handle in handles:
        handle.remove()
