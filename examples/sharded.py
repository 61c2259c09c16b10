"""ZeRO-1 in fp16: main params and optimizer state sharded over the ranks, saved, and resumed by the next start.

torchrun --standalone --nproc-per-node 2 examples/sharded.py [FOLDER]

Start it again and it goes on from the last checkpoint, on any number of ranks.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from megascale import DistributedOptimizer, DynamicGradScaler
from megascale.checkpoint import Checkpointer

STEPS, SAVE_EVERY, BATCH = 40, 20, 60
folder = sys.argv[1] if len(sys.argv) > 1 else "runs/examples/sharded"

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).to(device, torch.float16)
optimizer = DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=3e-3),
    grad_scaler=DynamicGradScaler(),
    modules=model,  # left plain: no DistributedDataParallel around it
    overlap_param_gather=True,  # the next forward gathers what the step wrote, layer by layer
)


def batch(step):
    """Return this rank's rows of the batch of a step; the whole batch is the same on any number of ranks."""
    x = torch.randn(BATCH, 32, generator=torch.Generator().manual_seed(step))[rank::world]
    return x.to(device, torch.float16), x.square().mean(1, keepdim=True).to(device)


with Checkpointer(folder, keep_last=2, async_save=True) as checkpointer:
    start = checkpointer.load(model, optimizer).step if checkpointer.latest() else 0
    if rank == 0:
        print(f"begins at step {start}", flush=True)
    for step in range(start + 1, start + STEPS + 1):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = mse_loss(model(x).float(), y)
        optimizer.scale_loss(loss).backward()
        optimizer.step()
        if step % SAVE_EVERY == 0:
            checkpointer.save(step, model, optimizer)  # each rank its own shards, in the background
            if rank == 0:
                print(f"step {step}: loss {loss.item():.4f}, saved", flush=True)
dist.destroy_process_group()
