"""GRPO in fp16 by TRL: fp16 keeps the trainer's log-probabilities nearer to those of the rollout than bf16 does.

torchrun --standalone --nproc-per-node 2 examples/grpo.py --model Qwen/Qwen2.5-0.5B-Instruct

A model learns to turn a number round. It needs transformers, accelerate, trl and datasets.
"""

import argparse
from difflib import SequenceMatcher
from pathlib import Path
from random import Random

import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig, LlamaForCausalLM, set_seed
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

from megascale import cast_model, estimate
from megascale.integrations.transformers import MegascaleTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="a hub name, a folder, or tiny: random weights, a token per byte")
parser.add_argument("--data", default="digits", help="a JSON file or a hub data set of prompt and answer, or digits")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--samples", type=int, default=8, help="completions per prompt")
parser.add_argument("--tokens", type=int, default=64, help="at most, per completion")
parser.add_argument("--lr", type=float, default=1e-6)
parser.add_argument("--folder", default="runs/grpo")
args = parser.parse_args()


class HalfTrainer(MegascaleTrainer, GRPOTrainer):
    """fp32 main params, one loss scale, and skipped steps in the log."""


def load(name):
    """Return a tokenizer, and the model in fp16."""
    if name == "tiny":
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        return ByT5Tokenizer(), cast_model(LlamaForCausalLM(LlamaConfig(vocab_size=384, **sizes)), torch.float16)
    return AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name, dtype=torch.float16)


def prompts(data):
    """Return a data set with the columns prompt and answer."""
    if data == "digits":
        numbers = [str(Random(seed).randrange(100, 1000)) for seed in range(1000)]
        return Dataset.from_dict(
            {
                "prompt": [f"Write the digits of {number} in reverse order, and nothing else: " for number in numbers],
                "answer": [number[::-1] for number in numbers],
            }
        )
    return load_dataset("json", data_files=data, split="train") if Path(data).is_file() else load_dataset(data)["train"]


def near(completions, answer, **_):
    """Return how near each completion is to its answer, from 0 to 1."""
    return [SequenceMatcher(None, text.strip(), right).ratio() for text, right in zip(completions, answer, strict=True)]


def digits(completions, **_):
    """Return the share of digits in each completion."""
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in completions]


set_seed(0)
tokenizer, model = load(args.model)
trainer = HalfTrainer(
    model=model,
    reward_funcs=[near, digits],
    args=GRPOConfig(
        output_dir=args.folder,
        use_cpu=not torch.accelerator.is_available(),
        bf16=False,  # TRL's default is True: autocast, in which fp16 weights would compute in bf16
        learning_rate=args.lr,
        lr_scheduler_type="constant_with_warmup",  # counts the steps that landed
        warmup_steps=args.steps // 10,
        max_grad_norm=1.0,
        num_generations=args.samples,
        max_completion_length=args.tokens,
        per_device_train_batch_size=args.samples,
        gradient_accumulation_steps=2,
        max_steps=args.steps,
        save_steps=args.steps // 4,
        save_total_limit=2,
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=prompts(args.data),
    processing_class=tokenizer,
)
if trainer.is_world_process_zero():
    held = estimate(model, precision="as_is", ranks=trainer.args.world_size)
    print(f"{held.total / 1e9:.3f} GB per rank, activations and the cache of the rollout")
last = get_last_checkpoint(args.folder) if Path(args.folder).is_dir() else None
trainer.train(resume_from_checkpoint=last)
trainer.save_model(f"{args.folder}/model")
