"""load_scaler_state: reads any supported system's scaler, with megascale's keys."""

from typing import Any

from megascale.errors import InteropError
from megascale.interop.formats import AUTO, format_of
from megascale.interop.scaler_state import FoundScaler
from megascale.interop.source import Source, damage_named, open_source


def load_scaler_state(source: Any, *, format: str = AUTO) -> FoundScaler:
    """Read the loss scaler's state from a checkpoint of another system. Executes no code of a file.

    Args:
        source: a loaded state dict, a checkpoint's file or folder, or an object with ``state_dict()``. Unchanged.
        format: "auto" or one of "megatron", "deepspeed", "transformers", "accelerate", "lightning", "torch".

    Returns:
        State, configuration, and notes on the mapping; see :meth:`FoundScaler.build_grad_scaler`. Where no state of
        ours continues this one exactly it is the nearest, and ``not_mapped`` says what differs.

    Raises:
        InteropError: ``source`` is not recognised, cannot be read, or holds no scaler.
        ArgumentError, ArgumentTypeError: for an argument out of range.
    """
    opened = open_source(source)
    found = find_scaler(opened, format)
    if found is None:
        raise InteropError(
            f"{opened.where} holds no loss scaler's state: it was trained without a loss scale, or saved without it, "
            "or by a library that is not read here, such as apex.amp"
        )
    return found


def find_scaler(source: Source, format: str) -> FoundScaler | None:
    """Return the scaler in an opened source, or None. Raises InteropError as :func:`load_scaler_state`."""
    with damage_named(source.where):
        return format_of(source, format).find_scaler(source)
