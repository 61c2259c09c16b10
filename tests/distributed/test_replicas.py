"""Ranks that hold the same parameters must have the same gradients: told from the one collective of a step."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from megascale import (
    ChainedOptimizer,
    ConstantGradScaler,
    DistributedOptimizer,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    ParallelGroups,
    build_optimizer,
)
from megascale.errors import ArgumentError, UsageError
from megascale.grad_sync import GradSync
from megascale.kernels import REPLICA_TOLERANCE
from megascale.step.grad_stats import contrast_coefficients
from tests.meshes import group_among, mesh_of
from tests.pool import RankPool
from tests.training import Bag, Tiny, grad_of, model, same_bits, set_grads, snapshot


def _wrapped(module: nn.Module, **options: Any) -> MixedPrecisionOptimizer:
    inner = torch.optim.AdamW(module.named_parameters(), lr=1e-2)
    scaler = None if all(p.dtype != torch.float16 for p in module.parameters()) else ConstantGradScaler(8.0)
    return MixedPrecisionOptimizer(inner, None, scaler, **options)


def _backward(module: nn.Module, optimizer: MixedPrecisionOptimizer, seed: int) -> None:
    """Backward of this rank's own data."""
    generator = torch.Generator().manual_seed(seed * 100 + dist.get_rank())
    dtype = next(module.parameters()).dtype
    loss = module(torch.randn(8, 4, generator=generator).to(dtype)).float().square().mean()
    optimizer.scale_loss(loss).backward()


def _plain_model(dtype: torch.dtype, likeness: float) -> list[Any]:
    """``likeness``: how far ranks' gradients are apart, relatively."""
    module = model(dtype)
    optimizer = _wrapped(module)
    set_grads(module, 1)
    with torch.no_grad():
        for param in module.parameters():
            assert param.grad is not None
            param.grad *= 1 + likeness * (dist.get_rank() == dist.get_world_size() - 1)
    before = snapshot(optimizer, module)
    optimizer.get_loss_scale()
    with CommDebugMode() as mode, pytest.raises(UsageError) as caught:
        optimizer.step()
    return [str(caught.value), same_bits(before, snapshot(optimizer, module)), mode.get_total_counts()]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_plain_model_on_several_ranks_is_refused(ranks: RankPool, world_size: int, dtype: torch.dtype) -> None:
    """Invariant 12: without DDP or GradSync ranks would part silently. An error on every rank at the first step, before
    anything is written. The collective of every step finds it; a gather of objects, of two, names the parameters.
    """
    for message, unchanged, collectives in ranks.run(world_size, _plain_model, dtype, 0.05):
        assert "ranks that hold the same parameters have different gradients: nobody has reduced them" in message
        assert "replicas_may_differ=True" in message
        assert "(those of 'first." in message
        assert unchanged
        assert collectives == 3


def _built(options: dict[str, Any]) -> str:
    module = model(torch.float32)
    optimizer = build_optimizer(OptimizerConfig(lr=0.1), module, **options)
    set_grads(module, dist.get_rank())
    try:
        return f"success {bool(optimizer.step().success)}"
    except UsageError as error:
        return str(error)


def test_a_built_optimizer_has_ranks_that_differ_only_if_told(ranks: RankPool) -> None:
    """``build_optimizer`` hands ``replicas_may_differ`` on; it is False."""
    assert all("have different gradients" in found for found in ranks.run(2, _built, {}))
    assert ranks.run(2, _built, {"replicas_may_differ": True}) == ["success True"] * 2


def _known_one_step_late() -> list[Any]:
    module = model()
    optimizer = _wrapped(module)
    optimizer._recipe.errors.on_host = False  # as on an accelerator
    before = snapshot(optimizer, module)
    set_grads(module, dist.get_rank())
    optimizer.get_loss_scale()
    skipped = not bool(optimizer.step().success)
    with pytest.raises(UsageError) as caught:
        optimizer.step()
    unchanged = same_bits(before, snapshot(optimizer, module))
    landed = []
    for step in range(3):  # mended
        set_grads(module, step)
        optimizer.get_loss_scale()
        landed.append(bool(optimizer.step().success))
    return [skipped, str(caught.value), unchanged, landed]


