"""Options of the training program: typed defaults, YAML files, ``a.b=c`` overrides. Unknown keys are refused."""

import ast
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megascale.config import HYSTERESIS_RESETS
from megascale.errors import ArgumentError
from megascale.grad_scaler import LARGEST_TRACKER
from megascale.utils import validate
from megascale.utils.spelling import meant

CONFIGS = Path(__file__).parent / "configs"
"""Config files that come with the program: ``config=text`` is ``config=configs/text.yaml``."""

CHOICES = {
    "task": ("digits", "text"),
    "precision": ("fp16", "bf16", "fp32"),
    "wandb": ("disabled", "offline", "online"),
    "scaler.scaler_type": ("dynamic", "static", "none"),
    "scaler.hysteresis_reset": HYSTERESIS_RESETS,
    "optimizer.name": ("sgd", "adamw", "adam", "muon"),
    "optimizer.schedule": ("cosine", "constant"),
    "checkpoint.resume": ("auto", "restart"),
}
MAY_BE_ZERO = ("seed", "threads", "optimizer.warmup_steps", "checkpoint.every", "digits.depth")
"""All other integers are 1 or more."""
LARGEST = {"seed": 2**32 - 1, "scaler.growth_interval": LARGEST_TRACKER, "scaler.hysteresis": LARGEST_TRACKER}
NUMBERS: dict[str, Callable[[str, Any], float]] = {
    **dict.fromkeys(("scaler.scale", "scaler.min_scale", "scaler.max_scale"), validate.scale),
    **dict.fromkeys(("scaler.growth_factor", "scaler.backoff_factor"), validate.positive),
    **dict.fromkeys(("optimizer.beta1", "optimizer.beta2"), validate.fraction),
    "optimizer.grad_norm_skip_threshold": validate.positive,
    "distributed.timeout": validate.positive,
}
"""How other numbers than integers are checked; those that are not here are 0 or more."""


@dataclass
class ScalerConfig:
    """The loss scaler."""

    scaler_type: str = "dynamic"
    """dynamic, static, or none (not with fp16)."""
    scale: float = 65536.0
    """The static scale, or the first dynamic one."""
    min_scale: float = 2.0**-14
    """The dynamic scale never falls below it."""
    max_scale: float | None = None
    """The dynamic scale never grows above it; null: as long as fp32 holds it."""
    growth_factor: float = 2.0
    """What the dynamic scale is multiplied by when it grows; above 1."""
    backoff_factor: float = 0.2
    """What the dynamic scale is multiplied by when it backs off; between 0 and 1."""
    growth_interval: int = 16
    """Clean steps before the dynamic scale grows."""
    hysteresis: int = 1
    """Overflows before the dynamic scale backs off."""
    hysteresis_reset: str = "growth"
    """When the count of overflows begins anew: at growth (Megatron-Core), or at every clean_step (apex)."""


@dataclass
class OptimizerOptions:
    """The wrapped optimizer and its schedule."""

    name: str = "sgd"
    """sgd, adamw, adam, or muon: hidden matrices by Muon, all else by adamw."""
    lr: float = 20.0
    """The peak learning rate."""
    adam_lr: float | None = None
    """With muon: the peak learning rate of adamw's part; null: lr."""
    momentum: float = 0.9
    """Momentum of sgd and of muon."""
    beta1: float = 0.9
    """Decay of the first moment, of adamw and adam."""
    beta2: float = 0.95
    """Decay of the second moment, of adamw and adam."""
    weight_decay: float = 0.0
    """Weight decay: decoupled with adamw, added to the gradient with sgd and adam."""
    clip_grad: float = 0.01
    """Largest global gradient norm; 0 does not clip."""
    grad_norm_skip_threshold: float | None = None
    """Skip steps whose gradient norm is above it; null: none."""
    max_consecutive_skips: int | None = None
    """More skipped steps in a row than this end the run with an error; null: no limit."""
    max_overflows_at_min_scale: int | None = None
    """More overflows in a row than this at the smallest dynamic scale end the run with an error; null: no limit."""
    warmup_steps: int = 50
    """Steps of linear warm-up. Warm-up and schedule count landed steps only: a skipped one does not advance them."""
    schedule: str = "cosine"
    """After the warm-up: cosine (to zero), or constant."""
    sharded: bool = False
    """Shard main params and optimizer state over the ranks: a DistributedOptimizer instead of DDP."""
    overlap_param_gather: bool = False
    """With sharded: let the gather of parameters run into the next forward."""
    bucket_numel: int = 1_000_000
    """With sharded: parameters that are reduced and gathered at once."""


