"""What happens around a DistributedOptimizer: refusals, outside writes, overlap, frozen and new parameters."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megascale import DistributedOptimizer, MixedPrecisionOptimizer, OptimizerConfig, build_optimizer
from megascale.errors import ArgumentError, UsageError
from tests.distributed.test_distributed_optimizer import (
    INNER,
    batch,
    config_of,
    flat,
    net,
    same,
    scaler,
    sharded,
    weights,
)
from tests.pool import RankPool
from tests.training import Sign

FP16 = torch.float16


def _step(optimizer: MixedPrecisionOptimizer, module: nn.Module, step: int) -> None:
    optimizer.zero_grad()
    loss = module(batch(step, dist.get_rank(), FP16)).float().square().mean()
    optimizer.scale_loss(loss).backward()
    assert bool(optimizer.step().success)


def _vouched() -> list[bool]:
    module, twin = net(), net()
    ours = DistributedOptimizer(
        Sign(module.named_parameters()),
        config_of(FP16),
        scaler(FP16),
        modules=module,
        grad_dtype=FP16,
        elementwise=True,
    )
    theirs = MixedPrecisionOptimizer(Sign(twin.named_parameters()), config_of(FP16), scaler(FP16))
    network = nn.parallel.DistributedDataParallel(twin)
    for step in range(4):
        _step(ours, module, step)
        _step(theirs, network, step)
    return [same(flat(ours.state_dict()), flat(theirs.state_dict())), same(weights(module), weights(twin))]


def test_elementwise_optimizer_of_the_users_own(ranks: RankPool) -> None:
    """With elementwise=True an unknown optimizer runs on pieces, bit for bit as on whole parameters."""
    assert ranks.run(2, _vouched) == [[True, True]] * 2


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


def _differing() -> list[Any]:
    module = net()
    with torch.no_grad():
        module.second.bias.add_(dist.get_rank())
    with pytest.raises(ArgumentError) as caught:
        sharded(module)
    untouched = not any(param._post_accumulate_grad_hooks for param in module.parameters())
    optimizer = sharded(module, broadcast_params=True)
    _step(optimizer, module, 0)
    return [str(caught.value), untouched, weights(module)]


def test_parameters_that_differ_are_named_or_broadcast(ranks: RankPool) -> None:
    """Ranks that start apart are refused on every rank alike; with broadcast_params the first rank's values count."""
    results = ranks.run(3, _differing)
    for message, untouched, model in results:
        assert "parameters differ between data-parallel ranks: 'second.bias'" in message
        assert untouched
        assert same(model, results[0][2])


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


def _checkpointed() -> list[bool]:
    results = []
    for reentrant in (False, True):
        module, twin = net(torch.float32), net(torch.float32)
        ours = sharded(module, "sgd", overlap_grad_reduce=not reentrant)
        theirs = MixedPrecisionOptimizer(INNER["sgd"](twin), config_of(torch.float32))
        network = nn.parallel.DistributedDataParallel(twin)
        for step in range(3):
            data = batch(step, dist.get_rank(), torch.float32).requires_grad_()
            ours.zero_grad()
            theirs.zero_grad()
            checkpoint(module, data, use_reentrant=reentrant).square().mean().backward()
            network(data).square().mean().backward()
            ours.step()
            theirs.step()
        results.append(same(weights(module), weights(twin)))
    return results


def test_activation_checkpointing(ranks: RankPool) -> None:
    """Both kinds of activation checkpointing, the reentrant one without overlap."""
    assert ranks.run(2, _checkpointed) == [[True, True]] * 2


def _state_of_before() -> bool:
    module, twin = net(torch.float32), net(torch.float32)
    optimizers = []
    for one in (module, twin):
        inner = INNER["adamw"](one)
        one(batch(0, 0, torch.float32)).square().mean().backward()
        inner.step()
        inner.zero_grad()
        optimizers.append(inner)
    ours = DistributedOptimizer(optimizers[0], modules=module, bucket_numel=300)
    theirs = MixedPrecisionOptimizer(optimizers[1])
    network = nn.parallel.DistributedDataParallel(twin)
    for step in range(3):
        for optimizer, net_ in ((ours, module), (theirs, network)):
            optimizer.zero_grad()
            net_(batch(step, dist.get_rank(), torch.float32)).square().mean().backward()
            optimizer.step()
    return same(flat(ours.state_dict()), flat(theirs.state_dict())) and same(weights(module), weights(twin))


