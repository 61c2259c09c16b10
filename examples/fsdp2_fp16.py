"""fp16 under FSDP2 (fully_shard): loss scale, clipping by the norm of all shards, one skip decision for all ranks.

torchrun --standalone --nproc-per-node 2 examples/fsdp2_fp16.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import mse_loss

from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig

STEPS, BATCH, BROKEN_STEP = 40, 32, 15

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
rank = dist.get_rank()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).to(device, torch.float16)
mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)  # averaged in fp32, kept in fp16
for module in (model[0], model[2], model):
    fully_shard(module, mesh=mesh, mp_policy=policy)

# After fully_shard: the parameters are DTensors, and so are main params and optimizer state.
optimizer = MixedPrecisionOptimizer(
    torch.optim.AdamW(model.named_parameters(), lr=3e-3),
    OptimizerConfig(fp16=True, clip_grad=0.5),  # in place of clip_grad_norm_, which would see scaled gradients
    DynamicGradScaler(),
    groups=mesh,
)

generator = torch.Generator().manual_seed(rank)
for step in range(1, STEPS + 1):
    x = torch.randn(BATCH, 32, generator=generator)
    y = x.square().mean(1, keepdim=True).to(device)
    loss = mse_loss(model(x.to(device, torch.float16)).float(), y)
    if step == BROKEN_STEP and rank == 0:
        loss = loss * float("inf")  # an overflow on one rank
    optimizer.zero_grad()
    optimizer.scale_loss(loss).backward()
    result = optimizer.step()
    if rank == 0 and (step % 10 == 0 or step == BROKEN_STEP):
        verdict = "landed" if result.success.item() else "skipped on all ranks"
        print(f"step {step}: loss {loss.item():.4f}, norm {result.grad_norm.item():.3f}, {verdict}", flush=True)
dist.destroy_process_group()
