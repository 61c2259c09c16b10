"""Launches of compiled kernels: Triton finds the code of a kind of launch once, and from then on it is called as it is.

Triton's own way from a kernel to its code, at every launch, is longer for the host than the launch itself.
"""

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_COMPILED: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
"""Code that is loaded, and the constants that it is handed after the arguments, by :func:`_kind`."""


def launch(
    kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any], num_warps: int, interpreted: bool
) -> None:
    """Launch ``programs`` programs of a kernel on the current stream of its tensors' device.

    Args:
        kernel: a jit function. Triton must make the same code of it for all tensors of one dtype and all numbers of one
            type: its tensors and whole numbers are named in ``do_not_specialize``.
        arguments: all that are no constants, in the kernel's order; the first one is a tensor.
        constants: the kernel's others, by name.
        interpreted: the kernel runs in Triton's interpreter.
    """
    device = arguments[0].device
    with _on(device):
        kind = _kind(kernel, device, arguments, constants, num_warps)
        known = _COMPILED.get(kind)
        if known is not None:
            code, values = known
            code[programs, 1, 1](*arguments, *values)
            return
        code = kernel[(programs,)](*arguments, **constants, num_warps=num_warps, enable_fp_fusion=False)
        if not interpreted:
            _COMPILED[kind] = code, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])


def _kind(
    kernel: Any, device: torch.device, arguments: tuple[Any, ...], constants: dict[str, Any], num_warps: int
) -> Hashable:
    """Return what one piece of code is made for."""
    types = [argument.dtype if isinstance(argument, Tensor) else type(argument) for argument in arguments]
    return kernel.fn, device, num_warps, *types, *constants.items()


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make ``device`` the current one, on which Triton launches."""
    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)
