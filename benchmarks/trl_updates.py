"""What a small learning rate does to 16-bit weights in TRL's SFTTrainer, with and without main params.

    python benchmarks/trl_updates.py [--seeds 3] [--steps 40] [--rates 1e-6 2e-5]

A tiny Llama is trained on random numbers from the same start in five ways: fp32; bf16 by TRL alone; bf16, fp16 and bf16
with 16-bit remainders and 8-bit moments by megascale. For each it prints the share of weights that differ from the
start, and how far the run has gone along the fp32 run: the update's projection on the fp32 run's update, 1 if it is the
same. It needs trl and datasets, no GPU and no network.
"""

import argparse
import os
import random
import tempfile
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer

from megascale.integrations.transformers import MegascaleTrainer

COMPACT = {"store_param_remainders": True, "exp_avg_dtype": "int8", "exp_avg_sq_dtype": "uint8"}
WAYS: dict[str, tuple[torch.dtype, Any]] = {
    "fp32": (torch.float32, None),
    "bf16, TRL alone": (torch.bfloat16, None),
    "bf16, megascale": (torch.bfloat16, {}),
    "bf16, megascale, compact": (torch.bfloat16, COMPACT),
    "fp16, megascale": (torch.float16, {}),
}


class HalfTrainer(MegascaleTrainer, SFTTrainer):
    """SFT in 16 bits: this line is all."""


def model_of(seed: int, dtype: torch.dtype) -> LlamaForCausalLM:
    """Return a new Llama of two layers; its start is a bf16 number in every dtype."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes))
    for param in model.parameters():
        param.data = param.data.bfloat16().to(dtype)
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the numbers up to 61."""
    words = {str(number): number for number in range(62)} | {"<pad>": 62, "<eos>": 63}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def train(way: str, seed: int, rate: float, steps: int) -> Tensor:
    """Return the update of all weights, flat, fp32: with main params theirs, otherwise the weights' own."""
    dtype, options = WAYS[way]
    model = model_of(seed, dtype)
    start = {name: param.detach().float().clone() for name, param in model.named_parameters()}
    numbers = random.Random(seed)
    texts = [" ".join(str(numbers.randrange(60)) for _ in range(16)) for _ in range(4 * steps)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            learning_rate=rate,
            lr_scheduler_type="constant",
            max_steps=steps,
            per_device_train_batch_size=4,
            max_length=20,
            seed=seed,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        given: dict[str, Any] = {"model": model, "args": arguments, "train_dataset": Dataset.from_dict({"text": texts})}
        given["processing_class"] = tokenizer()
        trainer = SFTTrainer(**given) if options is None else HalfTrainer(**given, megascale=options)
        trainer.train()
    ends: dict[str, Tensor] = {name: param.detach().float() for name, param in model.named_parameters()}
    if options is not None:
        ends |= {name: main.detach() for name, main in trainer.optimizer.optimizer.main_params()}
    return torch.cat([(ends[name] - before).flatten() for name, before in start.items()])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 2e-5])
    options = parser.parse_args()
    logging.set_verbosity_error()
    print("| lr | seed | run | moved | way |\n|---|---|---|---|---|")
    for rate in options.rates:
        for seed in range(options.seeds):
            reference: Tensor | None = None
            for way in WAYS:
                update = train(way, seed, rate, options.steps)
                reference = update if reference is None else reference
                moved = (update != 0).float().mean().item()
                along = (update @ reference / reference.square().sum()).item()
                print(f"| {rate:.0e} | {seed} | {way} | {100 * moved:.1f}% | {along:.3f} |", flush=True)


if __name__ == "__main__":
    main()
