"""Works around a bug of torch's fused SGD: uninitialised momentum after a skipped first step."""

import torch
from torch import Tensor

from megascale.utils.dtensors import to_local
from megascale.utils.transfer import to_device_async


def params_without_momentum(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters for which the next step of an SGD with momentum creates a buffer; none for others."""
    if not isinstance(optimizer, torch.optim.SGD):
        return []
    groups = [group for group in optimizer.param_groups if group["momentum"] != 0]
    params = [param for group in groups for param in group["params"]]
    return [param for param in params if optimizer.state.get(param, {}).get("momentum_buffer") is None]


@torch.no_grad()
def fill_momentum_(optimizer: torch.optim.Optimizer, params: list[Tensor], found_inf: Tensor) -> None:
    """Zero the new momentum of ``params`` if the step was skipped, without a sync.

    torch's fused kernel allocates it, fills it only in a landed step, but always reads it in the next one. Of a group
    with dampening it is dropped: a first gradient is not dampened. The host waits for that, in first steps alone.
    """
    fresh = {param for param in params if optimizer.state.get(param, {}).get("momentum_buffer") is not None}
    for group in optimizer.param_groups if fresh else ():
        made = fresh.intersection(group["params"])
        is_dropped = bool(made) and group["dampening"] != 0 and bool(found_inf > 0)
        for state in (optimizer.state[param] for param in made):
            if is_dropped:
                del state["momentum_buffer"]
            else:
                buffer = to_local(state["momentum_buffer"])
                buffer.masked_fill_(to_device_async(found_inf, buffer.device) > 0, 0.0)