def test_difference_known_one_step_late_has_written_nothing(ranks: RankPool) -> None:
    """Where the host sees statistics one step late the device has skipped the step before: no rank parts. Once it is
    raised and mended, it is not raised again.
    """
    for skipped, message, unchanged, landed in ranks.run(2, _known_one_step_late):
        assert skipped
        assert "have different gradients" in message
        assert unchanged
        assert landed == [True] * 3


def _reduced_within_pairs() -> str:
    module = model(torch.float32)
    ddp = DistributedDataParallel(module, process_group=group_among([(0, 1), (2, 3)]))
    optimizer = _wrapped(module)
    _backward(ddp, optimizer, 0)
    with pytest.raises(UsageError) as caught:
        optimizer.step()
    return str(caught.value)


def test_gradients_reduced_among_some_ranks_only_are_found(ranks: RankPool) -> None:
    """DDP over the ranks of a node, an optimizer over all: pairs agree in themselves and not with one another."""
    assert all("have different gradients" in message for message in ranks.run(4, _reduced_within_pairs))


def _last_backward_without_sync() -> list[Any]:
    module = model(torch.float32)
    ddp = DistributedDataParallel(module)
    optimizer = _wrapped(module)
    _backward(ddp, optimizer, 0)
    landed = bool(optimizer.step().success)
    optimizer.zero_grad()
    with ddp.no_sync():
        _backward(ddp, optimizer, 1)
    with pytest.raises(UsageError) as caught:
        optimizer.step()
    return [landed, str(caught.value)]


def test_step_in_no_sync_is_found(ranks: RankPool) -> None:
    """A step taken where DDP only accumulates."""
    for landed, message in ranks.run(2, _last_backward_without_sync):
        assert landed
        assert "let the last backward of a step sync" in message


def _not_judged() -> list[Any]:
    results: list[Any] = []
    module = model()  # allowed
    optimizer = _wrapped(module, replicas_may_differ=True)
    _backward(module, optimizer, 0)
    results.append(bool(optimizer.step().success))
    alone = model()  # a model of each rank's own
    optimizer = _wrapped(alone, groups=ParallelGroups())
    _backward(alone, optimizer, 0)
    results.append(bool(optimizer.step().success))
    broken = model()  # an overflow says nothing of the ranks' likeness: the step is skipped
    optimizer = _wrapped(broken)
    set_grads(broken, 1)
    if dist.get_rank() == 1:
        assert broken.head.weight.grad is not None
        broken.head.weight.grad[0, 0] = math.inf
    optimizer.get_loss_scale()
    results.append(not bool(optimizer.step().success))
    return results


def test_what_is_not_judged(ranks: RankPool) -> None:
    """An argument allows differences, groups of this rank alone have no replicas, overflows are skipped as ever."""
    assert ranks.run(2, _not_judged) == [[True, True, True]] * 2


def _synced(kind: str, dtype: torch.dtype) -> list[bool]:
    module: Any = model(dtype)
    trained, options = module, {}
    if kind == "ddp":
        trained = DistributedDataParallel(module, find_unused_parameters=True)
    elif kind == "grad_sync":
        options["grad_sync"] = GradSync(module.named_parameters())
    elif kind == "fsdp2":
        fully_shard(module)
    elif kind == "hsdp":
        fully_shard(module, mesh=mesh_of((2, 2), ("replicate", "shard")))
    optimizer = _wrapped(module, **options)
    landed = []
    for step in range(4):
        optimizer.zero_grad()
        _backward(trained, optimizer, step)
        landed.append(bool(optimizer.step().success))
    return landed


