"""convert: another system's checkpoint into a file that MixedPrecisionOptimizer.load_state_dict takes."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megascale.errors import InteropError
from megascale.interop.formats import AUTO, format_of
from megascale.interop.loading import find_scaler
from megascale.interop.named_state import FoundState, Names
from megascale.interop.scaler_state import FoundScaler
from megascale.interop.source import damage_named, open_source
from megascale.utils import validate
from megascale.utils.atomic_files import atomic_write

SCALER_ALONE = FoundState(
    "", not_mapped=("no main params and no optimizer state: load the file with strict=False, for its scaler",)
)


@dataclass(frozen=True)
class Conversion:
    """What was read, and the state dict made of it.

    Attributes:
        scaler: None where the source has none.
        state: main params and optimizer state; empty where the source has none.
        state_dict: the result, for ``MixedPrecisionOptimizer.load_state_dict``.
    """

    scaler: FoundScaler | None
    state: FoundState
    state_dict: Mapping[str, Any]

    def report(self) -> str:
        """Return one line for each thing that was mapped or not mapped."""
        lines = []
        for found in (self.scaler, self.state):
            if found is not None:
                lines += [f"mapped      {line}" for line in found.mapped]
                lines += [f"not mapped  {line}" for line in found.not_mapped]
        return "\n".join(lines)


def convert(
    source: Any,
    destination: str | os.PathLike[str] | None,
    *,
    format: str = AUTO,
    names: Names | None = None,
    scaler_only: bool = False,
) -> Conversion:
    """Read another system's checkpoint and write megascale's state dict, for ``torch.load(weights_only=True)``.

    Args:
        source, format: see :func:`load_scaler_state`.
        destination: the file to write, which must not exist; it appears when it is complete. None: write nothing.
        names: the parameters' names, in the order of the optimizer's parameters, flat or by param group. None: as the
            checkpoint records them, or found by comparison with the weights; InteropError if neither is possible.
        scaler_only: leave out main params and optimizer state.

    Raises:
        InteropError: ``source`` cannot be read or mapped, or ``destination`` exists or cannot be written.
        ArgumentError, ArgumentTypeError: for an argument out of range.
    """
    validate.flag("scaler_only", scaler_only)
    target = None if destination is None else Path(destination)
    if target is not None and target.exists():
        raise InteropError(f"{target} exists already; choose another file, or remove it")
    if target is not None and not target.parent.is_dir():
        raise InteropError(f"{target} cannot be written: there is no folder {target.parent}")
    opened = open_source(source)
    scaler = find_scaler(opened, format)
    with damage_named(opened.where):
        state = None if scaler_only else format_of(opened, format).find_state(opened, names)
    if scaler is None and state is None:
        raise InteropError(f"{opened.where} holds neither a loss scaler's nor an optimizer's state")
    state = state or SCALER_ALONE
    converted = Conversion(scaler, state, state.state_dict(scaler.state if scaler is not None else {}))
    if target is not None:
        try:
            with atomic_write(target, overwrite=False) as unnamed:
                torch.save(converted.state_dict, unnamed)
        except (OSError, RuntimeError) as error:
            raise InteropError(f"{target} cannot be written: {error}") from error
    return converted
