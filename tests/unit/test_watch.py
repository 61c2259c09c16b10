"""Outside writes to model params are told from counters and addresses."""

import torch
from torch import nn

from megascale.watch import Watch


def _params(count: int = 4) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3)) for _ in range(count)]


def test_writes_and_new_storage_are_told_by_place() -> None:
    """A write in place and storage of another tensor are each told once they happen, and until they are taken."""
    params = _params()
    watch = Watch(params)
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


def test_versions_of_own_writes_are_taken_together() -> None:
    """`take_written` takes the places it is told, and no others."""
    params = _params()
    watch = Watch(params)
    with torch.no_grad():
        for param in params:
            param.add_(1)
    watch.take_written([1, 3], [params[1]._version, params[3]._version])
    assert watch.written() == [0, 2]


def test_joined_remembers_what_the_parts_saw() -> None:
    """A write between the first look and the joining is still told afterwards, at its new place."""
    params = _params()
    first, second = Watch(params[:2]), Watch(params[2:])
    with torch.no_grad():
        params[1].add_(1)
    params[2].data = torch.ones(3)
    joined = Watch.joined([(second, 1), (second, 0), (first, 1), (first, 0)])
    assert joined.written() == [1, 2]
    assert joined.moved()
