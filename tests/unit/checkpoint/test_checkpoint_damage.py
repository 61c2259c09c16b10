"""Damaged files are found and named, nothing live changes, nothing in them is executed; killed saves do no harm."""

import json
import os
import pickle
import pickletools
import signal
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.checkpoint import consolidate, latest, load, save, storage
from megascale.errors import CheckpointError
from tests.checkpoint_cases import build, differences, state_of, train
from tests.pool import RankPool

DATA, METADATA, MANIFEST = "__0_0.distcp", ".metadata", "megascale.json"


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _edit(path: Path, key: str, value: Any) -> None:
    document = json.loads(path.read_text())
    document[key] = value
    path.write_text(json.dumps(document))


def _rewrite_marks(folder: Path, name: str) -> None:
    """Make a tampered file's checksums right again."""
    content = (folder / name).read_bytes()
    mark = {"size": len(content), "crc32": zlib.crc32(content)}
    _change_body(folder, lambda body: body["files"].update({name: mark}))


def _change_body(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest, with its checksum."""
    document = json.loads((folder / MANIFEST).read_text())
    change(document["body"])
    body = json.dumps(document["body"], sort_keys=True, separators=(",", ":"))
    document["crc32"] = zlib.crc32(body.encode())
    (folder / MANIFEST).write_text(json.dumps(document))


def _without_index(folder: Path) -> None:
    """Make a checkpoint one of commit 9dbb0b5, whose only index is `.metadata`."""
    _change_body(folder, lambda body: body.pop("index"))


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("flipped data", lambda f: _flip(f / DATA), r"__0_0\.distcp is damaged: its checksum does not fit"),
    ("truncated data", lambda f: _truncate(f / DATA), r"__0_0\.distcp has \d+ bytes, \d+ were written"),
    ("missing data", lambda f: (f / DATA).unlink(), r"__0_0\.distcp is missing"),
    ("flipped metadata", lambda f: _flip(f / METADATA), r"\.metadata is damaged: its checksum does not fit"),
    ("missing metadata", lambda f: (f / METADATA).unlink(), r"\.metadata is missing"),
    ("truncated manifest", lambda f: _truncate(f / MANIFEST), r"megascale\.json is damaged \(JSONDecodeError"),
    ("manifest of zeros", lambda f: (f / MANIFEST).write_bytes(bytes(50)), r"megascale\.json is damaged"),
    ("manifest not text", lambda f: (f / MANIFEST).write_bytes(b"\xff" * 50), r"megascale\.json is damaged"),
    ("manifest a list", lambda f: (f / MANIFEST).write_text("[]"), r"megascale\.json is damaged"),
    ("manifest without body", lambda f: (f / MANIFEST).write_text('{"format": 1}'), r"megascale\.json is damaged"),
    ("manifest edited", lambda f: _edit(f / MANIFEST, "body", {"step": 9}), "its checksum does not fit"),
    ("another format", lambda f: _edit(f / MANIFEST, "format", 99), "has format 99; this version of megascale reads 1"),
]


@pytest.mark.parametrize(("damage", "message"), [case[1:] for case in DAMAGES], ids=[case[0] for case in DAMAGES])
def test_damage_is_named_and_changes_nothing(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    """A damaged checkpoint raises CheckpointError; model, optimizer and scaler keep every bit."""
    model, optimizer = build(0)
    train(model, optimizer, 0, 2)
    damage(save(tmp_path, 2, model, optimizer, user_state={"epoch": 1}))
    train(model, optimizer, 2, 3)
    before = state_of(model, optimizer)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, model, optimizer)
    assert differences(state_of(model, optimizer), before) == []


def test_metadata_of_another_checkpoint(tmp_path: Path) -> None:
    """Files mixed from two checkpoints, with checksums made to fit, do not get past the shapes."""
    model, optimizer = build(0)
    folder = save(tmp_path / "whole", 1, model, optimizer)
    _without_index(folder)
    other = save(tmp_path / "weights", 1, model)
    (folder / METADATA).write_bytes((other / METADATA).read_bytes())
    _rewrite_marks(folder, METADATA)
    before = state_of(model, optimizer)
    with pytest.raises(CheckpointError, match="holds no tensor 'optimizer/"):
        load(folder, model, optimizer)
    assert differences(state_of(model, optimizer), before) == []


class _Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def test_pickled_code_is_not_executed(tmp_path: Path) -> None:
    """The metadata file is a pickle; a stranger's checkpoint must not run code through it."""
    model, _ = build(0)
    folder = save(tmp_path, 1, model)
    _without_index(folder)
    (folder / METADATA).write_bytes(pickle.dumps(_Evil(tmp_path / "executed")))
    _rewrite_marks(folder, METADATA)
    with pytest.raises(CheckpointError, match=r"\.metadata: it has posix\.mkdir in the place of Metadata"):
        load(folder, model)
    assert not (tmp_path / "executed").exists()


def _forbid_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a pickle was opened")

    for owner, names in {
        pickle: ("load", "loads", "Unpickler", "_Unpickler"),
        pickletools: ("genops",),
        torch: ("load",),
        torch._weights_only_unpickler: ("load", "loads", "Unpickler"),
    }.items():
        for name in names:
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, refuse)


