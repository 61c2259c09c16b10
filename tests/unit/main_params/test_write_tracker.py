"""Outside writes to model params are told from counters and addresses."""

import numpy as np
import pytest
import torch
from torch import nn

from megascale.kernels.tensors import tensor_reader
from megascale.main_params.write_tracker import WriteTracker


@pytest.fixture(autouse=True, params=["python", pytest.param("native", marks=pytest.mark.slow)])
def _reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tensor_reader.ENVIRONMENT_VARIABLE, request.param)


def _params(count: int = 4) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3)) for _ in range(count)]


def _written(watch: WriteTracker) -> list[int]:
    return watch.written(watch.snapshot())


def _moved(watch: WriteTracker) -> bool:
    return watch.moved(watch.snapshot())


def test_writes_and_new_storage_are_told_by_place() -> None:
    """A write in place and storage of another tensor are each told once they happen, and until they are taken."""
    params = _params()
    watch = WriteTracker(params)
    assert _written(watch) == []
    with torch.no_grad():
        params[2].add_(1)
    assert _written(watch) == [2]
    assert not _moved(watch)
    params[0].data = torch.ones(3)
    assert _written(watch) == [0, 2]
    assert _moved(watch)
    watch.take(0)
    assert _written(watch) == [2]
    assert not _moved(watch)
    watch.take(2)
    assert _written(watch) == []
    params[3].data = torch.ones(3)  # no version tells of it
    assert _written(watch) == [3]


def test_versions_of_own_writes_are_taken_together() -> None:
    """`take_written` takes the places it is told, and no others."""
    params = _params()
    watch = WriteTracker(params)
    with torch.no_grad():
        for param in params:
            param.add_(1)
    watch.take_written(np.array([1, 3]), watch.snapshot().versions[[1, 3]])
    assert _written(watch) == [0, 2]


def test_what_another_watch_saw_is_remembered() -> None:
    """A write before the new watch is told after it, at its new place; a param taken anew tells of later ones."""
    params = _params(5)
    before = WriteTracker(params[:4])
    with torch.no_grad():
        params[1].add_(1)
        params[3].add_(1)
    params[2].data = torch.ones(3)
    watch = WriteTracker([params[4], params[3], params[2], params[1]])
    watch.remember(2, before, 2)
    watch.remember(3, before, 1)
    assert _written(watch) == [2, 3]
    assert _moved(watch)


def test_one_snapshot_is_compared_with_what_is_remembered_now() -> None:
    """Also a second time, after a param was taken as it is, in another shape, or remembered by another watch."""
    params = _params()
    watch, before = WriteTracker(params), WriteTracker(params)
    params[0].data = torch.ones(2, 3)
    now = watch.snapshot()
    assert watch.moved(now)
    watch.take(0)
    assert not watch.moved(now)
    watch.remember(0, before, 0)
    assert watch.moved(now)


def test_what_requires_grad_is_told_by_place() -> None:
    """Freezing changes no version."""
    params = _params()
    watch = WriteTracker(params)
    params[1].requires_grad_(False)
    assert watch.requires_grad(watch.snapshot()).tolist() == [1, 0, 1, 1]
    assert _written(watch) == []
