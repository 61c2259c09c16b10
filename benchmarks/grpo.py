"""GRPO in bf16, in fp16 and in fp32: how far the rollout's and the trainer's log-probabilities are apart, and rewards.

    python benchmarks/grpo.py [--seeds 3] [--steps 50] [--threads 1] [--csv FILE] [--out FILE] [--svg FILE]

TRL's GRPOTrainer trains a small Llama, made from its configuration, to answer a number with numbers of the same parity;
the reward is the share of such numbers. Two rollouts, each with transformers' ``generate()``: one token after the
other, with a cache of keys and values, while the trainer computes whole sequences.

- "own": the trainer's model, as TRL does it without an engine. Measured on the first seed, for ten steps.
- "engine": another model, which stands for an inference engine. It gets the trainer's weights at each step, holds them
  in the dtype in which the trainer computes, and has another code for attention ("eager": scores and probabilities are
  rounded to that dtype, where the trainer's fused one keeps fp32).

All runs of a seed start from the same weights, which are bf16 numbers. It needs trl and datasets, no GPU and no
network. ``--read`` writes the table and the picture again from a CSV file.
"""

import argparse
import copy
import csv
import hashlib
import itertools
import math
import os
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
import trl
from backend import print_backend
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from megascale.integrations.transformers import MegascaleTrainer

if __package__:
    from benchmarks import svg
else:
    import svg

WORDS = 62
GENERATIONS = 8
LENGTH = 8
MARGIN, HEIGHT = 44, 110


class Way(NamedTuple):
    """A run: the dtype of its weights, that of forward and engine, megascale's options (None: TRL alone), a colour."""

    weights: torch.dtype
    computed: torch.dtype
    megascale: dict[str, Any] | None
    colour: str


WAYS = {
    "fp32": Way(torch.float32, torch.float32, None, "#808080"),
    "bf16 autocast": Way(torch.float32, torch.bfloat16, None, "#d9822b"),
    "fp16, megascale": Way(torch.float16, torch.float16, {}, "#2b7bd9"),
}
MEASURES = ("gap", "spread", "kl")
FIELDS = ("rollout", "seed", "run", "step", *MEASURES, "reward", "skipped", "scale")


class Measured(GRPOTrainer):
    """GRPO that keeps, per step, how far the trainer's log-probabilities are from the rollout's."""

    engine: LlamaForCausalLM | None = None
    """Samples in the place of the model."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Sample as TRL does, and return the log-probabilities of the tokens too, where TRL returns None."""
        model, sampler = self.model, self.engine
        if sampler is not None:
            sampler.load_state_dict(model.state_dict())
        inner = model.generate if sampler is None else sampler.generate
        rows: list[list[float]] = []

        def generate(*given: Any, **named: Any) -> Tensor:
            settings = copy.deepcopy(named.pop("generation_config"))
            settings.update(return_dict_in_generate=True, output_logits=True)
            made = inner(*given, generation_config=settings, **named)
            logits = torch.stack(made.logits, 1).float()
            tokens = made.sequences[:, -logits.shape[1] :]
            rows.extend(logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1).tolist())
            sequences: Tensor = made.sequences
            return sequences

        model.generate = generate
        try:
            completions, _ = super()._generate_single_turn(*args, **kwargs)
        finally:
            del model.generate
        return completions, [row[: len(tokens)] for row, tokens in zip(rows, completions, strict=True)]

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.own_logps = found[0].detach().double()
        return found

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        loss = super()._compute_loss(model, inputs)
        rolled = inputs["sampling_per_token_logps"].double()
        log_ratio = (self.own_logps - rolled)[inputs["completion_mask"].bool()]
        ratio = log_ratio.exp()
        found = (log_ratio.abs().mean(), (ratio - 1).square().mean().sqrt(), (ratio - 1 - log_ratio).mean())
        measured: list[dict[str, float]] = self.__dict__.setdefault("measured", [])
        measured.append(dict(zip(MEASURES, (value.item() for value in found), strict=True)))
        return loss


