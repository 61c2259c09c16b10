"""The files of a checkpoint: safetensors, and a manifest of which nothing is believed before it is checked."""

import contextlib
import json
import math
import os
import resource
import stat
import zlib
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megascale import MixedPrecisionOptimizer
from megascale.checkpoint import load, save
from megascale.checkpoint.files import PlannedRead
from megascale.checkpoint.manifest import Manifest, _cover
from megascale.errors import CheckpointError
from tests.checkpoint_cases import bits_of, build, differences, state_of, train
from tests.pool import RankPool

DATA, MANIFEST = "rank_00000.safetensors", "megascale.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small checkpoint."""
    model = nn.Linear(3, 4)
    return save(
        tmp_path_factory.mktemp("checkpoint"), 1, model, MixedPrecisionOptimizer(torch.optim.AdamW(model.parameters()))
    )


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda one: one,
    "a number": lambda one: one[0, 0],
    "empty": lambda one: one[:0],
    "transposed": lambda one: one.t(),
    "every other": lambda one: one[:, ::2],
}


def test_any_tensor_comes_back(tmp_path: Path) -> None:
    """Each dtype in each form, with the same bits; names may have any letters."""
    tensors = {
        f"{form} {dtype}/ü@0#%": change(torch.arange(24).view(4, 6).to(dtype))
        for dtype, (form, change) in product(DTYPES, FORMS.items())
    }
    tensors |= {"conjugated": torch.ones(2, dtype=torch.complex64).conj(), "zeros": torch.zeros(3)._neg_view()}
    model = nn.Linear(1, 1)
    save(tmp_path, 1, model, user_state=tensors)
    loaded = load(tmp_path, model).user_state
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert bits_of(loaded[name]) == bits_of(tensor.resolve_conj().resolve_neg())


def test_the_files_are_safetensors(tmp_path: Path) -> None:
    """Another program opens them, without megascale, and finds whole tensors by their names."""
    safetensors = pytest.importorskip("safetensors")
    model, optimizer = build(0)
    train(model, optimizer, 0, 2)
    path = save(tmp_path, 2, model, optimizer, user_state={"complex": torch.ones(2, dtype=torch.complex64)})
    state = state_of(model, optimizer)
    with safetensors.safe_open(path / DATA, "pt") as file:
        assert torch.equal(file.get_tensor("model/0.weight"), state["model"]["0.weight"])
        main = file.get_tensor("optimizer/main_params/0.weight")
        assert torch.equal(main, state["optimizer"]["main_params"]["0.weight"])
        assert torch.equal(file.get_tensor("user/complex").view(torch.complex64), torch.ones(2, dtype=torch.complex64))


# What a manifest may say


