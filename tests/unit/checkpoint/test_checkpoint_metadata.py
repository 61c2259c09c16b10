"""The index of a checkpoint, and `.metadata` read as data where the manifest has none, as in those of commit 9dbb0b5.

Both say what torch reads. Whatever `.metadata` says, nothing is run, changed or filled up.
"""

import contextlib
import pickle
import resource
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megascale import MixedPrecisionOptimizer
from megascale.checkpoint import save
from megascale.checkpoint.earlier_index import METADATA_NAME, read_earlier_index
from megascale.checkpoint.index import read_index
from megascale.checkpoint.manifest import Manifest
from megascale.errors import CheckpointError
from tests.pool import RankPool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small checkpoint."""
    model = nn.Linear(3, 4)
    return save(
        tmp_path_factory.mktemp("checkpoint"), 1, model, MixedPrecisionOptimizer(torch.optim.AdamW(model.parameters()))
    )


def _read(tmp_path: Path, data: bytes, folder: Path | None = None) -> Any:
    """Read another `.metadata`, of the checkpoint ``folder`` if that is given."""
    (tmp_path / METADATA_NAME).write_bytes(data)
    if folder is None:
        return read_earlier_index(tmp_path)
    return read_index(tmp_path, replace(Manifest.read(folder), index=None))


@pytest.mark.parametrize("is_earlier", [False, True], ids=["manifest", "metadata"])
def test_what_torch_reads(folder: Path, is_earlier: bool) -> None:
    """Every tensor, dtype, shape, piece and place is what torch's own reader finds."""
    manifest = Manifest.read(folder)
    theirs = FileSystemReader(folder).read_metadata()
    ours = read_index(folder, replace(manifest, index=None) if is_earlier else manifest)
    assert ours.storage_data == theirs.storage_data
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for key, stored in ours.state_dict_metadata.items():
        found = theirs.state_dict_metadata[key]
        assert isinstance(stored, TensorStorageMetadata)
        assert isinstance(found, TensorStorageMetadata)
        assert (stored.size, stored.chunks) == (found.size, found.chunks)
        assert stored.properties.dtype == found.properties.dtype


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_of_pickles_says_the_same(folder: Path, tmp_path: Path, protocol: int) -> None:
    """Python's default changes from version to version."""
    read = _read(tmp_path, pickle.dumps(FileSystemReader(folder).read_metadata(), protocol), folder)
    assert read == read_index(folder, Manifest.read(folder))


def _with_properties(folder: Path, monkeypatch: pytest.MonkeyPatch, state: tuple[Any, ...]) -> bytes:
    """Return a pickle in which the properties of "model/weight", of shape (4, 3), have another state."""
    metadata = FileSystemReader(folder).read_metadata()
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda _: state)
    stored = {"model/weight": metadata.state_dict_metadata["model/weight"]}
    places = {index: place for index, place in metadata.storage_data.items() if index.fqn in stored}
    return pickle.dumps(Metadata(stored, storage_data=places))


STATE_BEFORE_2_15 = (torch.float16, torch.strided, False, _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT, False)


@pytest.mark.parametrize("strides", [None, (1, 4)], ids=["without_strides", "with_strides"])
def test_what_other_versions_of_torch_write(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strides: tuple[int, ...] | None
) -> None:
    """A checkpoint outlives the torch that wrote it: strides, of torch 2.15, are as good as absent, and so is a dtype.

    They are the manifest's to say.
    """
    state = STATE_BEFORE_2_15 if strides is None else (*STATE_BEFORE_2_15, strides)
    read = _read(tmp_path, _with_properties(folder, monkeypatch, state), folder)
    assert list(read.state_dict_metadata) == ["model/weight"]
    assert read.state_dict_metadata["model/weight"].properties.dtype == torch.float32


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


