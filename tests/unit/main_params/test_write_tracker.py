"""Outside writes to model params are told from counters and addresses."""

import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from megascale.main_params.write_tracker import WriteTracker
from tests.meshes import mesh_of
from tests.pool import RankPool


def _params(count: int = 4) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3)) for _ in range(count)]


def test_writes_and_new_storage_are_told_by_place() -> None:
    """A write in place and storage of another tensor are each told once they happen, and until they are taken."""
    params = _params()
    watch = WriteTracker(params)
    assert watch.written() == []
    with torch.no_grad():
        params[2].add_(1)
    assert watch.written() == [2]
    assert not watch.moved()
    params[0].data = torch.ones(3)
    assert watch.written() == [0, 2]
    assert watch.moved()
    watch.take(0)
    assert watch.written() == [2]
    assert not watch.moved()
    watch.take(2)
    assert watch.written() == []
    params[3].data = torch.ones(3)  # no version tells of it
    assert watch.written() == [3]


def test_what_requires_grad_is_told_by_place() -> None:
    """Freezing changes no version."""
    params = _params()
    watch = WriteTracker(params)
    assert watch.written() == []
    params[1].requires_grad_(False)
    assert watch.written() == []
    assert watch.requires_grad == [True, False, True, True]
    params[1].requires_grad_(True)
    assert watch.written() == []
    assert watch.requires_grad == [True] * 4


def test_versions_are_handed_on_beside_dtensors(ranks: RankPool) -> None:
    """What was written, and only that, counts as written still when a DTensor joins plain params, or leaves them."""
    [(slots, are_new)] = ranks.run(1, _handed_on)
    assert (slots, are_new) == ([[1]] * 3, [False, True] * 3)


def _handed_on() -> tuple[list[list[int]], list[bool]]:
    params = _params(2)
    alone = WriteTracker(params)
    with torch.no_grad():
        params[1].add_(1)
    among = WriteTracker([*params, nn.Parameter(distribute_tensor(torch.zeros(3), mesh_of((1,), ("dp",)), [Shard(0)]))])
    again = WriteTracker(params)
    for slot in range(2):
        among.remember(slot, alone, slot)
        again.remember(slot, among, slot)
    trackers = (alone, among, again)
    return [one.written() for one in trackers], [one.has_new_version(slot) for one in trackers for slot in range(2)]