def change_body(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest, and make its checksum fit."""
    document = json.loads((folder / MANIFEST).read_text())
    body = json.loads(document["body"])
    change(body)
    document["body"] = json.dumps(body)
    document["crc32"] = zlib.crc32(document["body"].encode())
    (folder / MANIFEST).write_text(json.dumps(document))


def _piece(place: int, value: Any) -> Callable[[dict[str, Any]], object]:
    """Return what sets one of key, offsets, sizes and first byte of the first piece of a weight of shape (6, 4)."""

    def change(body: dict[str, Any]) -> None:
        piece = next(piece for piece in body["files"][DATA]["pieces"] if piece[0] == "model/0.weight")
        piece[place] = value

    return change


def _pieces(*boxes: tuple[list[Any], list[int]]) -> Callable[[dict[str, Any]], object]:
    """Return what cuts that weight into other pieces."""

    def change(body: dict[str, Any]) -> None:
        pieces = body["files"][DATA]["pieces"]
        [whole] = [piece for piece in pieces if piece[0] == "model/0.weight"]
        pieces.remove(whole)
        pieces += [[whole[0], offsets, sizes, whole[3]] for offsets, sizes in boxes]

    return change


def _leaf(at: int, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda body: dict(body["trees"]["model"]["dict"])["0.weight"].__setitem__(at, value)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a file outside": lambda body: body["files"].update({"../" + DATA: body["files"].pop(DATA)}),
    "no such tensor": _piece(0, "model/9.weight"),
    "a key that is a list": _piece(0, ["model/0.weight"]),
    "before the file": _piece(3, -1),
    "behind the file": _piece(3, 2**40),
    "far behind the file": _piece(3, 10**30),
    "no number": _piece(3, "0"),
    "no piece": _pieces(),
    "a half": _pieces(([0, 0], [3, 4])),
    "a half twice": _pieces(([0, 0], [3, 4]), ([0, 0], [3, 4])),
    "halves that overlap": _pieces(([0, 0], [3, 4]), ([2, 0], [3, 4])),
    "boxes that overlap, with a gap": _pieces(([0, 0], [4, 4]), ([3, 0], [2, 4])),
    "a box outside": _pieces(([1, 0], [6, 4])),
    "a box before": _pieces(([-1, 0], [6, 4])),
    "a negative box": _pieces(([0, 0], [-6, -4])),
    "a box of another shape": _pieces(([0], [24])),
    "NaN for an offset": _pieces(([float("nan"), 0], [6, 4])),
    "a fraction": _pieces(([0.5, 0], [6, 4])),
    "pieces that are none": lambda body: body["files"][DATA].update(pieces=3),
    "no size": lambda body: body["files"][DATA].pop("size"),
    "another shape": _leaf(2, [6, 5]),
    "a huge shape": _leaf(2, [10**12, 10**12]),
    "an unknown dtype": _leaf(1, "float9"),
    "no dtype": _leaf(1, "Tensor"),
    "an unknown kind": lambda body: body["trees"].update(user={"set": []}),
    "two kinds": lambda body: body["trees"].update(user={"list": [], "tuple": []}),
    "nested deeply": lambda body: body["trees"].update(user=json.loads('{"list":[' * 400 + "1" + "]}" * 400)),
    "no trees": lambda body: body.pop("trees"),
    "ranks that are none": lambda body: body.update(rank_trees=7),
}


@pytest.mark.default("boxes that overlap, with a gap", "two kinds", "before the file", "no size")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_manifest_that_does_not_fit(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Whatever a manifest says, with its checksum made to fit: a named error, or what was saved; no bit has changed."""
    model, optimizer = build(0)
    train(model, optimizer, 0, 2)
    folder = save(tmp_path, 2, model, optimizer)
    change_body(folder, change)
    before = state_of(model, optimizer)
    with contextlib.suppress(CheckpointError):
        load(folder, model, optimizer)
        pytest.fail("it loads") if change is not CHANGES["nested deeply"] else None
    assert differences(state_of(model, optimizer), before) == []


@pytest.mark.parametrize("key", ["9" * 5000, "{" * 5000, "\\ud800", "1e999"])
def test_json_that_python_refuses(folder: Path, tmp_path: Path, key: str) -> None:
    """A number of 5,000 digits, braces without end, half of a letter: a named error."""
    (tmp_path / MANIFEST).write_text(f'{{"format": 3, "crc32": {key}, "body": "{{}}"}}')
    with pytest.raises(CheckpointError, match=r"megascale\.json is damaged"):
        Manifest.read(tmp_path)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_damage_is_a_named_error(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Bytes of the manifest changed, left out and put in: the manifest or a CheckpointError, never another error."""
    whole = bytearray((folder / MANIFEST).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(whole) - 1))
        whole[place : place + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    target = tmp_path_factory.mktemp("damaged")
    (target / MANIFEST).write_bytes(bytes(whole))
    with contextlib.suppress(CheckpointError):
        Manifest.read(target)


def _flip_bits(source: Path, target: Path, stride: int) -> int:
    """Flip every ``stride``-th bit, one at a time, in 128 MiB of memory; return how many were named errors."""
    data = (source / MANIFEST).read_bytes()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, used + 2**27))
    named = 0
    for bit in range(0, 8 * len(data), stride):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        (target / MANIFEST).write_bytes(changed)
        try:
            Manifest.read(target)
        except CheckpointError:
            named += 1
    return named


@pytest.mark.slow
def test_bit_flips_in_little_memory(folder: Path, tmp_path: Path, ranks: RankPool) -> None:
    """Each flipped bit is a named error or harmless, in 128 MiB."""
    with ranks.spawn(1, _flip_bits, folder, tmp_path, 7, process_group=False) as fresh:
        [named] = fresh.results(timeout=240)
    assert named > 10


SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def _boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Draw a shape, and boxes in it: a true cover now and then, by cutting it again and again, else any."""
    shape = draw(SHAPES)
    if draw(st.booleans()):
        boxes = [(tuple(0 for _ in shape), shape)]
        for _ in range(draw(st.integers(0, 3))):
            index = draw(st.integers(0, len(boxes) - 1))
            if not shape:
                break
            (offsets, sizes), dim = boxes.pop(index), draw(st.integers(0, len(shape) - 1))
            cut = draw(st.integers(0, sizes[dim]))
            boxes.append((offsets, (*sizes[:dim], cut, *sizes[dim + 1 :])))
            moved = (*offsets[:dim], offsets[dim] + cut, *offsets[dim + 1 :])
            boxes.append((moved, (*sizes[:dim], sizes[dim] - cut, *sizes[dim + 1 :])))
        return shape, boxes
    boxes = []
    for _ in range(draw(st.integers(0, 4))):
        offsets = tuple(draw(st.integers(0, side)) for side in shape)
        sizes = tuple(draw(st.integers(0, side - at)) for side, at in zip(shape, offsets, strict=True))
        boxes.append((offsets, sizes))
    return shape, boxes


@given(_boxes())
def test_a_cover_is_one(case: tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]) -> None:
    """By corners and sizes the same answer as by counting how often each element is in a box."""
    shape, boxes = case
    counts = torch.zeros(shape, dtype=torch.int64)
    for offsets, sizes in boxes:
        counts[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] += 1
    if math.prod(shape):
        assert _cover(shape, boxes) == bool((counts == 1).all())


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            {"model/weight": torch.zeros(4, 3, dtype=torch.float16)},
            r"as torch.float32 \(4, 3\), expected torch.float16",
        ),
        ({"model/weight": torch.zeros(3, 4)}, r"\(4, 3\), expected torch.float32 \(3, 4\)"),
        ({"model/other": torch.zeros(3)}, "holds no tensor 'model/other'"),
    ],
)
def test_targets_must_fit(folder: Path, target: dict[str, Tensor], message: str) -> None:
    """A value is never converted, nor read into another shape."""
    with pytest.raises(CheckpointError, match=message):
        PlannedRead(folder, Manifest.read(folder), target)


def test_a_file_that_shrinks_after_its_check(folder: Path, tmp_path: Path) -> None:
    """Named, with the file."""
    manifest = Manifest.read(folder)
    (tmp_path / DATA).write_bytes((folder / DATA).read_bytes()[:-1])
    everything = {
        key: torch.zeros(saved.size, dtype=saved.properties.dtype)  # type: ignore[union-attr]
        for key, saved in manifest.metadata.state_dict_metadata.items()
    }
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors has become shorter"):
        PlannedRead(tmp_path, manifest, everything).read()


def test_a_checkpoint_outlives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files' names are on disk before the folder gets its own, and that is on disk before save() returns."""
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            calls.append("directory" if os.path.samestat(os.fstat(descriptor), tmp_path.stat()) else "folder")

    def renamed(source: Path, target: Path) -> None:
        rename(source, target)
        calls.append("rename")

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    model = nn.Linear(3, 4)
    save(tmp_path, 1, model, MixedPrecisionOptimizer(torch.optim.AdamW(model.parameters())))
    assert calls[-3:] == ["folder", "rename", "directory"]
