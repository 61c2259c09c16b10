"""Fine-tuning of a 0.5B model in fp16 on one T4, with LoRA or all weights, by transformers' Trainer.

python examples/finetune.py --model Qwen/Qwen2.5-0.5B --lora

A T4 has no bf16. Without --lora all weights are trained. Start it again and it goes on from its last checkpoint.
It needs transformers, accelerate, peft and datasets.
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from megascale import cast_model, estimate
from megascale.integrations.transformers import MegascaleTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="a hub name, a folder, or tiny: random weights, a token per byte")
parser.add_argument("--data", default="sums", help="a text file, a hub data set with texts, or sums, which it makes")
parser.add_argument("--lora", action="store_true", help="train adapters, in fp32, beside the frozen fp16 weights")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--length", type=int, default=512, help="tokens per sequence")
parser.add_argument("--lr", type=float, help="2e-4 with --lora, 1e-5 without, if you do not say")
parser.add_argument("--folder", default="runs/finetune")
args = parser.parse_args()


class HalfTrainer(MegascaleTrainer, Trainer):
    """fp32 main params, one loss scale, and skipped steps in the log."""


def load(name):
    """Return a tokenizer, and the model in fp16."""
    if name == "tiny":
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        return ByT5Tokenizer(), cast_model(LlamaForCausalLM(LlamaConfig(vocab_size=384, **sizes)), torch.float16)
    return AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name, dtype=torch.float16)


def sequences(tokenizer, data):
    """Return a data set of sequences of args.length tokens."""
    if data == "sums":
        texts = [f"{a} + {b} = {a + b}" for a in range(150) for b in range(150)]
    elif Path(data).is_file():
        texts = Path(data).read_text().splitlines()
    else:
        texts = load_dataset(data, split="train")["text"]
    tokens = tokenizer("\n".join(texts)).input_ids
    rows = [tokens[start : start + args.length] for start in range(0, len(tokens) - args.length + 1, args.length)]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


set_seed(0)
tokenizer, model = load(args.model)
if args.lora:
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
trainer = HalfTrainer(
    model=model,
    args=TrainingArguments(
        output_dir=args.folder,
        use_cpu=not torch.accelerator.is_available(),
        fp16=False,  # the weights are fp16; this would be autocast over fp32 weights
        learning_rate=args.lr or (2e-4 if args.lora else 1e-5),
        lr_scheduler_type="cosine",  # counts the steps that landed
        warmup_steps=args.steps // 10,
        max_grad_norm=1.0,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=8,
        activation_checkpointing=True,
        max_steps=args.steps,
        save_steps=args.steps // 4,
        save_total_limit=2,
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=sequences(tokenizer, args.data),
)
if trainer.is_world_process_zero():
    held = estimate(model, precision="as_is", ranks=trainer.args.world_size)
    print(f"{held.numel:,} parameters are trained: {held.total / 1e9:.3f} GB per rank, and activations")
last = get_last_checkpoint(args.folder) if Path(args.folder).is_dir() else None
trainer.train(resume_from_checkpoint=last)
trainer.save_model(f"{args.folder}/model")  # with --lora the adapters alone
tokenizer.save_pretrained(f"{args.folder}/model")
