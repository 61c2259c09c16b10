"""Options of the training program: typed defaults, YAML files, ``a.b=c`` arguments. OmegaConf checks keys and types."""

import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from megascale.errors import ArgumentError
from megascale.utils import validate

CONFIGS = Path(__file__).parent / "configs"
"""Config files that come with the program: ``config=text`` is ``config=configs/text.yaml``."""


def _key(default: Any, meaning: str) -> Any:
    """Return a dataclass's field with what ``--help`` says of it."""
    return field(default=default, metadata={"help": meaning})


MAY_BE_ZERO = ("seed", "threads", "optimizer.warmup_steps", "checkpoint.every", "digits.depth")
"""All other integers are 1 or more."""

TaskName = StrEnum("TaskName", ["digits", "text"])
Precision = StrEnum("Precision", ["fp16", "bf16", "fp32"])
Logging = StrEnum("Logging", ["disabled", "offline", "online"])
ScalerType = StrEnum("ScalerType", ["dynamic", "static", "none"])
Reset = StrEnum("Reset", ["growth", "clean_step"])
OptimizerName = StrEnum("OptimizerName", ["sgd", "adamw", "adam", "muon"])
Schedule = StrEnum("Schedule", ["cosine", "constant"])
Resume = StrEnum("Resume", ["auto", "restart"])


# ruff: noqa: RUF009  _key() is a field()


@dataclass
class ScalerConfig:
    """The loss scaler."""

    scaler_type: ScalerType = _key(ScalerType.dynamic, "dynamic, static, or none (not with fp16)")
    scale: float = _key(65536.0, "The static scale, or the first dynamic one")
    min_scale: float = _key(2.0**-14, "The dynamic scale never falls below it")
    max_scale: float | None = _key(None, "The dynamic scale never grows above it; null: as long as fp32 holds it")
    growth_factor: float = _key(2.0, "What the dynamic scale is multiplied by when it grows; above 1")
    backoff_factor: float = _key(0.2, "What the dynamic scale is multiplied by when it backs off; between 0 and 1")
    growth_interval: int = _key(16, "Clean steps before the dynamic scale grows")
    hysteresis: int = _key(1, "At which overflow the dynamic scale backs off")
    hysteresis_reset: Reset = _key(Reset.growth, "What replenishes hysteresis: growth, or each clean_step (apex)")


@dataclass
class OptimizerOptions:
    """The wrapped optimizer and its schedule."""

    name: OptimizerName = _key(OptimizerName.sgd, "sgd, adamw, adam, or muon (hidden matrices; all else adamw)")
    lr: float = _key(20.0, "The peak learning rate")
    adam_lr: float | None = _key(None, "With muon: the peak learning rate of adamw's part; null: lr")
    momentum: float = _key(0.9, "Momentum of sgd and of muon")
    beta1: float = _key(0.9, "Decay of the first moment, of adamw and adam")
    beta2: float = _key(0.95, "Decay of the second moment, of adamw and adam")
    weight_decay: float = _key(0.0, "Weight decay: decoupled with adamw, added to the gradient with sgd and adam")
    clip_grad: float = _key(0.01, "Largest global gradient norm; 0 does not clip")
    grad_norm_skip_threshold: float | None = _key(None, "Skip steps whose gradient norm is above it; null: none")
    max_consecutive_skips: int | None = _key(None, "More skipped steps in a row than this are an error; null: no limit")
    max_overflows_at_min_scale: int | None = _key(None, "The same for overflows in a row at min_scale; null: no limit")
    warmup_steps: int = _key(50, "Steps of linear warm-up; skipped steps advance neither it nor the schedule")
    schedule: Schedule = _key(Schedule.cosine, "After the warm-up: cosine (to zero), or constant")
    sharded: bool = _key(False, "Shard main params and state over the ranks by a DistributedOptimizer, without DDP")
    overlap_param_gather: bool = _key(False, "With sharded: let the gather of parameters run into the next forward")
    bucket_numel: int = _key(1_000_000, "With sharded: parameters that are reduced and gathered at once")


