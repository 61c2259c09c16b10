"""Adam's and AdamW's state whose moments are held as 8-bit codes: which can be, in what shape, and conversions.

See :mod:`megascale.kernels.compact_moments` for the codes. State that is loaded, in fp32 or as codes, is converted to
what the config asks for: codes become the fp32 numbers that they stand for, fp32 is rounded as a step would round it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megascale.errors import ArgumentError, UsageError
from megascale.kernels import Backend
from megascale.kernels.compact_moments import (
    GROUP,
    SCALE_SUFFIX,
    decode_moments,
    encode_moments,
    is_scale,
)
from megascale.main_params.group_scales import first_element, has_whole_groups, scales_shape
from megascale.main_params.main_param import MainParam
from megascale.rules import ADAM, CODE_DTYPES, MOMENT_CODES
from megascale.utils.dtensors import is_dtensor, to_local
from megascale.utils.wording import either

BACKENDS = ("native", "triton", "torch", "reference")
"""The backends that update 8-bit moments."""
_PAIR = ["exp_avg", "exp_avg_sq"]
"""Moments that are encoded together, see :mod:`megascale.kernels.compact_moments`."""


def require_supported(dtypes: Mapping[str, torch.dtype], optimizer: torch.optim.Optimizer, backend: Backend) -> None:
    """Raise ArgumentError if ``dtypes``, by name, ask for codes that this optimizer or backend cannot update."""
    for name in _PAIR:
        dtype = dtypes[name]
        if dtype not in CODE_DTYPES:
            continue
        if not isinstance(optimizer, ADAM.kinds):
            raise ArgumentError(
                f"config.{name}_dtype={dtype} needs {either([kind.__name__ for kind in ADAM.kinds])}, not "
                f"{type(optimizer).__name__}, whose moments have 16 bits at least: give torch.bfloat16, or leave it at "
                "torch.float32"
            )
        if backend.name not in BACKENDS:
            raise ArgumentError(
                f"config.{name}_dtype={dtype} needs one of the backends {', '.join(BACKENDS)}, not {backend.name}; "
                f'choose backend="torch", or leave it at torch.float32'
            )


def with_scales(names: Sequence[str], dtypes: Mapping[str, torch.dtype]) -> list[str]:
    """Return ``names`` of state, and after them the names of scales, of those moments that are codes by ``dtypes``."""
    held = [f"{name}{SCALE_SUFFIX}" for name in names if dtypes.get(name) in CODE_DTYPES]
    return [*names, *(scale for scale in held if scale not in names)]


def require_holdable(param: MainParam) -> None:
    """Raise ArgumentError for a parameter whose moments cannot be codes."""
    if is_dtensor(param.main) and not has_whole_groups(param.main):
        raise ArgumentError(
            f"parameter {param.name!r} is a DTensor of shape {tuple(param.main.shape)} with placements "
            f"{param.main.placements} on a mesh of {tuple(param.main.device_mesh.shape)}, which cut a group of {GROUP} "
            "elements that share a scale; cut it along dimension 0 into parts of whole groups, shard with "
            "DistributedOptimizer, or leave exp_avg_dtype and exp_avg_sq_dtype at torch.float32"
        )
    if param.main.dtype != torch.float32:
        raise ArgumentError(
            f"parameter {param.name!r} has dtype {param.main.dtype}, and 8-bit moments are for fp16, bf16 and fp32 "
            "parameters; leave exp_avg_dtype and exp_avg_sq_dtype at torch.float32"
        )


def start_of(param: MainParam) -> int:
    """Return the index in the whole parameter of the first element that this rank has."""
    return param.start + first_element(param.main)


def shape_of(name: str, param: MainParam) -> torch.Size:
    """Return the shape that a state of ``param`` has on this rank: its main param's; of scales, one for each group."""
    return scales_shape(param.main) if is_scale(name) else to_local(param.main).shape


def is_code(name: str, value: Any) -> bool:
    """Whether a state is a moment held as codes."""
    return isinstance(value, Tensor) and value.dtype == MOMENT_CODES.get(name)


def require_uncast(entry: Mapping[str, Any], param: MainParam) -> None:
    """Raise UsageError for codes that are no longer integers: torch's ``load_state_dict`` casts them to numbers."""
    for name, dtype in MOMENT_CODES.items():
        moment, scale = entry.get(name), entry.get(name + SCALE_SUFFIX)
        if isinstance(moment, Tensor) and scale is not None and moment.dtype.is_floating_point:
            raise UsageError(
                f"the optimizer's state of {param.name!r} has {name} of {moment.dtype} beside {name + SCALE_SUFFIX}: "
                f"codes of {dtype}, which load_state_dict() of the inner optimizer has cast; load the state dict of "
                "the wrapped optimizer"
            )


def require_whole_codes(entry: Mapping[str, Any], dtypes: Mapping[str, torch.dtype], param: MainParam) -> None:
    """Raise UsageError for codes without scales, or that are to be converted without the other moment."""
    there = [name for name in _PAIR if isinstance(entry.get(name), Tensor)]
    # A code means nothing without its scale, and the first moment's quotient nothing without the second moment.
    lacks = [
        name + SCALE_SUFFIX for name in there if is_code(name, entry[name]) and entry.get(name + SCALE_SUFFIX) is None
    ]
    if there and not _have_dtypes(entry, dtypes):
        lacks = [name for name in _PAIR if name not in there] + lacks
    if lacks:
        raise UsageError(
            f"the optimizer's state of {param.name!r} holds 8-bit codes and lacks {lacks}; load state that is whole"
        )


def convert_(entry: dict[str, Any], dtypes: Mapping[str, torch.dtype], param: MainParam) -> None:
    """Convert the moments in one parameter's state to ``dtypes``, where some are codes, or shall be.

    State that is missing stays missing. :func:`require_whole_codes` has passed.
    """
    if _have_dtypes(entry, dtypes):
        return
    step = entry.get("step", 0.0)
    step = step if isinstance(step, Tensor) else torch.as_tensor(step, dtype=torch.float32, device="cpu")
    decoded = decode_moments({key: to_local(value) for key, value in entry.items() if key in _PAIR or is_scale(key)})
    made = encode_moments(decoded["exp_avg"], decoded["exp_avg_sq"], dtypes, start_of(param), step)
    # Old scales go first: a moment that is fp32 from now on has none.
    for name in filter(is_scale, list(entry)):
        del entry[name]
    entry.update(made)


def _have_dtypes(entry: Mapping[str, Any], dtypes: Mapping[str, torch.dtype]) -> bool:
    return all(entry.get(name) is None or entry[name].dtype == dtypes[name] for name in _PAIR)


def holds_codes(entry: Mapping[str, Any]) -> bool:
    """Whether a parameter's state has moments held as codes."""
    return any(is_code(name, entry.get(name)) for name in MOMENT_CODES)
