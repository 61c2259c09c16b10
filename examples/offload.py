"""Full fine-tuning of a 7B model on one 24 GB card, in bf16: all but the layers at work is in host memory.

torchrun --standalone --nproc-per-node 1 examples/offload.py --model Qwen/Qwen2.5-7B

FSDP2 brings weights to the GPU layer by layer and takes gradients away; main params are 16-bit remainders, moments have
8 bits, and megascale's kernels for the host update them: 8.25 bytes of host memory per parameter. Start it again, also
on several cards, and it goes on from its last checkpoint. It needs transformers, and datasets for --data of a hub.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    get_cosine_schedule_with_warmup,
)

from megascale import MixedPrecisionOptimizer, OptimizerConfig, cast_model, estimate
from megascale.checkpoint import Checkpointer
from megascale.schedules import LandedLRScheduler

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="a hub name, a folder, or tiny: random weights, a token per byte")
parser.add_argument("--data", default="sums", help="a text file, a hub data set with texts, or sums, which it makes")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=8, help="sequences per step, of all ranks together")
parser.add_argument("--micro-batch", type=int, default=1, help="sequences at once, of a rank")
parser.add_argument("--length", type=int, default=1024, help="tokens per sequence")
parser.add_argument("--lr", type=float, default=1e-5)
parser.add_argument("--save-every", type=int, default=50)
parser.add_argument("--folder", default="runs/offload")
args = parser.parse_args()

accelerator = torch.accelerator.current_accelerator(check_available=True)
device = torch.device(accelerator.type, int(os.environ["LOCAL_RANK"])) if accelerator else torch.device("cpu")
if accelerator:
    torch.accelerator.set_device_index(device.index)
backend = dist.get_default_backend_for_device(device)
dist.init_process_group(f"cpu:gloo,{device.type}:{backend}" if accelerator else backend)  # gradients are on the host
rank, world = dist.get_rank(), dist.get_world_size()
if args.batch % (world * args.micro_batch):
    parser.error(f"--batch {args.batch} must be a multiple of {world} ranks times --micro-batch {args.micro_batch}")


def load(name):
    """Return a tokenizer, and the model in bf16 in host memory."""
    if name == "tiny":
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        return ByT5Tokenizer(), cast_model(LlamaForCausalLM(LlamaConfig(vocab_size=384, **sizes)), torch.bfloat16)
    return AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)


def sequences(tokenizer, data):
    """Return tokens of shape [sequences, args.length]."""
    if data == "sums":
        texts = [f"{a} + {b} = {a + b}" for a in range(150) for b in range(150)]
    elif Path(data).is_file():
        texts = Path(data).read_text().splitlines()
    else:
        from datasets import load_dataset

        texts = load_dataset(data, split="train")["text"]
    tokens = torch.tensor(tokenizer("\n".join(texts)).input_ids)
    return tokens[: len(tokens) // args.length * args.length].view(-1, args.length)


torch.manual_seed(0)
tokenizer, model = load(args.model)
data = sequences(tokenizer, args.data)
if len(data) == 0:
    parser.error(f"--data {args.data} has fewer than --length {args.length} tokens")
model.activation_checkpointing_enable()  # keeps what enters a layer, and computes the rest again in backward
model.train()
config = OptimizerConfig(bf16=True, compact_state=True, clip_grad=1.0)
if rank == 0:
    compact = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8, "store_param_remainders": True}
    held = estimate(model, precision="bf16", ranks=world, sharding="fsdp2", **compact)
    print(f"{held.total / 1e9:.3f} GB of host memory per rank")
mesh = dist.init_device_mesh(device.type, (world,), mesh_dim_names=("dp",))
precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
for layer in (*model.model.layers, model):
    offload = CPUOffloadPolicy(pin_memory=accelerator is not None)  # weights, gradients, main params and moments
    fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload)

# After fully_shard: parameters are DTensors in host memory now, and so are main params and moments.
optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(model.named_parameters(), lr=args.lr), config)
schedule = LandedLRScheduler(get_cosine_schedule_with_warmup(optimizer, args.steps // 10, args.steps))

with Checkpointer(args.folder, keep_last=2, async_save=True) as checkpointer:
    start = 0
    if checkpointer.latest():
        loaded = checkpointer.load(model, optimizer)
        schedule.load_state_dict(loaded.user_state)
        start = loaded.step
        if rank == 0:
            print(f"resumed after step {start}", flush=True)
    for step in range(start + 1, args.steps + 1):
        # A step's sequences depend on nothing but the step: they are the same on any number of ranks.
        chosen = torch.randint(len(data), (args.batch,), generator=torch.Generator().manual_seed(step))
        micro_batches = data[chosen][rank::world].split(args.micro_batch)
        total = torch.zeros((), device=device)
        optimizer.zero_grad()
        for tokens in micro_batches:  # each adds its gradients to the host's, in bf16: the fewer the better
            tokens = tokens.to(device)
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss / len(micro_batches)
            optimizer.scale_loss(loss).backward()
            total += loss.detach()
        result = optimizer.step()  # skipped on all ranks if it overflows on one
        schedule.step(result.success)  # a skipped step does not advance it
        if step % 10 == 0:
            dist.all_reduce(total)
            norm, skipped = result.grad_norm, optimizer.num_skipped_steps
            if rank == 0:  # reading a number waits for the device
                print(f"step {step}: loss {total.item() / world:.4f}, norm {norm.item():.3f}, ", end="")
                print(f"{skipped.item()} skipped", flush=True)
        if step % args.save_every == 0 or step == args.steps:
            checkpointer.save(step, model, optimizer, user_state=schedule.state_dict())  # in the background
weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if rank == 0:
    model.save_pretrained(f"{args.folder}/model", state_dict=weights)
    tokenizer.save_pretrained(f"{args.folder}/model")
dist.destroy_process_group()
