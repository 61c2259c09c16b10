"""Megatron-Core's DistributedOptimizer, from its wheel, with fp32 main grads.

On CPU through :mod:`peers.megatron_on_cpu`. Without TransformerEngine and apex it falls back to torch's AdamW, as its
users get it.
"""

from importlib import import_module

import torch
import torch.distributed as dist
from torch import Tensor

from peers import megatron_on_cpu
from peers.given import CLIP, EPS, GROWTH_INTERVAL, HYSTERESIS, LR, SCALE, WEIGHT_DECAY, GivenModel, Setup


class MegatronCore:
    """Its DistributedDataParallel reduces during backward, its step gathers."""

    def __init__(self, model: GivenModel, setup: Setup) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        half = setup.dtype == torch.float16
        wrap = DistributedDataParallelConfig(
            grad_reduce_in_fp32=setup.options.get("grad_reduce_in_fp32", True),
            overlap_grad_reduce=True,
            use_distributed_optimizer=True,
            bucket_size=setup.bucket_numel,
        )
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, fp16=half, bf16=not half)
        model.config = config
        self.setup = setup
        self.model = DistributedDataParallel(config, wrap, model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=LR,
                weight_decay=WEIGHT_DECAY,
                adam_eps=EPS,
                fp16=half,
                bf16=not half,
                params_dtype=setup.dtype,
                initial_loss_scale=SCALE,
                loss_scale_window=GROWTH_INTERVAL,
                hysteresis=HYSTERESIS,
                clip_grad=CLIP,
                use_distributed_optimizer=True,
            ),
            [self.model],
            use_gloo_process_groups=False,
        )
        if setup.options.get("fused"):
            for group in self.optimizer.chained_optimizers[0].optimizer.param_groups:
                group.update(fused=True, foreach=False)

    def reduce(self) -> None:
        """See :class:`peers.given.Contender`."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.optimizer.scale_loss(self.model(torch.zeros((), device=self.setup.device))).backward()
        self.model.finish_grad_sync()

    def step(self) -> None:
        """See :class:`peers.given.Contender`."""
        self.optimizer.step()

    def parameters(self) -> list[Tensor]:
        """See :class:`peers.given.Contender`."""
        dist.barrier()
        return list(self.model.module.parameters())


def prepare(setup: Setup) -> None:
    """Import it."""
    if setup.device.type == "cpu":
        megatron_on_cpu.install()
    import_module("megatron.core.optimizer")


def build(model: GivenModel, setup: Setup) -> MegatronCore:
    """Return Megatron-Core's. Options "grad_reduce_in_fp32" (default True), and "fused": torch's fused AdamW inside."""
    return MegatronCore(model, setup)