@pytest.mark.parametrize("archives", ["own", "torch"])
def test_a_load_opens_no_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, archives: str) -> None:
    """Neither torch's index nor an archive's: hostile ones in every file are as good as absent. `consolidate` too."""
    if archives == "torch":
        monkeypatch.setattr(storage, "archive_of", lambda *_: None)
    model, optimizer = build(0)
    train(model, optimizer, 0, 3)
    user_state = {"order": torch.randperm(9), "epoch": 1}
    folder = save(tmp_path, 3, model, optimizer, user_state=user_state, rank_state=torch.get_rng_state())
    (folder / METADATA).write_bytes(pickle.dumps(_Evil(tmp_path / "executed")))
    _rewrite_marks(folder, METADATA)
    other, into = build(1)
    with monkeypatch.context() as patch:
        _forbid_pickles(patch)
        with pytest.raises(AssertionError, match="a pickle was opened"):
            torch.load(folder / DATA)
        loaded = load(tmp_path, other, into)
        consolidate(tmp_path, tmp_path / "one.pt", dtype=torch.float32, optimizer=True)
    assert differences(state_of(other, into), state_of(model, optimizer)) == []
    assert differences(loaded.user_state, user_state) == []
    assert differences(torch.load(tmp_path / "one.pt")["optimizer"], dict(optimizer.state_dict())) == []
    assert not (tmp_path / "executed").exists()


def _set(place: int, value: Any) -> Callable[[dict[str, Any]], object]:
    def change(index: dict[str, Any]) -> None:
        piece = next(piece for piece in index[DATA] if piece[0] == "model/0.weight")
        piece[place:] = [value, *piece[place + 1 :]]

    return change


INDEXES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another file": lambda index: index.update({"../" + DATA: index.pop(DATA)}),
    "a file without checksum": lambda index: index.update({MANIFEST: index.pop(DATA)}),
    "no such tensor": _set(0, "model/9.weight"),
    "a key that is a list": _set(0, ["model/0.weight"]),
    "before the file": _set(1, -1),
    "behind the file": _set(1, 2**40),
    "no number": _set(1, "0"),
    "too few bytes": _set(2, 47),
    "no length": _set(2, None),
    "another place": lambda index: index[DATA][0].__setitem__(1, index[DATA][1][1]),
    "within an archive": _set(1, 64),
    "no piece": lambda index: index[DATA].pop(),
    "no box": lambda index: index[DATA][0].append([0, 0]),
    "a box outside": lambda index: index[DATA][0].extend([[1, 0], [6, 4]]),
    "a box before": lambda index: index[DATA][0].extend([[-1, 0], [6, 4]]),
    "a box of another shape": lambda index: index[DATA][0].extend([[0], [6]]),
    "not a dict": lambda index: index.update({DATA: 3}),
}