INDEX = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
BOMBS: dict[str, bytes] = {
    "build_on_a_class": INDEX + b"}(" + _text("__eq__") + b"Nub.",
    "build_on_a_class_with_slots": INDEX + b"N}(" + _text("offset") + b"Nu\x86b.",
    "build_on_a_type": b"cbuiltins\ntype\n}(" + _text("x") + b"Nub.",
    "call": b"cos\nsystem\n(" + _text("touch executed") + b"tR.",
    "call_of_a_call": b"cbuiltins\ngetattr\n" + INDEX + b"\x85R)R.",
    "memo_without_end": b"]r\xff\xff\xff\xff.",
    "frame_without_end": b"\x80\x04\x95" + b"\xff" * 8 + b".",
    "text_without_end": b"\x8d" + struct.pack("<Q", 2**62) + b".",
    "bytes_without_end": b"\x8e" + struct.pack("<Q", 2**40) + b".",
    "bytearray_without_end": b"\x96" + struct.pack("<Q", 2**40) + b".",
    "list_in_itself": b"]q\x00h\x00a.",
    "nothing": b"",
    "no_end": b"\x80\x04",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_hostile_files_change_nothing(bomb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BUILD on a class would change it for the process, a call would run, a length would fill the memory: all named."""
    monkeypatch.chdir(tmp_path)
    before = dict(vars(MetadataIndex))
    with pytest.raises(CheckpointError, match=r"\.metadata: .*load an earlier checkpoint"):
        _read(tmp_path, BOMBS[bomb])
    assert dict(vars(MetadataIndex)) == before
    assert not (tmp_path / "executed").exists()


def test_a_tuple_that_doubles(tmp_path: Path) -> None:
    """A key of sixty nested pairs, each twice the one before, would be hashed for a thousand years."""
    data = (
        b"}N"
        + b"\x85\x94"
        + b"".join(b"0h" + bytes([n]) + b"h" + bytes([n]) + b"\x86\x94" for n in range(60))
        + b"K\x01s."
    )
    with pytest.raises(CheckpointError, match="in the place of Metadata"):
        _read(tmp_path, data)


def test_one_list_of_pieces_for_many_tensors(folder: Path, tmp_path: Path) -> None:
    """Pieces are counted: a list that is referred to again and again is no way to ask for their square."""
    metadata = FileSystemReader(folder).read_metadata()
    stored = next(one for one in metadata.state_dict_metadata.values() if isinstance(one, TensorStorageMetadata))
    stored.chunks *= 1000
    metadata.state_dict_metadata = {str(name): stored for name in range(1000)}
    with pytest.raises(CheckpointError, match="more pieces than it has bytes"):
        _read(tmp_path, pickle.dumps(metadata))


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "", "..", "a\0b"])
def test_pieces_lie_in_the_checkpoint(folder: Path, tmp_path: Path, name: str) -> None:
    """A path that leads out of the folder is not followed."""
    metadata: Any = FileSystemReader(folder).read_metadata()
    next(iter(metadata.storage_data.values())).relative_path = name
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        _read(tmp_path, pickle.dumps(metadata), folder)


def test_a_shape_of_many_lengths(folder: Path, tmp_path: Path) -> None:
    """One of 60,000 that piece after piece refers to is no way to ask for a product of numbers of either."""
    metadata = FileSystemReader(folder).read_metadata()
    stored = next(one for one in metadata.state_dict_metadata.values() if isinstance(one, TensorStorageMetadata))
    stored.chunks[0].sizes = torch.Size([1] * 60_000)
    with pytest.raises(CheckpointError, match="60000 fields or dimensions"):
        _read(tmp_path, pickle.dumps(metadata))


def _damage(metadata: Any, kind: str) -> None:
    stored = next(iter(metadata.state_dict_metadata.values()))
    place = next(iter(metadata.storage_data.values()))
    match kind:
        case "offsets":
            stored.chunks[0].offsets = torch.Size([2**40, 2**40])
        case "negative":
            place.offset = -1
        case "piece":
            stored.chunks[0].sizes = torch.Size([99, 99])
        case "transformed":
            place.transform_descriptors = ["zstd"]
        case "fqn":
            metadata.state_dict_metadata = {3: stored}
        case "chunks":
            stored.chunks = None
        case "length":
            place.length = 2**70
        case "no_tensor":
            del metadata.state_dict_metadata[next(iter(metadata.state_dict_metadata))]


@pytest.mark.parametrize(
    "kind", ["offsets", "negative", "piece", "transformed", "fqn", "chunks", "length", "no_tensor"]
)
def test_values_that_no_checkpoint_has(folder: Path, tmp_path: Path, kind: str) -> None:
    """Each is named before anything is made of it."""
    metadata = FileSystemReader(folder).read_metadata()
    _damage(metadata, kind)
    with pytest.raises(CheckpointError, match="load an earlier checkpoint"):
        _read(tmp_path, pickle.dumps(metadata), folder)


def _flip_bits(source: Path, target: Path, stride: int) -> int:
    """Flip every ``stride``-th bit, one at a time, in 128 MiB of memory; return how many were named errors."""
    data = (source / METADATA_NAME).read_bytes()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, used + 2**27))
    named = 0
    for bit in range(0, 8 * len(data), stride):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            _read(target, bytes(changed), source)
        except CheckpointError:
            named += 1
    return named


@pytest.mark.slow
@pytest.mark.parametrize("stride", [53, 1])
def test_bit_flips_in_little_memory(folder: Path, tmp_path: Path, ranks: RankPool, stride: int) -> None:
    """Each flipped bit is a named error or harmless, in 128 MiB: a length or a memo index asked for all memory."""
    with ranks.spawn(1, _flip_bits, folder, tmp_path, stride, process_group=False) as fresh:
        [named] = fresh.results(timeout=240)
    assert named > 10


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_damage_is_a_named_error(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Bytes changed, left out and put in: metadata or a CheckpointError, never another error."""
    whole = bytearray((folder / METADATA_NAME).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(whole) - 1))
        whole[place : place + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    with contextlib.suppress(CheckpointError):
        _read(tmp_path_factory.mktemp("damaged"), bytes(whole), folder)
