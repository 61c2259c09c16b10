"""Outside writes to model params are told from counters and addresses."""

import torch
from torch import nn

from megascale.main_params.write_tracker import WriteTracker


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
