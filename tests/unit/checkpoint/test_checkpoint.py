"""Saving and loading in one process."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megascale.checkpoint import Checkpointer, directory, latest, load, save
from megascale.errors import ArgumentError, ArgumentTypeError, CheckpointError, StateDictError
from tests.checkpoint_cases import build, differences, state_of, train


def test_user_and_rank_state_come_back_as_given(tmp_path: Path) -> None:
    """Every type with its dtype and order; 0-d, empty and strided tensors; keys that look alike stay apart."""
    user_state: dict[str, Any] = {
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3, dtype=torch.float16),
        "strided": torch.arange(12).reshape(3, 4).t()[1:],
        "bool": torch.tensor([True, False]),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.float64),
        "alike": {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}, 0: torch.ones(2), "0": torch.zeros(2), "#0": None},
        "list": [1, 2.5, True, None, "text", b"\x00\xff", (1, (2,)), [], {}, float("inf"), 2**70, 0.1 + 0.2],
    }
    rank_state = {"rng": torch.get_rng_state(), "position": 17}
    before = pickle.dumps((user_state, rank_state))
    model, _ = build(0)
    save(tmp_path, 0, model, user_state=user_state, rank_state=rank_state)
    assert pickle.dumps((user_state, rank_state)) == before
    loaded = load(tmp_path, model)
    assert differences(loaded.user_state, user_state) == []
    assert differences(loaded.rank_state, rank_state) == []


def test_latest_ignores_what_is_not_a_complete_checkpoint(tmp_path: Path) -> None:
    """A killed save, a stray file and an empty folder of the right name are no checkpoints."""
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) is None
    model, _ = build(0)
    save(tmp_path, 9, model)
    save(tmp_path, 10, model)
    (tmp_path / ".step_00000030.incomplete-ab").mkdir()
    (tmp_path / "step_00000040").mkdir()
    (tmp_path / "step_50").mkdir()
    (tmp_path / "step_00000060").write_text("a file")
    assert latest(tmp_path) == tmp_path / "step_00000010"
    assert Checkpointer(tmp_path).latest() == tmp_path / "step_00000010"
    assert load(tmp_path, model).step == 10


def test_one_step_or_one_folder_can_be_chosen(tmp_path: Path) -> None:
    """`step=` and the path of a checkpoint both mean that checkpoint."""
    model, optimizer = build(0)
    states = {}
    for step in (1, 2):
        train(model, optimizer, step, step + 1)
        states[step] = state_of(model, optimizer)
        save(tmp_path, step, model, optimizer)
    for loaded in (load(tmp_path, model, optimizer, step=1), load(tmp_path / "step_00000001", model, optimizer)):
        assert loaded.step == 1
        assert differences(state_of(model, optimizer), states[1]) == []
    assert Checkpointer(tmp_path).load(model, optimizer, step=2).step == 2
    assert differences(state_of(model, optimizer), states[2]) == []


def test_keep_last(tmp_path: Path) -> None:
    """The highest steps stay, and the one just saved even where it is the lowest (after going back to another)."""
    model, _ = build(0)
    checkpointer = Checkpointer(tmp_path, keep_last=2)
    for step in (10, 20, 30):
        checkpointer.save(step, model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000020", "step_00000030"]
    checkpointer.save(5, model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000005", "step_00000030"]
    save(tmp_path, 6, model, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000006"]


def test_killed_removal_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next save removes what a killed one no longer could; who only loads removes nothing."""
    model, _ = build(0)
    with monkeypatch.context() as killed:
        killed.setattr("shutil.rmtree", lambda *_, **__: None)
        for step in (1, 2):
            save(tmp_path, step, model, keep_last=1)
    goes_on = Checkpointer(tmp_path, keep_last=1)
    assert goes_on.load(model).path == goes_on.latest() == tmp_path / "step_00000002"
    assert list(tmp_path.glob(".*.removed-*")) != []
    goes_on.save(4, model)
    assert list(tmp_path.glob(".*.removed-*")) == []