@dataclass
class CheckpointConfig:
    """When to save and how to start."""

    every: int = 100
    """Steps between checkpoints; one more is saved at the end. 0: only at the end."""
    keep_last: int = 2
    """How many checkpoints to keep."""
    async_save: bool = False
    """Write in a background thread."""
    resume: str = "auto"
    """auto: go on from the run folder's latest checkpoint. restart: remove it and begin anew."""


@dataclass
class DistributedConfig:
    """How long ranks wait for one another."""

    timeout: float | None = None
    """Seconds that a rank waits for another one before it ends with an error; null: torch's own, 1800 with gloo."""


@dataclass
class DigitsConfig:
    """The task ``digits``."""

    size: int = 256
    """Height and width of a scene, pixels."""
    grid: int = 6
    """A scene has grid x grid cells, each with at most one digit."""
    fill: float = 0.6
    """Probability that a cell has a digit."""
    noise: float = 0.05
    """Standard deviation of the noise on all pixels."""
    patch: int = 4
    """How often the 8 x 8 digits are enlarged, and height and width of the U-Net's patches, pixels."""
    width: int = 16
    """Channels of the first level of the U-Net."""
    depth: int = 2
    """Number of times it halves the resolution."""
    heldout_scenes: int = 64
    """Scenes that the accuracy is measured on; their digits are never trained on."""


@dataclass
class TextConfig:
    """The task ``text``."""

    width: int = 128
    """Size of the residual stream."""
    layers: int = 4
    """Blocks of attention and perceptron."""
    heads: int = 4
    """Attention heads; width is a multiple of it."""
    context: int = 128
    """Bytes a model sees at once."""
    heldout_windows: int = 64
    """Windows of held-out text that the accuracy is measured on."""


@dataclass
class TrainConfig:
    """Everything ``python -m megascale.train`` takes."""

    task: str = "digits"
    """digits: label the pixels of scenes of handwritten digits. text: a byte-level GPT on Python's documentation."""
    precision: str = "fp16"
    """Parameters and gradients: fp16, bf16 or fp32."""
    seed: int = 0
    """Decides initial weights and data."""
    steps: int = 800
    """Steps of the whole run, skipped ones included; a run may go on to more."""
    batch_size: int = 8
    """Samples per step over all ranks; a multiple of their number."""
    evaluate_every: int = 100
    """Steps between measurements on held-out data."""
    threads: int = 0
    """CPU threads of each rank; 0: the machine's cores divided by its ranks."""
    watch: bool = False
    """Watch all modules, so that overflows name the first one whose output was inf or NaN. Several passes over all
    activations."""
    output_dir: str = "runs"
    """Folder of all runs; each writes into a folder of its own in it."""
    wandb_name: str | None = None
    """Name of the run and of its folder; default: task and precision."""
    wandb: str = "disabled"
    """Log to Weights & Biases: disabled, offline or online."""
    wandb_project: str = "megascale"
    """Project of Weights & Biases."""
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


# A resumed run may have other values of these.
FREE_ON_RESUME = (
    "steps",
    "evaluate_every",
    "threads",
    "watch",
    "output_dir",
    "wandb",
    "checkpoint",
    "distributed",
    "optimizer.sharded",
    "optimizer.overlap_param_gather",
    "optimizer.bucket_numel",
    "optimizer.max_consecutive_skips",
    "optimizer.max_overflows_at_min_scale",
)


