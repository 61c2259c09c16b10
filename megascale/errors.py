"""The named errors of megascale. Every one says which argument, which value, and what to do."""

from collections.abc import Collection

MOST_NAMES = 8
"""At most this many parameters are named in a message; the others are counted."""


def listed(names: Collection[str]) -> str:
    """Return names as a message shows them: ``'a', 'b' and 3 more``."""
    rest = len(names) - MOST_NAMES
    return ", ".join(map(repr, list(names)[:MOST_NAMES])) + (f" and {rest} more" if rest > 0 else "")


class MegascaleError(Exception):
    """Base of every error that megascale raises on purpose."""


class ArgumentError(MegascaleError, ValueError):
    """An argument has a value outside its range."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument has the wrong type."""


class StateDictError(ArgumentError):
    """A state dict does not fit the object it is loaded into. The object has not changed."""


class InteropError(StateDictError):
    """Another system's checkpoint cannot be read, or holds what cannot be mapped faithfully. Nothing has changed."""


class UsageError(MegascaleError, RuntimeError):
    """A call came out of order, or with an option that does not apply here."""


class UnsupportedTorchError(MegascaleError, ImportError):
    """torch does not have a name that megascale uses. The message says which torch is here, and which are supported."""


class GradientError(MegascaleError, RuntimeError):
    """A gradient has a layout that the step cannot use. Nothing has been updated."""


def sparse_gradient(name: str, layout: object) -> GradientError:
    """Return the error for a gradient of parameter ``name`` that is not dense."""
    return GradientError(
        f"the gradient of {name!r} has layout {layout}; build the layer with sparse=False, or call grad.to_dense()"
    )


class MainParamOverflowError(MegascaleError, OverflowError):
    """A main param is finite in fp32 but rounds to inf in its model param's dtype."""


class NonFiniteParamError(MegascaleError, ArithmeticError):
    """A main param holds inf or NaN: gradients that depend on it do too, so every later step would be skipped."""


class InnerStepError(MegascaleError, RuntimeError):
    """The wrapped optimizer's own ``step()``, or an update by kernels, raised an error, as for want of memory. Some
    main params may be updated and others not.
    """


class SkippedStepsError(MegascaleError, RuntimeError):
    """More steps in a row were skipped than ``max_consecutive_skips`` allows."""


class MinScaleError(SkippedStepsError):
    """More overflows in a row came at the smallest loss scale than ``max_overflows_at_min_scale`` allows."""


class CheckpointError(MegascaleError, RuntimeError):
    """A checkpoint could not be written or read. Nothing that was live has changed, or the message says what has."""


class RunError(MegascaleError, RuntimeError):
    """A program that was started failed; its own output says why."""


class RankError(MegascaleError, RuntimeError):
    """Another rank failed with an error that is not one of the named ones."""