FOUND_WHEN_READ = ("another place", "within an archive", "no piece")


@pytest.mark.parametrize("damage", INDEXES)
def test_an_index_that_does_not_fit(tmp_path: Path, damage: str) -> None:
    """An index that points elsewhere, with checksums made to fit, is a named error; no live bit changes."""
    model, optimizer = build(0)
    train(model, optimizer, 0, 2)
    folder = save(tmp_path, 2, model, optimizer)
    _change_body(folder, lambda body: INDEXES[damage](body["index"]))
    before = state_of(model, optimizer)
    message = (
        "holds no .*" if damage in FOUND_WHEN_READ else r"the index of .* is damaged .*; load an earlier checkpoint"
    )
    with pytest.raises(CheckpointError, match=message):
        load(folder, model, optimizer)
    assert differences(state_of(model, optimizer), before) == []


def test_data_of_another_checkpoint(tmp_path: Path) -> None:
    """Data files mixed from two checkpoints, with checksums made to fit, are no archives where the index says."""
    model, optimizer = build(0)
    folder = save(tmp_path / "whole", 1, model, optimizer)
    other = save(tmp_path / "other", 1, *build(0), user_state=torch.zeros(3))
    content = (other / DATA).read_bytes()
    (folder / DATA).write_bytes(content[77:])
    _rewrite_marks(folder, DATA)
    before = state_of(model, optimizer)
    with pytest.raises(CheckpointError, match=r"holds no torch.* where the index says \(.*load an earlier checkpoint"):
        load(folder, model, optimizer)
    assert differences(state_of(model, optimizer), before) == []


FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir"}


def _die_at_event(number: int) -> None:
    """Make this process kill itself before its ``number``-th operation on files."""
    remaining = [number]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in FILE_EVENTS:
            remaining[0] -= 1
            if remaining[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _save_killed_everywhere(directory: Path) -> list[int]:
    """Save step 2 over step 1 in child processes that die at their first, second, ... operation on files.

    Returns the latest step found after each death. All that is found is loaded and compared.
    """
    model, optimizer = build(0)
    train(model, optimizer, 0, 1)
    states = {1: state_of(model, optimizer)}
    save(directory, 1, model, optimizer)
    train(model, optimizer, 1, 2)
    states[2] = state_of(model, optimizer)
    found: list[int] = []
    while True:
        child = os.fork()
        if child == 0:
            _die_at_event(len(found) + 1)
            save(directory, 2, model, optimizer, keep_last=1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        step = max(_load_all(directory, states))
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return [*found, step]
        found.append(step)
        if step == 2:
            # Back to the start: a checkpoint of step 1 alone.
            _remove(directory)
            load_model, load_optimizer = build(0)
            train(load_model, load_optimizer, 0, 1)
            save(directory, 1, load_model, load_optimizer)


def _load_all(directory: Path, states: dict[int, Any]) -> list[int]:
    """Load every folder that has a checkpoint's name; returns their steps."""
    found = []
    for folder in directory.glob("step_*"):
        model, optimizer = build(3)
        found.append(load(folder, model, optimizer).step)
        assert differences(state_of(model, optimizer), states[found[-1]]) == []
    return found


def _remove(directory: Path) -> None:
    for entry in directory.iterdir():
        for file in entry.iterdir():
            file.unlink()
        entry.rmdir()


def test_save_killed_at_every_operation(tmp_path: Path, ranks: RankPool) -> None:
    """SIGKILL before each single operation on files: the latest complete checkpoint is there and loads, bit for bit."""
    [found] = ranks.run(1, _save_killed_everywhere, tmp_path)
    assert len(found) > 10
    assert found == sorted(found)
    assert (found[0], found[-1]) == (1, 2)
    assert found.count(1) > 5
    assert found.count(2) > 2
    assert latest(tmp_path) == tmp_path / "step_00000002"
