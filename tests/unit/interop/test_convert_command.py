"""``python -m megascale convert``: what it prints, its status, and a file that appears whole or not at all."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.cli import main
from megascale.errors import InteropError
from megascale.interop import convert
from tests.unit.interop.checkpoints import SCALER, torch_checkpoint, trained


@pytest.mark.slow
def test_the_program_converts_and_says_what_it_did(tmp_path: Path) -> None:
    """``python -m megascale convert`` in a process of its own: a report, status 0, and the file."""
    torch.save(torch_checkpoint(), tmp_path / "last.pt")
    command = [sys.executable, "-m", "megascale", "convert", str(tmp_path / "last.pt"), str(tmp_path / "ours.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "mapped      grad scaler: key 'scaler'" in done.stdout
    assert "not mapped  torch lets the scale fall" in done.stdout
    assert f"written     {tmp_path / 'ours.pt'}" in done.stdout
    assert set(torch.load(tmp_path / "ours.pt", weights_only=True)) == {
        "optimizer", "main_params", "grad_scaler", "version",
    }  # fmt: skip


def test_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--dry-run reports and writes no file."""
    torch.save(torch_checkpoint(), tmp_path / "last.pt")
    assert main(["convert", str(tmp_path / "last.pt"), str(tmp_path / "ours.pt"), "--dry-run"]) == 0
    assert "nothing written" in capsys.readouterr().out
    assert not (tmp_path / "ours.pt").exists()


@pytest.mark.parametrize("form", ["flat", "nested", "lines"])
def test_names_come_from_a_file(form: str, tmp_path: Path) -> None:
    """--model-names: a JSON list, a list of lists, or lines."""
    model, optimizer = trained()
    torch.save({"optimizer": optimizer.state_dict(), "weights": model.state_dict()}, tmp_path / "last.pt")
    names = [f"renamed.{name}" for name, _ in model.named_parameters()]
    text = {"flat": json.dumps(names), "nested": json.dumps([names]), "lines": "\n".join(names)}[form]
    (tmp_path / "names").write_text(text)
    torch.save({"optimizer": optimizer.state_dict(), "scaler": SCALER}, tmp_path / "last.pt")
    arguments = ["convert", str(tmp_path / "last.pt"), str(tmp_path / "ours.pt")]
    assert main([*arguments, "--model-names", str(tmp_path / "names")]) == 0
    assert list(torch.load(tmp_path / "ours.pt", weights_only=True)["optimizer"]["state"]) == names


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, and a name that somebody took meanwhile: a named error; no half file, and theirs stays."""

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("torch.save", full)
        with pytest.raises(InteropError, match="No space left"):
            convert(SCALER, tmp_path / "ours.pt")
    assert list(tmp_path.iterdir()) == []

    def taken(*_: Any) -> None:
        (tmp_path / "ours.pt").write_text("theirs")

    with monkeypatch.context() as patched:
        patched.setattr("megascale.utils.atomic_files.os.fsync", taken)
        with pytest.raises(InteropError, match="cannot be written"):
            convert(SCALER, tmp_path / "ours.pt")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["theirs"]


def test_a_name_that_is_there_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a link whose disk is not mounted, nor a file that comes after the last look: both were. A file system
    without hard links gets its file.
    """
    link, file = tmp_path / "link.pt", tmp_path / "file.pt"
    link.symlink_to(tmp_path / "unmounted" / "ours.pt")
    file.write_text("theirs")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "exists", lambda path: False)
        for target in (link, file):
            with pytest.raises(InteropError, match=f"{target.name} cannot be written: .*exists"):
                convert(SCALER, target)
    assert link.is_symlink()
    assert file.read_text() == "theirs"

    def refused(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patched:
        patched.setattr("megascale.utils.atomic_files.os.link", refused)
        convert(SCALER, tmp_path / "ours.pt")
        with pytest.raises(InteropError, match="cannot be written"):
            convert(SCALER, link)
    assert torch.load(tmp_path / "ours.pt", weights_only=True)
    assert len(list(tmp_path.iterdir())) == 3
