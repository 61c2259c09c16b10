"""A gradient is wrong, but finite: which stage of a step, which rank, which elements?

torchrun --standalone --nproc-per-node 2 examples/wrong_gradient.py

Each stage is compared with plain torch, and begins from what the stage before has really made, so that the first stage
that differs is the one to look at. Replace make_model() and loss_of() by your own.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from megascale import ConstantGradScaler, DistributedOptimizer

STEPS, SCALE, CLIP, TOLERANCE = 3, 256.0, 1.0, 1e-3
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def make_model():
    """Return the model, the same on each rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).half()


def loss_of(model, step):
    """Return this rank's loss."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step * world + rank)).half()
    return mse_loss(model(x).float(), x[:, :4].float().square())


def gathered(value):
    """Return the values of all ranks."""
    values = [None] * world
    dist.all_gather_object(values, value)
    return values


def here(name, whole):
    """Return this rank's piece of a flattened parameter: pieces follow each other by rank; replicas have all of it."""
    sizes = gathered(mains[name].numel())
    start = 0 if sizes[rank] == whole.numel() else sum(sizes[:rank])
    return whole.flatten()[start : start + sizes[rank]]


def compare(stage, name, found, expected):
    """Print which elements are wrong on which rank; return where they are wrong on this one."""
    limit = TOLERANCE * max(gathered(float(expected.abs().max()) if expected.numel() else 0.0))
    wrong = (found.flatten().float() - expected.flatten().float()).abs() > limit
    at = wrong.nonzero().flatten().tolist()
    for other, (numel, places) in enumerate(gathered((len(wrong), at))):
        if places and rank == 0:
            where = f"{len(places)} of {numel} elements, from {places[0]} to {places[-1]}"
            print(f"step {step}: the {stage} of {name} is wrong on rank {other} in {where}", flush=True)
    return wrong


model, twin = make_model(), make_model()
inner = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
optimizer = DistributedOptimizer(inner, grad_scaler=ConstantGradScaler(SCALE), clip_grad=CLIP, modules=model)
mains = dict(optimizer.main_params())  # of each parameter this rank's piece
copies = {name: main.detach().flatten().clone().requires_grad_() for name, main in mains.items()}
torchs = type(inner)(copies.values(), lr=1e-2)
failed = 0
for step in range(STEPS):
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    local = torch.autograd.grad(loss_of(twin, step) * SCALE, list(twin.parameters()))
    optimizer.zero_grad()
    optimizer.scale_loss(loss_of(model, step)).backward()
    _, norm, _ = optimizer.step()
    clip = min(1.0, CLIP / (float(norm) + 1e-6))
    for name, own in zip(mains, local, strict=True):
        parts = torch.stack([here(name, part.float() / SCALE) for part in gathered(own)], dim=1)
        reduced = optimizer.local_grad(name).detach().float().flatten() / SCALE
        wrong = compare("reduced gradient", name, reduced, parts.mean(dim=1))
        times = torch.linalg.lstsq(parts[wrong], reduced[wrong].unsqueeze(1) * world).solution.flatten().tolist()
        for counts in gathered(times if wrong.any() else []):  # the gradient of each rank should count once
            if counts and rank == 0:
                print("  " + ", ".join(f"rank {i}'s counts {count:.2f} times" for i, count in enumerate(counts)))
        copies[name].grad = reduced * clip
        failed += int(wrong.any())
    torchs.step()
    for name, param in model.named_parameters():
        failed += int(compare("main param", name, mains[name], copies[name].detach()).any())
        whole = torch.cat(gathered(mains[name].detach().flatten().half()))[: param.numel()]
        failed += int(compare("model param", name, param.detach(), whole).any())
        copies[name].data.copy_(mains[name].flatten())
print(f"rank {rank}: {failed} stages wrong", flush=True)
dist.destroy_process_group()
