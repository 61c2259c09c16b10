"""What ranks run in the tests of MegascaleTrainer: train, save, and resume, for each trainer and layout."""

import contextlib
import math
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from megascale.integrations.transformers import MegascaleTrainer
from tests.integrations.accelerate_cases import as_rank
from tests.integrations.hf_cases import (
    Overflowing,
    Samples,
    arguments,
    fsdp2_on_cpu,
    llama,
    logged,
    optimizer_of,
    state_of,
    tokenizer,
)
from tests.pool import RankPool
from tests.training import same_bits

STEPS, SAVED_AT = 6, 3
LAYERS = "LlamaDecoderLayer"
AXOLOTL_PLUGIN = "megascale.integrations.axolotl.MegascalePlugin"
WORLDS = [(4, 2), (2, 4)]
"""How many ranks save, and how many new processes take it up."""
OPTIONS = {"initial_loss_scale": 2.0**12, "loss_scale_window": 2, "hysteresis": 1}


class AtStart(TrainerCallback):
    """Keeps the state with which training begins."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.state: dict[str, Tensor] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep it before the first step."""
        if not self.state:
            self.state = state_of(self.trainer)


class AtSave(TrainerCallback):
    """Keeps the state of a step after which it is saved."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.state: dict[str, Tensor] = {}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the first."""
        if not self.state:
            self.state = state_of(self.trainer)


def _words(seed: int) -> list[str]:
    numbers = random.Random(seed)
    return [" ".join(str(numbers.randrange(60)) for _ in range(10)) for _ in range(64)]


def build(kind: str, folder: Path, dtype: torch.dtype, megascale: Any = OPTIONS, **options: Any) -> Any:
    """Return a trainer of ours, of a kind ("trainer", "sft", "grpo", "rloo", "dpo" or "axolotl"), over a tiny Llama."""
    if kind == "axolotl":
        return by_axolotl(megascale, unmixed("trainer", folder, dtype, **options))
    base, given = _setup(kind, folder, dtype, options)
    return type("Half", (Overflowing, MegascaleTrainer, base), {})(megascale=megascale, **given)


def by_axolotl(megascale: Any, trainer: Any) -> Any:
    """Return a trainer that axolotl's plugin manager has adopted, with ``megascale`` as its YAML file's key."""
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.dict import DictDefault

    cfg = DictDefault({"plugins": [AXOLOTL_PLUGIN], "megascale": megascale})
    manager = PluginManager.get_instance()
    manager.plugins.clear()
    manager.register(AXOLOTL_PLUGIN)
    for plugin in manager.plugins.values():
        plugin.register(cfg)
    manager.post_trainer_create(cfg, trainer)
    manager.plugins.clear()
    return trainer


def unmixed(kind: str, folder: Path, dtype: torch.dtype, **options: Any) -> Any:
    """Return the library's trainer of the same kind."""
    base, given = _setup(kind, folder, dtype, options)
    return type("Plain", (Overflowing, base), {})(**given)


