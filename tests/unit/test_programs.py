"""Every program: its version, its exit status, and one line in place of a traceback."""

import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import megascale.checkpoint
from megascale.checkpoint.__main__ import main as checkpoint
from megascale.cli import info
from megascale.cli import main as tools
from megascale.train.__main__ import main as train
from megascale.train.config import load_config
from tests.checkpoint_cases import build
from tests.unit.interop.checkpoints import SCALER, torch_checkpoint

PROGRAMS = [
    ["megascale"],
    ["megascale", "convert"],
    ["megascale", "info"],
    ["megascale", "estimate"],
    ["megascale.checkpoint"],
    ["megascale.train"],
    ["megascale.train.experiment"],
]
ROOT = Path(__file__).parents[2]
TINY = ["task=text", "text.width=8", "text.layers=1", "text.heads=1", "text.context=8", "text.heldout_windows=4"]
TINY += ["steps=2", "batch_size=2", "threads=1"]


def _run(*arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=120, **options)


@pytest.mark.release
@pytest.mark.parametrize("program", PROGRAMS, ids=" ".join)
def test_version_and_help(program: list[str]) -> None:
    """Every program, and every command of one, tells its version and how it is called."""
    told = _run(*program, "--version")
    assert (told.returncode, told.stdout, told.stderr) == (0, f"megascale {megascale.__version__}\n", "")
    told = _run(*program, "--help")
    assert (told.returncode, told.stderr) == (0, "")
    assert f"python -m {program[0]}" in told.stdout


def test_the_console_command_is_the_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`megascale`, as pip installs it, runs what `python -m megascale` runs, and says its own name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    module, _, function = project["project"]["scripts"]["megascale"].partition(":")
    assert getattr(importlib.import_module(module), function) is tools
    for called, name in (("/usr/bin/megascale", "megascale"), ("/x/megascale/__main__.py", "python -m megascale")):
        monkeypatch.setattr(sys, "argv", [called, "--help"])
        with pytest.raises(SystemExit):
            tools()
        assert capsys.readouterr().out.startswith(f"usage: {name} [")


COMMANDS = ("train", "experiment", "checkpoint", "estimate", "info", "convert")


def test_one_command_has_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    """--help lists every command, and each is understood; those that parse their own arguments get what follows."""
    with pytest.raises(SystemExit):
        tools(["--help"])
    listed = re.findall(r"^    (\w+)", capsys.readouterr().out, flags=re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)
    for command in COMMANDS:
        assert tools([command, "--version"]) == 0
        assert capsys.readouterr().out == f"megascale {megascale.__version__}\n"
    assert tools(["train", "--help"]) == 0
    assert "batch_size=" in capsys.readouterr().out
    assert tools(["experiment", "seeds=x"]) == 2
    assert "seeds must be different integers" in capsys.readouterr().err
    assert tools(["experiment", "--help"]) == 0
    assert "`" not in capsys.readouterr().out


