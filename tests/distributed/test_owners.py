"""DistributedOptimizer with shard="parameters": whole parameters on one rank each, for any optimizer."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from megascale import DistributedOptimizer, MixedPrecisionOptimizer, ParallelGroups
from megascale.errors import InnerStepError, StateDictError
from megascale.grad_sync import GradSync
from tests.counting import OperatorCounter
from tests.distributed.test_distributed_optimizer import SIZES, _Messages, batch, config_of, net, same, scaler, weights
from tests.meshes import hybrid_groups
from tests.pool import RankPool
from tests.training import Sign
from tests.whole_optimizers import WHOLE, named

FP16 = torch.float16
KINDS = WHOLE | {"adamw": lambda m: torch.optim.AdamW(named(m), lr=1e-2), "sign": lambda m: Sign(named(m))}


def build(module: nn.Module, inner: str, **options: Any) -> DistributedOptimizer:
    """Return a DistributedOptimizer of small buckets, which takes whole parameters by itself."""
    given: dict[str, Any] = {"bucket_numel": 300} | options
    return DistributedOptimizer(
        KINDS[inner](module), config_of(FP16), scaler(FP16), modules=module, grads_are_scaled=True, **given
    )


def build_replicated(module: nn.Module, inner: str) -> MixedPrecisionOptimizer:
    """Return the unsharded optimizer, whose gradients a GradSync reduces."""
    optimizer = KINDS[inner](module)
    names = {id(param): name for name, param in module.named_parameters()}
    trained = [(names[id(param)], param) for group in optimizer.param_groups for param in group["params"]]
    return MixedPrecisionOptimizer(
        optimizer,
        config_of(FP16),
        scaler(FP16),
        named_parameters=trained,
        grad_sync=GradSync(trained, bucket_numel=300),
        grads_are_scaled=True,
    )


def nested(value: Any, path: str = "") -> dict[str, Tensor]:
    """Return the tensors and numbers of a nest by path."""
    if isinstance(value, Tensor):
        return {path: value}
    if isinstance(value, (int, float)):
        return {path: torch.tensor(value)}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {key: found for name, item in items for key, found in nested(item, f"{path}.{name}").items()}


def everything(optimizer: MixedPrecisionOptimizer, module: nn.Module) -> dict[str, Tensor]:
    """Return main params, state of any form, and weights."""
    packed = optimizer.state_dict()
    return nested(packed["main_params"]) | nested(packed["optimizer"]["state"]) | weights(module)


def take_step(
    optimizer: MixedPrecisionOptimizer, module: nn.Module, step: int, *, bad: bool = False, rank: int | None = None
) -> bool:
    """Take one step on this rank's batch; ``bad``: its loss is infinite. Returns whether it landed."""
    optimizer.zero_grad()
    loss = module(batch(step, dist.get_rank() if rank is None else rank, FP16)).float().square().mean()
    optimizer.scale_loss(loss * (math.inf if bad else 1.0)).backward()
    return bool(optimizer.step().success)


def _against_unsharded(inner: str, hybrid: bool = False) -> tuple[dict[str, bool], dict[str, Tensor]]:
    """Train sharded and unsharded on the same reduced gradients: sums of two, or of equal ones, have one order."""
    world, rank = dist.get_world_size(), dist.get_rank()
    of_rank = None if world == 2 else 0
    module, twin = net(), net()
    groups = hybrid_groups() if hybrid else None
    overlap = inner == "soap"
    ours = build(module, inner, shard="parameters", groups=groups, overlap_param_gather=overlap)
    theirs = build_replicated(twin, inner)
    found: dict[str, bool] = {}
    for step in range(world + 3):
        bad = step >= 2 and step - 2 == rank  # each rank overflows in turn
        before = everything(ours, module)
        landed = [
            take_step(ours, module, step, bad=bad, rank=of_rank),
            take_step(theirs, twin, step, bad=bad, rank=of_rank),
        ]
        found[f"landed {step}"] = landed == [not 2 <= step < world + 2] * 2
        found[f"unchanged {step}"] = same(before, everything(ours, module)) != landed[0]
    found["bits"] = same(everything(ours, module), everything(theirs, twin))
    found["scale"] = bool(ours.get_loss_scale() == theirs.get_loss_scale())
    found["owners"] = _each_has_one_owner(ours, dict(theirs.main_params()))
    return found, everything(ours, module)


