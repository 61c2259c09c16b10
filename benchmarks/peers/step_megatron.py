"""Megatron-Core's Float16OptimizerWithFloat16Params, from its wheel, on 16-bit gradients."""

from importlib import import_module

import torch
import torch.distributed as dist
from torch import Tensor

from peers import megatron_core
from peers.given import CLIP, EPS, GROWTH_INTERVAL, HYSTERESIS, LR, SCALE, WEIGHT_DECAY, Setup
from peers.work import Traffic, UnavailableError, Work


class Float16Optimizer:
    """Built as get_megatron_optimizer does it, from parameters in place of a Megatron model.

    bf16 has a constant loss scale, so that it unscales and checks too. Without TransformerEngine or apex its clip and
    its fp16 write-back are loops over tensors with a temporary, and its AdamW is torch's.
    """

    own_grad_bytes = 0

    def __init__(self, work: Work) -> None:
        if not work.half:
            raise UnavailableError("its FP32Optimizer scales no loss")
        if work.device.type == "cpu":
            megatron_core.prepare(Setup(0, 1, work.device, work.dtype, None, {}))
        optimizers = import_module("megatron.core.optimizer")
        fp16 = work.dtype == torch.float16
        self.params = work.parameters()
        self.grads = work.grads
        config = optimizers.OptimizerConfig(
            optimizer="adam",
            lr=LR,
            weight_decay=WEIGHT_DECAY,
            adam_eps=EPS,
            fp16=fp16,
            bf16=not fp16,
            params_dtype=work.dtype,
            loss_scale=None if fp16 else SCALE,
            initial_loss_scale=SCALE,
            loss_scale_window=GROWTH_INTERVAL,
            hysteresis=HYSTERESIS,
            clip_grad=CLIP,
        )
        self.optimizer = optimizers._get_megatron_optimizer_based_on_param_groups(
            config, [torch.nn.Module()], [{"params": self.params}], model_parallel_group=_model_parallel_group(work)
        )
        local = optimizers.USING_PYTORCH_OPTIMIZER
        self.traffic: Traffic = {
            "cast": 2 + 4,
            "unscale and check": 4 + 4,
            "norm": 4,
            "clip": 16 if local else 8,
            "AdamW": 28,
            "write back": 14 if local and fp16 else 6,
        }
        if work.options.get("fused"):
            if not local:
                raise UnavailableError("it has a fused AdamW already: see Megatron-Core")
            for group in self.optimizer.optimizer.param_groups:
                group.update(fused=True, foreach=False)
        elif local:
            # lerp 12, mul_ 8, addcmul_ 12, sqrt 8, div 8, add_ 8, addcdiv_ 16, weight decay 8
            self.traffic["AdamW"] = 80

    def prepare(self) -> None:
        """Free the main grads and give the gradients anew: it drops both."""
        self.optimizer.zero_grad()
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad

    def step(self) -> None:
        """See :class:`peers.work.Stepper`."""
        self.optimizer.step()

    def parameters(self) -> list[Tensor]:
        """See :class:`peers.work.Stepper`."""
        return [*self.params]


_worlds: list[object] = []
"""The world that Megatron-Core's groups were made for, if any: the next measurement has another one."""


def _model_parallel_group(work: Work) -> dist.ProcessGroup:
    parallel_state = import_module("megatron.core.parallel_state")
    if not dist.is_initialized():
        backend = "gloo" if work.device.type == "cpu" else "nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if dist.group.WORLD not in _worlds:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        _worlds[:] = [dist.group.WORLD]
    group: dist.ProcessGroup = parallel_state.get_model_parallel_group()
    return group


def build(work: Work) -> Float16Optimizer:
    """Return Megatron-Core's. Option "fused": torch's fused AdamW inside."""
    return Float16Optimizer(work)
