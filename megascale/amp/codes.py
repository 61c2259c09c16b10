"""Refuses torch optimizers whose moments are 8-bit codes: only a MixedPrecisionOptimizer can read them."""

from typing import Any

import torch

from megascale.errors import UsageError
from megascale.kernels.compact_moments import SCALE_SUFFIX
from megascale.lion import Lion
from megascale.step.compact_state import MOMENTS

_KINDS = (torch.optim.Adam, torch.optim.SGD, Lion)
"""The optimizers whose moments may be codes, with their subclasses. Others may call anything by these names."""
_MOMENTS = {f"{name}{SCALE_SUFFIX}": name for name in MOMENTS}
"""Moments by the names of their scales."""


def require_no_codes(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError, naming the parameter and the moment, if the optimizer's state holds 8-bit codes.

    Its wrapper left them when it was dropped. They are told by the scales beside them, also where torch has cast them.
    """
    if not isinstance(optimizer, _KINDS):
        return
    for param, entry in optimizer.state.items():
        if isinstance(entry, dict) and not _MOMENTS.keys().isdisjoint(entry):
            moment = next(moment for scale, moment in _MOMENTS.items() if scale in entry)
            raise UsageError(
                f"the state of {_name(optimizer, param)!r} in {type(optimizer).__name__} holds {moment} as 8-bit "
                "codes, which its own step() cannot read: a MixedPrecisionOptimizer left them; wrap the optimizer "
                "again and call the wrapper's step(), or load a state dict of fp32 moments, which a wrapper has with "
                "exp_avg_dtype=torch.float32 and exp_avg_sq_dtype=torch.float32"
            )


def _name(optimizer: torch.optim.Optimizer, wanted: Any) -> str:
    """Return what its param group calls a parameter, else its position."""
    position = 0
    for group in optimizer.param_groups:
        given = group.get("param_names") or [None] * len(group["params"])
        for param, name in zip(group["params"], given, strict=True):
            if param is wanted:
                return name or str(position)
            position += 1
    return "a parameter of no param group"
