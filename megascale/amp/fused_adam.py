"""torch's fused Adam and AdamW on our kernels: same state, same arithmetic, but gradients are not written.

torch's own kernel with a ``grad_scale`` writes back every gradient that it has divided: 4 bytes of 32 per parameter.
"""

from collections.abc import Hashable
from operator import attrgetter
from typing import Any, TypeGuard, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from megascale.amp.local_grads import LocalGrads, reader_of
from megascale.kernels import Backend, Decision, Operands, TensorList, TorchBackend
from megascale.rules import ADAM
from megascale.step.kernel_state import rate
from megascale.utils.calls import has_step_hooks
from megascale.utils.identity import are_same

_STATE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
"""In the order in which torch collects it."""
_tables: WeakKeyDictionary[torch.optim.Optimizer, dict[int, tuple[list[Hashable], dict[Any, Any]]]] = (
    WeakKeyDictionary()
)
"""Tables of each param group, and where the tensors lay that they are of. They keep no tensor, as readers do."""
_DTYPE, _DEVICE = attrgetter("dtype"), attrgetter("device")


def fits(optimizer: torch.optim.Optimizer, backend: Backend) -> TypeGuard[torch.optim.Adam]:
    """Return whether :func:`step_` can replace the optimizer's ``step()``; results differ in the last bits at most.

    That must be torch's own ``step()``, with ``fused=True`` and without hooks, on fp32 parameters of one device.
    """
    if type(optimizer) not in ADAM.kinds or type(backend) is TorchBackend:
        return False
    # An LR scheduler wraps step() only to see that it was called.
    replaced = "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched")
    if has_step_hooks(optimizer) or replaced:
        return False
    numbers = all(
        group["fused"] and not any(isinstance(beta, Tensor) for beta in group["betas"])
        for group in optimizer.param_groups
    )
    params = [param for group in optimizer.param_groups for param in group["params"]]
    are_fp32 = set(map(_DTYPE, params)) == {torch.float32} and set(map(type, params)) == {nn.Parameter}
    return numbers and are_fp32 and len(set(map(_DEVICE, params))) == 1


GroupUpdate = tuple[dict[str, Any], Operands]
"""The update of one param group: the group, with its options, and its tensors."""


@torch.no_grad()
def updates_of(optimizer: torch.optim.Adam, grads: LocalGrads, device: torch.device) -> list[GroupUpdate] | None:
    """Return the updates of the param groups; None if our kernels cannot read all that they need.

    torch's own step handles such parameters and state, or refuses them. Missing state is created as torch creates it.

    Args:
        optimizer: :func:`fits` returned True.
        grads: its gradients.
        device: of the parameters.
    """
    updates = []
    for index, group in enumerate(optimizer.param_groups):
        lists: list[list[Tensor]] = [[] for _ in range(6)]
        optimizer._init_group(group, *lists)
        params, own_grads, *state = lists
        if not params:
            continue
        known = grads.plain_of(index, device, own_grads[0].dtype)
        if known is None or known.params is None:
            return None
        if not (are_same(known.params, params) and are_same(known.grads, own_grads)):
            return None
        operands = _operands(optimizer, index, known.params, known.grads, state)
        if operands is None:
            return None
        updates.append((group, operands))
    return updates


def _operands(
    optimizer: torch.optim.Adam, group: int, params: TensorList, grads: TensorList, state: list[list[Tensor]]
) -> Operands | None:
    """Return the operands of the param group at an index, with its state in torch's order, ``step`` last.

    None if a tensor of state is none that our kernels can read, of its parameter's shape and device.
    """
    read: dict[str, Any] = {}  # lists, to mypy
    for name, tensors in zip(_STATE, state, strict=True):
        if not tensors:  # max_exp_avg_sq without amsgrad
            continue
        known = reader_of(optimizer, (name, group)).read(tensors)
        if known is None or known.forms.kinds != {torch.float32}:
            return None
        if name == "step":
            fits = set(known.forms.shapes) == {torch.Size()} and known.forms.devices == params.forms.devices
        else:
            fits = known.forms.fit(params.forms)
        if not fits:
            return None
        read[name] = known
    steps, mains = read.pop("step"), cast("Any", params)
    operands = Operands(mains, mains, grads, read, steps)
    # Where all tensors lie as in the step before, its tables serve.
    places: list[Hashable] = [(column.places, column.forms.key) for column in (params, steps, *read.values())]
    kept = _tables.setdefault(optimizer, {})
    if group not in kept or kept[group][0] != places:
        kept[group] = places, operands.tables
    operands.tables = kept[group][1]
    return operands


@torch.no_grad()
def step_(optimizer: torch.optim.Adam, updates: list[GroupUpdate], backend: Backend, decision: Decision) -> None:
    """Update parameters and state if the step lands."""
    for group, operands in updates:
        backend.adam_(operands, ADAM.hyper(group, rate(group), type(optimizer)), decision)
    optimizer._opt_called = True  # type: ignore[attr-defined]  # an LR scheduler reads it