def test_state_of_before_wrapping_is_kept(ranks: RankPool) -> None:
    """Moments and step counts that the torch optimizer had already are cut into pieces, not lost."""
    assert ranks.run(2, _state_of_before) == [True, True]


def _unused(overlap: bool) -> list[Any]:
    module = nn.ModuleDict({"used": nn.Linear(4, 20), "sometimes": nn.Linear(4, 20), "never": nn.Linear(4, 20)})
    inner = torch.optim.SGD(module.named_parameters(), lr=1.0)
    optimizer = DistributedOptimizer(
        inner, modules=module, bucket_numel=10, broadcast_params=True, overlap_param_gather=overlap
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
        assert not any(bucket.is_under_way for bucket in optimizer._gather.buckets.values())
        assert bool(optimizer.step_with_ready_grads().success)
        assert any(bucket.is_under_way for bucket in optimizer._gather.buckets.values()) == overlap
    optimizer.finish_param_gather()
    moved = {name: (before[name] - value).unique().tolist() for name, value in weights(module).items()}
    return [moved]


@pytest.mark.parametrize("overlap", [False, True])
def test_unused_parameters_neither_hang_nor_poison(ranks: RankPool, overlap: bool) -> None:
    """A layer that one rank, or every rank, leaves out counts as zeros; nothing of the step before remains."""
    for [moved] in ranks.run(2, _unused, overlap):
        assert moved["used.bias"] == [3.0]
        assert moved["sometimes.bias"] == [1.5]
        assert moved["never.bias"] == moved["never.weight"] == [0.0]


def _sixteen_bit_traffic() -> list[float]:
    module, twin = net(), net()
    narrow, wide = sharded(module, "sgd", reduce_dtype=FP16), sharded(twin, "sgd")
    for step in range(6):
        _step(narrow, module, step)
        _step(wide, twin, step)
    mine, theirs = flat(narrow.state_dict()), flat(wide.state_dict())
    return [(mine[key] - value).abs().max().item() for key, value in theirs.items() if key.startswith("main")]


@pytest.mark.slow
def test_sixteen_bit_traffic_is_close_to_fp32(ranks: RankPool) -> None:
    """reduce_dtype=fp16 halves what travels; weights stay within fp16's rounding of gradients."""
    for apart in ranks.run(3, _sixteen_bit_traffic):
        assert 0 < max(apart) < 1e-3


def _built() -> list[Any]:
    module = net()
    config = OptimizerConfig(fp16=True, lr=1e-2, use_distributed_optimizer=True, overlap_param_gather=True)
    optimizer = build_optimizer(config, module)
    assert isinstance(optimizer, DistributedOptimizer)
    _step(optimizer, module, 0)
    return [type(optimizer).__name__, optimizer.param_names()[:2], len(optimizer.param_groups)]


def test_build_optimizer_shards_when_asked(ranks: RankPool) -> None:
    """Megatron-Core's use_distributed_optimizer in the config is all it takes."""
    assert ranks.run(2, _built) == [["DistributedOptimizer", ["first.weight", "second.weight"], 2]] * 2


def _late() -> str:
    module = net()
    optimizer = sharded(module)
    _step(optimizer, module, 0)
    with pytest.raises(UsageError) as caught:
        module(batch(1, 0, FP16)).float().sum().backward()
    return str(caught.value)


def test_backward_without_zero_grad_is_refused(ranks: RankPool) -> None:
    """A gradient that comes after its bucket was reduced would be lost or counted twice."""
    for message in ranks.run(2, _late):
        assert "call zero_grad() before a new step" in message


def test_main_params_of_a_rank_are_pieces() -> None:
    """Alone, the pieces are whole, flattened parameters; the state is theirs."""
    module = net()
    optimizer = sharded(module)
    shapes = {name: tuple(main.shape) for name, main in optimizer.main_params()}
    assert shapes == {name: (param.numel(),) for name, param in module.named_parameters()}
    assert {tuple(state["exp_avg"].shape) for state in optimizer.state.values()} == set(shapes.values())
    packed: dict[str, Tensor] = optimizer.state_dict()["main_params"]
    assert {name: value.shape for name, value in packed.items()} == {n: p.shape for n, p in module.named_parameters()}