def test_existing_step_is_refused(tmp_path: Path) -> None:
    """A second save of a step neither overwrites the first nor leaves a folder behind."""
    model, optimizer = build(0)
    save(tmp_path, 4, model, optimizer)
    first = state_of(model, optimizer)
    train(model, optimizer, 0, 1)
    with pytest.raises(CheckpointError, match=r"step_00000004 exists already; delete it"):
        save(tmp_path, 4, model, optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000004"]
    load(tmp_path, model, optimizer)
    assert differences(state_of(model, optimizer), first) == []


SAVE_REFUSALS: list[tuple[dict[str, Any], type[ArgumentError], str]] = [
    ({"step": -1}, ArgumentError, "step must be 0 or more, got -1"),
    ({"step": True}, ArgumentTypeError, "step must be an integer, got True"),
    ({"step": 1.0}, ArgumentTypeError, r"step must be an integer, got 1\.0"),
    ({"model": {"weight": 1}}, ArgumentTypeError, r"model must be a torch\.nn\.Module, got dict"),
    (
        {"optimizer": torch.optim.SGD([torch.zeros(1)])},
        ArgumentTypeError,
        "an optimizer of megascale or None, got SGD; wrap",
    ),
    ({"user_state": {"a": [{1, 2}]}}, ArgumentTypeError, r"user/a/#0 is a builtins\.set"),
    ({"user_state": {"a": torch.strided}}, ArgumentTypeError, r"user/a is a torch\.layout"),
    ({"user_state": {(1, 2): 3}}, ArgumentTypeError, r"user has the key \(1, 2\) of type tuple"),
    ({"rank_state": {"rng": object()}}, ArgumentTypeError, r"rank/0/rng is a builtins\.object"),
    ({"user_state": torch.ones(2).to_sparse()}, ArgumentError, "user is a tensor that a checkpoint cannot hold"),
    ({"user_state": torch.ones(2, device="meta")}, ArgumentError, "user is a tensor that a checkpoint cannot hold"),
    ({"keep_last": 0}, ArgumentError, "keep_last must be 1 or more, got 0"),
    ({"keep_last": True}, ArgumentTypeError, "keep_last must be an integer, got True"),
    ({"keep_last": 2.0}, ArgumentTypeError, r"keep_last must be an integer, got 2\.0"),
    ({"groups": "world"}, ArgumentTypeError, "groups must be"),
]


@pytest.mark.parametrize(("change", "kind", "message"), SAVE_REFUSALS, ids=lambda value: str(value)[:40])
def test_refused_arguments_of_save(
    tmp_path: Path, change: dict[str, Any], kind: type[ArgumentError], message: str
) -> None:
    """Every refused argument is named, with its value, before anything is written."""
    arguments = {"step": 1, "model": nn.Linear(1, 1), **change}
    with pytest.raises(kind, match=message):
        save(tmp_path, **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_save_writes_into_is_renamed_before_its_files_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the other one fails, and completes no checkpoint of which files are missing."""
    removed: list[str] = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: removed.append(path.name))
    other = directory.begin(tmp_path, 1)
    directory.begin(tmp_path, 2)
    assert [name.split("-")[0] for name in removed] == [".step_00000002.removed"]
    with pytest.raises(FileNotFoundError):
        directory.commit(other, tmp_path, 1)


def test_a_checkpointer_stays_in_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the program goes to another one. A step's folder is found by itself; a link to nowhere is noticed."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    checkpointer, model = Checkpointer("run"), nn.Linear(1, 1)
    monkeypatch.chdir("elsewhere")
    path = checkpointer.save(1, model)
    assert path == checkpointer.latest() == tmp_path / "run" / "step_00000001"
    assert load(path, model, step=1).step == 1
    (tmp_path / "run" / "step_00000002").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="step_00000002 exists already"):
        checkpointer.save(2, model)
    with pytest.raises(ArgumentTypeError, match="directory must be a path, got None"):
        Checkpointer(None)  # type: ignore[arg-type]


LOAD_REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"model": None}, ArgumentTypeError, r"model must be a torch\.nn\.Module, got NoneType"),
    ({"optimizer": "adam"}, ArgumentTypeError, "optimizer must be an optimizer of megascale or None, got str"),
    ({"step": -2}, ArgumentError, "step must be 0 or more, got -2"),
    ({"strict": 1}, ArgumentTypeError, "strict must be True or False, got 1"),
    ({"step": 8}, CheckpointError, r"no checkpoint of step 8 in .*; there are steps 7"),
    ({"path": "nowhere"}, CheckpointError, "the folder does not exist"),
    ({"path": "run/step_00000007/megascale.json"}, CheckpointError, "it is not a folder"),
    ({"path": "run/step_00000007", "step": 8}, CheckpointError, "no complete checkpoint in"),
    ({"path": "empty"}, CheckpointError, "no complete checkpoint in .*: expected folders named like step_00000040"),
]


@pytest.mark.parametrize(("change", "kind", "message"), LOAD_REFUSALS, ids=lambda value: str(value)[:40])
def test_refused_arguments_of_load(tmp_path: Path, change: dict[str, Any], kind: type[Exception], message: str) -> None:
    """Every refused argument is named, with its value or with what is there instead."""
    model = nn.Linear(1, 1)
    (tmp_path / "empty").mkdir()
    save(tmp_path / "run", 7, model)
    arguments = {"model": model, **change, "path": tmp_path / change.get("path", "run")}
    with pytest.raises(kind, match=message):
        load(**arguments)


def _module(**buffers: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, value in buffers.items():
        module.register_buffer(name, value)
    return module


def test_model_that_does_not_fit(tmp_path: Path) -> None:
    """All missing, unexpected and mismatched names in one message; the model is unchanged."""
    saved = _module(kept=torch.zeros(2), narrow=torch.zeros(4), low=torch.zeros(2).long(), old=torch.zeros(1))
    save(tmp_path, 1, saved)
    model = _module(kept=torch.ones(2), narrow=torch.ones(3), low=torch.ones(2).half(), new=torch.ones(1))
    with pytest.raises(CheckpointError) as refusal:
        load(tmp_path, model)
    for line in (
        "'new' is missing in the checkpoint",
        "'old' is not in the model",
        "'narrow' is float32[4] in the checkpoint, float32[3] in the model",
        "'low' is int64[2] in the checkpoint, float16[2] in the model",
        "pass strict=False",
    ):
        assert line in str(refusal.value)
    assert all(bool((value == 1).all()) for value in model.state_dict().values())

    loaded = load(tmp_path, model, strict=False)
    assert [line.split(" ")[0] for line in loaded.skipped] == ["'low'", "'narrow'", "'new'", "'old'"]
    values = {name: value.tolist() for name, value in model.state_dict().items()}
    assert values == {"kept": [0, 0], "narrow": [1, 1, 1], "low": [1, 1], "new": [1]}


def test_optimizer_that_does_not_fit(tmp_path: Path) -> None:
    """The optimizer refuses, and the model, which would fit, has not changed either."""
    model, optimizer = build(0)
    train(model, optimizer, 0, 2)
    save(tmp_path, 2, model, optimizer)
    model, optimizer = build(1)
    optimizer.add_param_group({"params": [("extra", nn.Parameter(torch.ones(2, dtype=torch.float16)))]})
    before = state_of(model, optimizer)
    with pytest.raises(StateDictError, match="extra"):
        load(tmp_path, model, optimizer)
    assert differences(state_of(model, optimizer), before) == []


def test_main_params_follow_weights_loaded_alone(tmp_path: Path) -> None:
    """Weights loaded without the optimizer are not reverted by its next step (Megatron-LM issues 174 and 5071)."""
    trained, optimizer = build(0)
    train(trained, optimizer, 0, 3)
    save(tmp_path, 3, trained, optimizer)
    model, optimizer = build(1)
    load(tmp_path, model)
    for name, main_param in optimizer.main_params():
        assert torch.equal(main_param, trained.state_dict()[name].float()), name


def test_checkpoint_without_optimizer(tmp_path: Path) -> None:
    """Refused if the optimizer is wanted; with strict=False the main params take the loaded weights."""
    trained, _ = build(0)
    save(tmp_path, 3, trained)
    model, optimizer = build(1)
    before = state_of(model, optimizer)
    with pytest.raises(CheckpointError, match="step 3 holds no optimizer state; it has model"):
        load(tmp_path, model, optimizer)
    assert differences(state_of(model, optimizer), before) == []
    assert load(tmp_path, model, optimizer, strict=False).skipped == ("the checkpoint holds no optimizer state",)
    for name, main_param in optimizer.main_params():
        assert torch.equal(main_param, trained.state_dict()[name].float()), name


def test_python_values_in_a_model_state_dict(tmp_path: Path) -> None:
    """A module's extra state, which need not be a tensor, comes back through the module's own hook."""
    module = _Counting()
    module.calls = {"forward": 3, "note": "warm"}
    save(tmp_path, 1, module)
    fresh = _Counting()
    load(tmp_path, fresh)
    assert fresh.calls == {"forward": 3, "note": "warm"}


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, Any] = {}

    def get_extra_state(self) -> dict[str, Any]:
        return self.calls

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state


def test_load_while_the_only_save_is_unfinished(tmp_path: Path) -> None:
    """The error says that a save is unfinished: another process may have to wait for it."""
    directory.begin(tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"unfinished are .*\.step_00000003\.incomplete-\w+.*wait\(\)"):
        load(tmp_path, nn.Linear(1, 1))