@dataclass
class CheckpointConfig:
    """When to save and how to start."""

    every: int = _key(100, "Steps between checkpoints; one more is saved at the end. 0: only at the end")
    keep_last: int = _key(2, "How many checkpoints to keep")
    async_save: bool = _key(False, "Write in a background thread")
    resume: Resume = _key(Resume.auto, "auto: go on from the latest checkpoint. restart: remove the run, begin anew")


@dataclass
class DistributedConfig:
    """How long ranks wait for one another."""

    timeout: float | None = _key(None, "Seconds that a rank waits for another; null: torch's own, 1800 with gloo")


@dataclass
class DigitsConfig:
    """The task ``digits``."""

    size: int = _key(256, "Height and width of a scene, pixels")
    grid: int = _key(6, "A scene has grid x grid cells, each with at most one digit")
    fill: float = _key(0.6, "Probability that a cell has a digit")
    noise: float = _key(0.05, "Standard deviation of the noise on all pixels")
    patch: int = _key(4, "How often the 8 x 8 digits are enlarged, and height and width of the U-Net's patches, pixels")
    width: int = _key(16, "Channels of the first level of the U-Net")
    depth: int = _key(2, "Number of times it halves the resolution")
    heldout_scenes: int = _key(64, "Scenes that the accuracy is measured on; their digits are never trained on")


@dataclass
class TextConfig:
    """The task ``text``."""

    width: int = _key(128, "Size of the residual stream")
    layers: int = _key(4, "Blocks of attention and perceptron")
    heads: int = _key(4, "Attention heads; width is a multiple of it")
    context: int = _key(128, "Bytes a model sees at once")
    heldout_windows: int = _key(64, "Windows of held-out text that the accuracy is measured on")


