"""A loop whose optimizer reduces gradients inside of step(), as nanochat's does, in fp16 autocast on several ranks.

    torchrun --standalone --nproc-per-node 2 examples/local_optimizer.py

There is no DistributedDataParallel: each rank has gradients of its own until step(), so only a rank's own overflow is
seen by torch's scaler, and ranks that disagree wait for ever, as one of them leaves out the step that holds the
collectives. ``GradScaler(process_group=...)`` agrees by itself: nanochat's five lines that all-reduce the flag go.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascale.amp import GradScaler, autocast


class ReducingAdamW(torch.optim.AdamW):
    """AdamW that averages gradients over ranks in its step."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Reduce, then update."""
        for group in self.param_groups:
            for param in group["params"]:
                dist.all_reduce(param.grad)
                param.grad.div_(dist.get_world_size())
        super().step()


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Return this rank's loss; at step 5 it overflows on the last rank."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
    with autocast("cpu", torch.float16):
        loss: Tensor = (model(x) - 1).float().square().mean()
    is_bad = step == 5 and dist.get_rank() == dist.get_world_size() - 1
    return loss * torch.inf if is_bad else loss


def main() -> None:
    """Train for 20 steps."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = ReducingAdamW(model.parameters(), lr=1e-2)
    scaler = GradScaler("cpu", init_scale=2.0**10, process_group=dist.group.WORLD)
    for step in range(20):
        loss = loss_of(model, step)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # all ranks learn of any rank's overflow
        scaler.step(optimizer)  # all ranks take the step, or none does
        scaler.update()
        model.zero_grad(set_to_none=True)
        if step in (0, 5, 19):
            checksum = sum(param.sum().item() for param in model.parameters())
            print(
                f"rank {dist.get_rank()} step {step} loss {loss.item():.4f} scale {scaler.get_scale():.0f} "
                f"checksum {checksum:.6f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
