"""What ``repr()`` says of an optimizer. Nothing is read from a device, synchronised between ranks, or changed."""

from collections import Counter
from operator import attrgetter

from torch import Tensor, nn

from megascale.main_params.owned import OwnedMainParams
from megascale.parallel import ParallelGroups
from megascale.step.member import StepMember
from megascale.step.recipe import StepRecipe
from megascale.utils.collectives import group_size
from megascale.utils.dtensors import is_dtensor, to_local
from megascale.utils.dtypes import HALF_DTYPES
from megascale.utils.nests import tensors_in
from megascale.utils.wording import count, size

_NO_16_BITS = (
    ". No parameter has 16 bits: the model computes in fp32, or in autocast, and takes the memory of fp32. If it "
    "should train in 16 bits, call model = megascale.cast_model(model, torch.bfloat16), or torch.float16, before the "
    "optimizer is built"
)


def described(kind: str, recipe: StepRecipe) -> str:
    """Return the text of an optimizer of class ``kind``, or of a chain: what it wraps, decides by, and holds here.

    The lines of param groups are torch's, parameters' names aside.
    """
    chain = recipe.members[0].chain and recipe.members[0].chain()
    who = kind if chain in (None, recipe) else "its ChainedOptimizer"
    whose = "gradients" if chain is None else "the gradients of all its optimizers together"
    lines = [f"{kind} ("]
    for member in recipe.members:
        lines += [
            f"wraps: {type(member.optimizer).__name__}",
            f"parameters: {_parameters(member)}",
            f"main params: {_main_params(member, recipe.groups)}",
            f"backend: {member.backend.name}, on {member.device}",
            f"held by this rank: {_held(member)}",
        ]
    lines += [
        f"loss scale: {'none' if recipe.grad_scaler is None else repr(recipe.grad_scaler)}",
        f"clipping: {who} {_clipping(recipe.clip_grad, whose)}",
        f"ranks: {_ranks(recipe.groups)}",
    ]
    for index, group in enumerate(group for member in recipe.members for group in member.optimizer.param_groups):
        options = {key: group[key] for key in sorted(group) if key not in ("params", "param_names")}
        lines += [
            f"Parameter Group {index}",
            f"    params: {count(len(group['params']), 'tensor')}",
            # Of a number on a device, such as a learning rate that a schedule writes, its place: reading it would wait.
            *(
                f"    {key}: {f'<on {it.device}>' if isinstance(it, Tensor) and it.device.type != 'cpu' else it}"
                for key, it in options.items()
            ),
        ]
    return "\n".join([*lines, ")"])


def summary(kind: str, recipe: StepRecipe) -> str:
    """Return one line that says what was built: an optimizer of class ``kind``, which is no chain."""
    (member,) = recipe.members
    scaler = "no loss scale" if recipe.grad_scaler is None else type(recipe.grad_scaler).__name__
    return (
        f"{kind}({type(member.optimizer).__name__}): {_parameters(member)}; "
        f"main params: {_main_params(member, recipe.groups)}; {scaler}; "
        f"{_clipping(recipe.clip_grad)}; "
        f"backend {member.backend.name} on {member.device}; {_ranks(recipe.groups)}; {_held(member)}"
        f"{'' if _has_16_bits(member) else _NO_16_BITS}"
    )


def _params(member: StepMember) -> list[nn.Parameter]:
    return [param for group in member.optimizer.param_groups for param in group["params"]]


def _clipping(clip_grad: float, whose: str = "gradients") -> str:
    return f"clips {whose} to norm {clip_grad}" if clip_grad else f"does not clip {whose} by itself"


def _has_16_bits(member: StepMember) -> bool:
    return any(param.dtype in HALF_DTYPES for param in _params(member))


def _parameters(member: StepMember) -> str:
    params, numels = _params(member), Counter[str]()
    for param in filter(attrgetter("requires_grad"), params):
        numels[str(param.dtype).removeprefix("torch.")] += param.numel()
    frozen = sum(not param.requires_grad for param in params)
    parts = [f"{numel:,} in {dtype}" for dtype, numel in numels.items()] or ["none are trained"]
    parts += [f"{count(frozen, 'tensor')} frozen"] * bool(frozen) + ["DTensors"] * any(map(is_dtensor, params))
    return ", ".join(parts)


def _main_params(member: StepMember, groups: ParallelGroups) -> str:
    mains = member.main_params
    form = "16-bit remainders beside the weights" if mains.stores_remainders else "float32"
    form = form if _has_16_bits(member) else "none, as no parameter has 16 bits"
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
    mains = states = there = 0
    for param in member.main_params:
        main = to_local(param.memory).nbytes if param.is_copy else 0  # an fp32 model param is its own main param
        state = sum(to_local(one).nbytes for one in tensors_in(member.optimizer.state.get(param.model, {})))
        mains, states, there = mains + main, states + state, there + (main + state) * (param.on_host is not None)
    where = f", {size(there)} of it in host memory" * bool(there)
    where = ", in host memory until reload()" if member.main_params.residence.is_away else where
    return f"{size(mains + states)} (main params {size(mains)}, optimizer state {size(states)}){where}"
