"""Checksums that are taken while a file is written, and the memory that asynchronous saves copy into."""

import os
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

from megascale.checkpoint.manifest import CHUNK_BYTES, FileMark, Manifest, mark_of
from megascale.checkpoint.marking import Marker
from megascale.checkpoint.storage import Staging, plan_write


@given(parts=st.lists(st.binary(max_size=99), max_size=9))
def test_mark_is_that_of_the_whole_file(parts: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    """However it was written; an empty file too."""
    path = tmp_path_factory.mktemp("marks") / "file"
    with open(path, "wb") as stream, Marker(path) as marker:
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
    with Marker(path) as marker:
        marker.written(path.stat().st_size)
        assert marker.mark() == mark_of(path)


def test_file_that_is_cut_is_an_error(tmp_path: Path) -> None:
    """What was written must be in the file; the thread ends, and no checksum is made up."""
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    with Marker(path) as marker:
        marker.written(5)
        with pytest.raises(OSError, match="ends at byte 3, although 5 were written"):
            marker.mark()
    assert not marker._thread.is_alive()


def test_error_while_writing_ends_the_thread(tmp_path: Path) -> None:
    """Nothing is left behind by a save that fails."""
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ZeroDivisionError), Marker(path) as marker:
        _ = 1 / 0
    assert not marker._thread.is_alive()


def test_staging_copies_into_the_same_memory() -> None:
    """A copy has the values of its call; a tensor of another shape or dtype gets other memory, and what is gone is."""
    first, second, third = MetadataIndex("first"), MetadataIndex("second"), MetadataIndex("third")
    staging = Staging()
    live = torch.arange(6.0).reshape(2, 3)
    before = staging.copied({first: live, second: live.t(), third: live})
    assert torch.equal(before[second], live.t())
    live += 1
    assert before[first][0, 0] == 0
    after = staging.copied({first: live, second: live.half()})
    assert after[first] is before[first]
    assert torch.equal(after[first], live)
    assert after[second].dtype == torch.float16
    assert set(staging._held) == {first, second}


class _Uncopied(str):
    """A leaf of a tree that must not be copied."""

    def __deepcopy__(self, memo: object) -> "_Uncopied":
        raise RuntimeError("copied")


def test_manifest_is_written_without_copies_of_its_trees(tmp_path: Path) -> None:
    """A copy of every leaf costs as much as all else of the manifest; what is read is what was written."""
    manifest = Manifest(3, 1, {"model": {"b": _Uncopied("x"), "a": 1}}, [None], {"file": FileMark(5, 7)})
    manifest.write(tmp_path)
    read = Manifest.read(tmp_path)
    assert read == manifest
    assert list(read.trees["model"]) == ["b", "a"]


def test_checksum_is_woken_by_the_chunk_not_by_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 small tensors wake its thread once, and a tensor of a chunk once more; the mark covers the whole file."""
    ends: list[int] = []
    written = Marker.written

    def counted(marker: Marker, end: int) -> None:
        ends.append(end)
        written(marker, end)

    monkeypatch.setattr(Marker, "written", counted)
    for name, large, wakes in (("small", 0, 1), ("large", CHUNK_BYTES, 2)):
        ends.clear()
        tensors = {f"t{index:03}": torch.zeros(4) for index in range(100)}
        planned = plan_write(tensors | {"a": torch.zeros(large, dtype=torch.uint8)}, tmp_path / name, None)
        _, marks = planned.write()
        ((file, mark),) = marks.items()
        assert len(ends) == wakes
        assert mark == mark_of(tmp_path / name / file)
