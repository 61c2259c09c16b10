"""The process group of the simulated device: what collectives give, and what a missing wait for one shows."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.fake_device.device import ORDERS, FakeDevice, WrittenAfterFree
from tests.fake_device.process import OnDevice
from tests.pool import RankFailure

LATE = ORDERS[1:]
RUNS = [("late", 0), ("side first", 0), *(("random", seed) for seed in range(8))]
GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _mine(where: str) -> Tensor:
    return torch.arange(6.0, device=where) + 10 * dist.get_rank()


def _waited(work: dist.Work | None, *outputs: Tensor) -> tuple[Tensor, ...]:
    if work is not None:
        work.wait()
    return outputs


def _functional(where: str) -> list[Tensor]:
    from torch.distributed import _functional_collectives as functional

    group: Any = dist.group.WORLD
    gather: Any = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    scatter: Any = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
    return [
        gather(_mine(where), 0, group) + 0,
        functional.all_reduce(_mine(where), "sum", group) + 0,
        scatter(_mine(where), "sum", 0, group) + 0,
    ]


def _results(where: str) -> list[list[float]]:
    """Return what each collective gives this rank."""
    rank, mine = dist.get_rank(), _mine(where)
    reduced, averaged, most, first = mine.clone(), mine.clone(), mine.clone(), mine.clone()
    whole, half, parts = torch.zeros(12, device=where), torch.zeros(3, device=where), [torch.zeros(2), torch.zeros(4)]
    parts = [part.to(where) for part in parts]
    part, objects = parts[rank].clone(), [None, None]
    given = [
        *_waited(dist.all_reduce(reduced, async_op=True), reduced),
        *_waited(dist.all_reduce(averaged, dist.ReduceOp.AVG), averaged),
        *_waited(dist.all_reduce(most, dist.ReduceOp.MAX), most),
        *_waited(dist.broadcast(first, 1), first),
        *_waited(GATHER(whole, mine, async_op=True), whole),
        *_waited(dist.all_gather(parts, mine[: parts[rank].numel()].clone(), async_op=True), *parts),
        *_waited(SCATTER(half, mine), half),
        *_waited(dist.reduce_scatter(part, list(mine.split([2, 4])), async_op=True), part),
        *_functional(where),
    ]
    dist.all_gather_object(objects, rank)
    dist.barrier()
    return [*(value.tolist() for value in given), objects]


def _all_results(device: FakeDevice) -> list[list[list[float]]]:
    found = [_results("cpu"), _results("cuda")]
    for order in LATE:
        with device.running(order, 1):
            found.append(_results("cuda"))
    return found


def test_collectives_give_what_they_are_asked_for(on_device: OnDevice) -> None:
    """On the host, on the device, and in each order of streams."""
    mine = [[float(10 * rank + at) for at in range(6)] for rank in range(2)]
    total = [first + second for first, second in zip(*mine, strict=True)]
    for rank, found in enumerate(on_device.ranks(2, _all_results)):
        half = total[3 * rank : 3 * rank + 3]
        expected = [
            total,
            [value / 2 for value in total],
            mine[1],
            mine[1],
            mine[0] + mine[1],
            mine[0][:2],
            mine[1][:4],
            half,
            [total[:2], total[2:]][rank],
            mine[0] + mine[1],
            total,
            half,
            [0, 1],
        ]
        assert found == [expected] * (2 + len(LATE))


def _used_too_early(waits: bool) -> bool:
    """Return whether a product sees what was gathered."""
    whole, mine = torch.zeros(4, device="cuda"), torch.ones(2, device="cuda")
    torch.accelerator.synchronize()
    work = GATHER(whole, mine, async_op=True)
    if waits:
        work.wait()
    twice = whole * 2
    right = twice.tolist() == [2.0] * 4
    work.wait()
    return right


def _sent_too_early(waits: bool) -> bool:
    """Return whether a reduction sends what another stream writes."""
    total, side = torch.zeros(2, device="cuda"), torch.Stream("cuda")
    torch.accelerator.synchronize()
    with side:
        total.fill_(1)
    if waits:
        torch.accelerator.current_stream().wait_stream(side)
    dist.all_reduce(total)
    return bool(total.tolist() == [2.0] * 2)


def _written_too_early(waits: bool) -> bool:
    """Return whether what is sent stays as it is until it was sent."""
    whole, mine = torch.zeros(4, device="cuda"), torch.ones(2, device="cuda")
    work = GATHER(whole, mine, async_op=True)
    if waits:
        work.wait()
    mine.fill_(5)
    torch.accelerator.current_stream().synchronize()
    work.wait()
    return bool(whole.tolist() == [1.0] * 4)


def _freed_too_early(waits: bool) -> bool:
    """Return whether what is written is kept until it was written."""
    whole, mine = torch.zeros(4, device="cuda"), torch.ones(2, device="cuda")
    work = GATHER(whole, mine, async_op=True)
    if waits:
        work.wait()
    del work, whole  # another work would keep them
    torch.zeros(4, device="cuda")
    torch.accelerator.current_stream().synchronize()
    return True


MISTAKES: dict[str, tuple[Callable[[bool], bool], set[str]]] = {
    "use": (_used_too_early, {"late", "random"}),  # a stream that is first is early enough
    "send": (_sent_too_early, {"late", "random"}),
    "write": (_written_too_early, {"late", "random"}),
    "free": (_freed_too_early, {"late", "random"}),
}
"""What goes wrong without a wait, and the orders in which that shows."""


def _right(device: FakeDevice, waits: bool) -> dict[tuple[str, str], list[bool]]:
    found: dict[tuple[str, str], list[bool]] = {}
    for mistake, (function, _) in MISTAKES.items():
        for order, seed in RUNS:
            try:
                with device.running(order, seed):
                    is_right = function(waits)
            except WrittenAfterFree:
                is_right = False
            found.setdefault((mistake, order), []).append(is_right)
    return found


def _shown(ranks: Sequence[dict[tuple[str, str], list[bool]]]) -> set[tuple[str, str]]:
    return {key for found in ranks for key, right in found.items() if not all(right)}


def test_a_missing_wait_for_a_collective_shows(on_device: OnDevice) -> None:
    """With the wait values are right in every order; without it they are wrong where the order lets them."""
    assert _shown(on_device.ranks(2, _right, True)) == set()
    expected = {(mistake, order) for mistake, (_, orders) in MISTAKES.items() for order in orders}
    assert _shown(on_device.ranks(2, _right, False)) == expected


def _fails_alone(device: FakeDevice) -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 alone")
    dist.barrier()


def test_what_one_rank_raises_is_told(on_device: OnDevice) -> None:
    """The others, which wait for it, are ended."""
    with pytest.raises(RankFailure, match="rank 1 alone"):
        on_device.ranks(2, _fails_alone)
