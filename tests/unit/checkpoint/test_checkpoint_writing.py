"""The files of a checkpoint, as they are written, and their checksums."""

import ctypes
import io
import mmap
import os
import zipfile
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale.checkpoint import archive_writing, storage
from megascale.checkpoint.archive_writing import write_by_torch
from megascale.checkpoint.crc32 import combined
from megascale.checkpoint.manifest import CHUNK_BYTES, FileMark, Manifest, mark_of
from megascale.checkpoint.storage import Planning
from tests.checkpoint_cases import read_metadata


@pytest.mark.parametrize("size", [0, 5, 2 * CHUNK_BYTES + 5])
def test_mark_is_that_of_the_whole_file(tmp_path: Path, size: int) -> None:
    """Of an empty one, and of one that is read in chunks."""
    whole = os.urandom(size)
    (tmp_path / "file").write_bytes(whole)
    assert mark_of(tmp_path / "file") == FileMark(size, zlib.crc32(whole))


class _Uncopied(str):
    """A leaf of a tree that must not be copied."""

    def __deepcopy__(self, memo: object) -> "_Uncopied":
        raise RuntimeError("copied")


def test_manifest_is_written_without_copies_of_its_trees(tmp_path: Path) -> None:
    """A copy of every leaf costs as much as all else of the manifest; what is read is what was written."""
    manifest = Manifest(3, 1, {"model": {"dict": [["b", _Uncopied("x")], ["a", 1]]}}, [None], {"file": FileMark(5, 7)})
    manifest.write(tmp_path)
    read = Manifest.read(tmp_path)
    assert read == manifest


def test_a_file_of_torchs_archives_has_its_mark(tmp_path: Path) -> None:
    """Each archive is torch.save's own, of the tensor alone where it is a view; the mark covers the whole file."""
    tensors = [torch.zeros(CHUNK_BYTES, dtype=torch.uint8), torch.zeros(0), *torch.randn(20, 4)]
    lengths, mark = write_by_torch(tmp_path / "file", tensors)
    assert mark == mark_of(tmp_path / "file")
    assert sum(lengths) == mark.size
    content = io.BytesIO((tmp_path / "file").read_bytes())
    for tensor, length in zip(tensors, lengths, strict=True):
        archive = content.read(length)
        assert _records(archive) == _records(_saved(tensor))
        assert torch.equal(torch.load(io.BytesIO(archive), weights_only=True), tensor)


def _saved(tensor: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor.clone(), stream)
    return stream.getvalue()


def _records(archive: bytes) -> dict[str, bytes]:
    """Return a zip archive's records; raises if a checksum does not fit."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return {name: opened.read(name) for name in opened.namelist() if "serialization_id" not in name}


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64]


def test_archives_are_those_of_torch(tmp_path: Path) -> None:
    """Every dtype, no dimension, nothing in it, a view, a transposed one; larger than a chunk, and more than a batch.

    Records are torch.save's own, with checksums that unzip accepts, and the file's checksum is that of the file.
    """
    random = torch.randint(0, 2, (CHUNK_BYTES + 77,), dtype=torch.uint8)
    tensors = [random[: 24 * dtype.itemsize].view(dtype).reshape(2, 3, 4) for dtype in DTYPES]
    tensors += [
        torch.tensor(3.0),
        torch.empty(3, 0),
        random[5:9],
        random[:6].view(3, 2).t(),
        random,
        *torch.randn(600, 3),
    ]
    planned = Planning().plan({f"{place}": tensor for place, tensor in enumerate(tensors)}, tmp_path, None)
    places, marks = planned.write()
    ((name, mark),) = marks.items()
    assert mark == mark_of(tmp_path / name)
    content = (tmp_path / name).read_bytes()
    assert places is not None
    assert len(places) == len(tensors)
    for place in places:
        info, tensor = place.storage_data, tensors[int(place.index.fqn)]
        archive = content[info.offset : info.offset + info.length]
        assert _records(archive) == _records(_saved(tensor.contiguous()))
        assert torch.load(io.BytesIO(archive), weights_only=True).shape == tensor.shape


def test_archive_that_torch_would_write_otherwise_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then torch.save writes every tensor, and the checkpoint is read all the same."""
    monkeypatch.setattr(storage, "archive_of", lambda *_: None)
    wanted = torch.randn(5, 3)
    planned = Planning().plan({"a": wanted[:2], "b": wanted}, tmp_path, None)
    planned.write_metadata([planned.write()[0]])
    got = torch.empty(5, 3)
    storage.plan_read(tmp_path, read_metadata(tmp_path), {"b": got}).read()
    assert torch.equal(got, wanted)


def test_short_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call may write less than it was given: at a signal, at 2 GiB, on a disk that is nearly full."""
    pwritev = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda to, parts, at: pwritev(to, [memoryview(parts[0])[:1000]], at))
    wanted = torch.randn(3000)
    planned = Planning().plan({"a": wanted, "b": wanted}, tmp_path, None)
    planned.write_metadata([planned.write()[0]])
    got = torch.empty(3000)
    storage.plan_read(tmp_path, read_metadata(tmp_path), {"b": got}).read()
    assert torch.equal(got, wanted)


def test_plan_is_kept_while_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second save plans nothing and has the same index; another shape, dtype or name is planned anew."""
    plans: list[Any] = []
    create = storage._SavePlanner.create_local_plan

    def counted(planner: Any) -> Any:
        plans.append(planner)
        return create(planner)

    monkeypatch.setattr(storage._SavePlanner, "create_local_plan", counted)
    planning = storage.Planning()

    def save(number: int, **tensors: torch.Tensor) -> bytes:
        folder = tmp_path / str(number)
        folder.mkdir()
        planned = planning.plan(tensors, folder, None)
        places, _ = planned.write()
        planned.write_metadata([places])
        planned.pieces.reduce(index_is_kept=places is None)
        for name, tensor in tensors.items():
            got = torch.empty_like(tensor)
            storage.plan_read(folder, read_metadata(folder), {name: got}).read()
            assert torch.equal(got, tensor)
        return (folder / ".metadata").read_bytes()

    one = torch.randn(4)
    assert save(1, a=one) == save(2, a=one + 1)
    assert len(plans) == 1
    for number, tensors in enumerate([{"a": torch.randn(5)}, {"a": one.half()}, {"a": one, "b": one}, {"b": one}], 3):
        save(number, **tensors)
        assert len(plans) == number - 1
    planning.forget()
    save(9, b=one)
    assert len(plans) == 6


@given(first=st.binary(max_size=50), second=st.binary(max_size=50))
def test_checksums_of_parts_are_joined(first: bytes, second: bytes) -> None:
    """As zlib's own of both."""
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_disk_begins_while_the_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is handed whole pages, none twice: a page on its way to the disk would make the next write wait for it."""
    handed: list[tuple[int, int]] = []

    def counted(_: int, first: ctypes.c_int64, length: ctypes.c_int64, flags: int) -> None:
        handed.append((first.value, first.value + length.value))
        assert flags == 2

    monkeypatch.setattr(archive_writing, "_sync_file_range", counted)
    tensors = {"a": torch.zeros(CHUNK_BYTES), "b": torch.zeros(3), "c": torch.zeros(CHUNK_BYTES // 4)}
    _, marks = Planning().plan(tensors, tmp_path, None).write()
    ((_, mark),) = marks.items()
    handed.sort()
    assert all(place % mmap.PAGESIZE == 0 for pages in handed for place in pages)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(handed))
    left = mark.size - sum(stop - start for start, stop in handed)
    assert left <= 2 * mmap.PAGESIZE * (len(handed) + 1)
