"""Optimizer state whose moments are held as codes of 8 bits: what fits, and how it is converted.

See :mod:`megascale.kernels.compact_moments` for the codes. State that comes from elsewhere, in fp32 or as codes, is
converted to what the config asks for: codes become fp32 exactly, fp32 is rounded as a step would round it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megascale.errors import ArgumentError, UsageError
from megascale.kernels import Backend
from megascale.kernels.compact_moments import (
    CODE_DTYPES,
    FIRST_DTYPE,
    SCALE_SUFFIX,
    SECOND_DTYPE,
    decode_moments,
    encode_moments,
    is_scale,
    num_groups,
)
from megascale.main_params.main_param import MainParam
from megascale.utils.dtensors import is_dtensor, local

BACKENDS = ("native", "torch", "reference")
"""The backends that update moments of 8 bits."""
MOMENTS = {"exp_avg": FIRST_DTYPE, "exp_avg_sq": SECOND_DTYPE}
"""The moments that may be codes, and the dtype of these."""


def require_supported(dtypes: Mapping[str, torch.dtype], optimizer: torch.optim.Optimizer, backend: Backend) -> None:
    """Raise ArgumentError if moments of 8 bits are asked for that no kernel here can update. ``dtypes``: of MOMENTS."""
    for name in MOMENTS:
        dtype = dtypes[name]
        if dtype not in CODE_DTYPES:
            continue
        if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            raise ArgumentError(
                f"config.{name}_dtype={dtype} needs Adam or AdamW, not {type(optimizer).__name__}; leave it at "
                "torch.float32 or torch.bfloat16"
            )
        if backend.name not in BACKENDS:
            raise ArgumentError(
                f"config.{name}_dtype={dtype} needs one of the backends {', '.join(BACKENDS)}, not {backend.name}; "
                f'choose backend="torch", or leave it at torch.float32'
            )


def with_scales(names: Sequence[str], dtypes: Mapping[str, torch.dtype]) -> list[str]:
    """Return names of state and, after them, those of the scales of moments that ``dtypes`` holds as codes."""
    held = [f"{name}{SCALE_SUFFIX}" for name in names if dtypes.get(name) in CODE_DTYPES]
    return [*names, *(scale for scale in held if scale not in names)]


def require_holdable(param: MainParam) -> None:
    """Raise ArgumentError for a parameter whose moments cannot be codes."""
    if is_dtensor(param.main):
        raise ArgumentError(
            f"parameter {param.name!r} is a DTensor, whose shards may cut a group of 32 elements that share a scale; "
            "leave exp_avg_dtype and exp_avg_sq_dtype at torch.float32, or shard with DistributedOptimizer"
        )
    if param.main.dtype != torch.float32:
        raise ArgumentError(
            f"parameter {param.name!r} has dtype {param.main.dtype}, and moments of 8 bits are for fp16, bf16 and fp32 "
            "parameters; leave exp_avg_dtype and exp_avg_sq_dtype at torch.float32"
        )


def shape_of(name: str, param: MainParam) -> torch.Size:
    """Return the shape of a state of ``param``: its main param's, for scales their number."""
    main = local(param.main)
    return torch.Size([num_groups(main.numel())]) if is_scale(name) else main.shape


def is_code(name: str, value: Tensor) -> bool:
    """Whether a state is a moment held as codes."""
    return value.dtype == MOMENTS.get(name)


def require_uncast(entry: Mapping[str, Any], param: MainParam) -> None:
    """Raise UsageError for codes that are no longer integers: torch's ``load_state_dict`` casts them to numbers."""
    for name, dtype in MOMENTS.items():
        moment, scale = entry.get(name), entry.get(name + SCALE_SUFFIX)
        if isinstance(moment, Tensor) and scale is not None and moment.dtype.is_floating_point:
            raise UsageError(
                f"the optimizer's state of {param.name!r} has {name} of {moment.dtype} beside {name + SCALE_SUFFIX}: "
                f"codes of {dtype}, which load_state_dict() of the inner optimizer has cast; load the state dict of "
                "the wrapped optimizer"
            )


def convert_(entry: dict[str, Any], dtypes: Mapping[str, torch.dtype], param: MainParam) -> None:
    """Convert the moments of one parameter's state, some of which are codes or are to be, to ``dtypes``.

    State that is missing stays missing. Raises UsageError for codes without scales, or without the other moment.
    """
    unscaled = [
        name + SCALE_SUFFIX
        for name in MOMENTS
        if isinstance(entry.get(name), Tensor) and is_code(name, entry[name]) and entry.get(name + SCALE_SUFFIX) is None
    ]
    fits = all(entry.get(name) is None or entry[name].dtype == dtypes[name] for name in MOMENTS)
    lacks = unscaled if fits else [name for name in MOMENTS if entry.get(name) is None] + unscaled
    if lacks:
        raise UsageError(
            f"the optimizer's state of {param.name!r} holds codes of 8 bits and lacks {lacks}; load state that is whole"
        )
    if fits:
        return
    decoded = decode_moments(entry)
    for name in filter(is_scale, list(entry)):
        del entry[name]
    step = torch.as_tensor(entry.get("step", 0.0))
    entry |= encode_moments(decoded["exp_avg"], decoded["exp_avg_sq"], dtypes, param.start, step)


def holds_codes(entry: Mapping[str, Any]) -> bool:
    """Whether a parameter's state has moments held as codes."""
    return any(isinstance(entry.get(name), Tensor) and is_code(name, entry[name]) for name in MOMENTS)