@pytest.mark.default("dtype1-grad_sync", "dtype0-hsdp")
@pytest.mark.parametrize("kind", ["ddp", "grad_sync", "fsdp2", "hsdp"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reduced_gradients_raise_no_alarm(ranks: RankPool, kind: str, dtype: torch.dtype) -> None:
    """Whoever reduces the gradients, replicas pass."""
    assert ranks.run(4, _synced, kind, dtype) == [[True] * 4] * 4


def _begun_apart(seeds: list[int], sharded: bool, option: str | None = None) -> str:
    """Return the error, or a digest of the weights after construction. ``option``: is True."""
    options: dict[str, Any] = {option: True} if option else {}
    module = model(torch.float16, seeds[dist.get_rank()])
    inner, scaler = torch.optim.AdamW(module.named_parameters(), lr=1e-2), ConstantGradScaler(8.0)
    try:
        if sharded:
            DistributedOptimizer(inner, None, scaler, modules=module, **options)
        else:
            sync = GradSync(module.named_parameters())
            MixedPrecisionOptimizer(inner, None, scaler, grad_sync=sync, **options)
    except ArgumentError as error:
        return str(error)
    return str(sum(param.double().abs().sum().item() for param in module.parameters()))


@pytest.mark.parametrize(("sharded", "option"), [(False, "replicas_may_differ"), (True, "broadcast_params")])
@pytest.mark.parametrize("seeds", [[0, 1], [5, 5, 5, 6]])
def test_ranks_that_begin_with_different_weights_are_found(
    ranks: RankPool, seeds: list[int], sharded: bool, option: str
) -> None:
    """Their gradients are reduced, and alike, so that no later check would see it."""
    told = ranks.run(len(seeds), _begun_apart, seeds, sharded)
    assert len(set(told)) == 1
    assert told[0].startswith("parameters differ between data-parallel ranks: ")
    assert f"{option}=True" in told[0]
    assert next(iter(dict(model().named_parameters()))) in told[0]
    alike = ranks.run(len(seeds), _begun_apart, [seeds[0]] * len(seeds), sharded)
    assert len(set(alike)) == 1
    begun = ranks.run(len(seeds), _begun_apart, seeds, sharded, option)
    assert begun[0] == alike[0]
    assert (set(begun) == set(alike)) == sharded  # broadcast, or left as they were


def _added_in_any_order(apart: float) -> tuple[float, bool]:
    """Return the sum of this rank's gradients, and whether the step landed.

    They are sums of the same 256 parts, added in fp32 in an order of each rank's own, as atomics of a backward add
    them. ``apart``: how far the last rank's are off, relatively.
    """
    module, rank = model(torch.float32), dist.get_rank()
    optimizer = _wrapped(module)
    for param in module.parameters():
        parts = torch.randn(256, *param.shape, generator=torch.Generator().manual_seed(0))
        grad = torch.zeros(param.shape)
        for index in torch.randperm(256, generator=torch.Generator().manual_seed(rank)).tolist():
            grad += parts[index]
        param.grad = grad * (1 + apart * rank)
    added = torch.cat([grad_of(param).flatten() for param in module.parameters()]).double().sum().item()
    try:
        return added, bool(optimizer.step().success)
    except UsageError:
        return added, False


def test_noise_of_a_backward_that_adds_in_any_order_is_no_difference(ranks: RankPool) -> None:
    """Copies whose gradients each rank computes by itself: REPLICA_TOLERANCE is above that noise, and below 0.1 %."""
    for apart, landed in ((0.0, True), (1e-3, False)):
        [first, second] = ranks.run(2, _added_in_any_order, apart)
        assert first[0] != second[0]
        assert first[1] == second[1] == landed


def _added_apart(seeds: list[int]) -> tuple[str, int, bool]:
    module = model(torch.float16)
    sync = GradSync(module.named_parameters())
    inner = torch.optim.AdamW(module.named_parameters(), lr=1e-2)
    optimizer = MixedPrecisionOptimizer(inner, None, ConstantGradScaler(8.0), grad_sync=sync)
    torch.manual_seed(seeds[dist.get_rank()])
    later = torch.nn.Linear(4, 4).half()
    named = [(f"later.{name}", param) for name, param in later.named_parameters()]
    sync.add(named)
    told = ""
    try:
        optimizer.add_param_group({"params": named})
    except ArgumentError as error:
        told = str(error)
    _backward(module, optimizer, 0)
    return told, len(optimizer.param_groups), bool(optimizer.step().success)


def test_parameters_that_are_added_apart_are_found(ranks: RankPool) -> None:
    """A group whose parameters differ between ranks is not added, and training goes on without it."""
    for told, num_groups, success in ranks.run(2, _added_apart, [0, 1]):
        assert told.startswith("parameters differ between data-parallel ranks: 'later.weight', 'later.bias'")
        assert (num_groups, success) == (1, True)
    assert ranks.run(2, _added_apart, [3, 3]) == [("", 2, True)] * 2


def _frozen_apart(apart: bool) -> str:
    module = model(torch.float16)
    module.first.weight.requires_grad_(False).fill_(1.0 + apart * dist.get_rank())
    sync = GradSync((name, param) for name, param in module.named_parameters() if param.requires_grad)
    sparse = nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False)  # has no bits to compare, and is left out
    inner = torch.optim.AdamW([*module.named_parameters(), ("sparse", sparse)], lr=1e-2)
    try:
        MixedPrecisionOptimizer(inner, None, ConstantGradScaler(8.0), grad_sync=sync)
    except ArgumentError as error:
        return str(error)
    return ""


def test_frozen_parameters_that_differ_are_found(ranks: RankPool) -> None:
    """Unfrozen later, they would differ for good: ranks would add the same updates to other values."""
    for told in ranks.run(2, _frozen_apart, True):
        assert told.startswith("parameters differ between data-parallel ranks: 'first.weight'")
    assert ranks.run(2, _frozen_apart, False) == ["", ""]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(self.norm(x)).relu())
        return out


