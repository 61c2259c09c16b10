"""Options of the training program: what is understood, and what is refused with which words."""

import math
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from megascale.errors import ArgumentError
from megascale.train.build import build_wrapped_optimizer
from megascale.train.config import TextConfig, TrainConfig, as_dict, flat, load_config, usage
from megascale.train.runtime import Runtime
from megascale.train.text import TextTask

CONFIGS = Path(__file__).parents[3] / "configs"


def test_documented_runs_parse() -> None:
    """The four runs of the experiment, as typed."""
    for kind, scale, name in (
        ("static", "1", "no_scaling"),
        ("static", "65536", "static_scaling_65536"),
        ("dynamic", "65536", "dynamic_scaling_65536"),
        ("dynamic", "4294967296", "dynamic_scaling_4294967296"),
    ):
        config = load_config([f"scaler.scaler_type={kind}", f"scaler.scale={scale}", f"wandb_name={name}"])
        assert config.scaler.scaler_type == kind
        assert config.scaler.scale == float(scale)
        assert config.run_folder == Path("runs") / name
        scaler = config.scaler
        assert (scaler.growth_factor, scaler.backoff_factor, scaler.growth_interval) == (2.0, 0.2, 16)
        assert (config.task, config.precision) == ("digits", "fp16")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_files_in_configs_load(path: Path) -> None:
    """Every file in configs/ is valid, and overrides go on top of it."""
    assert load_config([f"config={path}", "seed=7"]).seed == 7


def test_digits_file_equals_the_defaults() -> None:
    """configs/digits.yaml documents what runs without arguments."""
    assert as_dict(load_config([f"config={CONFIGS / 'digits.yaml'}"])) == as_dict(TrainConfig())


def test_saved_options_load_again(tmp_path: Path) -> None:
    """The config.yaml of a run folder starts the same run."""
    config = load_config(["task=text", "optimizer.lr=1e-3", "checkpoint.keep_last=5", "wandb_name=x"])
    OmegaConf.save(OmegaConf.structured(config), tmp_path / "config.yaml")
    assert as_dict(load_config([f"config={tmp_path / 'config.yaml'}"])) == as_dict(config)


def test_help_says_what_each_key_means() -> None:
    """--help shows every key with its default, and its meaning beside it; the line says what YAML reads."""
    lines = usage().splitlines()
    assert all(len(line) <= 120 for line in lines)
    for key, value in flat(as_dict(TrainConfig())).items():
        [line] = [line for line in lines if line.startswith(f"  {key}=")]
        shown, *meaning = line.split()
        assert OmegaConf.from_dotlist([shown]) == OmegaConf.from_dotlist(
            [f"{key}={'null' if value is None else value}"]
        )
        assert len(meaning) > 2


REFUSED = [
    (["scaler.growth_interval=0"], "scaler.growth_interval must be 1 or more, got 0"),
    (["optimizer.max_consecutive_skips=0"], "optimizer.max_consecutive_skips must be 1 or more, got 0"),
    (["seed=100000000000000000000"], "seed must be .* or less, got 1"),
    (["wandb_name=["], r"argument 'wandb_name=\[': wandb_name: while parsing"),
    (["steps=${nothing}"], "steps: .*nothing"),
    (["steps="], "steps: "),
    (["optimizer.sharded=2x"], "optimizer.sharded: Value '2x' is not a valid bool"),
    (["scaler.scal=1"], "Key 'scal' not in 'ScalerConfig'"),
    (["lr=1"], "argument 'lr=1': lr: Key 'lr' not in 'TrainConfig'"),
    (["scaler=static"], "argument 'scaler=static': scaler: "),
    (["--steps", "3"], "argument '--steps' is not of the form key=value"),
    (["steps"], "argument 'steps' is not of the form key=value"),
    (["steps=many"], "steps: .*many"),
    (["steps=1.5"], "steps: .*1.5"),
    (["steps=0"], "steps must be 1 or more, got 0"),
    (["batch_size=-1"], "batch_size must be 1 or more, got -1"),
    (["task=mnist"], r"task: Invalid value 'mnist', expected one of \[digits, text\]"),
    (["precision=fp8"], "precision: Invalid value 'fp8'"),
    (["scaler.scaler_type=none"], "scaler.scaler_type=none does not go with precision=fp16"),
    (["optimizer.adam_lr=1"], "optimizer.adam_lr goes with optimizer.name=muon"),
    (["scaler.scale=nan"], "scaler.scale must be finite, got nan"),
    (["optimizer.lr=-1"], "optimizer.lr must be 0 or more"),
    (["wandb=on"], "wandb: Invalid value 'True', expected one of"),
    (["wandb_name=a/b"], "wandb_name must be a plain name without '/', got 'a/b'"),
    (["config=nowhere.yaml"], "config=nowhere.yaml: there is no such file; digits and text come with the program"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_bad_argument_is_refused(arguments: list[str], message: str) -> None:
    """Typos and impossible values are refused before anything starts, with the nearest name or the choices."""
    with pytest.raises(ArgumentError, match=message):
        load_config(arguments)


BAD_FILES = [
    ("stepz: 3\n", "stepz: Key 'stepz' not in 'TrainConfig'"),
    ("scaler:\n  scle: 3\n", "scaler.scle: Key 'scle' not in"),
    ("steps: [1, 2]\n", "steps: "),
    ("- 1\n- 2\n", "Cannot merge"),
    ("a: b: c\n", "mapping values are not allowed"),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES)
def test_bad_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """A config file gets the same checks, and the message names the file."""
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=message) as caught:
        load_config([f"config={path}"])
    assert "bad.yaml" in str(caught.value)


def test_budgets_and_spikes_reach_the_optimizer() -> None:
    """As they are typed; null is no rule and no limit."""
    names = ["grad_norm_skip_threshold", "max_consecutive_skips", "max_overflows_at_min_scale"]
    for values, expected in (
        ("10 50 20", [10.0, 50, 20]),
        ("null null null", [math.inf, None, None]),
    ):
        keys = [f"optimizer.{name}={value}" for name, value in zip(names, values.split(), strict=True)]
        optimizer = build_wrapped_optimizer(load_config(keys), torch.nn.Linear(2, 1).half())
        assert [getattr(optimizer._config, name) for name in names] == expected


def test_times_and_sizes_are_checked_where_they_are_used() -> None:
    """The ranks' patience, and the sizes of the text's model."""
    for value in (0.0, -1.0):
        with pytest.raises(ArgumentError, match=r"distributed.timeout must be above 0"):
            Runtime(1, value)
    with pytest.raises(ArgumentError, match=r"text.width=128 must be a multiple of text.heads=3"):
        TextTask(TextConfig(heads=3), 0)
