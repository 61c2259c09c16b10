"""torch FSDP2: fully_shard with fp32 shards, 16-bit compute, fp32 reduction, torch's GradScaler, clip, fused AdamW."""

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from peers.given import CLIP, EPS, GROWTH_INTERVAL, LR, SCALE, WEIGHT_DECAY, GivenModel, Setup


class Fsdp2:
    """Shards block by block; the gather of the next forward is made in the step, and waited for."""

    def __init__(self, model: GivenModel, setup: Setup) -> None:
        mesh = init_device_mesh(setup.device.type, (setup.ranks,))
        policy = MixedPrecisionPolicy(
            param_dtype=setup.dtype, reduce_dtype=setup.options["reduce_dtype"], cast_forward_inputs=False
        )
        model.float()
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self.model = model
        self.setup = setup
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)
        self.scaler = torch.amp.GradScaler(setup.device.type, init_scale=SCALE, growth_interval=GROWTH_INTERVAL)

    def reduce(self) -> None:
        """See :class:`peers.given.Contender`."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(torch.zeros((), device=self.setup.device))).backward()

    def step(self) -> None:
        """See :class:`peers.given.Contender`."""
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP, foreach=True)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        for block in self.model.blocks:
            block.unshard()

    def parameters(self) -> list[Tensor]:
        """See :class:`peers.given.Contender`."""
        for block in self.model.blocks:
            block.reshard()
        whole = [param.full_tensor() for param in self.model.parameters() if isinstance(param, DTensor)]
        return [param.to(self.setup.dtype) for param in whole]


def build(model: GivenModel, setup: Setup) -> Fsdp2:
    """Return FSDP2. Option "reduce_dtype"."""
    return Fsdp2(model, setup)