class HalfMeasured(MegascaleTrainer, Measured):
    """The same with 16-bit weights."""


def model_of(seed: int, dtype: torch.dtype, attention: str = "sdpa") -> LlamaForCausalLM:
    """Return a new Llama of two layers, 64 wide; its start is a bf16 number in every dtype."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": WORDS + 2, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation=attention))
    for param in model.parameters():
        param.data = param.data.bfloat16().to(dtype)
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the numbers up to 61."""
    words = {str(number): number for number in range(WORDS)} | {"<pad>": WORDS, "<eos>": WORDS + 1}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def parity(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """Return, per answer, the share of its words that are numbers with the parity of the prompt's."""
    return [
        sum(word.isdigit() and int(word) % 2 == int(prompt) % 2 for word in answer.split()) / LENGTH
        for prompt, answer in zip(prompts, completions, strict=True)
    ]


def train(rollout: str, name: str, seed: int, steps: int) -> list[dict[str, Any]]:
    """Return a row of FIELDS for each step of a run."""
    way = WAYS[name]
    numbers = random.Random(seed)
    prompts = [str(numbers.randrange(WORDS)) for _ in range(8 * steps)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=way.weights != way.computed,
            learning_rate=2e-3,
            lr_scheduler_type="constant",
            max_steps=steps,
            beta=0.0,
            num_generations=GENERATIONS,
            max_completion_length=LENGTH,
            per_device_train_batch_size=8 * GENERATIONS,
            seed=seed,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
        )
        given: dict[str, Any] = {"model": model_of(seed, way.weights), "args": arguments, "reward_funcs": parity}
        given |= {"train_dataset": Dataset.from_dict({"prompt": prompts}), "processing_class": tokenizer()}
        plain = way.megascale is None
        trainer = Measured(**given) if plain else HalfMeasured(**given, megascale=way.megascale)
        trainer.remove_callback(PrinterCallback)
        if rollout == "engine":
            trainer.engine = model_of(seed, way.computed, "eager").eval()
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    return [
        {"rollout": rollout, "seed": seed, "run": name, "step": step}
        | measured
        | {"reward": log["reward"], "skipped": log.get("skipped_steps", 0), "scale": log.get("loss_scale", 1.0)}
        for step, (measured, log) in enumerate(zip(trainer.measured, logs, strict=True), 1)
    ]


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a CSV file that :func:`main` wrote."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    texts = ("rollout", "run")
    return [{key: value if key in texts else float(value) for key, value in row.items()} for row in rows]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a row per run: means over its steps, and the reward in each quarter."""
    lines = [
        "| rollout | seed | run | mean gap | ratio's spread | KL | reward, each quarter | skipped | steps |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for rollout, seed, run in dict.fromkeys((row["rollout"], row["seed"], row["run"]) for row in rows):
        own = [row for row in rows if (row["rollout"], row["seed"], row["run"]) == (rollout, seed, run)]
        means = " | ".join(f"{statistics.fmean(row[key] for row in own):.1e}" for key in MEASURES)
        cuts = [len(own) * quarter // 4 for quarter in range(5)]
        quarters = [
            statistics.fmean(row["reward"] for row in own[low:high])
            for low, high in itertools.pairwise(cuts)
            if high > low
        ]
        rewards = " ".join(f"{value:.3f}" for value in quarters)
        skipped = f"{own[-1]['skipped']:.0f} | {len(own)}"
        lines.append(f"| {rollout} | {seed:.0f} | {run} | {means} | {rewards} | {skipped} |")
    return "\n".join(lines)


def _curves(rows: Sequence[dict[str, Any]], key: str, top: float, height: float, low: float, high: float) -> list[str]:
    """Return a line per run of the engine's rollout. ``low`` and ``high``: exponents of ten for "gap"."""
    shapes, steps = [], max(row["step"] for row in rows)
    for run, way in WAYS.items():
        for seed in sorted({row["seed"] for row in rows}):
            points = []
            for row in rows:
                if (row["rollout"], row["run"], row["seed"]) == ("engine", run, seed):
                    value = math.log10(row[key]) if key == "gap" else row[key]
                    x = MARGIN + (svg.WIDTH - MARGIN - 8) * row["step"] / steps
                    points.append(f"{x:.1f} {top + height * (high - value) / (high - low):.1f}")
            shapes.append(f'<path d="M{"L".join(points)}" fill="none" stroke="{way.colour}" stroke-width="1.5"/>')
    return shapes


def draw(rows: Sequence[dict[str, Any]], source: str) -> str:
    """Return the picture: gap and reward by step, a line per seed."""
    shapes, y = svg.legend([(run, way.colour) for run, way in WAYS.items()], 0)
    exponents = [math.log10(row["gap"]) for row in rows if row["rollout"] == "engine"]
    lowest, highest = math.floor(min(exponents)), math.ceil(max(exponents))
    panels = (
        ("gap", "Mean gap of log-probabilities, by step; a line per seed", lowest, highest, range(lowest, highest + 1)),
        ("reward", "Mean reward, by step", 0, 1, (0, 0.5, 1)),
    )
    for key, title, low, high, ticks in panels:
        shapes.append(svg.text(0, y + svg.SIZE, title, bold=True))
        top = y + 28
        for tick in ticks:
            level = top + HEIGHT * (high - tick) / (high - low)
            shapes.append(f'<path d="M{MARGIN} {level:.1f}H{svg.WIDTH - 8}" {svg.GRID}/>')
            name = f"1e{tick}" if key == "gap" else f"{tick:g}"
            shapes.append(svg.text(MARGIN - 6, level + 4.5, name, anchor="end"))
        shapes += _curves(rows, key, top, HEIGHT, low, high)
        y = top + HEIGHT + 16
    last = max(row["step"] for row in rows)
    for fifth in range(6):
        x = MARGIN + (svg.WIDTH - MARGIN - 8) * fifth / 5
        shapes.append(svg.text(x, y, f"{last * fifth / 5:g}", anchor="middle", size=12))
    y += 4
    return svg.picture("GRPO in fp32, bf16 and fp16: gap between rollout and trainer, and reward", shapes, y, source)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run everything, and keep what was measured so far in the CSV file."""
    runs = [("own", run, 0, min(10, options.steps)) for run in WAYS]
    runs += [("engine", run, seed, options.steps) for seed in range(options.seeds) for run in WAYS]
    rows: list[dict[str, Any]] = []
    for rollout, run, seed, steps in runs:
        rows += train(rollout, run, seed, steps)
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            for row in rows:
                writer.writerow(
                    {key: f"{value:.5g}" if isinstance(value, float) else value for key, value in row.items()}
                )
        print(table(rows).splitlines()[-1], flush=True)
    return rows


def main() -> None:
    """Measure, and write the rows, the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--csv", type=Path, default=Path("grpo_cpu.csv"))
    parser.add_argument("--out", type=Path, default=Path("grpo_cpu.md"))
    parser.add_argument("--svg", type=Path, default=Path("grpo.svg"))
    parser.add_argument("--read", action="store_true", help="measure nothing: read --csv")
    options = parser.parse_args()
    print_backend()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    rows = read(options.csv) if options.read else measure(options)
    last = max(row["step"] for row in rows)
    command = f"python benchmarks/grpo.py --seeds {len({row['seed'] for row in rows})} --steps {last:.0f}"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, trl {trl.__version__}, on a CPU"
    options.out.write_text(f"# GRPO in fp32, bf16 and fp16\n\n`{command}`, {versions}.\n\n{table(rows)}\n")
    digest = hashlib.sha256(options.csv.read_bytes()).hexdigest()[:12]
    options.svg.write_text(draw(rows, f"drawn from {options.csv.name}, sha256 {digest}"))


if __name__ == "__main__":
    main()
