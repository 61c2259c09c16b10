"""The simulated group keeps NCCL's rules: what would hang a GPU, or give wrong values there, is named on every rank."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascale.grad_sync import GradSync
from megascale.grad_sync.sharded_sync import ShardedGradSync
from tests.fake_device.device import FakeDevice
from tests.fake_device.models import model, sharded
from tests.fake_device.process import OnDevice
from tests.pool import RankFailure


def _ones(numel: int, dtype: torch.dtype = torch.float32, device: str = "cuda") -> Tensor:
    return torch.ones(numel, dtype=dtype, device=device)


def _sums(*numels: int) -> None:
    for numel in numels:
        dist.all_reduce(_ones(numel))


CASES: dict[str, tuple[Callable[[int], object], str]] = {
    "a swap": (
        lambda rank: _sums(128, 64) if rank == 0 else _sums(64, 128),
        "call 2 of ranks [0, 1]: rank 0 calls all_reduce float32[128] SUM, rank 1 calls all_reduce float32[64] SUM",
    ),
    "two kinds": (
        lambda rank: _sums(4) if rank == 0 else dist.reduce_scatter(_ones(2), [_ones(2), _ones(2)]),
        "rank 0 calls all_reduce float32[4] SUM, rank 1 calls reduce_scatter float32[2] float32[2] SUM",
    ),
    "unequal sizes": (
        lambda rank: dist.all_gather([_ones(3), _ones(4 + rank)], _ones(3 + rank)),
        "rank 0 calls all_gather float32[3] float32[4], rank 1 calls all_gather float32[3] float32[5]",
    ),
    "two dtypes": (
        lambda rank: dist.all_reduce(_ones(4, torch.float16 if rank else torch.bfloat16)),
        "rank 0 calls all_reduce bfloat16[4] SUM, rank 1 calls all_reduce float16[4] SUM",
    ),
    "two roots": (
        lambda rank: dist.broadcast(_ones(4), src=rank),
        "rank 0 calls broadcast float32[4] from 0, rank 1 calls broadcast float32[4] from 1",
    ),
    "a tensor of the host": (
        lambda rank: dist.all_reduce(_ones(4, device="cpu" if rank else "cuda")),
        "all_reduce float32[4] SUM: rank 0 has cuda:0, rank 1 has cpu",
    ),
    "the device of another rank": (
        lambda rank: dist.all_reduce(_ones(4, device="cuda:0")),
        "all_reduce float32[4] SUM: rank 0 has cuda:0, rank 1 has cuda:0",
    ),
}
"""What each rank calls after one sum, and what is said of it."""


def _refused(device: FakeDevice, case: str) -> str:
    _sums(8)
    with pytest.raises(dist.DistBackendError) as caught:
        CASES[case][0](dist.get_rank())
    return str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_what_ranks_do_not_do_alike_is_named(on_device: OnDevice, case: str) -> None:
    """Calls in another order, of other sizes, dtypes or roots; tensors that are not on a device of the rank's own."""
    for message in on_device.ranks(2, _refused, case):
        assert CASES[case][1] in message


def _asked(device: FakeDevice, sharded: bool, options: dict[str, Any]) -> tuple[list[str], int, list[str]]:
    """Return the reductions that buckets ask for, how many divisions come beside them, and the passes before them."""
    from tests.fake_device.ranks import StreamGroup  # it is "nccl" in this process

    params = [nn.Parameter(torch.zeros(24, device="cuda")) for _ in range(3)]
    named = [(str(index), param) for index, param in enumerate(params)]
    sync = (ShardedGradSync if sharded else GradSync)(named, bucket_numel=24, **options)
    for param in params:
        param.grad = torch.ones_like(param)
    asked, start = list[str](), StreamGroup._exchange

    def exchange(*call: Any) -> Any:
        asked.append(call[-1])
        return start(*call)

    with pytest.MonkeyPatch.context() as patched, device.watch() as seen:
        patched.setattr(StreamGroup, "_exchange", exchange)
        sync.finish()
    passes = [call.what for call in seen if call.kind in ("operator", "copy") and call.line().endswith(" packed")]
    return asked, sum(count for name, count in seen.operators().items() if "div" in name), passes


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("world", "options", "expected"),
    [
        (2, {}, ("AVG", 0, [])),
        pytest.param(3, {}, ("SUM", 3, []), marks=pytest.mark.slow),
        pytest.param(2, {"reduction": "sum"}, ("SUM", 0, []), marks=pytest.mark.slow),
        pytest.param(2, {"reduce_dtype": torch.bfloat16}, ("SUM", 3, ["aten::div.out"]), marks=pytest.mark.slow),
    ],
)
def test_an_average_spares_a_division(
    on_device: OnDevice, world: int, options: dict[str, Any], expected: tuple[str, int, list[str]], sharded: bool
) -> None:
    """Where its bits are those of a sum divided: for a power of two ranks and 32 bits. Lives compare the bits.

    What is sent in 16 bits is divided and cast in one pass over the bucket, and what is sent as it is in none.
    """
    operation, divisions, passes = expected
    for found in on_device.ranks(world, _asked, sharded, options):
        assert found == ([operation] * 3, divisions, passes * 3)


def _die_in_backward(device: FakeDevice) -> None:
    optimizer, loss = sharded(module := model(), bucket_numel=30)
    if dist.get_rank() == 1:
        next(module.parameters()).register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    optimizer.scale_loss(loss()).backward()
    optimizer.step()


def test_a_rank_that_dies_is_told_by_the_call_that_waits_for_it(on_device: OnDevice) -> None:
    """SIGKILL in the midst of backward, when reductions have begun."""
    with pytest.raises(RankFailure) as caught:
        on_device.ranks(2, _die_in_backward)
    assert "call 5 of ranks [0, 1]: rank 0 calls reduce_scatter" in caught.value.errors[0]
    assert "exit code -9" in caught.value.errors[1]
