"""Checksums that are taken while a file is written, and the files that they are of."""

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
from megascale.checkpoint.checksum_follower import ChecksumFollower
from megascale.checkpoint.crc32 import combined
from megascale.checkpoint.manifest import CHUNK_BYTES, FileMark, Manifest, mark_of
from megascale.checkpoint.storage import Planning
from tests.checkpoint_cases import read_metadata


@given(parts=st.lists(st.binary(max_size=99), max_size=9))
def test_mark_is_that_of_the_whole_file(parts: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    """However it was written; an empty file too."""
    path = tmp_path_factory.mktemp("marks") / "file"
    with open(path, "wb") as stream, ChecksumFollower(path) as marker:
        for part in parts:
            stream.write(part)
            stream.flush()
            marker.written(stream.tell())
        assert marker.mark() == mark_of(path)
    whole = b"".join(parts)
    assert marker.mark() == FileMark(len(whole), zlib.crc32(whole))


def test_mark_of_a_file_longer_than_a_chunk(tmp_path: Path) -> None:
    """Chunks are added up."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(2 * CHUNK_BYTES + 5))
    with ChecksumFollower(path) as marker:
        marker.written(path.stat().st_size)
        assert marker.mark() == mark_of(path)


def test_file_that_is_cut_is_an_error(tmp_path: Path) -> None:
    """What was written must be in the file; the thread ends, and no checksum is made up."""
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    with ChecksumFollower(path) as marker:
        marker.written(5)
        with pytest.raises(OSError, match="ends at byte 3, although 5 were written"):
            marker.mark()
    assert not marker._thread.is_alive()


def test_error_while_writing_ends_the_thread(tmp_path: Path) -> None:
    """Nothing is left behind by a save that fails."""
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ZeroDivisionError), ChecksumFollower(path) as marker:
        _ = 1 / 0
    assert not marker._thread.is_alive()


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


def test_checksum_is_woken_by_the_chunk_not_by_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 small tensors wake its thread once, and a tensor of a chunk once more; the mark covers the whole file."""
    ends: list[int] = []
    written = ChecksumFollower.written

    def counted(marker: ChecksumFollower, end: int) -> None:
        ends.append(end)
        written(marker, end)

    monkeypatch.setattr(ChecksumFollower, "written", counted)
    for name, large, wakes in (("small", 0, 1), ("large", CHUNK_BYTES, 2)):
        ends.clear()
        tensors = [torch.zeros(large, dtype=torch.uint8), *torch.zeros(100, 4)]
        lengths, mark = write_by_torch(tmp_path / name, tensors)
        assert len(ends) == wakes
        assert mark == mark_of(tmp_path / name)
        assert sum(lengths) == mark.size


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
