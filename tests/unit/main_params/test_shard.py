"""ParamShard: a range of a flattened tensor is boxes, and travels through torch.distributed.checkpoint as such."""

import math
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from megascale.checkpoint.directory import MANIFEST_NAME
from megascale.checkpoint.files import PlannedRead, write_file
from megascale.checkpoint.manifest import DataFile, Manifest
from megascale.checkpoint.nest import flatten
from megascale.checkpoint.pieces import on_host, pieces_of
from megascale.errors import ArgumentError, CheckpointError, UsageError
from megascale.main_params.shard import ParamShard, boxes_of

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def _ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    start, stop = sorted(draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    return shape, start, stop


@given(_ranges())
def test_boxes_are_the_range_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    """The boxes' elements, row-major and box after box, are exactly start to stop; there are at most 2 * ndim - 1."""
    shape, start, stop = case
    boxes = list(boxes_of(shape, start, stop))
    visited: list[int] = []
    for box in boxes:
        assert box.begin == len(visited)
        for index in np.ndindex(*box.sizes):
            place = tuple(offset + i for offset, i in zip(box.offsets, index, strict=True))
            visited.append(int(np.ravel_multi_index(place, shape)) if shape else 0)
        assert box.end == len(visited)
    assert visited == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@st.composite
def _resharding(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int], list[int]]:
    shape = draw(SHAPES)
    ends = st.lists(st.integers(0, math.prod(shape)), max_size=3)
    return shape, [0, *sorted(draw(ends)), math.prod(shape)], [0, *sorted(draw(ends)), math.prod(shape)]


def _write(folder: Path, pieces: list[ParamShard]) -> Manifest:
    """Write ``pieces`` under the name "w" as so many ranks do, in this process."""
    files: dict[str, DataFile] = {}
    for rank, piece in enumerate(pieces):
        mine = pieces_of({"w": piece}, rank)
        files |= write_file(folder / f"rank_{rank}.safetensors", mine, map(on_host, mine.values()))
    tree, _ = flatten(pieces[0], "w")
    Manifest(1, len(pieces), {"w": tree}, [None] * len(pieces), files).write(folder)
    return Manifest.read(folder)


@settings(deadline=None, max_examples=40)
@given(_resharding(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_any_cut_is_read_back_by_any_other(
    case: tuple[tuple[int, ...], list[int], list[int]], dtype: torch.dtype
) -> None:
    """Ranges written by N ranks, some of them empty, come back whole, and cut otherwise, bit for bit."""
    shape, written, wanted = case
    whole = torch.randn(shape).to(dtype)
    flat = whole.reshape(-1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = _write(folder, [ParamShard(flat[a:b], shape, a) for a, b in pairwise(written)])
        shards = [ParamShard(torch.empty(b - a, dtype=dtype), shape, a) for a, b in pairwise(wanted)]
        for shard in shards:
            PlannedRead(folder, manifest, {"w": shard}).read()
        got = torch.empty(shape, dtype=dtype)
        PlannedRead(folder, manifest, {"w": got}).read()
    assert torch.equal(torch.cat([shard.piece for shard in shards]), flat)
    assert torch.equal(got, whole)


def test_read_goes_into_the_piece_itself(tmp_path: Path) -> None:
    """Nothing but the range changes, and the piece keeps its memory."""
    manifest = _write(tmp_path, [ParamShard(torch.arange(12.0), (3, 4), 0)])
    memory = torch.full((9,), -1.0)
    shard = ParamShard(memory[2:7], (3, 4), 3)
    PlannedRead(tmp_path, manifest, {"w": shard}).read()
    assert memory.tolist() == [-1, -1, 3, 4, 5, 6, 7, -1, -1]


def test_part_of_the_ranks_is_refused(tmp_path: Path) -> None:
    """A save without the ranks that hold the rest of a tensor leaves no checkpoint, which would never load."""
    with pytest.raises(CheckpointError, match=r"pieces of 'w' do not cover .* ranks that hold a part .* take part"):
        _write(tmp_path, [ParamShard(torch.arange(7.0), (3, 4), 0)])
    assert not (tmp_path / MANIFEST_NAME).exists()


@pytest.mark.parametrize(
    "use",
    [
        lambda shard: shard + 1,
        lambda shard: shard.to("cpu", copy=True),
        lambda shard: shard.clone(),
        lambda shard: torch.zeros(3, 4).copy_(shard),
    ],
)
def test_use_as_a_tensor_is_refused(use: Callable[[Tensor], Any]) -> None:
    """A part is never taken for the whole."""
    with pytest.raises(UsageError, match=r"on a ParamShard, which is a part of a tensor only; use its piece"):
        use(ParamShard(torch.zeros(5), (3, 4), 7))


@pytest.mark.parametrize(("piece", "start"), [(torch.zeros(5, 1), 0), (torch.zeros(6), 7), (torch.zeros(2), -1)])
def test_piece_that_does_not_fit_is_refused(piece: Tensor, start: int) -> None:
    """A wrong range is found where it is made, not when the checkpoint is read."""
    with pytest.raises(ArgumentError, match=r"does not fit a tensor of \(3, 4\)"):
        ParamShard(piece, (3, 4), start)