def _tensor_and_data_parallel(reduced: bool) -> str:
    torch.manual_seed(0)
    module = _Block()
    mesh = mesh_of((2, 2), ("dp", "tp"))
    parallelize_module(module, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    inner = torch.optim.AdamW(module.named_parameters(), lr=1e-2)
    optimizer = MixedPrecisionOptimizer(inner, OptimizerConfig(), None, groups=mesh)
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    module(torch.randn(8, 4, generator=generator)).square().mean().backward()
    if reduced:
        for param in module.parameters():
            grad: Any = param.grad
            dist.all_reduce(grad.to_local() if hasattr(grad, "to_local") else grad, group=mesh.get_group("dp"))
    try:
        return str(bool(optimizer.step().success))
    except UsageError as error:
        return str(error)


def test_tensor_parallel_replicas(ranks: RankPool) -> None:
    """DTensors sharded over two ranks, repeated by data parallelism: compared with their own replicas only."""
    assert ranks.run(4, _tensor_and_data_parallel, True) == ["True"] * 4
    assert all("have different gradients" in message for message in ranks.run(4, _tensor_and_data_parallel, False))


def _replicated_dtensor(alike: bool) -> str:
    mesh = mesh_of((2, 2), ("dp_replicate", "dp_shard"))
    whole = torch.arange(8, dtype=torch.float32)
    module = Bag([distribute_tensor(whole, mesh, [Replicate(), Shard(0)])])
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), groups=mesh)
    copy, shard = mesh["dp_replicate"].get_local_rank(), mesh["dp_shard"].get_local_rank()
    part = torch.randn(4, generator=torch.Generator().manual_seed(shard if alike else 2 * copy + shard))
    module[0].grad = DTensor.from_local(part, mesh, [Replicate(), Shard(0)], run_check=False)
    try:
        return str(bool(optimizer.step().success))
    except UsageError as error:
        return str(error)


