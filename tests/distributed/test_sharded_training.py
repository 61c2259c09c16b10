"""What happens around a DistributedOptimizer: refusals, outside writes, overlap, frozen and new parameters."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascale import DistributedOptimizer, MixedPrecisionOptimizer
from tests.distributed.test_distributed_optimizer import (
    batch,
    config_of,
    net,
    same,
    scaler,
    sharded,
    weights,
)
from tests.pool import RankPool

FP16 = torch.float16


def _step(optimizer: MixedPrecisionOptimizer, module: nn.Module, step: int) -> None:
    optimizer.zero_grad()
    loss = module(batch(step, dist.get_rank(), FP16)).float().square().mean()
    optimizer.scale_loss(loss).backward()
    assert bool(optimizer.step().success)


def _mixed_dtypes() -> list[Any]:
    module = net()
    module.norm.float()
    module.head.bfloat16()
    inner = torch.optim.AdamW(module.named_parameters(), lr=1e-2)
    optimizer = DistributedOptimizer(inner, config_of(FP16), scaler(FP16), modules=module, grad_dtype=FP16)
    found = {name: optimizer.grad_sync.main_grad(param) for name, param in module.named_parameters()}
    return [{name: str(grad.dtype) for name, grad in found.items() if grad is not None}]


def test_main_grads_hold_what_their_parameters_make(ranks: RankPool) -> None:
    """grad_dtype=fp16 narrows neither fp32 gradients nor the range of bf16 ones."""
    for [dtypes] in ranks.run(2, _mixed_dtypes):
        assert dtypes["first.weight"] == "torch.float16"
        assert dtypes["norm.weight"] == "torch.float32"
        assert dtypes["head.weight"] == "torch.bfloat16"


class _Attention(nn.Module):
    """MultiheadAttention reads out_proj.weight without calling out_proj; a tied weight is read by two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return shape [batch, length, 16]."""
        x = self.embed(tokens)
        out: Tensor = self.head(self.attention(x, x, x)[0])
        return out


def _slow_gather() -> list[Any]:
    logs = []
    for overlap in (False, True):
        torch.manual_seed(0)
        module = _Attention()
        inner = torch.optim.SGD(module.named_parameters(), lr=0.5)
        optimizer = DistributedOptimizer(inner, modules=module, bucket_numel=64, overlap_param_gather=overlap)
        losses = []
        for step in range(6):
            if overlap and dist.get_rank() == 1:
                time.sleep(0.02)  # the other rank reaches forward while its gathers are still on their way
            tokens = torch.randint(16, (2, 3), generator=torch.Generator().manual_seed(step))
            loss = nn.functional.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        logs.append([losses, {k: v.clone() for k, v in module.state_dict().items()}])
    return logs


def test_overlapped_gather_is_waited_for(ranks: RankPool) -> None:
    """Modules wait for what they read: attention's inner weights, tied weights, a state dict. Same bits as without."""
    for (losses, state), (overlapped, overlapped_state) in ranks.run(2, _slow_gather):
        assert losses == overlapped
        assert same(state, overlapped_state)


def _unused() -> dict[str, list[float]]:
    module = nn.ModuleDict({"used": nn.Linear(4, 20), "sometimes": nn.Linear(4, 20), "never": nn.Linear(4, 20)})
    inner = torch.optim.SGD(module.named_parameters(), lr=1.0)
    optimizer = DistributedOptimizer(
        inner, modules=module, bucket_numel=10, broadcast_params=True, overlap_param_gather=True
    )
    before = weights(module)
    for step in range(3):
        optimizer.zero_grad()
        data = torch.ones(1, 4)
        loss = module["used"](data).sum()
        if dist.get_rank() == step % 2:
            loss = loss + module["sometimes"](data).sum()
        loss.backward()
        optimizer.prepare_grads()
        # Forward has not waited for a layer that it did not use; its shard is written next.
        assert not any(bucket._arrival is not None for bucket in optimizer._gather.buckets)
        assert bool(optimizer.step_with_ready_grads().success)
        assert any(bucket._arrival is not None for bucket in optimizer._gather.buckets)
    optimizer.finish_param_gather()
    return {name: (before[name] - value).unique().tolist() for name, value in weights(module).items()}


def test_unused_parameters_neither_hang_nor_poison(ranks: RankPool) -> None:
    """A layer that one rank, or every rank, leaves out counts as zeros; nothing of the step before remains."""
    for moved in ranks.run(2, _unused):
        assert moved["used.bias"] == [3.0]
        assert moved["sometimes.bias"] == [1.5]
        assert moved["never.bias"] == moved["never.weight"] == [0.0]


def test_main_params_of_a_rank_are_pieces() -> None:
    """Alone, the pieces are whole, flattened parameters; the state is theirs."""
    module = net()
    optimizer = sharded(module)
    shapes = {name: tuple(main.shape) for name, main in optimizer.main_params()}
    assert shapes == {name: (param.numel(),) for name, param in module.named_parameters()}
    assert {tuple(state["exp_avg"].shape) for state in optimizer.state.values()} == set(shapes.values())
    packed: dict[str, Tensor] = optimizer.state_dict()["main_params"]
    assert {name: value.shape for name, value in packed.items()} == {n: p.shape for n, p in module.named_parameters()}


def test_chunks_have_names_of_their_own() -> None:
    """Two chunks may call their parameters alike."""
    chunks = [nn.Linear(2, 2), nn.Linear(2, 2)]
    params = [param for chunk in chunks for param in chunk.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD(params), modules=chunks)
    assert optimizer._param_names() == ["0.weight", "0.bias", "1.weight", "1.bias"]
