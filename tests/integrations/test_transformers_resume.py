"""Trainers that resume what another kind of Trainer has saved: plain or adopted, in this precision or another.

One process: how state dicts load in ZeRO-1's and FSDP2's cells is in tests/distributed/test_resume_elsewhere.py.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale import DynamicGradScaler, MixedPrecisionOptimizer
from megascale.errors import InteropError
from megascale.interop import convert
from tests.training import bits_equal

transformers = pytest.importorskip("transformers", reason="tests of the Trainer need transformers and accelerate")
pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from megascale.integrations.transformers import adopt  # noqa: E402
from tests.integrations.accelerate_cases import reset  # noqa: E402
from tests.integrations.hf_cases import Samples, arguments, llama, logged, optimizer_of  # noqa: E402

SAVED_AT, STEPS = 3, 6
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
STATES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "compact": {"exp_avg_dtype": "int8", "exp_avg_sq_dtype": "uint8", "store_param_remainders": True},
}


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate's state is shared by a whole process."""
    reset()
    yield
    reset()


class _AtStart(TrainerCallback):
    """What a run begins with, after everything was loaded."""

    state: dict[str, Any]
    weights: dict[str, Tensor]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Copy it."""
        optimizer = kwargs["optimizer"].optimizer
        self.state = optimizer.state_dict() if isinstance(optimizer, MixedPrecisionOptimizer) else {}
        self.moments = [dict(optimizer.state[p]) for group in optimizer.param_groups for p in group["params"]]
        self.moments = [{key: value.clone() for key, value in one.items() if value is not None} for one in self.moments]
        self.rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.weights = {name: param.detach().clone() for name, param in kwargs["model"].named_parameters()}


def _train(folder: Path, dtype: str, resume: Path | None = None, **options: Any) -> tuple[Any, _AtStart, list[str]]:
    """Train, plain or adopted with ``options``; return the trainer, what it began with, and what a load said."""
    reset()
    start = _AtStart()
    trainer = Trainer(
        model=llama(DTYPES[dtype]),
        args=arguments(TrainingArguments, folder, save_strategy="steps", save_steps=SAVED_AT, weight_decay=0.1),
        train_dataset=Samples(),
        callbacks=[start],
    )
    if options.pop("adopted", True):
        adopt(trainer, **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer, start, [str(one.message) for one in said if "load_state_dict() takes" in str(one.message)]


def _saved(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what a Trainer has saved of its optimizer, and its weights."""
    from safetensors.torch import load_file

    checkpoint = folder / f"checkpoint-{SAVED_AT}"
    return torch.load(checkpoint / "optimizer.pt", weights_only=True), load_file(checkpoint / "model.safetensors")


@pytest.mark.parametrize(
    ("plain", "dtype", "state"),
    [("bf16", "bf16", "fp32"), ("fp32", "fp16", "compact"), ("fp32", "fp32", "fp32"), ("bf16", "fp16", "fp32")],
)
def test_an_adopted_trainer_resumes_a_plain_one(plain: str, dtype: str, state: str, tmp_path: Path) -> None:
    """Moments, rates and schedule go on; the weights are the main params; it is said once. It was an error."""
    options = STATES[state] if dtype != "fp32" else {}
    expected, *_ = _train(tmp_path / "plain", plain, adopted=False)
    saved, weights = _saved(tmp_path / "plain")
    trainer, start, said = _train(tmp_path / "ours", dtype, tmp_path / "plain" / f"checkpoint-{SAVED_AT}", **options)
    assert len(said) == int(dtype != "fp32")
    groups = start.state["optimizer"]["param_groups"]
    names = [name for group in groups for name in group["params"]]
    for position, name in enumerate(names):
        assert bits_equal(start.weights[name], weights[name].to(DTYPES[dtype]))
        if dtype != "fp32":
            assert bits_equal(start.state["main_params"][name], weights[name].to(DTYPES[dtype]).float())
        if not options:
            for key, value in saved["state"][position].items():
                assert bits_equal(start.state["optimizer"]["state"][name][key], value.float())
    assert start.rates == [group["lr"] for group in saved["param_groups"]]
    assert logged(trainer, "learning_rate") == logged(expected, "learning_rate")
    losses = [logged(one, "loss") for one in (trainer, expected)]
    assert losses[0][:SAVED_AT] == losses[1][:SAVED_AT]  # of the log that it took up
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)


