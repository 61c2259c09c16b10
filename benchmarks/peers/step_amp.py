"""The end of an iteration on fp32 parameters under torch's fused AdamW: torch.amp's loop, and megascale.amp's."""

from collections.abc import Callable

import torch
from torch import Tensor

from megascale.amp import GradScaler, optimizer_step
from peers.given import CLIP, GROWTH_INTERVAL, SCALE
from peers.step_by_hand import ADAMW, ADAMW_TRAFFIC
from peers.work import Traffic, Work

DIVIDED = {"AdamW, gradients divided in place": ADAMW_TRAFFIC + 4}
"""torch's fused kernels write the gradients that they have divided by ``grad_scale``."""
CLIPPED = {"unscale and check": 4 + 4, "norm": 4, "clip": 4 + 4, "AdamW": ADAMW_TRAFFIC}


class Trained:
    """Parameters, their gradients and fused AdamW.

    Contenders of one run share them: where tensors lie in memory moves a pass by more than what is compared here.
    """

    def __init__(self, work: Work) -> None:
        self.params = work.parameters(torch.float32)
        self.grads = [torch.empty_like(param) for param in self.params]
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad
        self.optimizer = torch.optim.AdamW(self.params, **ADAMW)


class Loop:
    """A scaler, and the calls that end an iteration. The option "on" is what is Trained."""

    own_grad_bytes = 4

    def __init__(self, work: Work, kind: type[torch.amp.GradScaler], end: Callable[["Loop"], object], traffic: Traffic):
        self.traffic = traffic
        self.given = work.grads
        trained: Trained = work.options["on"]
        self.params, self.grads, self.optimizer = trained.params, trained.grads, trained.optimizer
        self.scaler = kind(work.device.type, init_scale=SCALE, growth_interval=GROWTH_INTERVAL)
        # Nothing depends on it: backward is there, but has no gradient to make.
        self.loss = torch.zeros((), device=work.device, requires_grad=True)
        self.scaler.scale(self.loss)
        self.end = end

    @torch.no_grad()
    def prepare(self) -> None:
        """Give the gradients anew: they are unscaled in place."""
        torch._foreach_copy_(self.grads, self.given)

    def step(self) -> None:
        """See :class:`peers.work.Stepper`."""
        self.end(self)

    def parameters(self) -> list[Tensor]:
        """See :class:`peers.work.Stepper`."""
        return [*self.params]


def _step(loop: Loop) -> None:
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()


def _clip_and_step(loop: Loop) -> None:
    loop.scaler.unscale_(loop.optimizer)
    torch.nn.utils.clip_grad_norm_(loop.params, CLIP)
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()


def _helper(loop: Loop) -> None:
    optimizer_step(loop.loss, loop.optimizer, loop.scaler, CLIP, zero_grad=False)


def torch_plain(work: Work) -> Loop:
    """Return torch.amp.GradScaler: step, update."""
    return Loop(work, torch.amp.GradScaler, _step, {"check, times 1": 4 + 4, **DIVIDED})


def torch_clipped(work: Work) -> Loop:
    """Return torch.amp.GradScaler: unscale_, clip_grad_norm_, step, update."""
    return Loop(work, torch.amp.GradScaler, _clip_and_step, CLIPPED)


def plain(work: Work) -> Loop:
    """Return megascale.amp.GradScaler: step, update."""
    return Loop(work, GradScaler, _step, {"check": 4, **DIVIDED})


def clipped(work: Work) -> Loop:
    """Return megascale.amp.GradScaler in torch's loop: unscale_, clip_grad_norm_, step, update."""
    return Loop(work, GradScaler, _clip_and_step, CLIPPED)


def helped(work: Work) -> Loop:
    """Return megascale.amp.optimizer_step with a norm to clip to."""
    return Loop(work, GradScaler, _helper, {"check and norm": 4, "AdamW": ADAMW_TRAFFIC})