def _setup(kind: str, folder: Path, dtype: torch.dtype, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a trainer's class, and what its constructor takes."""
    given = {"save_strategy": "steps", "save_steps": SAVED_AT, "max_steps": STEPS} | options
    model = llama(dtype)
    if kind == "trainer":
        made = arguments(TrainingArguments, folder, **given)
        return Trainer, {"model": model, "args": made, "train_dataset": Samples()}
    import trl
    from datasets import Dataset

    kinds: dict[str, tuple[Any, Any]] = {
        "sft": (trl.SFTTrainer, trl.SFTConfig),
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
        "rloo": (trl.RLOOTrainer, trl.RLOOConfig),
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
    }
    base, config = kinds[kind]
    samples: dict[str, Any] = {"num_generations": 2, "max_completion_length": 4}
    columns = {"prompt": _words(0)}
    made_of: dict[str, Any] = {"peft_config": given.pop("peft_config")} if "peft_config" in given else {}
    if kind == "sft":
        samples, columns = {"max_length": 16}, {"text": _words(0)}
    elif kind == "dpo":
        samples, columns = {"max_length": 16}, columns | {"chosen": _words(1), "rejected": _words(2)}
        made_of["ref_model"] = llama(dtype)
    else:
        made_of["reward_funcs"] = _reward
        samples["beta"] = 0.0  # else RLOO loads the reference model by the model's name
    made = arguments(config, folder, **{"bf16": False, **samples, **given})
    data = Dataset.from_dict(columns)
    return base, {"model": model, "args": made, "train_dataset": data, "processing_class": tokenizer(), **made_of}


def _reward(completions: list[str], **_: Any) -> list[float]:
    """Even numbers are better."""
    return [sum(word.isdigit() and int(word) % 2 == 0 for word in text.split()) / 4.0 for text in completions]


def _layout(layout: str) -> Any:
    if layout == "ddp":
        return contextlib.nullcontext()
    options: dict[str, Any] = {
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": [LAYERS],
        "state_dict_type": "FULL_STATE_DICT" if "full" in layout else "SHARDED_STATE_DICT",
        "activation_checkpointing": "checkpointing" in layout,
        "cpu_ram_efficient_loading": "ram" in layout,
    }
    return fsdp2_on_cpu(**options)


def train_on_rank(kind: str, layout: str, folder: str, dtype: torch.dtype, options: Any = None) -> dict[str, Any]:
    """Train to the end, saved on the way."""
    with as_rank(), _layout(layout):
        trainer = build(kind, Path(folder), dtype, **(options or {}))
        trainer.bad = (1,)
        saved = AtSave(trainer)
        trainer.add_callback(saved)
        trainer.train()
        return _report(trainer, saved.state)


def resume_on_rank(kind: str, layout: str, folder: str, dtype: torch.dtype, options: Any = None) -> dict[str, Any]:
    """Take up what :func:`train_on_rank` has saved, on any number of ranks."""
    with as_rank(), _layout(layout):
        trainer = build(kind, Path(folder), dtype, **(options or {}))
        started = AtStart(trainer)
        trainer.add_callback(started)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED_AT}")
        return _report(trainer, started.state)


def reduce_dtype_on_rank(folder: str) -> str:
    """Return the dtype in which FSDP2 reduces, for a trainer whose arguments cannot say."""
    with as_rank(), _layout("fsdp2"):
        trainer = build("trainer", Path(folder), torch.float16, save_strategy="no", max_steps=1)
        trainer.train()
        return str(trainer.accelerator.state.fsdp_plugin.mixed_precision_policy.reduce_dtype)


def assert_resumed(resumed: Any, whole: Any, *, to_the_end: bool) -> None:
    """Assert that runs began with what was saved; ``to_the_end``: that they ended as the run that went on."""
    for one in resumed:
        assert same_bits(one["at_save"], whole[0]["at_save"])
    if to_the_end:
        for one, other in zip(resumed, whole, strict=True):
            assert one["losses"] == other["losses"]
            assert same_bits(one["at_end"], other["at_end"])


def assert_others_take_it_up(ranks: RankPool, kind: str, worlds: tuple[int, int], folder: str) -> None:
    """Assert that new processes of another number begin with what FSDP2 in fp16 has saved, and train on.

    ``worlds``: how many ranks save, and how many take it up.
    """
    given = (kind, "fsdp2", folder, torch.float16)
    saved = ranks.run(worlds[0], train_on_rank, *given, timeout=300)
    assert saved[0]["skips"] == [0, 1, 1, 1, 1, 1]
    with ranks.spawn(worlds[1], resume_on_rank, *given) as fresh:
        resumed = fresh.results(timeout=300)
    assert_resumed(resumed, saved, to_the_end=False)
    for one in resumed:
        assert same_bits(one["at_end"], resumed[0]["at_end"])
        assert not same_bits(one["at_end"], one["at_save"])
        assert all(map(math.isfinite, one["norms"][SAVED_AT:]))  # the log has those from before, too


def _report(trainer: Any, at_save: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "at_save": at_save,
        "at_end": state_of(trainer),
        "losses": logged(trainer, "loss"),
        "norms": logged(trainer, "grad_norm"),
        "scales": logged(trainer, "loss_scale"),
        "skips": logged(trainer, "skipped_steps"),
        "model": type(trainer.model_wrapped).__name__,
        "dtypes": sorted({str(main.dtype) for _, main in optimizer_of(trainer).main_params()}),
    }
