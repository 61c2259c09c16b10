"""Selects how main params are updated. Both ways keep state in torch's own layout, keyed by model param."""

import torch

from megascale.config import StepConfig
from megascale.errors import ArgumentError
from megascale.kernels import Backend
from megascale.main_params.weight_arrivals import WeightArrivals
from megascale.rules import ADAM, BY_KIND, CODE_DTYPES, ELEMENTWISE, FIRST, KINDS, MUON, SECOND
from megascale.step.host_update import HostUpdate
from megascale.step.kernel_update import KernelUpdate
from megascale.step.known_optimizers import refuse_held_optimizers, refuse_low_bit_moments
from megascale.step.muon_update import MuonUpdate
from megascale.step.torch_step import GeneralUpdate
from megascale.utils import call_site
from megascale.utils.dtensors import is_cut
from megascale.utils.wording import either


def check_inner(optimizer: torch.optim.Optimizer) -> None:
    """Raise ArgumentError for an optimizer that cannot be wrapped, with the reason."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentError(
            f"optimizer {type(optimizer).__name__} needs a closure, which loss scaling cannot serve; use Adam, "
            "AdamW, SGD"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ArgumentError(
            f"optimizer {type(optimizer).__name__} works on sparse gradients only; use Adam and a dense embedding"
        )
    refuse_low_bit_moments(optimizer)
    refuse_held_optimizers(optimizer)
    for index, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ArgumentError(
                f"param group {index} has differentiable=True; a step on main params cannot be differentiated"
            )


def select_update(
    optimizer: torch.optim.Optimizer,
    backend: Backend,
    config: StepConfig,
    device: torch.device,
    arrivals: WeightArrivals | None,
) -> GeneralUpdate:
    """Return how ``optimizer`` is run. Exact types only: a subclass may have changed ``step()``.

    ``arrivals``: sends weights from host memory, where main params of parameters on ``device`` live; None: none do.

    Raises ArgumentError for 16-bit moments of an optimizer that runs its own ``step()``; warns where that may read
    pieces of DTensors.
    """
    rule = BY_KIND.get(type(optimizer))
    if rule is MUON:
        return MuonUpdate(optimizer, backend, config)
    if rule is not None and arrivals is not None:
        return HostUpdate(optimizer, backend, config, rule, device, arrivals)
    if rule is not None:
        return KernelUpdate(optimizer, backend, config, rule)
    for name in (FIRST, SECOND):
        if (dtype := getattr(config, name)) != torch.float32:
            known = ADAM.kinds if dtype in CODE_DTYPES else KINDS
            raise ArgumentError(
                f"config.{name}={dtype} needs {either([kind.__name__ for kind in known])}, not "
                f"{type(optimizer).__name__}; leave it at torch.float32"
            )
    # An optimizer that may read whole parameters has a piece of a DTensor on each rank.
    params = (param for group in optimizer.param_groups for param in group["params"])
    if type(optimizer) not in ELEMENTWISE and any(map(is_cut, params)):
        call_site.warn(
            f"{type(optimizer).__name__} is not known to be elementwise, and runs its own step() on DTensors that are "
            "cut over ranks: it must compute with torch's operators, for which a DTensor is whole; what it reads from "
            "to_local() is a piece of a parameter",
        )
    return GeneralUpdate(optimizer, backend)
