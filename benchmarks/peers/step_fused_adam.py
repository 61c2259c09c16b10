"""Fused AdamW with master weights, on GPUs only: apex's, TransformerEngine's and FlashOptim's."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from peers.given import CLIP, EPS, GROWTH_INTERVAL, LR, SCALE, WEIGHT_DECAY
from peers.work import Traffic, UnavailableError, Work


class _OnOwnGrads:
    """16-bit gradients of its own, as the clip is in place."""

    traffic: Traffic
    own_grad_bytes = 2

    def __init__(self, work: Work, name: str) -> None:
        if work.device.type != "cuda":
            raise UnavailableError(f"{name} needs CUDA")
        if not work.half:
            raise UnavailableError("its master weights are for 16-bit parameters")
        self.given = work.grads
        self.params = work.parameters()
        self.grads = [torch.empty_like(param) for param in self.params]
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad

    @torch.no_grad()
    def prepare(self) -> None:
        """Give the gradients anew."""
        torch._foreach_copy_(self.grads, self.given)

    def parameters(self) -> list[Tensor]:
        """See :class:`peers.work.Stepper`."""
        return [*self.params]


class FusedAdam(_OnOwnGrads):
    """apex's or TransformerEngine's, capturable, driven by torch.amp.GradScaler.

    The clip is Megatron-Core's: their l2norm, one host read, and their multi-tensor scale on the scaled gradients.
    """

    def __init__(self, work: Work, name: str, fused_adam: Any, kernels: Any, apply: Any) -> None:
        super().__init__(work, name)
        self.optimizer = fused_adam(
            self.params, lr=LR, eps=EPS, weight_decay=WEIGHT_DECAY, capturable=True, master_weights=True
        )
        self.scaler = torch.amp.GradScaler(work.device.type, init_scale=SCALE, growth_interval=GROWTH_INTERVAL)
        self.scaler.scale(torch.ones((), device=work.device))
        self.kernels, self.apply = kernels, apply
        self.overflow = torch.zeros(1, dtype=torch.int, device=work.device)
        self.traffic = {
            "norm": 2,
            "clip": 2 + 2,
            "check": 2 + 2,
            "AdamW and write back": 2 + 12 + 12 + 2,
        }

    def step(self) -> None:
        """See :class:`peers.work.Stepper`."""
        norm, _ = self.apply(self.kernels.multi_tensor_l2norm, self.overflow, [self.grads], False)
        coefficient = CLIP / (norm.item() / SCALE + 1e-6)
        if coefficient < 1.0:
            self.apply(self.kernels.multi_tensor_scale, self.overflow, [self.grads, self.grads], coefficient)
        self.scaler.step(self.optimizer)
        self.scaler.update()


class FlashAdamW(_OnOwnGrads):
    """FlashOptim's: 24-bit masters, 8-bit moments, torch's clip. It has no loss scale and checks no overflow.

    Its gradients are unscaled before the step: torch's norm of scaled fp16 gradients would be inf.
    """

    def __init__(self, work: Work) -> None:
        super().__init__(work, "FlashOptim")
        optimizer = import_module("flashoptim").FlashAdamW
        self.optimizer = optimizer(self.params, lr=LR, eps=EPS, weight_decay=WEIGHT_DECAY, master_weight_bits=24)
        self.traffic = {
            "norm": 2,
            "clip": 2 + 2,
            "AdamW, 24-bit masters, 8-bit moments": 2 + 3 + 3 + 2 + 2,
        }

    @torch.no_grad()
    def prepare(self) -> None:
        """Give the gradients anew, unscaled."""
        super().prepare()
        torch._foreach_mul_(self.grads, 1 / SCALE)

    def step(self) -> None:
        """See :class:`peers.work.Stepper`."""
        torch.nn.utils.clip_grad_norm_(self.params, CLIP, foreach=True)
        self.optimizer.step()


def apex(work: Work) -> FusedAdam:
    """Return apex's."""
    kernels, applier = import_module("amp_C"), import_module("apex.multi_tensor_apply").multi_tensor_applier
    return FusedAdam(work, "apex", import_module("apex.optimizers").FusedAdam, kernels, applier)


def transformer_engine(work: Work) -> FusedAdam:
    """Return TransformerEngine's."""
    optimizers = import_module("transformer_engine.pytorch.optimizers")
    return FusedAdam(work, "TransformerEngine", optimizers.FusedAdam, optimizers, optimizers.multi_tensor_applier)


def flashoptim(work: Work) -> FlashAdamW:
    """Return FlashOptim's."""
    return FlashAdamW(work)
