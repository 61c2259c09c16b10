"""Hooks that make modules wait for their parameters before forward, saving, loading, copying and conversion.

They refer to the gather weakly and are removed with it. A deep or pickled copy of a module has its own parameters and
gets no hooks.
"""

import copy
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary, finalize, ref

from torch import nn
from torch.utils.hooks import RemovableHandle

# Modules of torch.nn that only call their children; any other one of torch.nn may use its children's weights itself, as
# MultiheadAttention does.
CALLERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)

READERS = ("__deepcopy__", "__getstate__", "_apply")
"""Methods that read a module's parameters and that torch has no hooks for: ``copy``, ``pickle``, ``module.to()``."""

HOOK_DICTS = ("_forward_pre_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")


class Gather(Protocol):
    """What the hooks wait for."""

    def wait(self) -> None:
        """Wait until every parameter is whole."""

    def wait_for(self, params: Iterable[nn.Parameter]) -> None:
        """Wait until these parameters are whole."""


class GatherHooks:
    """Makes modules wait for ``gather``, as long as that lives."""

    def __init__(self, gather: Gather) -> None:
        self._gather = ref(gather)
        self._handles: WeakKeyDictionary[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()
        self.remove = finalize(gather, _remove, self._handles, self._gather)
        self.remove.atexit = False

    def add(self, roots: Iterable[nn.Module]) -> None:
        """Hook the modules in ``roots`` that are not hooked yet."""
        for module in (module for root in roots for module in root.modules()):
            if module not in self._handles:
                self._handles[module] = [
                    module.register_forward_pre_hook(_BeforeForward(self._gather)),
                    module.register_state_dict_pre_hook(_BeforeStateDict(self._gather)),
                    module.register_load_state_dict_pre_hook(_BeforeStateDict(self._gather)),
                ]
                for name in READERS:
                    if hasattr(module, name):
                        _WaitingMethod.of(module, name).gathers.add(self._gather)


def _remove(handles: "WeakKeyDictionary[nn.Module, list[RemovableHandle]]", gather: "ref[Gather]") -> None:
    for module, hooks in handles.items():
        for hook in hooks:
            hook.remove()
        for name in READERS:
            method = module.__dict__.get(name)
            if isinstance(method, _WaitingMethod):
                method.gathers.discard(gather)
                if not method.gathers:
                    method.restore(module)


class _Hook:
    """Base of the hooks that are registered on a module."""

    def __init__(self, gather: "ref[Gather]") -> None:
        self.gather = gather


class _BeforeForward(_Hook):
    """Waits for the parameters that the module's forward reads."""

    def __call__(self, module: nn.Module, _inputs: Any) -> None:
        gather = self.gather()
        if gather is not None:
            gather.wait_for(params_read_by(module))


def params_read_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """Return the parameters that a module's forward may read: its own, of a module of torch its children's too.

    A module under FSDP2 reads all that are in it: its root gathers, and prefetches, on streams that wait for the
    current one only when the root is called.
    """
    # Unless FSDP2 is imported, no module is under it.
    gathers = isinstance(module, getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ()))
    reads_children = type(module).__module__.startswith("torch.nn.") and not isinstance(module, CALLERS)
    return module.parameters(recurse=gathers or reads_children)


class _BeforeStateDict(_Hook):
    """Waits for all parameters: a state dict holds those of the modules inside too."""

    def __call__(self, *_: Any) -> None:
        gather = self.gather()
        if gather is not None:
            gather.wait()


class _WaitingMethod:
    """Replaces a method of one module: waits for all parameters, then calls it. Copies that it makes have no hooks."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.gathers: set[ref[Gather]] = set()
        self._module = ref(module)
        self._name = name
        self._before = module.__dict__.get(name)

    @classmethod
    def of(cls, module: nn.Module, name: str) -> "_WaitingMethod":
        """Return the one that replaces a method, made if there is none. Two optimizers may share a module."""
        method = module.__dict__.get(name)
        if not isinstance(method, cls):
            method = module.__dict__[name] = cls(module, name)
        return method

    def restore(self, module: nn.Module) -> None:
        """Put the original method back."""
        del module.__dict__[self._name]
        if self._before is not None:
            module.__dict__[self._name] = self._before

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Wait, then call the method."""
        for gather in [gather() for gather in self.gathers]:
            if gather is not None:
                gather.wait()
        module = self._module()
        result = (self._before or partial(getattr(type(module), self._name), module))(*args, **options)
        if self._name == "__getstate__" and isinstance(result, dict):
            return _without_hooks(result)
        if self._name == "__deepcopy__" and isinstance(result, nn.Module):
            _strip_hooks(result)
        return result

    def __deepcopy__(self, memo: Any) -> "_WaitingMethod":
        return self  # __call__ removes it from the copy


class _CopiedHooks(OrderedDict[int, Any]):
    """A module's hooks in its copied state. A deep copy drops ours; a shallow one shares parameters, so keeps them."""

    def __deepcopy__(self, memo: Any) -> "OrderedDict[int, Any]":
        return copy.deepcopy(self._others(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._others().__reduce_ex__(protocol)

    def _others(self) -> "OrderedDict[int, Any]":
        return OrderedDict((key, hook) for key, hook in self.items() if not _is_ours(hook))


def _is_ours(hook: Any) -> bool:
    return isinstance(getattr(hook, "hook", hook), _Hook)  # torch wraps some hooks


def _strip_hooks(module: nn.Module) -> None:
    """Remove our hooks from a module that was copied by its own method."""
    for key in [key for key, value in module.__dict__.items() if isinstance(value, _WaitingMethod)]:
        del module.__dict__[key]
    for hooks in (module.__dict__.get(name, {}) for name in HOOK_DICTS):
        for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
            del hooks[key]


def _without_hooks(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copied module's attributes without our hooks."""
    kept = {key: value for key, value in state.items() if not isinstance(value, _WaitingMethod)}
    return kept | {name: _CopiedHooks(kept[name]) for name in HOOK_DICTS if name in kept}
