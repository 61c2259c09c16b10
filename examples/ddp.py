"""fp16 training with DistributedDataParallel: dynamic loss scale, gradients accumulated over micro-batches.

torchrun --standalone --nproc-per-node 2 examples/ddp.py
"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from megascale import DynamicGradScaler, MixedPrecisionOptimizer

STEPS, MICRO_BATCHES, BATCH = 40, 2, 32

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
rank = dist.get_rank()

torch.manual_seed(0)
teacher = nn.Linear(32, 10)  # labels to learn: the largest of ten random projections
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10)).to(device, torch.float16)
model = DistributedDataParallel(model)
optimizer = MixedPrecisionOptimizer(
    torch.optim.AdamW(model.module.named_parameters(), lr=1e-2),  # names that a DistributedOptimizer has, too
    grad_scaler=DynamicGradScaler(2.0**24, growth_interval=20),  # too large on purpose: the first steps are skipped
    clip_grad=1.0,
)

generator = torch.Generator().manual_seed(rank)
for step in range(1, STEPS + 1):
    optimizer.zero_grad()
    for micro_batch in range(MICRO_BATCHES):
        x = torch.randn(BATCH, 32, generator=generator)
        labels = teacher(x).argmax(1).to(device)
        is_last = micro_batch == MICRO_BATCHES - 1
        with nullcontext() if is_last else model.no_sync():  # ranks reduce gradients once a step
            loss = cross_entropy(model(x.to(device, torch.float16)).float(), labels) / MICRO_BATCHES
            optimizer.scale_loss(loss).backward()
    result = optimizer.step()  # device tensors: the step waits for nothing
    if step % 10 == 0:
        mean = (loss.detach() * MICRO_BATCHES).clone()
        dist.all_reduce(mean)
        if rank == 0:  # reading a number waits for the device
            norm, scale = result.grad_norm.item(), optimizer.get_loss_scale().item()
            print(f"step {step}: loss {mean.item() / dist.get_world_size():.3f}, norm {norm:.3f}, scale 2**", end="")
            print(f"{torch.tensor(scale).log2().item():.0f}, skipped {optimizer.num_skipped_steps}", flush=True)
dist.destroy_process_group()
