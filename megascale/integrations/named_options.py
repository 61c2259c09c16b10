"""Options that a loop of another library has no name for, checked by name: fields of OptimizerConfig, and a dtype."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from megascale.amp import GradScaler
from megascale.config import SCALER_FIELDS, DecisionConfig, OptimizerConfig
from megascale.errors import ArgumentError, ArgumentTypeError
from megascale.rules import FIRST, SECOND
from megascale.utils.spelling import meant

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
"""Short names of dtypes, beside torch's own ("float16")."""

FIELDS = (
    *SCALER_FIELDS,
    *(one.name for one in fields(DecisionConfig) if one.name != "log_num_zeros_in_grad"),
    "backend",
    FIRST,
    SECOND,
    "store_param_remainders",
    "compact_state",
)
"""Fields of OptimizerConfig that may be given: what builds the torch optimizer, and clips, is the other library's."""

_SCALER_ARGUMENTS = {
    **SCALER_FIELDS,
    "loss_scale": "loss_scale",
    "initial_loss_scale": "init_scale",
    "max_consecutive_skips": "max_consecutive_skips",
    "max_overflows_at_min_scale": "max_overflows_at_min_scale",
}
"""Of FIELDS what :class:`megascale.amp.GradScaler` takes, by its names."""


@dataclass(frozen=True)
class NamedOptions:
    """What was asked for by name.

    Attributes:
        dtype: to cast the model's parameters to; None: they stay as they are.
        fields: of OptimizerConfig, among FIELDS.
    """

    dtype: torch.dtype | None
    fields: Mapping[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, Any], owner: str, decided: Mapping[str, str]) -> "NamedOptions":
        """Check options by name. Dtypes may be names: "fp16", "bfloat16", "int8".

        Args:
            given: the options.
            owner: what decides the other fields of OptimizerConfig, such as "TrainingArguments".
            decided: those fields, and what ``owner`` calls them.

        Raises:
            ArgumentError, ArgumentTypeError: naming the option, and what decides it if ``owner`` does.
        """
        for name in given:
            if name in decided:
                raise ArgumentError(f"{name} comes from {owner}: set {decided[name]} there")
            if name not in ("dtype", *FIELDS):
                known = ("dtype", *FIELDS)
                raise ArgumentTypeError(
                    f"megascale has no option {name!r} beside {owner}, but {', '.join(known)}{meant(name, known)}"
                )
        dtype = _dtype("dtype", given.get("dtype"))
        if dtype not in (None, torch.float16, torch.bfloat16):
            raise ArgumentError(f"dtype must be torch.float16 or torch.bfloat16, got {given['dtype']!r}")
        fields = {name: value for name, value in given.items() if name != "dtype"}
        fields |= {name: _dtype(name, fields[name]) for name in (FIRST, SECOND) if name in fields}
        OptimizerConfig(**fields)
        return cls(dtype, fields)

    def config(self, params: Iterable[Tensor], moments: Mapping[str, torch.dtype]) -> OptimizerConfig:
        """Return the config of an optimizer, which is told at every step how to clip.

        Args:
            params: of the model, frozen ones too: gradients flow through these.
            moments: dtypes that the name of the optimizer implies; options that name others win.
        """
        dtypes = {param.dtype for param in params}
        fp16 = torch.float16 in dtypes
        chosen = {**moments, **self.fields}
        return OptimizerConfig(fp16=fp16, bf16=torch.bfloat16 in dtypes and not fp16, **chosen)

    def autocast_scaler(self, device: str, remedy: str, **defaults: Any) -> GradScaler:
        """Return the scaler of a loss that is computed from fp32 parameters under fp16 autocast.

        Args:
            device: type of device.
            remedy: how to train 16-bit weights instead.
            defaults: arguments of GradScaler that the options may replace.

        Raises:
            ArgumentError: for an option that only main params of 16-bit weights have.
        """
        if other := [name for name in self.fields if name not in _SCALER_ARGUMENTS]:
            raise ArgumentError(f"{other[0]} is for weights in 16 bits, and these are fp32 under autocast: {remedy}")
        given = {_SCALER_ARGUMENTS[name]: value for name, value in self.fields.items()}
        return GradScaler(device, **{**defaults, **given})


def _dtype(option: str, value: Any) -> torch.dtype | None:
    """Return the dtype that ``value`` is or names. Raises ArgumentError."""
    if value is None or isinstance(value, torch.dtype):
        return value
    found = DTYPES.get(value, getattr(torch, str(value).removeprefix("torch."), None))
    if not isinstance(found, torch.dtype):
        raise ArgumentError(f"{option} must be a dtype or the name of one, such as 'bfloat16', got {value!r}")
    return found
