"""cast_model: a model's parameters in 16 bit, while buffers and chosen modules keep their precision."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megascale.errors import ArgumentError, ArgumentTypeError, listed
from megascale.utils import call_site, spelling
from megascale.utils.dtensors import is_dtensor
from megascale.utils.dtypes import HALF_DTYPES
from megascale.utils.live_objects import objects_of
from megascale.utils.param_names import bare

M = TypeVar("M", bound=nn.Module)
Chosen = str | type[nn.Module] | nn.Module

CAST_FROM = (torch.float64, torch.float32, *HALF_DTYPES)
ROPE = ("*inv_freq*", "*freqs*", "*rope*", "*rotary*")
"""Names of buffers that hold the frequencies of rotary position embeddings, of which 16 bits are not enough."""


def cast_model(model: M, dtype: torch.dtype, keep: Chosen | Iterable[Chosen] = ()) -> M:
    """Cast a model's floating point parameters to ``dtype``, in place, and leave its buffers as they are.

    ``model.half()`` casts buffers too: BatchNorm's running statistics, and the frequencies of rotary position
    embeddings, whose angles are then wrong by a radian at position 4,095.

    Modules with running statistics (BatchNorm) keep their parameters in fp32 as well, as torch's kernels want it. Tied
    parameters stay tied: one that a kept module shares with another stays as it is, and the other module is kept, too.

    A module named in ``keep`` computes in fp32, and so does one all of whose parameters are kept by name: its 16-bit
    inputs are cast to fp32 by a hook, and its results back to ``dtype``. The results of modules after which no cast
    parameter comes, in the model's order, stay fp32: the logits of a head, say.

    A module that owns kept parameters and has cast layers below it (LayerScale's gamma, Mamba's ``A_log``) is called as
    it was, and computes in what torch promotes its operands to. Hooks cast what reaches those layers to ``dtype``, and
    its results.

    Args:
        model: not yet wrapped in DistributedDataParallel, nor sharded by ``fully_shard``. Its optimizer is built after.
        dtype: torch.float16 or torch.bfloat16.
        keep: what is not cast, one or several: a shell-style pattern of module or parameter names ("*norm*", "head"), a
            type of modules (``nn.LayerNorm``), or a module. A module includes all that is in it.

    Returns:
        The model.

    Raises:
        ArgumentError, ArgumentTypeError: naming the argument; nothing has changed. Also for a pattern or a module that
            the model does not have.
    """
    _check(model, dtype)
    if not isinstance(keep, (str, type, nn.Module, Iterable)):
        raise ArgumentTypeError(f"keep must be a pattern, a type, a module, or several of these, got {keep!r}")
    chosen: list[Any] = [keep] if isinstance(keep, (str, type, nn.Module)) else list(keep)
    kept, kept_params = _kept(model, chosen)
    whole = {id(part) for module in kept for part in module.modules()}
    whole |= {id(module) for module in model.modules() if isinstance(getattr(module, "running_mean", None), Tensor)}
    kept_params |= {
        id(param) for module in model.modules() if id(module) in whole for param in module.parameters(recurse=False)
    }
    for module in model.modules():
        # With parameters of its own, where these and all below it are kept: by name, or tied.
        owns = any(True for _ in module.parameters(recurse=False))
        if owns and id(module) not in whole and {id(param) for param in module.parameters()} <= kept_params:
            kept.append(module)
    _add_hooks(model, kept, kept_params, dtype)
    done: dict[tuple[Any, ...], Tensor] = {}
    for param in model.parameters():
        if id(param) not in kept_params and param.dtype in CAST_FROM:
            _cast(param, dtype, done)
    return model


def warn_of_cast_buffers(params: Iterable[Tensor]) -> None:
    """Warn of buffers that lose what they are for in 16 bits: BatchNorm's running statistics, RoPE's frequencies.

    An optimizer is not told which modules its parameters belong to: if any has 16 bits, this goes through all Python
    objects for the modules around them, which takes tens of milliseconds.
    """
    ours = {id(param) for param in params if param.dtype in HALF_DTYPES}
    modules = objects_of(nn.Module) if ours else []
    owners = {id(module) for module in modules if _cast_buffers(module)}
    roots = [
        module
        for module in (modules if owners else [])
        if any(id(part) in owners for part in module.modules())
        and any(id(param) in ours for param in module.parameters())
    ]
    inner = {id(part) for root in roots for part in root.modules() if part is not root}
    names = [
        bare(f"{path}.{name}" if path else name)
        for root in roots
        if id(root) not in inner
        for path, module in root.named_modules()
        for name in _cast_buffers(module)
    ]
    if names:
        call_site.warn(
            f"buffers {listed(names)} have 16 bits: model.half(), .bfloat16() and .to(dtype) cast buffers too, and "
            "running statistics and rotary frequencies are wrong in 16 bits. Build or load the model again, and cast "
            "it by megascale.cast_model(model, torch.float16), which casts parameters alone"
        )


def _cast_buffers(module: nn.Module) -> list[str]:
    """Return the names of a module's own buffers that should not have 16 bits. It may be one that is half built."""
    buffers = module.__dict__.get("_buffers") or {}
    halves = [name for name, one in buffers.items() if isinstance(one, Tensor) and one.dtype in HALF_DTYPES]
    return [
        name
        for name in halves
        if name in ("running_mean", "running_var") or any(fnmatchcase(name.lower(), pattern) for pattern in ROPE)
    ]