@dataclass
class TrainConfig:
    """Everything ``python -m megascale.train`` takes."""

    task: TaskName = _key(TaskName.digits, "digits: label pixels of handwritten digits. text: a GPT on Python's pages")
    precision: Precision = _key(Precision.fp16, "Parameters and gradients: fp16, bf16 or fp32")
    seed: int = _key(0, "Decides initial weights and data")
    steps: int = _key(800, "Steps of the whole run, skipped ones included; a run may go on to more")
    batch_size: int = _key(8, "Samples per step over all ranks; a multiple of their number")
    evaluate_every: int = _key(100, "Steps between measurements on held-out data")
    threads: int = _key(0, "CPU threads of each rank; 0: the machine's cores divided by its ranks")
    watch: bool = _key(False, "Name the first module with inf or NaN; several passes over all activations")
    output_dir: str = _key("runs", "Folder of all runs; each writes into a folder of its own in it")
    wandb_name: str | None = _key(None, "Name of the run and of its folder; default: task and precision")
    wandb: Logging = _key(Logging.disabled, "Log to Weights & Biases: disabled, offline or online")
    wandb_project: str = _key("megascale", "Project of Weights & Biases")
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    scaler: ScalerConfig = field(default_factory=ScalerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    digits: DigitsConfig = field(default_factory=DigitsConfig)
    text: TextConfig = field(default_factory=TextConfig)

    @property
    def run_name(self) -> str:
        """The run's name."""
        return self.wandb_name or f"{self.task}_{self.precision}"

    @property
    def run_folder(self) -> Path:
        """Where the run writes."""
        return Path(self.output_dir) / self.run_name


FREE_ON_RESUME = (
    *("steps", "evaluate_every", "threads", "watch", "output_dir", "wandb", "checkpoint", "distributed"),
    *("optimizer.sharded", "optimizer.overlap_param_gather", "optimizer.bucket_numel"),
    *("optimizer.max_consecutive_skips", "optimizer.max_overflows_at_min_scale"),
)
"""A resumed run may have other values of these."""


def load_config(arguments: list[str]) -> TrainConfig:
    """Return the defaults, overlaid by the file of ``config=FILE`` if given, overlaid by the ``a.b=c`` arguments.

    Raises ArgumentError for an argument of another form, an unknown key or a bad value.
    """
    merged: Any = OmegaConf.structured(TrainConfig)
    for argument in sorted(arguments, key=lambda one: not one.startswith("config=")):
        name, separator, value = argument.partition("=")
        if not separator or not name or name.startswith("-"):
            raise ArgumentError(f"argument {argument!r} is not of the form key=value, e.g. scaler.scale=65536")
        layer: Any = _config_file(value) if name == "config" else None
        try:
            layer = OmegaConf.from_dotlist([argument]) if layer is None else OmegaConf.load(layer)
            merged = OmegaConf.merge(merged, layer)
            OmegaConf.to_object(merged)
        except Exception as error:  # OmegaConf's, and those of YAML, which share no base with them
            where, reason = getattr(error, "full_key", None) or name, str(error).partition("\n")[0]
            raise ArgumentError(f"argument {argument!r}: {where}: {reason}; --help lists all keys") from None
    config: Any = OmegaConf.to_object(merged)
    _check_values(config)
    return cast(TrainConfig, config)


def as_dict(config: TrainConfig) -> dict[str, Any]:
    """Return the options as nested dicts of primitives."""
    plain: Any = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    return dict(plain)


def flat(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values in nested dicts by their keys with dots between, such as ``scaler.scale``."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves


def usage() -> str:
    """Return the text of ``--help``: every key, its default and its meaning."""
    head = f"""usage: python -m megascale.train [config=FILE] [key=value ...]

Train one of the tasks, alone or under torchrun. FILE: YAML of these keys, under those of the line; {_packaged()} come
along. --version prints the version. Keys and their defaults:
"""
    return "\n".join([head, *_described(TrainConfig, "")])


def _described(kind: Any, prefix: str) -> Iterator[str]:
    for entry in fields(kind):
        if is_dataclass(entry.type):
            yield f"\n{prefix}{entry.name}: {inspect.getdoc(entry.type)}"
            yield from _described(entry.type, f"{prefix}{entry.name}.")
        else:
            key = f"  {prefix}{entry.name}={json.dumps(entry.default).strip(chr(34))}"
            yield textwrap.fill(f"{key:<40} {entry.metadata['help']}", 120, subsequent_indent=" " * 41)


def _packaged() -> str:
    return " and ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))


def _config_file(given: str) -> Path:
    """Return the file of ``config=``: the one of that name, or one that comes with the program."""
    path = Path(given)
    packaged = CONFIGS / f"{path.stem}.yaml"
    if path.is_file():
        return path
    if path.parent in (Path(), Path("configs")) and path.name in (path.stem, packaged.name) and packaged.is_file():
        return packaged
    raise ArgumentError(f"config={given}: there is no such file; {_packaged()} come with the program")


def _check_values(config: TrainConfig) -> None:
    """Raise ArgumentError for values that no constructor of the library refuses."""
    for name, value in flat(as_dict(config)).items():
        if isinstance(value, int) and not isinstance(value, bool):
            validate.integer(name, value, minimum=int(name not in MAY_BE_ZERO), maximum=2**32 - 1)
        elif isinstance(value, float):
            validate.non_negative(name, value)
    if config.precision == "fp16" and config.scaler.scaler_type == "none":
        raise ArgumentError("scaler.scaler_type=none does not go with precision=fp16; take static or dynamic")
    if config.optimizer.adam_lr is not None and config.optimizer.name != "muon":
        raise ArgumentError("optimizer.adam_lr goes with optimizer.name=muon; leave it null, and set optimizer.lr")
    if config.run_name in (".", "..") or "/" in config.run_name:
        raise ArgumentError(
            f"wandb_name must be a plain name without '/', got {config.run_name!r}; set output_dir for folders"
        )