def load_config(arguments: list[str]) -> TrainConfig:
    """Return the defaults, overlaid by the file of ``config=FILE`` if given, overlaid by the ``a.b=c`` arguments.

    Raises ArgumentError for an argument of another form, an unknown key (with the nearest known one) or a bad value.
    """
    pairs = [_pair(argument) for argument in arguments]
    merged = OmegaConf.structured(TrainConfig)
    for name, value in pairs:
        if name == "config":
            merged = _overlaid(merged, _read_yaml(value), value)
    dotted = [f"{name}={value}" for name, value in pairs if name != "config"]
    for name, _ in pairs:
        if name != "config":
            _check_key(name, "argument")
    try:
        merged = OmegaConf.merge(merged, *map(_one_argument, dotted))
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ArgumentError(f"{error.full_key or 'an argument'}: {_first_line(error)}") from None
    if not isinstance(config, TrainConfig):
        raise ArgumentError(f"the options make a {type(config).__name__}; give a.b=c arguments only")
    _check_values(config)
    return config


def as_dict(config: TrainConfig) -> dict[str, Any]:
    """Return the options as nested dicts of primitives."""
    plain = OmegaConf.to_container(OmegaConf.structured(config))
    return {str(key): value for key, value in plain.items()} if isinstance(plain, dict) else {}


def save_yaml(config: TrainConfig, path: Path, command: str = "") -> None:
    """Write the options to a file that ``config=`` reads, below the command that gave them, as a comment."""
    comment = "".join(f"# {line}\n" for line in command.splitlines())
    path.write_text(comment + OmegaConf.to_yaml(OmegaConf.structured(config)), encoding="utf-8")


def usage() -> str:
    """Return the text of ``--help``: every key, its default and its meaning."""
    packaged = " and ".join(_packaged())
    return "\n".join(
        [
            "usage: python -m megascale.train [config=FILE] [key=value ...]",
            "",
            "Train one of the tasks, alone or under torchrun.",
            "",
            *_described("config=FILE", f"YAML file of these keys, under those of the line; {packaged} come along."),
            *_described("-h, --help", "Print this and exit."),
            *_described("--version", "Print the version and exit."),
            "",
            "Keys and their defaults:",
            *_key_lines(TrainConfig, ""),
        ]
    )


def _key_lines(kind: Any, prefix: str) -> Iterator[str]:
    meanings = _meanings(kind)
    for entry in fields(kind):
        if is_dataclass(entry.type):
            yield f"\n{prefix}{entry.name}: {inspect.getdoc(entry.type)}"
            yield from _key_lines(entry.type, f"{prefix}{entry.name}.")
        else:
            yield from _described(f"{prefix}{entry.name}={_typed(entry.default)}", meanings[entry.name])


