"""autocast, with a process-wide half dtype and this machine's device as defaults."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from megascale.errors import ArgumentError, ArgumentTypeError

HALF_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

# One per process, as it is a property of the run. A single reference, so threads need no lock.
_chosen: torch.dtype | None = None


def set_half_dtype(value: str | torch.dtype | None) -> torch.dtype:
    """Set the default half dtype of :class:`autocast`; ``cerebras.pytorch.amp``'s function.

    It holds for the whole process, all threads included, from the next autocast region or decorated call on. Regions
    that have begun keep theirs. Loss scalers are not affected: fp16 needs one, bf16 does not.

    Args:
        value: "float16", "bfloat16", ``torch.float16`` or ``torch.bfloat16``. None: torch's own default again.

    Returns:
        The torch dtype of regions that begin from now on, on this machine's accelerator or its CPU.

    Raises:
        ArgumentError: for another dtype or name, ``cbfloat16`` among them.
        ArgumentTypeError: for anything else.
    """
    global _chosen
    _chosen = None if value is None else _half_dtype("half dtype", value)
    return _get_half_dtype()


def _get_half_dtype(device_type: str | None = None) -> torch.dtype:
    """Return the dtype that :func:`set_half_dtype` set, else torch's default: bf16 on CPU, fp16 on most accelerators.

    Args:
        device_type: the device type for the default, such as "cuda". None: this machine's accelerator, else the CPU.
    """
    return _chosen or torch.get_autocast_dtype(device_type or _device_type())


class autocast(torch.autocast):
    """``torch.autocast`` with every argument optional: ``with autocast():`` is enough. A context manager and decorator.

    A decorated function looks up device and half dtype at every call, so that a decorator, which runs when a module is
    imported, follows a later :func:`set_half_dtype`. It may call itself.

    Args:
        device_type: such as "cuda". None: this machine's accelerator, or the CPU.
        dtype: a torch dtype, "float16" or "bfloat16". None: that of :func:`set_half_dtype`, else torch's.
        enabled: False: the region runs in the dtypes of its tensors.
        cache_enabled: whether casts of weights are kept until the region ends. None: torch's present setting.

    Raises:
        ArgumentError, ArgumentTypeError: for an argument that does not fit. As ``torch.autocast``, it warns and is
            disabled on a device that does not support the dtype.
    """

    def __init__(
        self,
        device_type: str | None = None,
        dtype: torch.dtype | str | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type is not None and not isinstance(device_type, str):
            raise ArgumentTypeError(f"device_type must be a string such as 'cuda', got {device_type!r}; or dtype=")
        self._arguments = (device_type, dtype, enabled, cache_enabled)
        device_type = device_type or _device_type()
        if dtype is None:
            dtype = _get_half_dtype(device_type)
        elif isinstance(dtype, str):
            dtype = _half_dtype("dtype", dtype)
        super().__init__(device_type, dtype, enabled, cache_enabled)

    def __call__(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``func`` wrapped so that every call runs in a new region."""
        if not callable(func):
            raise ArgumentTypeError(f"autocast()(func) needs a callable, got {func!r}; or write `with autocast():`")
        arguments = self._arguments

        @functools.wraps(func)
        def decorated(*args: Any, **kwargs: Any) -> Any:
            with autocast(*arguments):
                return func(*args, **kwargs)

        return decorated


def _device_type() -> str:
    # check_available: torch that was built for CUDA also runs on machines without a GPU.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def _half_dtype(argument: str, value: Any) -> torch.dtype:
    """Return the torch dtype of a name or dtype. Raises naming ``argument``."""
    if isinstance(value, str) and value == "cbfloat16":
        raise ArgumentError(
            f"{argument} 'cbfloat16' is a format of Cerebras hardware (6 bits of exponent, 9 of mantissa), for which "
            "torch has no dtype; choose 'bfloat16', or 'float16' with a GradScaler"
        )
    for name, dtype in HALF_DTYPES.items():
        if value in (name, dtype):
            return dtype
    kind = ArgumentError if isinstance(value, (str, torch.dtype)) else ArgumentTypeError
    raise kind(f"{argument} must be 'float16', 'bfloat16', torch.float16 or torch.bfloat16, got {value!r}")
