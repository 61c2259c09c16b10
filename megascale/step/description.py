"""What ``repr()`` says of an optimizer. Nothing is read from a device, synchronised between ranks, or changed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn

from megascale.grad_scaler import MegatronGradScaler
from megascale.main_params.owned import OwnedMainParams
from megascale.parallel import ParallelGroups
from megascale.step.member import StepMember
from megascale.utils.collectives import group_size
from megascale.utils.dtensors import is_dtensor, to_local
from megascale.utils.dtypes import HALF_DTYPES
from megascale.utils.wording import count, size

_INDENT = "    "
_NO_16_BITS = (
    "No parameter has 16 bits: the model computes in fp32, or in autocast, and takes the memory of fp32. If it should "
    "train in 16 bits, call model = megascale.cast_model(model, torch.bfloat16), or torch.float16, before the "
    "optimizer is built"
)


def described(
    kind: str,
    members: Sequence[StepMember],
    groups: ParallelGroups,
    grad_scaler: MegatronGradScaler | None,
    clip_grad: float,
) -> str:
    """Return the text of an optimizer, or of a chain of them: what they wrap, decide by, and hold on this rank.

    The lines of param groups are torch's, parameters' names aside.

    Args:
        kind: the class of what is described.
        members, groups, grad_scaler, clip_grad: as in :class:`megascale.step.recipe.StepRecipe`.
    """
    lines = [f"{kind} ("]
    for member in members:
        lines += [
            f"wraps: {type(member.optimizer).__name__}",
            f"parameters: {_parameters(member)}",
            f"main params: {_main_params(member, groups)}",
            f"backend: {member.backend.name}, on {member.device}",
            f"held by this rank: {_held(member)}",
        ]
    lines += [
        f"loss scale: {'none' if grad_scaler is None else repr(grad_scaler)}",
        f"clipping: {kind} {_clipping(clip_grad)}",
        f"ranks: {_ranks(groups)}",
    ]
    for index, group in enumerate(group for member in members for group in member.optimizer.param_groups):
        options = [key for key in sorted(group) if key not in ("params", "param_names")]
        lines += [
            f"Parameter Group {index}",
            f"{_INDENT}params: {count(len(group['params']), 'tensor')}",
            *(f"{_INDENT}{key}: {_shown(group[key])}" for key in options),
        ]
    return "\n".join([*lines, ")"])


def summary(
    kind: str,
    member: StepMember,
    groups: ParallelGroups,
    grad_scaler: MegatronGradScaler | None,
    clip_grad: float,
) -> str:
    """Return one line that says what was built; arguments: see :func:`described`."""
    scaler = "no loss scale" if grad_scaler is None else type(grad_scaler).__name__
    remark = "" if _has_16_bits(member) else f". {_NO_16_BITS}"
    return (
        f"{kind}({type(member.optimizer).__name__}): {_parameters(member)}; "
        f"main params: {_main_params(member, groups)}; {scaler}; "
        f"{_clipping(clip_grad)}; "
        f"backend {member.backend.name} on {member.device}; {_ranks(groups)}; {_held(member)}{remark}"
    )


def _params(member: StepMember) -> list[nn.Parameter]:
    return [param for group in member.optimizer.param_groups for param in group["params"]]


def _clipping(clip_grad: float) -> str:
    return f"clips gradients to norm {clip_grad}" if clip_grad else "does not clip gradients"


def _has_16_bits(member: StepMember) -> bool:
    return any(param.dtype in HALF_DTYPES for param in _params(member))


def _parameters(member: StepMember) -> str:
    params, numels = _params(member), Counter[str]()
    for param in params:
        if param.requires_grad:
            numels[str(param.dtype).removeprefix("torch.")] += param.numel()
    frozen = sum(not param.requires_grad for param in params)
    parts = [f"{numel:,} in {dtype}" for dtype, numel in numels.items()] or ["none are trained"]
    parts += [f"{count(frozen, 'tensor')} frozen"] * bool(frozen) + ["DTensors"] * any(map(is_dtensor, params))
    return ", ".join(parts)


def _main_params(member: StepMember, groups: ParallelGroups) -> str:
    mains = member.main_params
    form = "16-bit remainders beside the weights" if mains.stores_remainders else "float32"
    if not _has_16_bits(member):
        form = "none, as no parameter has 16 bits"
    if not mains.is_sharded:
        return form
    unit = "whole parameters" if isinstance(mains, OwnedMainParams) else "elements"
    return f"{form}, with the state in {count(group_size(groups.data_shard), 'shard')} of {unit}"


def _ranks(groups: ParallelGroups) -> str:
    deciding = count(group_size(groups.grad_stats), "rank")
    others = [
        f"{name.replace('_', ' ')} {group_size(getattr(groups, name))}"
        for name in ("data_parallel", "tensor_parallel")
        if group_size(getattr(groups, name)) > 1
    ]
    return ", ".join([f"{deciding} decide{'s' * (deciding == '1 rank')}", *others])


def _held(member: StepMember) -> str:
    # An fp32 model param is its own main param.
    mains = sum(to_local(param.memory).nbytes for param in member.main_params if param.is_copy)
    entries = filter(lambda own: isinstance(own, Mapping), member.optimizer.state.values())
    values = chain.from_iterable(own.values() for own in entries)
    state = sum(to_local(value).nbytes for value in values if isinstance(value, Tensor))
    where = ", in host memory until reload()" if member.main_params.residence.is_away else ""
    return f"{size(mains + state)} (main params {size(mains)}, optimizer state {size(state)}){where}"


def _shown(option: Any) -> str:
    """Return an option as text: of a tensor on a device, such as a learning rate that a schedule writes, its place."""
    return f"<on {option.device}>" if isinstance(option, Tensor) and option.device.type != "cpu" else str(option)