def test_copies_of_a_dtensor_are_compared(ranks: RankPool) -> None:
    """Shards differ from one another, as they should; the two copies of each must not."""
    assert ranks.run(4, _replicated_dtensor, True) == ["True"] * 4
    assert all("have different gradients" in message for message in ranks.run(4, _replicated_dtensor, False))


def _megatron_marks() -> tuple[bool, float, float]:
    """Return whether the step landed, its norm, and the norm of what all ranks hold."""
    torch.manual_seed(0)
    module = Tiny()
    mesh = mesh_of((2, 2), ("dp", "tp"))
    data, tensor = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    groups = ParallelGroups(
        data_parallel=mesh.get_group("dp"),
        tensor_parallel=mesh.get_group("tp"),
        grad_stats=dist.group.WORLD,
        expert_data_parallel=None,
        expert_tensor_parallel=None,
    )
    module.first.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    module.second.weight.shared = True  # type: ignore[attr-defined]
    module.head.weight.allreduce = False  # type: ignore[attr-defined]
    inner = torch.optim.AdamW(module.named_parameters(), lr=1e-2)
    optimizer = MixedPrecisionOptimizer(inner, OptimizerConfig(), None, groups=groups)
    set_grads(module, 0)
    own = torch.Generator().manual_seed(10 * data + tensor)
    split = torch.Generator().manual_seed(tensor)
    module.first.weight.grad = torch.randn(6, 4, generator=split)  # another part on each tensor-parallel rank
    module.second.weight.grad = torch.randn(4, 6, generator=own)  # a copy that counts on another rank
    module.head.weight.grad = torch.randn(1, 4, generator=own)  # an expert of each rank's own
    squares = {name: grad_of(param).double().square().sum().item() for name, param in module.named_parameters()}
    held: list[dict[str, float]] = [{}] * 4
    dist.all_gather_object(held, squares)
    experts = sum(one.pop("head.weight") for one in held)
    other_part = held[1]["first.weight"]
    del held[0]["second.weight"]
    result = optimizer.step()
    return bool(result.success), result.grad_norm.item(), math.sqrt(sum(held[0].values()) + other_part + experts)


def test_megatrons_marks_are_known(ranks: RankPool) -> None:
    """Parameters that Megatron marks as split, as shared or as an expert's are alike only where they must be. In the
    norm each element counts once, and a shared copy not at all.
    """
    for landed, norm, expected in ranks.run(4, _megatron_marks):
        assert landed
        assert norm == pytest.approx(expected, rel=1e-6)


def _chained() -> str:
    module = model()
    scaler = ConstantGradScaler(8.0)
    parts = [module.first, nn.ModuleList([module.norm, module.second, module.head])]
    members = [
        MixedPrecisionOptimizer(
            torch.optim.AdamW([(f"{index}.{name}", param) for name, param in part.named_parameters()]), None, scaler
        )
        for index, part in enumerate(parts)
    ]
    optimizer = ChainedOptimizer(members)
    set_grads(module, dist.get_rank())
    optimizer.get_loss_scale()
    with pytest.raises(UsageError) as caught:
        optimizer.step()
    return str(caught.value)


def test_chain_is_judged_as_one(ranks: RankPool) -> None:
    """A chain of optimizers over a plain model."""
    assert all("have different gradients" in message for message in ranks.run(2, _chained))


def test_coefficients_tell_every_part_of_the_ranks_apart() -> None:
    """They add up to 0 over all ranks, and over no half, pair or single rank, at any number of ranks that is used."""
    for num_ranks in [2, 3, 4, 5, 8, 16, 64, 72, 512]:
        drawn = contrast_coefficients(num_ranks)
        assert abs(math.fsum(drawn)) < 1e-12
        assert max(map(abs, drawn)) == 1.0
        parts = [drawn[start : start + size] for size in (1, num_ranks // 2) for start in range(0, num_ranks, size)]
        parts += [drawn[start::2] for start in range(2)]
        assert all(abs(math.fsum(part)) > REPLICA_TOLERANCE for part in parts if len(part) < num_ranks)
    assert contrast_coefficients(1) == (0.0,)
