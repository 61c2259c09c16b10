"""load_scaler_state: reads any supported system's scaler, with megascale's keys."""

from typing import Any

from megascale.errors import InteropError
from megascale.interop.formats import AUTO, format_of
from megascale.interop.scaler_state import FoundScaler
from megascale.interop.source import Source, damage_named, open_source
from megascale.utils import validate


def load_scaler_state(source: Any, *, format: str = AUTO, index: int | None = None, strict: bool = True) -> FoundScaler:
    """Read the loss scaler's state from a checkpoint of another system. Executes no code of a file.

    Args:
        source: a loaded state dict, a checkpoint's file or folder, or an object with ``state_dict()``. Unchanged.
        format: "auto" or one of "megatron", "deepspeed", "transformers", "accelerate", "lightning", "apex", "torch".
        index: selects a scaler if a checkpoint holds several that differ.
        strict: raise if no state of ours continues this one exactly. False: take the nearest, with the differences in
            ``unfaithful``.

    Returns:
        State, configuration, and notes on the mapping; see :meth:`FoundScaler.build_grad_scaler`.

    Raises:
        InteropError: ``source`` is not recognised, cannot be read, holds no scaler, or cannot be mapped faithfully.
        ArgumentError, ArgumentTypeError: for an argument out of range.
    """
    validate.flag("strict", strict)
    opened = open_source(source)
    found = find_scaler(opened, format, index, strict=strict)
    if found is None:
        raise InteropError(
            f"{opened.where} holds no loss scaler's state: it was trained without a loss scale, or saved without it"
        )
    return found


def find_scaler(source: Source, format: str, index: int | None, *, strict: bool) -> FoundScaler | None:
    """Return the scaler in an opened source, or None. Raises InteropError as :func:`load_scaler_state`."""
    if index is not None:
        validate.integer("index", index, minimum=0)
    with damage_named(source.where):
        found = format_of(source, format).find_scaler(source, index)
    if found is not None and strict and found.unfaithful:
        raise InteropError(
            f"{source.where}: {found.system}'s scale would not go on as it did: {'; '.join(found.unfaithful)}; "
            "strict=False takes the nearest state"
        )
    return found
