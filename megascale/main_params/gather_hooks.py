"""Hooks that make modules wait for their parameters before forward, saving, loading, copying and conversion.

They refer to the gather weakly and are removed with it. A deep or pickled copy of a module has its own parameters and
gets no hooks.

**Under torch.compile** a wait in the middle of forward would cut the graph in two. So a compiled module waits for all
parameters below it before its graph begins, and the modules below it do not wait. What is compiled apart, such as each
block of a model, waits apart. Where compiled code calls modules that nobody saw to be compiled, as a compiled function
does, the outermost of them waits, and the graph begins there.
"""

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary, finalize, ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megascale.utils.graph_breaks import outside_of_graphs

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
    """Makes modules wait for ``gather``, as long as that lives.

    Attributes:
        gather: what modules wait for.
        awaited: by ``id``, parameters that modules were seen to wait for.
    """

    def __init__(self, gather: Gather) -> None:
        self.awaited: set[int] = set()
        self.gather = ref(gather)
        self._handles: WeakKeyDictionary[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()
        self._before: WeakKeyDictionary[nn.Module, _BeforeForward] = WeakKeyDictionary()
        self._regions: WeakKeyDictionary[nn.Module, CompiledRegion] = WeakKeyDictionary()
        self.remove = finalize(gather, _remove, self._handles, self.gather)
        self.remove.atexit = False

    def add(self, roots: Iterable[nn.Module]) -> None:
        """Hook the modules in ``roots`` that are not hooked yet."""
        for module in (module for root in roots for module in root.modules()):
            if module not in self._handles:
                before = self._before[module] = _BeforeForward(self.gather, self)
                CompiledCall.replace(module, self)
                self._handles[module] = [
                    # Before other hooks: FSDP2's and spectral_norm's read parameters.
                    module.register_forward_pre_hook(before, prepend=True),
                    module.register_state_dict_pre_hook(_BeforeStateDict(self.gather)),
                    module.register_load_state_dict_pre_hook(_BeforeStateDict(self.gather)),
                ]
                for name in READERS:
                    if hasattr(module, name):
                        _WaitingMethod.of(module, name).gathers.add(self.gather)

    def __contains__(self, module: nn.Module) -> bool:
        """Whether a module has hooks."""
        return module in self._handles

    def find_compiled(self, module: nn.Module) -> None:
        """Let ``module``, and those below it, wait outside of their graphs where they are compiled."""
        for inner in module.modules():
            CompiledCall.replace(inner, self)
        if is_compiled(module):
            self.enter_region(module, outside=True)

    def enter_region(self, module: nn.Module, *, outside: bool = False) -> None:
        """Wait for all parameters below ``module``, the outermost one of compiled code.

        outside: of the graph, in every call: then the module itself need not wait inside.
        """
        region = self._regions.get(module)
        if region is None:
            region = self._regions[module] = CompiledRegion()
            self.add([module])
            self.awaited.update(map(id, module.parameters()))
            for inner in module.modules():
                if inner is not module or outside:
                    self._before[inner].regions.append(region)
        gather = self.gather()
        if gather is not None:
            gather.wait_for(module.parameters())
        region.is_whole = True

    def leave_regions(self) -> None:
        """Let compiled code wait again: parameters are about to change."""
        for region in self._regions.values():
            region.is_whole = False


class CompiledRegion:
    """What compiled code reads below one module.

    Attributes:
        is_whole: whether a stream has waited for all of it since parameters changed. Compiled code is guarded by it.
    """

    is_whole = False


class CompiledCall:
    """Replaces what ``module.compile()`` made: waits for all parameters below the module, then calls that."""

    def __init__(self, module: nn.Module, compiled: Callable[..., Any], hooks: GatherHooks) -> None:
        self.compiled = compiled
        self.hooks = hooks
        self._module = ref(module)

    @classmethod
    def replace(cls, module: nn.Module, hooks: GatherHooks) -> None:
        """Replace the compiled call of a module, if it has one that does not wait yet."""
        call = module._compiled_call_impl
        if call is not None and not (isinstance(call, cls) and call.hooks is hooks):
            module._compiled_call_impl = cls(module, call, hooks)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Wait, then call."""
        module = self._module()
        if module is not None:
            self.hooks.enter_region(module, outside=True)
        return self.compiled(*args, **options)


def _remove(handles: "WeakKeyDictionary[nn.Module, list[RemovableHandle]]", gather: "ref[Gather]") -> None:
    for module, hooks in handles.items():
        for hook in hooks:
            hook.remove()
        call = module._compiled_call_impl
        if isinstance(call, CompiledCall) and call.hooks.gather is gather:  # another optimizer's stays
            module._compiled_call_impl = call.compiled
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
    """Waits for the parameters that the module's forward reads.

    Attributes:
        hooks: whose it is.
        regions: that the module is in, below their outermost one.
    """

    def __init__(self, gather: "ref[Gather]", hooks: GatherHooks) -> None:
        super().__init__(gather)
        self.hooks = hooks
        self.regions: list[CompiledRegion] = []

    def __call__(self, module: nn.Module, _inputs: Any) -> None:
        """Wait, unless compiled code runs whose outermost module has waited."""
        if torch.compiler.is_compiling():
            if has_params(module) and not self._is_in_whole_region():
                enter_region(self.hooks, module)
            return
        if is_compiled(module):
            self.hooks.enter_region(module, outside=True)
            return
        gather = self.gather()
        if gather is not None:
            gather.wait_for(params_read_by(module))

    def _is_in_whole_region(self) -> bool:
        for region in self.regions:  # noqa: SIM110  # a loop is what every version of the compiler can trace
            if region.is_whole:
                return True
        return False


@outside_of_graphs
def enter_region(hooks: GatherHooks, module: nn.Module) -> None:
    """Wait, in Python, for what compiled code reads below ``module``: its graph begins after that."""
    hooks.enter_region(module)
    CompiledCall.replace(module, hooks)  # from the next call on outside of the graph


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is what ``torch.compile(module)`` returned, which calls the module."""
    return type(module).__module__ == "torch._dynamo.eval_frame"


def has_params(module: nn.Module) -> bool:
    """Whether a module holds parameters, or one below it does."""
    for _ in module.parameters():
        return True
    return False


def params_read_by(module: nn.Module) -> Iterable[nn.Parameter]:
    """Return the parameters that a module's forward may read: its own, of a module of torch its children's too.

    A module under FSDP2 reads all that are in it: its root gathers, and prefetches, on streams that wait for the
    current one only when the root is called.
    """
    if module._modules and _reads_below(module):
        return module.parameters()
    return [param for param in module._parameters.values() if param is not None]  # parameters() would take 2 us


def _reads_below(module: nn.Module) -> bool:
    # Unless FSDP2 is imported, no module is under it.
    if isinstance(module, getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())):
        return True
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, CALLERS)


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
