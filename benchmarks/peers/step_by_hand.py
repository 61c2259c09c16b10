"""What users write by hand around torch's fused AdamW: fp32 masters, or torch.amp.GradScaler on fp32 parameters."""

import torch
from torch import Tensor

from peers.given import CLIP, EPS, GROWTH_INTERVAL, LR, SCALE, WEIGHT_DECAY
from peers.work import Traffic, UnavailableError, Work

ADAMW = {"lr": LR, "eps": EPS, "weight_decay": WEIGHT_DECAY, "fused": True}
ADAMW_TRAFFIC = 28
"""fp32 gradient, parameter and two moments read; parameter and moments written."""


class Masters:
    """fp32 masters and their gradients, torch's fused AdamW, one host read of the overflow flag."""

    own_grad_bytes = 0

    def __init__(self, work: Work) -> None:
        if not work.half:
            raise UnavailableError("fp32 parameters are their own masters: see torch amp")
        self.traffic: Traffic = {
            "cast": 2 + 4,
            "unscale and check": 4 + 4,
            "norm": 4,
            "clip": 4 + 4,
            "AdamW": ADAMW_TRAFFIC,
            "write back": 4 + 2,
        }
        self.params: list[Tensor] = [*work.parameters()]
        self.grads = work.grads
        self.masters = [param.detach().float().requires_grad_() for param in self.params]
        self.master_grads = [torch.empty_like(master) for master in self.masters]
        for master, grad in zip(self.masters, self.master_grads, strict=True):
            master.grad = grad
        self.optimizer = torch.optim.AdamW(self.masters, **ADAMW)
        self.scale = torch.full((), SCALE, device=work.device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=work.device)
        self.found_inf = torch.zeros((), device=work.device)

    def prepare(self) -> None:
        """Do nothing: the gradients are there, and stay as they are."""

    @torch.no_grad()
    def step(self) -> None:
        """See :class:`peers.work.Stepper`."""
        self.found_inf.zero_()
        torch._foreach_copy_(self.master_grads, self.grads)
        inv_scale = self.scale.double().reciprocal().float()
        torch._amp_foreach_non_finite_check_and_unscale_(self.master_grads, self.found_inf, inv_scale)
        if not self.found_inf.item():
            torch.nn.utils.clip_grad_norm_(self.masters, CLIP, foreach=True)
            self.optimizer.step()
            torch._foreach_copy_(self.params, self.masters)
        torch._amp_update_scale_(self.scale, self.growth_tracker, self.found_inf, 2.0, 0.5, GROWTH_INTERVAL)

    def parameters(self) -> list[Tensor]:
        """See :class:`peers.work.Stepper`."""
        return self.params


class TorchAmp:
    """torch.amp.GradScaler on fp32 parameters: unscale_, clip_grad_norm_, fused AdamW."""

    own_grad_bytes = 4

    def __init__(self, work: Work) -> None:
        self.traffic: Traffic = {
            "unscale and check": 4 + 4,
            "norm": 4,
            "clip": 4 + 4,
            "AdamW": ADAMW_TRAFFIC,
        }
        self.given = work.grads
        self.params = work.parameters(torch.float32)
        self.grads = [torch.empty_like(param) for param in self.params]
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad
        self.optimizer = torch.optim.AdamW(self.params, **ADAMW)
        self.scaler = torch.amp.GradScaler(work.device.type, init_scale=SCALE, growth_interval=GROWTH_INTERVAL)
        self.scaler.scale(torch.ones((), device=work.device))

    @torch.no_grad()
    def prepare(self) -> None:
        """Give it the gradients anew, in fp32: it unscales and clips in place."""
        torch._foreach_copy_(self.grads, self.given)

    def step(self) -> None:
        """See :class:`peers.work.Stepper`."""
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.params, CLIP, foreach=True)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def parameters(self) -> list[Tensor]:
        """See :class:`peers.work.Stepper`."""
        return [*self.params]


def masters(work: Work) -> Masters:
    """Return fp32 masters by hand."""
    return Masters(work)


def torch_amp(work: Work) -> TorchAmp:
    """Return torch.amp on fp32 parameters."""
    return TorchAmp(work)