def _meanings(kind: Any) -> dict[str, str]:
    """Return the docstrings of a dataclass's fields, parsed from the source."""
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    return {
        entry.target.id: " ".join(str(text.value.value).split())
        for entry, text in itertools.pairwise(body)
        if isinstance(entry, ast.AnnAssign)
        and isinstance(entry.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def _described(key: str, meaning: str) -> list[str]:
    return [f"  {key}", *textwrap.wrap(meaning, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)]


def _typed(value: Any) -> str:
    """Return a value as it is typed on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _one_argument(argument: str) -> Any:
    try:
        return OmegaConf.from_dotlist([argument])
    except Exception as error:  # yaml's errors have no common base that omegaconf exposes
        raise ArgumentError(f"argument {argument!r} has no value that YAML can read: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _pair(argument: str) -> tuple[str, str]:
    name, separator, value = argument.partition("=")
    if not separator or not name or name.startswith("-"):
        raise ArgumentError(f"argument {argument!r} is not of the form key=value, e.g. scaler.scale=65536")
    return name, value


def _packaged() -> list[str]:
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def _config_file(given: str) -> Path:
    """Return the file of ``config=``: the one of that name, or one that comes with the program."""
    path = Path(given)
    if path.is_file():
        return path
    if path.parent in (Path(), Path("configs")) and path.name in (path.stem, f"{path.stem}.yaml"):
        packaged = CONFIGS / f"{path.stem}.yaml"
        if packaged.is_file():
            return packaged
    raise ArgumentError(
        f"config={given}: there is no such file; those that come with the program are {', '.join(_packaged())}"
    )


def _read_yaml(path: str) -> Any:
    file = _config_file(path)
    try:
        return OmegaConf.load(file)
    except Exception as error:  # yaml's errors have no common base that omegaconf exposes
        raise ArgumentError(f"config={path} cannot be read: {error}") from None


def _overlaid(merged: Any, loaded: Any, path: str) -> Any:
    tree = OmegaConf.to_container(loaded)
    if not isinstance(tree, dict):
        raise ArgumentError(f"a config file must hold keys and values, got {type(tree).__name__} at its top")
    for key in flat(tree):
        _check_key(key, path)
    try:
        return OmegaConf.merge(merged, loaded)
    except OmegaConfBaseException as error:
        raise ArgumentError(f"{path}: {error.full_key}: {_first_line(error)}") from None


def flat(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values in nested dicts by their keys with dots between, such as ``scaler.scale``."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves


def _check_key(key: str, where: str) -> None:
    known = list(flat(as_dict(TrainConfig())))
    if key in known:
        return
    if any(name.startswith(f"{key}.") for name in known):
        inside = ", ".join(name for name in known if name.startswith(f"{key}."))
        raise ArgumentError(f"{where}: {key!r} is a group; give one of {inside}")
    # Only the group of a key may be wrong: compare keys without it too.
    by_leaf = [name for name in known if name.split(".")[-1] == key.split(".")[-1]]
    raise ArgumentError(f"{where}: unknown key {key!r}{meant(key, by_leaf or known)}")


def _check_values(config: TrainConfig) -> None:
    for name, value in flat(as_dict(config)).items():
        if value is None or isinstance(value, bool):
            continue
        if name in CHOICES:
            validate.one_of(name, value, CHOICES[name])
        elif isinstance(value, int):
            validate.integer(name, value, minimum=int(name not in MAY_BE_ZERO), maximum=LARGEST.get(name))
        elif isinstance(value, float):
            NUMBERS.get(name, validate.non_negative)(name, value)
    if config.precision == "fp16" and config.scaler.scaler_type == "none":
        raise ArgumentError("scaler.scaler_type=none does not go with precision=fp16; take static or dynamic")
    if config.optimizer.overlap_param_gather and not config.optimizer.sharded:
        raise ArgumentError("optimizer.overlap_param_gather=true needs optimizer.sharded=true: nothing is gathered")
    if config.optimizer.adam_lr is not None and config.optimizer.name != "muon":
        raise ArgumentError("optimizer.adam_lr goes with optimizer.name=muon; leave it null, and set optimizer.lr")
    _check_scaler(config.scaler)
    if config.digits.fill > 1:
        raise ArgumentError(f"digits.fill is a probability: it must be 1 or less, got {config.digits.fill!r}")
    if config.text.width % config.text.heads:
        raise ArgumentError(f"text.width={config.text.width} must be a multiple of text.heads={config.text.heads}")
    if config.run_name in (".", "..") or "/" in config.run_name:
        raise ArgumentError(
            f"wandb_name must be a plain name without '/', got {config.run_name!r}; set output_dir for folders"
        )


def _check_scaler(scaler: ScalerConfig) -> None:
    highest = validate.LARGEST_SCALE if scaler.max_scale is None else scaler.max_scale
    if scaler.scaler_type == "dynamic" and not scaler.min_scale <= scaler.scale <= highest:
        raise ArgumentError(
            "scaler.min_scale <= scaler.scale <= scaler.max_scale must hold, got "
            f"{scaler.min_scale} <= {scaler.scale} <= {highest}"
        )
    if scaler.growth_factor <= 1:
        raise ArgumentError(f"scaler.growth_factor must be above 1, got {scaler.growth_factor!r}")
    if scaler.backoff_factor >= 1:
        raise ArgumentError(f"scaler.backoff_factor must be below 1, got {scaler.backoff_factor!r}")
