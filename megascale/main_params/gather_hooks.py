"""Hooks that make modules wait for their parameters before forward, and before their state dict is saved or loaded.

They refer to the gather weakly and are removed with it. In a deep or pickled copy of a module, which has its own
parameters, they wait for nothing. Whatever else reads weights calls ``optimizer.finish_param_gather()`` first.

**Under torch.compile** a wait would cut the graph in two. So a hook that the compiler traces lets the step itself wait
for all weights from then on, and adds nothing to the graph.
"""

import sys
from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megascale.errors import UsageError

# Modules of torch.nn that only call their children; any other one of torch.nn may use its children's weights itself, as
# MultiheadAttention does.
CALLERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)


_COMPILED: WeakSet[nn.Module] = WeakSet()
"""Modules that compiled code may call. It is not traced anew for the hooks of another optimizer."""


class Gather(Protocol):
    """What the hooks wait for."""

    def wait(self) -> None:
        """Wait until every parameter is whole."""

    def wait_for(self, params: Iterable[nn.Parameter]) -> None:
        """Wait until these parameters are whole."""


class GatherHooks:
    """Makes modules wait for ``gather``, as long as that lives.

    Attributes:
        are_compiled: whether compiled code has called a hooked module: no hook waits in it, so that the step has to.
    """

    def __init__(self, gather: Gather) -> None:
        self.are_compiled = False
        self._gather = ref(gather)
        self._is_capturing: Callable[[], bool] = bool
        self._handles: WeakKeyDictionary[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()
        self.remove = finalize(gather, _remove, self._handles)
        self.remove.atexit = False
        # Runs while the compiler traces, not in the graph. This imports the compiler, as every torch optimizer does.
        torch.compiler.assume_constant_result(GatherHooks.meet_compiler)

    def add(self, roots: Iterable[nn.Module]) -> None:
        """Hook the modules in ``roots`` that are not hooked yet."""
        for module in chain.from_iterable(root.modules() for root in roots):
            if module not in self._handles:
                self.are_compiled |= module in _COMPILED
                for param in islice(module.parameters(recurse=False), 1):
                    # Of the current device, which a capture's is: is_capturing() takes as long as all else in a hook.
                    self._is_capturing = getattr(
                        getattr(torch, param.device.type, None), "is_current_stream_capturing", bool
                    )
                self._handles[module] = [
                    # Before other hooks: FSDP2's and spectral_norm's read parameters.
                    module.register_forward_pre_hook(_Hook(self._before_forward), prepend=True),
                    # A state dict holds the parameters of the modules inside, too.
                    module.register_state_dict_pre_hook(_Hook(self._wait)),
                    module.register_load_state_dict_pre_hook(_Hook(self._wait)),
                ]

    def __contains__(self, module: nn.Module) -> bool:
        """Whether a module has hooks."""
        return module in self._handles

    def _before_forward(self, module: nn.Module) -> None:
        """Wait for the parameters that the module's forward reads; in compiled code, once for all.

        Raises UsageError where a program's own graph captures the forward of a module that is trained.
        """
        if torch.compiler.is_compiling():
            self.meet_compiler()
        elif (gather := self._gather()) is not None:
            if self._is_capturing() and any(param.requires_grad for param in params_read_by(module)):
                raise UsageError(
                    f"a graph captures the forward pass of {type(module).__name__}: its replays call no hook, and "
                    "would not wait for weights that are on their way; build the optimizer without "
                    "overlap_param_gather and overlap_cpu_optimizer_d2h_h2d, by which weights arrive during forward"
                )
            gather.wait_for(params_read_by(module))

    def _wait(self, _module: nn.Module | None = None) -> None:
        """Wait until every parameter is whole."""
        if (gather := self._gather()) is not None:
            gather.wait()

    def meet_compiler(self) -> None:
        """Wait until every parameter is whole, and let steps do so: compiled code is about to read them."""
        self.are_compiled = True
        _COMPILED.update(self._handles)
        self._wait()


def _remove(handles: "WeakKeyDictionary[nn.Module, list[RemovableHandle]]") -> None:
    for hooks in handles.values():
        for hook in hooks:
            hook.remove()


class _Hook:
    """A hook of a module. A copy of it, with a copy of the module, waits for nothing."""

    def __init__(self, wait: Callable[[nn.Module], None] | None = None) -> None:
        self._wait = wait

    def __call__(self, module: nn.Module, *_: Any) -> None:
        """Wait."""
        if self._wait is not None:
            self._wait(module)

    def __reduce__(self) -> Any:
        return type(self), ()


def params_read_by(module: nn.Module) -> Iterable[nn.Parameter]:
    """Return the parameters that a module's forward may read: its own, of a module of torch its children's too.

    A module whose forward is one of torch.cuda.make_graphed_callables() reads all that are in it.

    Those of a ParameterList or ParameterDict are its parent's: nobody calls one.
    A module under FSDP2 reads all that are in it: its root gathers, and prefetches, on streams that wait for the
    current one only when the root is called.
    """
    if module._modules and _reads_below(module):
        return module.parameters()
    lists = (child for child in module._modules.values() if isinstance(child, (nn.ParameterList, nn.ParameterDict)))
    # parameters() would take 2 us.
    return [param for owner in (module, *lists) for param in owner._parameters.values() if param is not None]


def _reads_below(module: nn.Module) -> bool:
    # Unless FSDP2 is imported, no module is under it.
    if isinstance(module, getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())):
        return True
    # A graph that torch has put in the place of a forward replays without the hooks of the modules inside.
    if getattr(vars(module).get("forward"), "__module__", None) == "torch.cuda.graphs":
        return True
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, CALLERS)
