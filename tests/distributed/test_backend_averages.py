"""A backend that averages on the way spares a pass over the bucket, where the bits are those of a division.

NCCL is the one that does. Here gloo's average stands in for it, in what is asked for and in the bits of two and four
ranks.
"""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascale import ParallelGroups
from megascale.grad_sync import reduction
from megascale.grad_sync.sharded_sync import ShardedGradSync
from megascale.grad_sync.sync import GradSync
from megascale.utils import collectives
from tests.counting import OperatorCounter
from tests.meshes import hybrid_groups
from tests.pool import RankPool

PASSES = (
    torch.ops.aten.div_.Scalar,
    torch.ops.aten.div_.Tensor,
    torch.ops.aten.div.out,
    torch.ops.aten._to_copy.default,
)
"""Over a bucket, to divide it or to cast it to what travels."""


class _Asked:
    """Counts the reductions that collectives are asked for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ops: Counter[str] = Counter()
        patch.setattr(dist, "all_reduce", self._counted(dist.all_reduce))
        patch.setattr(collectives, "_reduce_scatter", self._counted(collectives._reduce_scatter))

    def _counted(self, real: Any) -> Any:
        def collective(*tensors: Tensor, op: Any, **options: Any) -> Any:
            self.ops[str(op).rpartition(".")[2]] += 1
            return real(*tensors, op=op, **options)

        return collective


def _as_on_nccl(group: Any, device: torch.device) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group=None: "cpu:nccl")
        return collectives.can_average_exactly(group, device)


def _reduced(
    backend: str, sharded: bool, divisor: float | None, hybrid: bool, options: dict[str, Any]
) -> tuple[list[Tensor], dict[str, int], int]:
    """Return this rank's part of each bucket, the reductions that were asked for, and the passes over buckets."""
    groups = hybrid_groups() if hybrid else ParallelGroups(dist.group.WORLD)
    params = [nn.Parameter(torch.zeros(24)) for _ in range(3)]
    torch.manual_seed(dist.get_rank())
    grads = [torch.randn(24) * 10.0**power for power in (-30, 0, 30)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction, "is_message_passing", lambda *_: False)
        if backend == "nccl":
            patch.setattr(reduction, "can_average_exactly", _as_on_nccl)
        named = [(str(index), param) for index, param in enumerate(params)]
        sync = (ShardedGradSync if sharded else GradSync)(named, groups=groups, bucket_numel=24, **options)
        asked = _Asked(patch)
        if divisor is not None:
            sync.set_divisor(divisor)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        with OperatorCounter() as counter:
            sync.finish()
        kept = [bucket.reduction.kept.clone() for bucket in sync.buckets]
        sync.detach()
    return kept, dict(asked.ops), sum(counter.counts[op] for op in PASSES)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("world", "divisor", "hybrid", "options", "averages"),
    [
        (2, None, False, {}, True),
        (2, 2.0, False, {}, True),
        pytest.param(4, None, False, {}, True, marks=pytest.mark.slow),
        pytest.param(4, None, True, {}, True, marks=pytest.mark.slow),
        pytest.param(3, None, False, {}, False, marks=pytest.mark.slow),
        (2, 7.0, False, {}, False),
        (2, None, False, {"reduction": "sum"}, False),
        (2, None, False, {"reduce_dtype": torch.bfloat16}, False),
    ],
)
def test_an_average_is_a_sum_divided(
    ranks: RankPool,
    world: int,
    divisor: float | None,
    hybrid: bool,
    options: dict[str, Any],
    averages: bool,
    sharded: bool,
) -> None:
    """The same bits, without a pass for it, where the number of ranks is a power of two; elsewhere nothing changes.

    What travels in 16 bits is divided and cast in one pass.
    """
    hybrid = hybrid and sharded
    plain = ranks.run(world, _reduced, "gloo", sharded, divisor, hybrid, options)
    nccl = ranks.run(world, _reduced, "nccl", sharded, divisor, hybrid, options)
    for (expected, asked, passes), (kept, asked_nccl, passes_nccl) in zip(plain, nccl, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, kept, strict=True))
        assert set(asked) == {"SUM"}
        assert set(asked_nccl) == {"AVG" if averages else "SUM"}
        assert sum(asked_nccl.values()) == sum(asked.values())
        assert passes_nccl == (0 if averages else passes)
        assert passes == (0 if options == {"reduction": "sum"} else 3)
