"""Errors of GradScaler that are also what torch.amp.GradScaler raises at the same place."""

from megascale.errors import ArgumentError, StateDictError, UsageError


class ScalerOrderError(UsageError, AssertionError):
    """A call came too early, or without the calls that go before it. torch raises AssertionError there."""


class ScalerArgumentError(ArgumentError, AssertionError):
    """A factor or a new scale that cannot be. torch raises AssertionError there."""


class EmptyScalerStateError(StateDictError, RuntimeError):
    """A state dict without entries, as a disabled scaler gives. torch raises RuntimeError there."""
