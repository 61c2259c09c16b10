"""A character-level GPT on Python's documentation, stage 4: main params and optimizer state are sharded."""

from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from megascale import DistributedOptimizer, DynamicGradScaler, cast_model

STEPS, BATCH, CONTEXT, WIDTH = 120, 12, 32, 32

text = "\n".join(topics[name] for name in sorted(topics))
letters = sorted(set(text))
data = torch.tensor([letters.index(letter) for letter in text[:50_000]])


class GPT(nn.Module):
    """Letters of shape [batch, context] to logits of shape [batch, context, letters]."""

    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(len(letters), WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(letters)))

    def forward(self, x):
        """Return logits of the next letter at every place."""
        h = self.letters(x) + self.positions.weight
        future = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool, device=x.device).triu(1)
        return self.head(self.blocks(h, mask=future))


def batch(step):
    """Return this rank's share of one step's inputs and targets, each of shape [BATCH / world, CONTEXT]."""
    starts = torch.randint(len(data) - CONTEXT, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    windows = data[starts + torch.arange(CONTEXT + 1)][rank::world]
    return windows[:, :-1], windows[:, 1:]


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = cast_model(GPT(), torch.float16)
inner = torch.optim.AdamW(model.named_parameters(), lr=3e-3)
optimizer = DistributedOptimizer(inner, grad_scaler=DynamicGradScaler(), modules=model)

for step in range(STEPS):
    x, y = batch(step)
    loss = functional.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
    optimizer.zero_grad()
    optimizer.scale_loss(loss).backward()
    optimizer.step()
    if step % 20 == 19 and rank == 0:
        print(f"step {step + 1}: loss {loss.item():.5f}")
dist.destroy_process_group()