def _check(model: Any, dtype: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if dtype not in HALF_DTYPES:
        raise ArgumentError(f"dtype must be torch.float16 or torch.bfloat16, got {dtype!r}")
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ArgumentError(
            "model holds a DistributedDataParallel, whose buckets have the parameters' dtype; cast the bare model, "
            "then wrap it"
        )
    sharded = [name for name, param in model.named_parameters() if is_dtensor(param)]
    if sharded:
        raise ArgumentError(f"model has sharded parameters, {listed(sharded)}; cast it, then call fully_shard()")


def _kept(model: nn.Module, keep: Sequence[Any]) -> tuple[list[nn.Module], set[int]]:
    """Return the outermost modules, and the ids of single parameters, that ``keep`` names. Raises as cast_model."""
    found: dict[int, nn.Module] = {}
    params: set[int] = set()
    modules = list(model.named_modules())
    named = list(model.named_parameters(remove_duplicate=False))
    for one in keep:
        if isinstance(one, str):
            hits = [module for name, module in modules if name and _matches(name, one)]
            own = {id(param) for name, param in named if _matches(name, one)}
            if not hits and not own:
                nearest = spelling.meant(one, [bare(name) for name, _ in [*modules, *named] if name])
                raise ArgumentError(f"keep: {one!r} matches no module or parameter of the model{nearest}")
            params |= own
        elif isinstance(one, type) and issubclass(one, nn.Module):
            hits = [module for _, module in modules if isinstance(module, one)]
        elif isinstance(one, nn.Module):
            hits = [module for _, module in modules if module is one]
            if not hits:
                raise ArgumentError(f"keep: the given {type(one).__name__} is no module of the model; pass one of it")
        else:
            raise ArgumentTypeError(
                f"keep must hold name patterns, types of modules or modules, got {one!r} of type {type(one).__name__}"
            )
        found |= {id(module): module for module in hits}
    inner = {id(part) for module in found.values() for part in module.modules() if part is not module}
    return [module for key, module in found.items() if key not in inner], params


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(bare(name), pattern)


def _add_hooks(model: nn.Module, kept: Sequence[nn.Module], kept_params: set[int], dtype: torch.dtype) -> None:
    """Let kept modules take and give 16-bit tensors. ``kept_params``: ids of those that are not cast."""
    order = {id(module): index for index, module in enumerate(model.modules())}
    casts = {
        id(module): module
        for module in model.modules()
        if any(id(param) not in kept_params for param in module.parameters(recurse=False))
    }
    last_cast = max((order[key] for key in casts), default=-1)
    whole = {id(part) for module in kept for part in module.modules()}
    mixed: dict[int, nn.Module] = {}
    for module in model.modules():
        layers = {id(part): part for part in module.modules() if part is not module and id(part) in casts}
        owns = any(id(param) in kept_params for param in module.parameters(recurse=False))
        if owns and layers and id(module) not in whole:
            mixed |= layers
            if max(order[id(part)] for part in module.modules()) < last_cast:
                module.register_forward_hook(partial(_narrow, dtype))
    for layer in mixed.values():
        layer.register_forward_pre_hook(partial(_cast_inputs, (torch.float32,), dtype), with_kwargs=True)
    for module in kept:
        takes_both = isinstance(getattr(module, "running_mean", None), Tensor)  # 16-bit inputs beside fp32 parameters
        if takes_both or all(param.dtype in HALF_DTYPES for param in module.parameters()):
            continue
        module.register_forward_pre_hook(partial(_cast_inputs, HALF_DTYPES, torch.float32), with_kwargs=True)
        if max(order[id(part)] for part in module.modules()) < last_cast:
            module.register_forward_hook(partial(_narrow, dtype))


def _cast_inputs(
    dtypes: tuple[torch.dtype, ...], dtype: torch.dtype, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    return _converted(args, dtypes, dtype), _converted(kwargs, dtypes, dtype)


def _narrow(dtype: torch.dtype, _: nn.Module, __: Any, output: Any) -> Any:
    return _converted(output, (torch.float32,), dtype)


def _converted(nest: Any, dtypes: tuple[torch.dtype, ...], dtype: torch.dtype) -> Any:
    """Return ``nest`` with its tensors of ``dtypes`` cast to ``dtype``. Containers keep their types."""
    if isinstance(nest, Tensor):
        return nest.to(dtype) if nest.dtype in dtypes else nest
    if isinstance(nest, Mapping):
        new: Any = copy.copy(nest)
        for key, value in nest.items():
            new[key] = _converted(value, dtypes, dtype)
        return new
    if isinstance(nest, (list, tuple)):
        values: Iterator[Any] = (_converted(value, dtypes, dtype) for value in nest)
        return type(nest)(values) if type(nest) in (list, tuple) else type(nest)(*values)  # a named tuple's
    return nest


@torch.no_grad()
def _cast(param: nn.Parameter, dtype: torch.dtype, done: dict[tuple[Any, ...], Tensor]) -> None:
    """Cast one parameter in place. ``done``: casts of the same memory, which two parameters may share."""
    grad = param.grad
    place: tuple[Any, ...] = (id(param),)
    if not param.is_meta and param.numel():
        place = (param.data_ptr(), param.shape, param.stride(), param.dtype)
    if place not in done:
        done[place] = param.data.to(dtype)
    param.data = done[place]
    if grad is not None:
        param.grad = grad.to(dtype)
