"""DistributedOptimizer against MixedPrecisionOptimizer under DDP: same bits, same skips, whatever the shards."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megascale import DistributedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from tests.counting import OperatorCounter
from tests.pool import RankPool
from tests.training import Sign, bits_equal


class Net(nn.Module):
    """Ten tensors of 1 to 407 elements: smaller than a shard of 64, and cut by several."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 37)
        self.norm = nn.LayerNorm(37)
        self.second = nn.Linear(37, 11)
        self.third = nn.Linear(11, 11)
        self.head = nn.Linear(11, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return shape [..., 1]."""
        out: Tensor = self.head(self.third(self.second(self.norm(self.first(x))).relu()))
        return out


def net(dtype: torch.dtype = torch.float16, seed: int = 0) -> Net:
    """Return a Net in ``dtype``."""
    torch.manual_seed(seed)
    return Net().to(dtype)


def param_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Return two param groups: weights, and the rest without weight decay and with another lr."""
    named = list(module.named_parameters())
    return [
        {"params": [(n, p) for n, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [(n, p) for n, p in named if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


INNER: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(param_groups(m), lr=1e-2),
    "amsgrad": lambda m: torch.optim.Adam(param_groups(m), lr=1e-2, amsgrad=True),
    "sgd": lambda m: torch.optim.SGD(param_groups(m), lr=1e-2, momentum=0.9, nesterov=True),
    "dampened": lambda m: torch.optim.SGD(param_groups(m), lr=1e-2, momentum=0.9, dampening=0.3),
    "sign": lambda m: Sign(m.named_parameters()),
    "rmsprop": lambda m: torch.optim.RMSprop(param_groups(m), lr=1e-3, momentum=0.5),
}


def scaler(dtype: torch.dtype) -> DynamicGradScaler | None:
    """Return a scaler for fp16, window 4, hysteresis 1."""
    return DynamicGradScaler(2.0**8, 1.0, 2.0, 0.5, 4, 1) if dtype == torch.float16 else None


def config_of(dtype: torch.dtype, clip_grad: float = 0.0) -> OptimizerConfig:
    """Return a config that counts zeros."""
    fp16, bf16 = dtype == torch.float16, dtype == torch.bfloat16
    return OptimizerConfig(fp16=fp16, bf16=bf16, clip_grad=clip_grad, log_num_zeros_in_grad=True)


def sharded(module: nn.Module, inner: str = "adamw", clip_grad: float = 0.0, **options: Any) -> DistributedOptimizer:
    """Return a DistributedOptimizer of ``module`` with small buckets."""
    dtype = next(module.parameters()).dtype
    return DistributedOptimizer(
        INNER[inner](module),
        config_of(dtype, clip_grad),
        scaler(dtype),
        modules=module,
        **({"bucket_numel": 300} | options),
        grads_are_scaled=True,
    )


def batch(step: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Return this rank's inputs of a step."""
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(97 * step + rank)).to(dtype)


def flat(packed: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a state dict by name."""
    found = {f"main.{name}": value for name, value in packed["main_params"].items()}
    for name, state in packed["optimizer"]["state"].items():
        found |= {f"{name}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    return found


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of a module's parameters."""
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether names and bits agree."""
    return left.keys() == right.keys() and all(bits_equal(left[key], right[key]) for key in left)


def _train(
    optimizer: MixedPrecisionOptimizer, network: nn.Module, dtype: torch.dtype, steps: int, bad: dict[int, int]
) -> list[Any]:
    """Train; ``bad``: step to the rank that sees an inf. Returns success, scale and zeros of each step."""
    log = []
    for step in range(steps):
        factor = math.inf if bad.get(step) == dist.get_rank() else 1.0
        optimizer.zero_grad()
        loss = network(batch(step, dist.get_rank(), dtype)).float().square().mean()
        optimizer.scale_loss(loss * factor).backward()
        result = optimizer.step()
        log.append((bool(result.success), optimizer.get_loss_scale().item(), result.num_zeros_in_grad.item()))
    return log


def _against_ddp(inner: str, dtype: torch.dtype, overlap: bool) -> list[Any]:
    module, twin = net(dtype), net(dtype)
    world = dist.get_world_size()
    # DDP reduces gradients in their own dtype.
    options: dict[str, Any] = {"grad_dtype": dtype, "overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    ours = sharded(module, inner, elementwise=inner == "sign", **options)
    theirs = MixedPrecisionOptimizer(INNER[inner](twin), config_of(dtype), scaler(dtype), grads_are_scaled=True)
    bad = {3: 0, 8: world - 1}
    logs = [
        _train(ours, module, dtype, 12, bad),
        _train(theirs, DistributedDataParallel(twin), dtype, 12, bad),
    ]
    ours.finish_param_gather()
    return [logs, flat(ours.state_dict()), flat(theirs.state_dict()), weights(module), weights(twin)]


@pytest.mark.default("2-adamw-float16-True", "2-dampened-float16-False")
@pytest.mark.parametrize(
    ("world", "inner", "dtype", "overlap"),
    [
        (1, "adamw", "float16", True),
        (2, "adamw", "float16", True),
        (2, "adamw", "bfloat16", False),
        (2, "sgd", "bfloat16", True),
        (2, "sgd", "float32", False),
        (2, "amsgrad", "float32", True),
        (2, "dampened", "float16", False),
        (2, "rmsprop", "float16", True),
        (2, "sign", "float16", False),
    ],
)
def test_bits_of_the_replicated_optimizer(ranks: RankPool, world: int, inner: str, dtype: str, overlap: bool) -> None:
    """Invariant 3: at 1 and 2 ranks the order of reduction is DDP's; params, state, skips, scales: the same bits. Also
    where options have more state, of an optimizer that runs its own step(), and of a user's own, elementwise=True.
    """
    results = ranks.run(world, _against_ddp, inner, getattr(torch, dtype), overlap)
    for (ours_log, ddp_log), ours, theirs, module, twin in results:
        assert ours_log == ddp_log
        assert [step for step, row in enumerate(ours_log) if not row[0]] == [3, 8]
        assert same(ours, theirs)
        assert same(module, twin)


def _counted(tensors: int) -> list[Any]:
    module = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(tensors)).half()
    optimizer = DistributedOptimizer(
        torch.optim.AdamW(module.named_parameters()),
        config_of(torch.float16, 1.0),
        scaler(torch.float16),
        modules=module,
        bucket_numel=64 * tensors // 4,
        grads_are_scaled=True,
    )
    counted = []
    for take_step in (optimizer.step, optimizer.step, optimizer._recipe.rehearse):
        optimizer.zero_grad()
        loss = torch.stack([layer.weight.float().sum() for layer in module]).sum()  # type: ignore[operator]
        with _Messages() as messages, OperatorCounter() as step:
            optimizer.scale_loss(loss).backward()
            take_step()
        others = {str(op): n for op, n in step.counts.items() if op.namespace == "c10d" and "allreduce" in str(op)}
        gather = optimizer._recipe.members[0].main_params._gather  # type: ignore[attr-defined]
        under_way = sum(bucket._arrival is not None for bucket in gather.buckets)
        counted.append([messages.sent, messages.received, others, step.host_reads, under_way])
    return counted[1:]


class _Messages:
    """Counts messages from rank to rank, whatever thread sends them."""

    sent = received = 0

    def __enter__(self) -> "_Messages":
        self._real = dist.isend, dist.irecv

        def isend(*args: Any, **kwargs: Any) -> Any:
            self.sent += 1
            return self._real[0](*args, **kwargs)

        def irecv(*args: Any, **kwargs: Any) -> Any:
            self.received += 1
            return self._real[1](*args, **kwargs)

        dist.isend, dist.irecv = isend, irecv
        return self

    def __exit__(self, *_: Any) -> None:
        dist.isend, dist.irecv = self._real


@pytest.mark.parametrize("tensors", [8, 200])
def test_collectives_do_not_grow_with_tensors(ranks: RankPool, tensors: int) -> None:
    """Invariants 5 and 8: a reduce-scatter and a gather for each of 4 buckets, one all-reduce, no host read.

    On gloo a reduce-scatter or a gather is one message to, and one from, each other rank. A graph's rehearsal sends
    what a step sends, and ends what it started: a graph can neither make a communicator nor wait for earlier work.
    """
    for step_and_rehearsal in ranks.run(2, _counted, tensors):
        for sent, received, others, host_reads, under_way in step_and_rehearsal:
            assert under_way == 0
            assert (sent, received) == (8, 8)
            assert others == {"c10d.allreduce_.default": 1}
            assert host_reads == 0


def _bytes() -> dict[str, float]:
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(40))).half()
    optimizer = DistributedOptimizer(
        torch.optim.AdamW(module.named_parameters()),
        OptimizerConfig(fp16=True),
        scaler(torch.float16),
        modules=module,
        bucket_numel=20_000,
        grads_are_scaled=True,
    )
    numel = sum(param.numel() for param in module.parameters())
    module(torch.randn(2, 64).half()).float().sum().backward()
    optimizer.step()
    storages: dict[int, int] = {}

    def note(*tensors: Tensor | None) -> int:
        before = sum(storages.values())
        for tensor in tensors:
            if tensor is not None and tensor.dim():
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return sum(storages.values()) - before

    return {
        "model": note(*module.parameters()) / numel,
        "grads": note(*(param.grad for param in module.parameters())) / numel,
        "main_grads": note(*(bucket.memory.flat for bucket in optimizer.grad_sync.buckets)) / numel,
        "main_params": note(*(main for _, main in optimizer.main_params())) / numel,
        "state": note(*(value for state in optimizer._inner.state.values() for value in state.values())) / numel,
    }


@pytest.mark.parametrize("world", [1, 3])
def test_bytes_of_state(ranks: RankPool, world: int) -> None:
    """Per parameter and rank: 2 of the model, 4 of the main grad, 12/d of main param and moments; padding aside."""
    totals = []
    for found in ranks.run(world, _bytes):
        assert found["grads"] == 0
        assert found["model"] == pytest.approx(2, rel=0.02)
        assert found["main_grads"] == pytest.approx(4, rel=0.02)
        totals.append(found["main_params"] + found["state"])
    assert sum(totals) == pytest.approx(12, rel=0.001)
    assert max(totals) <= 12 / world * 1.05


class _Layer(nn.Module):
    """One block of a 70B decoder."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"q": 8192, "k": 1024, "v": 1024, "o": 8192, "gate": 28_672, "up": 28_672}
        self.linears = nn.ModuleDict({name: nn.Linear(8192, size, bias=False) for name, size in shapes.items()})
        self.down = nn.Linear(28_672, 8192, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(8192), nn.RMSNorm(8192)])


def _seventy_billion() -> list[Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=511, world_size=1024)
    with torch.device("meta"):
        layers = [_Layer() for _ in range(80)]
        embedding, head = nn.Embedding(128_256, 8192), nn.Linear(8192, 128_256, bias=False)
        module = nn.Sequential(embedding, *layers, nn.RMSNorm(8192), head).bfloat16()
    inner = torch.optim.AdamW(module.named_parameters(), fused=False)
    with OperatorCounter() as operators:
        optimizer = DistributedOptimizer(inner, OptimizerConfig(bf16=True), modules=module)
    held = [main for _, main in optimizer.main_params()]
    real = [tensor for state in optimizer._inner.state.values() for tensor in state.values() if not tensor.is_meta]
    total = sum(param.numel() for param in module.parameters())
    return [total, sum(main.numel() for main in held), all(m.is_meta for m in held), len(real), operators.host_reads]


@pytest.mark.slow
def test_seventy_billion_parameters_build_without_memory(ranks: RankPool) -> None:
    """Rank 511 of 1,024 with a 70B model on the meta device: everything is built, nothing is allocated.

    What is read is how long each rank's answer is, once, whether it could build the same: two numbers a rank.
    """
    with ranks.spawn(1, _seventy_billion, process_group=False) as fresh:
        [[total, held, all_meta, real, host_reads]] = fresh.results()
    assert total > 70e9
    assert held == pytest.approx(total / 1024, rel=1e-3)
    assert (all_meta, real, host_reads) == (True, 0, 2 * 1024)
