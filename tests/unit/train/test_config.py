"""Options of the training program: what is understood, and what is refused with which words."""

import math
from pathlib import Path

import pytest
import torch

from megascale.errors import ArgumentError
from megascale.train.build import build_wrapped_optimizer
from megascale.train.config import TrainConfig, as_dict, load_config, save_yaml, usage
from megascale.train.runtime import as_typed

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
    save_yaml(config, tmp_path / "config.yaml", as_typed(["task=text", "wandb_name=a b\nc"]))
    assert as_dict(load_config([f"config={tmp_path / 'config.yaml'}"])) == as_dict(config)
    first, second, third = (tmp_path / "config.yaml").read_text().splitlines()[:3]
    assert (first, second) == ("# python -m megascale.train task=text 'wandb_name=a b", "# c'")
    assert not third.startswith("#")


def test_the_command_says_on_how_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun it is torchrun's, on one node or on many."""
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    assert as_typed(["steps=5"]) == "python -m megascale.train steps=5"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert as_typed(["steps=5"]) == "torchrun --standalone --nproc-per-node 2 -m megascale.train steps=5"
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert as_typed([]) == "torchrun --nnodes 3 --nproc-per-node 2 -m megascale.train"


def test_usage_lists_every_key() -> None:
    """--help shows keys with their defaults."""
    text = usage()
    assert "scaler.growth_interval=16" in text
    assert "checkpoint.resume=auto" in text


REFUSED = [
    (["scaler.growth_factor=1"], "scaler.growth_factor must be above 1, got 1.0"),
    (["scaler.backoff_factor=1.5"], "scaler.backoff_factor must be below 1, got 1.5"),
    (["scaler.growth_interval=0"], "scaler.growth_interval must be 1 or more, got 0"),
    (["scaler.hysteresis=0"], "scaler.hysteresis must be 1 or more, got 0"),
    (["scaler.min_scale=0"], "scaler.min_scale must be above 0"),
    (["scaler.max_scale=2"], "scaler.min_scale <= scaler.scale <= scaler.max_scale must hold"),
    (["distributed.timeout=0"], "distributed.timeout must be above 0"),
    (["distributed.timeout=-1"], "distributed.timeout must be above 0"),
    (["optimizer.max_consecutive_skips=0"], "optimizer.max_consecutive_skips must be 1 or more, got 0"),
    (["optimizer.max_overflows_at_min_scale=0"], "optimizer.max_overflows_at_min_scale must be 1 or more, got 0"),
    (["optimizer.grad_norm_skip_threshold=0"], "optimizer.grad_norm_skip_threshold must be above 0"),
    (["digits.fill=2"], "digits.fill is a probability"),
    (["seed=100000000000000000000"], "seed must be .* or less, got 1"),
    (["wandb_name=["], r"argument 'wandb_name=\[' has no value that YAML can read"),
    (["steps=${nothing}"], "steps: .*nothing"),
    (["steps="], "steps: "),
    (["optimizer.sharded=2x"], "optimizer.sharded"),
    (["optimizer.bucket_numel=0"], "optimizer.bucket_numel must be 1 or more, got 0"),
    (["optimizer.overlap_param_gather=true"], "optimizer.overlap_param_gather=true needs optimizer.sharded=true"),
    (["scaler.scal=1"], "unknown key 'scaler.scal'; did you mean 'scaler.scale'"),
    (["scaler.type=static"], "unknown key 'scaler.type'; did you mean 'scaler."),
    (["scaler=static"], "'scaler' is a group; give one of scaler.scaler_type, scaler.scale"),
    (["--steps", "3"], "argument '--steps' is not of the form key=value"),
    (["steps"], "argument 'steps' is not of the form key=value"),
    (["steps=many"], "steps: .*many"),
    (["steps=1.5"], "steps: .*1.5"),
    (["steps=0"], "steps must be 1 or more, got 0"),
    (["batch_size=-1"], "batch_size must be 1 or more, got -1"),
    (["seed=-1"], "seed must be 0 or more"),
    (["task=mnist"], "task must be one of 'digits', 'text', got 'mnist'"),
    (["precision=fp8"], "precision must be one of 'fp16', 'bf16', 'fp32', got 'fp8'"),
    (["scaler.scaler_type=fixed"], "scaler.scaler_type must be one of 'dynamic', 'static', 'none', got 'fixed'"),
    (["scaler.scaler_type=none"], "scaler.scaler_type=none does not go with precision=fp16"),
    (["scaler.scale=nan"], "scaler.scale must be finite, got nan"),
    (["scaler.scale=0"], "scaler.scale must be above 0"),
    (["optimizer.lr=-1"], "optimizer.lr must be 0 or more"),
    (["optimizer.beta1=1"], r"optimizer.beta1 must be in \[0, 1\)"),
    (["checkpoint.resume=never"], "checkpoint.resume must be one of 'auto', 'restart', got 'never'"),
    (["text.heads=3"], "text.width=128 must be a multiple of text.heads=3"),
    (["wandb=on"], "wandb must be one of 'disabled', 'offline', 'online', got 'True'"),
    (["wandb_name=a/b"], "wandb_name must be a plain name without '/', got 'a/b'"),
    (["config=nowhere.yaml"], "config=nowhere.yaml: there is no such file"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_bad_argument_is_refused(arguments: list[str], message: str) -> None:
    """Typos and impossible values are refused before anything starts, with the nearest name or the choices."""
    with pytest.raises(ArgumentError, match=message):
        load_config(arguments)


BAD_FILES = [
    ("stepz: 3\n", "unknown key 'stepz'; did you mean 'steps'"),
    ("scaler:\n  scle: 3\n", "unknown key 'scaler.scle'; did you mean 'scaler.scale'"),
    ("steps: [1, 2]\n", "steps: "),
    ("- 1\n- 2\n", "a config file must hold keys and values, got list"),
    ("a: b: c\n", "cannot be read"),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES)
def test_bad_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """A config file gets the same checks, and the message names the file."""
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=message) as caught:
        load_config([f"config={path}"])
    assert "bad.yaml" in str(caught.value) or "config file" in str(caught.value)


def test_budgets_and_spikes_reach_the_optimizer() -> None:
    """As they are typed; null is no rule and no limit."""
    names = ["grad_norm_skip_threshold", "max_consecutive_skips", "max_overflows_at_min_scale"]
    for values, expected in (
        ("10 50 20", [10.0, 50, 20]),
        ("null null null", [math.inf, None, None]),
    ):
        keys = [f"optimizer.{name}={value}" for name, value in zip(names, values.split(), strict=True)]
        optimizer = build_wrapped_optimizer(load_config(keys), torch.nn.Linear(2, 1).half())
        assert [getattr(optimizer.config, name) for name in names] == expected
