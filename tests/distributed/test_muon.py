"""optimizer="muon" from a config: sharded as unsharded, one decision over Muon and Adam."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascale import (
    ChainedOptimizer,
    OptimizerConfig,
    build_optimizer,
)
from tests.distributed.test_distributed_optimizer import same
from tests.pool import RankPool

STEPS = 6


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.hidden = nn.ModuleList(nn.Linear(4, 4, bias=index == 0) for index in range(3))
        self.head = nn.Linear(4, 7, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits."""
        found: Tensor = self.tokens(ids)
        for layer in self.hidden:
            found = layer(found).tanh()
        logits: Tensor = self.head(found)
        return logits


def _build(sharded: bool) -> tuple[_Model, ChainedOptimizer]:
    torch.manual_seed(0)
    model = _Model().half()
    config = OptimizerConfig(
        fp16=True, lr=0.02, optimizer="muon", muon_adam_lr=1e-2, loss_scale=64.0, use_distributed_optimizer=sharded
    )
    optimizer = build_optimizer(config, model, replicas_may_differ=not sharded)
    assert isinstance(optimizer, ChainedOptimizer)
    return model, optimizer


def _train(model: _Model, optimizer: ChainedOptimizer) -> list[bool]:
    """Step on batches that are the same on all ranks, so that their mean is exact; each rank overflows in turn."""
    landed = []
    for step in range(STEPS):
        optimizer.zero_grad()
        ids = torch.randint(0, 7, (8,), generator=torch.Generator().manual_seed(step))
        bad = step % 2 == 1 and step // 2 % dist.get_world_size() == dist.get_rank()
        loss = nn.functional.cross_entropy(model(ids).float(), ids) * (torch.inf if bad else 1.0)
        optimizer.scale_loss(loss).backward()
        landed.append(bool(optimizer.step().success))
    return landed


def _state(model: _Model, optimizer: ChainedOptimizer) -> dict[str, Tensor]:
    found = {f"weight {name}": param.detach().clone() for name, param in model.named_parameters()}
    packed = optimizer.state_dict()
    found |= {f"main {name}": main for name, main in packed["main_params"].items()}
    for name, state in packed["optimizer"]["state"].items():
        found |= {f"{key} {name}": torch.as_tensor(value) for key, value in state.items()}
    return found


def _trained(sharded: bool) -> tuple[list[bool], dict[str, Tensor]]:
    model, optimizer = _build(sharded)
    return _train(model, optimizer), _state(model, optimizer)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_muon_and_adam_step_as_one(ranks: RankPool, world: int) -> None:
    """An overflow of any rank skips both; main params and state are those of one rank."""
    [(landed, state), *others] = ranks.run(world, _trained, True)
    [(alone_landed, alone)] = ranks.run(1, _trained, False)
    assert landed == alone_landed == [True, False] * (STEPS // 2)
    assert same(state, alone)
    assert all(same(state, other) for _, other in others)
