"""DeepSpeed ZeRO stage 1, fp16 with its dynamic scale, and its own AdamW.

On CPU: its fused AdamW for CPU is compiled at the first run (ninja on PATH), and the accelerator is told that fp16 is
supported, which it refuses where oneDNN has no fp16 kernels: nothing here multiplies matrices.
"""

from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from peers.given import CLIP, EPS, GROWTH_INTERVAL, HYSTERESIS, LR, WEIGHT_DECAY, GivenModel, Setup


class DeepSpeedZero1:
    """Its backward reduces, its step unscales, clips, updates and gathers."""

    def __init__(self, model: GivenModel, setup: Setup) -> None:
        if setup.device.type == "cpu":
            get_accelerator().is_fp16_supported = lambda: True
        half = setup.dtype == torch.float16
        zero: dict[str, Any] = {"stage": 1}
        if setup.bucket_numel is not None:
            zero |= {"reduce_bucket_size": setup.bucket_numel, "allgather_bucket_size": setup.bucket_numel}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": CLIP,
            "zero_optimization": zero,
            "fp16": {
                "enabled": half,
                "initial_scale_power": 16,
                "loss_scale_window": GROWTH_INTERVAL,
                "hysteresis": HYSTERESIS,
            },
            "bf16": {"enabled": not half},
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "eps": EPS, "weight_decay": WEIGHT_DECAY}},
            "steps_per_print": 10**9,
            **setup.options,
        }
        self.setup = setup
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)

    def reduce(self) -> None:
        """See :class:`peers.given.Contender`."""
        self.engine.backward(self.engine(torch.zeros((), device=self.setup.device)))

    def step(self) -> None:
        """See :class:`peers.given.Contender`. Its step zeroes the gradients for the next round."""
        self.engine.step()

    def parameters(self) -> list[Tensor]:
        """See :class:`peers.given.Contender`."""
        return list(self.engine.module.parameters())


def build(model: GivenModel, setup: Setup) -> DeepSpeedZero1:
    """Return ZeRO-1. Options are merged into its config."""
    return DeepSpeedZero1(model, setup)
