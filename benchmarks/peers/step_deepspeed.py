"""DeepSpeed's FP16_Optimizer around its own fused Adam: what its engine wraps without ZeRO, in fp16 and in bf16."""

import os
import sys
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from peers.given import CLIP, EPS, GROWTH_INTERVAL, LR, SCALE, WEIGHT_DECAY
from peers.work import Traffic, UnavailableError, Work


class Fp16Optimizer:
    """One flat fp32 master; model parameters become views of one flat 16-bit buffer.

    In bf16 it scales no loss; the clip multiplies all the same. On CPU its Adam is compiled at the first run, by ninja.
    """

    own_grad_bytes = 0

    def __init__(self, work: Work) -> None:
        if not work.half:
            raise UnavailableError("FP16_Optimizer is for 16-bit parameters")
        if work.device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        # ninja is where its wheel put it, beside this interpreter
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        fused_adam = import_module("deepspeed.ops.adam").FusedAdam
        optimizer = import_module("deepspeed.runtime.fp16.fused_optimizer").FP16_Optimizer
        timer = import_module("deepspeed.utils.timer").NoopTimer
        self.params = work.parameters()
        self.grads = work.grads
        self.optimizer = optimizer(
            fused_adam(self.params, lr=LR, eps=EPS, weight_decay=WEIGHT_DECAY),
            low_precision_dtype=work.dtype,
            dynamic_loss_scale=True,
            dynamic_loss_args={"init_scale": SCALE, "scale_window": GROWTH_INTERVAL, "min_scale": 1.0},
            clip_grad=CLIP,
            verbose=False,
            timers=timer(),
        )
        self.traffic: Traffic = {
            "check, largest and smallest": 2 + 2,
            "cast": 2 + 4,
            "flatten": 4 + 4,
            "norm": 4,
            "unscale and clip": 4 + 4,
            "AdamW": 28,
            "write back": 4 + 2,
        }

    def prepare(self) -> None:
        """Give the gradients anew: it drops them."""
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad

    @torch.no_grad()
    def step(self) -> None:
        """See :class:`peers.work.Stepper`."""
        self.optimizer.step()

    def parameters(self) -> list[Tensor]:
        """See :class:`peers.work.Stepper`."""
        return [*self.params]


def build(work: Work) -> Fp16Optimizer:
    """Return DeepSpeed's."""
    return Fp16Optimizer(work)
