"""Launches compiled kernels: Triton looks up the code of a kind of launch once, later launches call it directly.

Triton's own look-up at every launch costs the host more time than the launch itself.
"""

from collections.abc import Hashable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

_COMPILED: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
"""Loaded code and the constants that follow its arguments, by what Triton compiles it for."""


def launch(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    options: dict[str, Any],
    kept: list[Any] | None = None,
) -> None:
    """Launch ``programs`` programs of a kernel on the current stream of its tensors' device.

    Args:
        kernel: a jit function. Its tensors and integers must be named in ``do_not_specialize``, so that its code
            depends only on dtypes.
        arguments: all but constants, in the kernel's order; the first one is a tensor.
        constants: the kernel's constexpr arguments, by name.
        options: Triton's, such as ``num_warps``.
        kept: empty at first; the same list for launches alike in all but tensors' addresses and numbers, whose code is
            kept in it. To look it up takes half of a launch's time.
    """
    device = arguments[0].device
    # Triton launches on the current device.
    with nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index):
        if not kept:
            types = [argument.dtype if isinstance(argument, Tensor) else type(argument) for argument in arguments]
            kind = kernel.fn, device, *options.items(), *types, *constants.items()
            if kind not in _COMPILED:
                code = kernel[(programs,)](*arguments, **constants, **options, enable_fp_fusion=False)
                if code is not None:  # Triton's interpreter returns none
                    _COMPILED[kind] = code, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
                return
            kept = [] if kept is None else kept
            kept.append(_COMPILED[kind])
        [(code, values)] = kept
        code[programs, 1, 1](*arguments, *values)