@pytest.mark.parametrize(("plain", "dtype"), [("fp32", "fp16"), ("bf16", "bf16"), ("fp32", "fp32")])
def test_a_plain_trainer_resumes_an_adopted_one(plain: str, dtype: str, tmp_path: Path) -> None:
    """What torch's AdamW keeps is in the file as torch saves it. It was KeyError: 'param_groups'."""
    expected, *_ = _train(tmp_path / "ours", dtype)
    saved, weights = _saved(tmp_path / "ours")
    trainer, start, _ = _train(tmp_path / "plain", plain, tmp_path / "ours" / f"checkpoint-{SAVED_AT}", adopted=False)
    names = [name for group in saved["optimizer"]["param_groups"] for name in group["params"]]
    assert len(start.moments) == len(names)
    for name, moments in zip(names, start.moments, strict=True):
        ours = saved["optimizer"]["state"][name]
        assert moments.keys() == ours.keys()
        assert all(bits_equal(value, ours[key].to(value.dtype)) for key, value in moments.items())
        assert bits_equal(start.weights[name], weights[name].to(DTYPES[plain]))
    assert logged(trainer, "learning_rate") == logged(expected, "learning_rate")
    assert logged(trainer, "loss") == pytest.approx(logged(expected, "loss"), rel=5e-3)


def test_a_plain_trainer_does_not_take_codes_for_moments(tmp_path: Path) -> None:
    """8-bit moments are refused by torch, as it finds no state; ours with fp32 moments decodes them."""
    _train(tmp_path / "ours", "bf16", **STATES["compact"])
    with pytest.raises(KeyError, match="state"):
        _train(tmp_path / "plain", "fp32", tmp_path / "ours" / f"checkpoint-{SAVED_AT}", adopted=False)
    _, start, _ = _train(tmp_path / "wide", "bf16", tmp_path / "ours" / f"checkpoint-{SAVED_AT}")
    assert {value.dtype for one in start.state["optimizer"]["state"].values() for value in one.values()} == {
        torch.float32
    }


def test_the_scale_of_autocast_is_left_alone(tmp_path: Path) -> None:
    """``scaler.pt`` of ``fp16=True``, which a CPU does not save: there is no such scaler for 16-bit weights."""
    _train(tmp_path / "plain", "fp32", adopted=False)
    checkpoint = tmp_path / "plain" / f"checkpoint-{SAVED_AT}"
    torch.save(_autocast_scale(), checkpoint / "scaler.pt")
    trainer, *_ = _train(tmp_path / "ours", "fp16", checkpoint, initial_loss_scale=2.0**9)
    assert optimizer_of(trainer).get_loss_scale().item() == 2.0**9
    assert convert(checkpoint, None).scaler.state["scale"].item() == 2.0**11  # type: ignore[union-attr]


def _autocast_scale() -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
    scaler.scale(torch.ones(()))
    return scaler.state_dict()


@pytest.mark.parametrize("given", ["found", "given"])
def test_convert_knows_a_trainers_folder(given: str, tmp_path: Path) -> None:
    """fp32 weights become main params, bit for bit, beside their moments; names are the model's that the folder names.

    Without transformers names have to be given.
    """
    trainer, *_ = _train(tmp_path, "fp32", adopted=False)
    checkpoint, names = tmp_path / f"checkpoint-{STEPS}", None
    torch.save(_autocast_scale(), checkpoint / "scaler.pt")
    inner, called = trainer.optimizer.optimizer, {param: name for name, param in trainer.model.named_parameters()}
    if given == "given":
        (checkpoint / "config.json").unlink()
        with pytest.raises(InteropError, match=r"only where it has a config\.json and transformers.*--model-names"):
            convert(checkpoint, None)
        names = [[called[param] for param in group["params"]] for group in inner.param_groups]
    convert(checkpoint, tmp_path / "ours.pt", names=names)
    half = llama(torch.float16, seed=1)
    adamw = torch.optim.AdamW(
        [
            {"params": [(name, half.get_parameter(name)) for name in (called[param] for param in group["params"])]}
            for group in inner.param_groups
        ]
    )
    optimizer = MixedPrecisionOptimizer(adamw, grad_scaler=DynamicGradScaler())
    optimizer.load_state_dict(torch.load(tmp_path / "ours.pt", weights_only=True))
    state, mains = optimizer.state_dict()["optimizer"]["state"], dict(optimizer.main_params())
    for param, name in called.items():
        assert bits_equal(mains[name], param.detach())
        assert bits_equal(half.get_parameter(name), param.detach().half())
        assert all(bits_equal(state[name][key], value) for key, value in inner.state[param].items())
    assert optimizer.get_loss_scale().item() == 2.0**11
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_convert_says_what_a_folder_is_not(tmp_path: Path) -> None:
    """An adopted Trainer's resumes as it is; without the optimizer's file there is nothing to convert."""
    _train(tmp_path, "bf16")
    checkpoint = tmp_path / f"checkpoint-{SAVED_AT}"
    with pytest.raises(InteropError, match=r"optimizer\.pt is megascale's own; .* adopt\(trainer\)"):
        convert(checkpoint, None)
    (checkpoint / "optimizer.pt").unlink()
    with pytest.raises(InteropError, match=r"has no optimizer\.pt: save with save_only_model=False"):
        convert(checkpoint, None)