def _each_has_one_owner(optimizer: DistributedOptimizer, whole: dict[str, Tensor]) -> bool:
    """Whether each main param is whole on one rank of those that share a copy, and its state nowhere else."""
    owned = {name: main.shape for name, main in optimizer.main_params() if main.numel()}
    everywhere: list[Any] = [None] * dist.get_world_size(optimizer.groups.data_shard)
    dist.all_gather_object(everywhere, owned, group=optimizer.groups.data_shard)
    every = [pair for one in everywhere for pair in one.items()]
    state = optimizer.optimizer.state
    names = {id(param): name for bucket in optimizer.grad_sync.buckets for name, param in bucket.params.items()}
    is_elsewhere = all(
        names[id(param)] in owned or not any(value.numel() for key, value in nested(held).items() if key != ".step")
        for param, held in state.items()
    )
    return sorted(every) == sorted((name, main.shape) for name, main in whole.items()) and is_elsewhere


@pytest.mark.default("adafactor-2")
@pytest.mark.parametrize(("inner", "world"), [(inner, world) for inner in (*WHOLE, "adamw") for world in SIZES])
def test_bits_of_the_unsharded_optimizer(ranks: RankPool, inner: str, world: int) -> None:
    """Invariants 2 and 3: main params, state and weights as unsharded; overflows on each rank in turn change no bit."""
    results = ranks.run(world, _against_unsharded, inner)
    for found, state in results:
        assert all(found.values()), found
        assert same(state, results[0][1])


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["soap", "adamw"])
def test_owners_of_each_copy(ranks: RankPool, inner: str) -> None:
    """Two copies of two shards each: both copies have the bits of the unsharded optimizer."""
    for found, _ in ranks.run(4, _against_unsharded, inner, True):
        assert all(found.values()), found


class _Counted(_Messages):
    """Counts also the elements that this rank sends."""

    elements = 0

    def __enter__(self) -> "_Counted":
        super().__enter__()
        isend = dist.isend

        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.elements += tensor.numel()
            assert tensor.numel()
            return isend(tensor, *args, **kwargs)

        dist.isend = counted
        return self


def _counts(shard: str) -> tuple[int, int, dict[str, int], int, int]:
    module = net()
    optimizer = build(module, "sign", shard=shard, elementwise=True)
    take_step(optimizer, module, 0)
    optimizer.zero_grad()
    loss = module(batch(1, dist.get_rank(), FP16)).float().square().mean()
    with _Counted() as messages, OperatorCounter() as step:
        optimizer.scale_loss(loss).backward()
        optimizer.step()
    others = {str(op): n for op, n in step.counts.items() if op.namespace == "c10d" and "allreduce" in str(op)}
    return messages.sent, messages.elements, others, step.host_reads, len(optimizer.grad_sync.buckets)


def test_collectives_and_bytes_of_a_step(ranks: RankPool) -> None:
    """One all-reduce, one host read; a bucket is one reduction and one gather, with no more bytes than equal shards."""
    equal, owned = (ranks.run(3, _counts, shard) for shard in ("elements", "parameters"))
    for sent, _, others, host_reads, buckets in owned:
        assert sent <= 2 * 2 * buckets
        assert others == {"c10d.allreduce_.default": 1}
        assert host_reads == 1
    assert sum(elements for _, elements, _, _, _ in owned) <= sum(elements for _, elements, _, _, _ in equal)


class _Broadcasts:
    """What NCCL makes of an all-gather of shards of several sizes: a broadcast from each rank, waited for together."""

    asked = 0

    def __call__(self, shards: list[Tensor], shard: Tensor, *, group: Any, async_op: bool) -> "_Broadcasts":
        assert async_op
        assert shards[dist.get_rank(group)].data_ptr() == shard.data_ptr()
        self.asked += 1
        self.works = [dist.broadcast(part, src=rank, group=group, async_op=True) for rank, part in enumerate(shards)]
        return self

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self.works:
            work.wait()


