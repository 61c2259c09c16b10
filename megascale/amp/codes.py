"""Refuses torch optimizers whose moments are 8-bit codes: only a MixedPrecisionOptimizer can read them."""

import torch
from torch import Tensor

from megascale.amp.overflows import named_params
from megascale.errors import UsageError
from megascale.kernels.compact_moments import SCALE_SUFFIX
from megascale.rules import ADAM, MOMENT_CODES

_MOMENTS = {f"{name}{SCALE_SUFFIX}": name for name in MOMENT_CODES}
"""Moments by the names of their scales."""


def require_no_codes(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError, naming the parameter and the moment, if the optimizer's state holds 8-bit codes.

    Its wrapper left them when it was dropped, for every parameter that has state: the first one tells. They are known
    by the scales beside them, also where torch has cast them.
    """
    if not isinstance(optimizer, ADAM.kinds):
        return  # others may call anything by these names
    of_params = ((param, entry) for param, entry in optimizer.state.items() if isinstance(param, Tensor) and entry)
    param, entry = next(of_params, (None, None))
    if not isinstance(entry, dict) or _MOMENTS.keys().isdisjoint(entry):
        return
    listed = named_params(optimizer.param_groups)
    name = next((name for name, other in listed if other is param), "a parameter of no param group")
    moment = next(moment for scale, moment in _MOMENTS.items() if scale in entry)
    raise UsageError(
        f"the state of {name!r} in {type(optimizer).__name__} holds {moment} as 8-bit codes, which its own step() "
        "cannot read: a MixedPrecisionOptimizer left them; wrap the optimizer again and call the wrapper's step(), or "
        "load a state dict of fp32 moments, which a wrapper has with exp_avg_dtype=torch.float32 and "
        "exp_avg_sq_dtype=torch.float32"
    )
