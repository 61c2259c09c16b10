"""Saves that write in the background."""

import gc
import os
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale.checkpoint import Checkpointer, save
from megascale.checkpoint import checkpointer as module
from megascale.checkpoint.files import write_file
from megascale.checkpoint.pieces import HostMemory, on_host
from megascale.errors import CheckpointError
from tests.checkpoint_cases import build, train

HELD = (torch.float32, torch.float16, torch.complex64)
PLACES = st.tuples(st.integers(0, 9000), st.sampled_from((0, 2, 6, 1000, 9000)))


def test_steps_before_the_write_change_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training that overtakes the background write, at a first save and at a later one into the same memory."""
    model, optimizer = build(0)
    trained = threading.Event()

    def late(*arguments: Any) -> Any:
        assert trained.wait(60)
        return write_file(*arguments)

    monkeypatch.setattr(module, "write_file", late)
    saver = Checkpointer(tmp_path / "late", async_save=True)
    for step in (1, 2):
        trained.set()
        save(tmp_path / "at once", step, model, optimizer)
        trained.clear()
        saver.save(step, model, optimizer)
        train(model, optimizer, step, step + 2)
        trained.set()
        saver.wait()
    for step in (1, 2):
        late_files, files = (
            {path.name: path.read_bytes() for path in (tmp_path / name / f"step_{step:08d}").iterdir()}
            for name in ("late", "at once")
        )
        assert late_files == files


@given(data=st.data())
def test_copies_are_of_all_bytes(data: st.DataObject) -> None:
    """Whatever shares a storage, side by side, far apart or over each other, in any order of rows, in any dtype; at a
    second time too, in the memory of the first; and what happens to the tensors later changes nothing.
    """
    memory = HostMemory()
    for _ in range(2):
        storage = torch.randn(20000).to(data.draw(st.sampled_from(HELD)))
        live = [torch.ones(3)]
        for start, size in data.draw(st.lists(PLACES, min_size=4, max_size=8)):
            part = storage[start : start + size]
            forms = part, part.reshape(2, -1), part.reshape(2, -1).T, part[::2], part[:, None], part.conj()
            live.append(data.draw(st.sampled_from(forms)))
        expected = [on_host(tensor).tobytes() for tensor in live]
        copies = memory.copied(live)
        storage.zero_()
        assert [copy.tobytes() for copy in copies] == expected


def test_latest_and_load_wait(tmp_path: Path) -> None:
    """A save under way counts: it is finished first. What took most of its time, Python's collector, was paused."""
    model, optimizer = build(0)
    collects: list[bool] = []
    model.register_state_dict_post_hook(lambda *_: collects.append(gc.isenabled()))
    checkpointer = Checkpointer(tmp_path, async_save=True)
    checkpointer.save(1, model, optimizer)
    assert (collects[0], gc.isenabled()) == (False, True)
    assert checkpointer.latest() == tmp_path / "step_00000001"
    checkpointer.save(2, model, optimizer)
    assert checkpointer.load(model, optimizer).step == 2


def _full_disk(*args: Any) -> None:
    raise OSError(28, "No space left on device")


def _leave_block(checkpointer: Checkpointer) -> None:
    with checkpointer:
        pass


SURFACES: dict[str, Callable[[Checkpointer], Any]] = {
    "a save in the foreground": Checkpointer.wait,
    "wait": Checkpointer.wait,
    "next save": lambda checkpointer: checkpointer.save(2, *build(0)),
    "end of the with block": _leave_block,
}


@pytest.mark.parametrize("surface", SURFACES)
def test_an_error_surfaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, surface: str) -> None:
    """In the background at wait(), at the next save, or at the end of the with block; else in the save itself. Once;
    with nothing left behind.
    """
    model, optimizer = build(0)
    in_background = "foreground" not in surface
    checkpointer = Checkpointer(tmp_path, async_save=in_background)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", _full_disk)
        begin, end = partial(checkpointer.save, 1, model, optimizer), partial(SURFACES[surface], checkpointer)
        if in_background:
            begin()
        with pytest.raises(CheckpointError, match=r"cannot write .*No space left on device"):
            end() if in_background else begin()
    assert list(tmp_path.iterdir()) == []
    checkpointer.save(3, model, optimizer)
    assert checkpointer.latest() == tmp_path / "step_00000003"


def test_error_of_a_dropped_checkpointer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can raise it any more, the error is a warning; one that was raised is not told again."""
    model, optimizer = build(0)
    monkeypatch.setattr(os, "fsync", _full_disk)
    for raised in (True, False):
        checkpointer = Checkpointer(tmp_path, async_save=True)
        checkpointer.save(1, model, optimizer)
        if raised:
            with pytest.raises(CheckpointError):
                checkpointer.wait()
        for thread in [thread for thread in threading.enumerate() if thread.name == "megascale checkpoint"]:
            thread.join()
        with warnings.catch_warnings(record=True, action="always") as caught:
            del checkpointer
            gc.collect()
        messages = [str(one.message) for one in caught]
        assert len(messages) == (0 if raised else 1)
        assert all("No space left on device" in message and "call wait()" in message for message in messages)


def test_error_of_the_block_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving the with block by an error shows that error, not the background save's."""
    model, optimizer = build(0)
    checkpointer = Checkpointer(tmp_path, async_save=True)
    monkeypatch.setattr(os, "fsync", _full_disk)
    checkpointer.save(1, model, optimizer)
    with pytest.raises(ZeroDivisionError), checkpointer:
        _ = 1 / 0