def _by_collectives(native: bool) -> tuple[dict[str, Tensor], int, int, int]:
    from megascale.grad_sync import reduction
    from megascale.main_params import gather
    from megascale.utils import collectives

    module, gathers = net(), _Broadcasts()
    with pytest.MonkeyPatch.context() as patch:
        if native:
            for place in (collectives, reduction, gather):
                patch.setattr(place, "is_message_passing", lambda *_: False)
            patch.setattr(dist, "all_gather", gathers)
        optimizer = build(module, "sign")
        take_step(optimizer, module, 0)
        gathers.asked = 0
        with CommDebugMode() as counted:
            take_step(optimizer, module, 1)
        reductions = sum(n for op, n in counted.get_comm_counts().items() if "reduce_scatter" in str(op))
    return everything(optimizer, module), reductions, gathers.asked, len(optimizer.grad_sync.buckets)


def test_collectives_of_the_backend(ranks: RankPool) -> None:
    """With a backend's own reduce-scatter and gather of unequal shards, one of each for a bucket: the same bits."""
    by_messages, native = ranks.run(2, _by_collectives, False), ranks.run(2, _by_collectives, True)
    for (ours, _, _, _), (theirs, reductions, gathers, buckets) in zip(by_messages, native, strict=True):
        assert same(ours, theirs)
        assert reductions == gathers == buckets


def _over_a_group_of(backend: str) -> dict[str, Tensor]:
    group, module = dist.new_group(backend=backend), net()
    optimizer = build(module, "sign", groups=group, overlap_param_gather=True)
    for step in range(2):
        take_step(optimizer, module, step)
    return everything(optimizer, module)


def test_backends_by_device(ranks: RankPool) -> None:
    """A group with a backend for each kind of device, as docs/fsdp2.md asks for: what counts is the parameters'."""
    alone, by_device = (ranks.run(2, _over_a_group_of, backend) for backend in ("gloo", "cpu:gloo"))
    assert all(map(same, alone, by_device))


def _unportable() -> str:
    module = net()
    optimizer = build(module, "sign")
    take_step(optimizer, module, 0)
    if dist.get_rank() == 1:
        next(iter(optimizer.optimizer.state.values()))["helper"] = object()
    with pytest.raises(StateDictError) as caught:
        optimizer.state_dict()
    return str(caught.value)


def test_state_that_one_owner_cannot_save_is_named_on_all(ranks: RankPool) -> None:
    """Invariant 7: only its owner has a parameter's state; all ranks raise what is wrong with it."""
    for message in ranks.run(2, _unportable):
        assert "rank 1: state[" in message
        assert "['helper'] is a object, which a state dict cannot hold" in message


class _Fails(Sign):
    """Raises at its second step where it has a parameter of one row."""

    taken = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        self.taken += 1
        if self.taken == 2 and any(len(p) == 1 and p.dim() == 2 for p in self.param_groups[0]["params"]):
            raise RuntimeError("no convergence")
        super().step()


def _failing(alone: bool) -> list[str]:
    module = net()
    optimizer = DistributedOptimizer(
        _Fails(named(module)),
        config_of(FP16),
        scaler(FP16),
        modules=module,
        bucket_numel=300,
        groups=ParallelGroups() if alone else None,
    )
    messages = []
    for step in range(4):
        try:
            take_step(optimizer, module, step)
            messages.append("")
        except InnerStepError as error:
            messages.append(str(error))
    return messages


def test_step_that_fails_on_its_owner_is_every_ranks_error(ranks: RankPool) -> None:
    """Invariant 7: the owner's optimizer raises: no rank is left waiting, and all raise it at the next step."""
    for messages in ranks.run(2, _failing, False):
        assert messages == ["", "", messages[2], ""]
        assert "_Fails.step() raised RuntimeError: no convergence" in messages[2]
    for messages in ranks.run(2, _failing, True):
        assert "_Fails.step() raised RuntimeError: no convergence" in messages[1]
        assert messages == ["", messages[1], "", ""]
