"""What users write by hand around torch: fp32 masters, one all-reduce, unscale, clip, and a torch optimizer.

`masters` replicates masters and state; `zero_redundancy` shards the state with torch's ZeroRedundancyOptimizer, which
broadcasts the updated masters. `backward_alone` reduces and updates nothing: what the given backward costs everybody.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer

from peers.given import CLIP, EPS, GROWTH_INTERVAL, LR, SCALE, WEIGHT_DECAY, GivenModel, Setup

ADAMW = {"lr": LR, "eps": EPS, "weight_decay": WEIGHT_DECAY, "fused": True}


class Masters:
    """fp32 masters whose gradients are views of one flat buffer, all-reduced at once."""

    def __init__(self, model: GivenModel, setup: Setup, *, shard_state: bool) -> None:
        self.model = model
        self.setup = setup
        self.params = list(model.parameters())
        self.masters = [param.detach().float().requires_grad_() for param in self.params]
        self.flat_grad = torch.zeros(sum(param.numel() for param in self.params), device=setup.device)
        self.grads = self.flat_grad.split([param.numel() for param in self.params])
        for master, grad in zip(self.masters, self.grads, strict=True):
            master.grad = grad.view(master.shape)
        self.optimizer: torch.optim.Optimizer
        if shard_state:
            self.optimizer = ZeroRedundancyOptimizer(self.masters, torch.optim.AdamW, **ADAMW)
        else:
            self.optimizer = torch.optim.AdamW(self.masters, **ADAMW)
        self.scale = torch.full((), SCALE, device=setup.device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=setup.device)
        self.found_inf = torch.zeros((), device=setup.device)

    def reduce(self) -> None:
        """See :class:`peers.given.Contender`."""
        for param in self.params:
            param.grad = None
        (self.model(torch.zeros((), device=self.setup.device)) * self.scale).backward()
        with torch.no_grad():
            half = [param.grad for param in self.params]
            torch._foreach_copy_([master.grad for master in self.masters], half)
            dist.all_reduce(self.flat_grad)

    @torch.no_grad()
    def step(self) -> None:
        """See :class:`peers.given.Contender`."""
        self.found_inf.zero_()
        mean = self.scale.double().mul(self.setup.ranks).reciprocal().float()
        torch._amp_foreach_non_finite_check_and_unscale_([self.flat_grad], self.found_inf, mean)
        if not self.found_inf.item():
            torch.nn.utils.clip_grad_norm_(self.masters, CLIP, foreach=True)
            self.optimizer.step()
            torch._foreach_copy_(self.params, self.masters)
        torch._amp_update_scale_(self.scale, self.growth_tracker, self.found_inf, 2.0, 0.5, GROWTH_INTERVAL)

    def parameters(self) -> list[Tensor]:
        """See :class:`peers.given.Contender`."""
        return list(self.params)


class BackwardAlone:
    """The given backward, and nothing else."""

    def __init__(self, model: GivenModel, setup: Setup) -> None:
        self.model = model
        self.setup = setup

    def reduce(self) -> None:
        """See :class:`peers.given.Contender`."""
        self.model.zero_grad()
        self.model(torch.zeros((), device=self.setup.device)).backward()

    def step(self) -> None:
        """Do nothing."""

    def parameters(self) -> list[Tensor]:
        """Return none: they have not been trained."""
        return []


def masters(model: GivenModel, setup: Setup) -> Masters:
    """Return replicated masters and state."""
    return Masters(model, setup, shard_state=False)


def zero_redundancy(model: GivenModel, setup: Setup) -> Masters:
    """Return replicated masters with sharded state."""
    return Masters(model, setup, shard_state=True)


def backward_alone(model: GivenModel, setup: Setup) -> BackwardAlone:
    """Return what the given backward costs."""
    return BackwardAlone(model, setup)
