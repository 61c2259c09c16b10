"""DistributedOptimizer with shard="parameters": whole parameters on one rank each, for any optimizer."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from megascale import DistributedOptimizer, MixedPrecisionOptimizer
from tests.counting import OperatorCounter
from tests.distributed.test_distributed_optimizer import _Messages, batch, config_of, net, same, scaler, weights
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


def _counts(shard: str) -> tuple[int, int, dict[str, int], int, int, set[str]]:
    module = net()
    optimizer = build(module, "sign", shard=shard, elementwise=True)
    take_step(optimizer, module, 0)
    optimizer.zero_grad()
    loss = module(batch(1, dist.get_rank(), FP16)).float().square().mean()
    with _Counted() as messages, OperatorCounter() as step:
        optimizer.scale_loss(loss).backward()
        optimizer.step()
    others = {str(op): n for op, n in step.counts.items() if op.namespace == "c10d" and "allreduce" in str(op)}
    owned = {name for name, main in optimizer.main_params() if main.numel()}
    return messages.sent, messages.elements, others, step.host_reads, len(optimizer.grad_sync.buckets), owned


def test_collectives_and_bytes_of_a_step(ranks: RankPool) -> None:
    """One all-reduce, one host read; a bucket is one reduction and one gather, with no more bytes than equal shards.
    Each parameter has one owner. Its bits are those of the unsharded optimizer in the checkpoint table, and in lives.
    """
    equal, owned = (ranks.run(3, _counts, shard) for shard in ("elements", "parameters"))
    for sent, _, others, host_reads, buckets, _ in owned:
        assert sent <= 2 * 2 * buckets
        assert others == {"c10d.allreduce_.default": 1}
        assert host_reads == 1
    assert sum(one[1] for one in owned) <= sum(one[1] for one in equal)
    assert sorted(name for one in owned for name in one[5]) == sorted(name for name, _ in net().named_parameters())


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


def _by_collectives(native: bool, shard: str) -> tuple[dict[str, Tensor], dict[str, int], int]:
    from megascale.grad_sync import reduction
    from megascale.utils import collectives

    module, gathers = net(), _Broadcasts()
    with pytest.MonkeyPatch.context() as patch:
        if native:
            for place in (collectives, reduction):
                patch.setattr(place, "is_message_passing", lambda *_: False)
            patch.setattr(dist, "all_gather", gathers)
        optimizer = build(module, "sign", shard=shard, elementwise=True)
        take_step(optimizer, module, 0)
        gathers.asked = 0
        with CommDebugMode() as counted:
            take_step(optimizer, module, 1)
    counts = {str(op).rpartition(".")[2]: n for op, n in counted.get_comm_counts().items()}
    if gathers.asked:
        counts["broadcast_"] = gathers.asked
    return everything(optimizer, module), counts, len(optimizer.grad_sync.buckets)


@pytest.mark.parametrize("shard", ["elements", "parameters"])
def test_collectives_of_the_backend(ranks: RankPool, shard: str) -> None:
    """With a backend's own reduce-scatter and gather, as NCCL's, one of each for a bucket and an all-reduce a step: the
    same bits at two ranks.
    """
    by_messages, native = (ranks.run(2, _by_collectives, native, shard) for native in (False, True))
    for (ours, *_), (theirs, counts, buckets) in zip(by_messages, native, strict=True):
        assert same(ours, theirs)
        assert sorted(counts.values()) == [1, buckets, buckets], counts


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
