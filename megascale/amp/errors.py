"""Errors of GradScaler that are also of the class that torch.amp.GradScaler raises."""

from megascale.errors import ArgumentError, StateDictError, UsageError


class ScalerOrderError(UsageError, AssertionError):
    """A call came too early, or without the calls that must precede it. torch raises AssertionError."""


class ScalerArgumentError(ArgumentError, AssertionError):
    """A factor or a new scale is out of range. torch raises AssertionError."""


class EmptyScalerStateError(StateDictError, RuntimeError):
    """A state dict without entries, as a disabled scaler returns it. torch raises RuntimeError."""
