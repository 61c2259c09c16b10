"""Damaged files are found and named, nothing live changes, nothing in them is executed; killed saves do no harm."""

import json
import os
import pickle
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.checkpoint import consolidate, latest, load, save
from megascale.errors import CheckpointError
from tests.checkpoint_cases import build, differences, state_of, train
from tests.pool import RankPool

DATA, MANIFEST = "rank_00000.safetensors", "megascale.json"


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


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("flipped data", lambda f: _flip(f / DATA), r"rank_00000\.safetensors is damaged: its checksum does not fit"),
    ("truncated data", lambda f: _truncate(f / DATA), r"rank_00000\.safetensors has \d+ bytes, \d+ were written"),
    ("missing data", lambda f: (f / DATA).unlink(), r"rank_00000\.safetensors is missing"),
    ("truncated manifest", lambda f: _truncate(f / MANIFEST), r"megascale\.json is damaged \(JSONDecodeError"),
    ("manifest of zeros", lambda f: (f / MANIFEST).write_bytes(bytes(50)), r"megascale\.json is damaged"),
    ("manifest not text", lambda f: (f / MANIFEST).write_bytes(b"\xff" * 50), r"megascale\.json is damaged"),
    ("manifest a list", lambda f: (f / MANIFEST).write_text("[]"), r"megascale\.json is damaged"),
    ("manifest without body", lambda f: (f / MANIFEST).write_text('{"format": 3}'), r"megascale\.json is damaged"),
    ("manifest edited", lambda f: _edit(f / MANIFEST, "body", "{}"), "its checksum does not fit"),
    ("another format", lambda f: _edit(f / MANIFEST, "format", 99), "has format 99; this version of megascale reads 3"),
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


def _forbid_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a pickle was opened")

    for owner, names in {
        pickle: ("load", "loads", "Unpickler", "_Unpickler"),
        torch: ("load",),
        torch._weights_only_unpickler: ("load", "loads", "Unpickler"),
    }.items():
        for name in names:
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, refuse)


def test_a_load_opens_no_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger's checkpoint cannot run code. `consolidate` opens none either."""
    model, optimizer = build(0)
    train(model, optimizer, 0, 3)
    user_state = {"order": torch.randperm(9), "epoch": 1}
    folder = save(tmp_path, 3, model, optimizer, user_state=user_state, rank_state=torch.get_rng_state())
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, DATA]
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