def test_a_command_in_a_process_of_its_own() -> None:
    """`megascale checkpoint`, through the same function as the console command's file."""
    start = "import sys; from megascale.cli import main; sys.argv[0] = 'megascale'; sys.exit(main())"
    call = [sys.executable, "-c", start]
    done = subprocess.run([*call, "checkpoint", "nowhere"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: no checkpoint at nowhere: the folder does not exist\n"


def _info(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return what `info` says, by label, each in one line."""
    assert tools(["info"]) == 0
    said: dict[str, str] = {}
    label = ""
    for line in capsys.readouterr().out.splitlines():
        label = line[: info.LABEL].strip() or label
        said[label] = f"{said[label]} {line[info.LABEL :].strip()}" if label in said else line[info.LABEL :].strip()
    return said


def test_info_says_what_runs_and_why_nothing_else_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for every backend: the chosen one is the one that an optimizer gets; the others say why not."""
    monkeypatch.delenv("MEGASCALE_BACKEND", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    said = _info(capsys)
    params = [torch.nn.Parameter(torch.zeros(3))]
    optimizer = megascale.MixedPrecisionOptimizer(torch.optim.SGD(params, 0.1), megascale.OptimizerConfig())
    assert said[f"backend {optimizer._backend.name}"] == "chosen; works here"
    assert said["backend torch"] in ("works here", "chosen; works here")
    assert said["torch"].startswith(torch.__version__)
    assert "backend 'apex' needs" in said["backend apex"]
    assert ("TRITON_INTERPRET" in said["backend triton"]) != (os.environ.get("TRITON_INTERPRET") == "1")
    assert said["megascale"].startswith(megascale.__version__)
    assert f"{torch.get_num_threads()} threads" in said["cpu"]


@pytest.mark.parametrize(
    ("module", "arguments"),
    [("omegaconf", []), ("tensorboard", TINY), ("tqdm", TINY), ("sklearn", ["steps=1"])],
)
def test_missing_extra_is_named_with_its_pip_command(
    module: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What the extra `train` installs is not there: one line that says how to install it, and no traceback."""
    ours = [name for name in sys.modules if name.startswith("megascale.train.")]
    for name in [*ours, "torch.utils.tensorboard"]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, module, None)
    assert train([*arguments, f"output_dir={tmp_path}"]) == 1
    said = capsys.readouterr().err
    assert said == (f"megascale.train: this needs {module}, which is not installed: pip install 'megascale[train]'\n")


@pytest.mark.parametrize(
    ("main", "arguments", "status", "said"),
    [
        (checkpoint, ["nowhere"], 1, "error: no checkpoint at nowhere: the folder does not exist\n"),
        (checkpoint, ["{saved}", "{there}"], 1, "exists already; choose another file, or give --overwrite\n"),
        (checkpoint, ["{saved}", "--step", "4"], 1, "no checkpoint of step 4 in"),
        (checkpoint, ["{saved}", "--step", "-1"], 2, "argument --step: must be an integer, 0 or more, got '-1'\n"),
        (checkpoint, ["{saved}", "--overwrite"], 2, "--overwrite says how to write OUT, which is not given\n"),
        (checkpoint, ["{saved}", "out.pt", "--quick"], 2, "--quick is for a listing"),
        (checkpoint, ["{empty}"], 1, "expected folders named like step_00000040\n"),
        (tools, [], 2, "the following arguments are required: COMMAND\n"),
        (tools, ["trian"], 2, "there is no command 'trian'; did you mean 'train'?"),
        (tools, ["xyzzy"], 2, "invalid choice: 'xyzzy'"),
        (tools, ["convert", "{two}", "{new}"], 1, "that differ, a, b; save one of them alone"),
        (tools, ["convert", "{two}", "{new}", "--model-names", "{empty}"], 1, "--model-names {empty} cannot be read"),
        (tools, ["convert", "{last}"], 2, "the following arguments are required: destination\n"),
        (tools, ["convert", "{nowhere}", "{new}"], 1, "does not exist"),
        (tools, ["convert", "{last}", "{there}"], 1, "exists already"),
        (tools, ["convert", "{last}", "{nowhere}/new"], 1, "there is no folder"),
        (tools, ["convert", "{last}", "{new}", "--format", "accelerate"], 1, "neither a loss scaler's nor"),
        (tools, ["convert", "{empty}", "{new}"], 1, "no checkpoint of megatron"),
        (tools, ["convert", "{last}", "{new}", "--model-names", "{there}"], 1, "1 parameter names"),
        (train, ["steps"], 2, "megascale.train: argument 'steps' is not of the form key=value"),
        (train, [*TINY, "output_dir={there}"], 2, "output_dir={there} cannot be written"),
        (train, [*TINY, "text.context=100000000"], 2, "text.context=100000000 is longer than the held-out text"),
    ],
)
def test_refusals_name_what_the_user_typed(
    main: Any, arguments: list[str], status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, the flag or key as typed, and a status: 1 refused, 2 wrong usage; nothing is written or overwritten."""
    names = {name: tmp_path / name for name in ("saved", "there", "empty", "two", "last", "nowhere", "new")}
    megascale.checkpoint.save(names["saved"], 3, *build(0))
    names["there"].write_text("mine")
    names["empty"].mkdir()
    torch.save({"a": SCALER, "b": SCALER | {"_growth_tracker": 12}}, names["two"])
    torch.save(torch_checkpoint(), names["last"])
    try:
        ended = main([argument.format(**names) for argument in arguments])
    except SystemExit as caught:
        ended = caught.code
    assert ended == status
    shown = capsys.readouterr().err
    assert said.format(**names) in shown
    assert "Traceback" not in shown
    assert status == 2 or (shown.startswith("error: ") and shown.count("\n") == 1)
    assert [name for name, path in names.items() if not path.exists()] == ["nowhere", "new"]
    assert names["there"].read_text() == "mine"


def test_a_checkpoint_of_another_program_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint in the run's place that megascale.train did not write."""
    megascale.checkpoint.save(tmp_path / "run" / "checkpoints", 3, *build(0), user_state=[1])
    assert train([*TINY, f"output_dir={tmp_path}", "wandb_name=run"]) == 1
    assert "was not saved by megascale.train" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["text", "text.yaml", "configs/text.yaml"])
def test_packaged_configs_are_found_anywhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """config=text, from any folder; a file of that name there comes first."""
    monkeypatch.chdir(tmp_path)
    assert load_config([f"config={name}"]).task == "text"
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("task: digits\nseed: 5\n")
    assert load_config([f"config={name}"]).seed == 5
