"""Gradient accumulation in fp32 and bucketed reduction on plain modules, against DDP and against fp64."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from megascale.errors import ArgumentError, UsageError
from megascale.grad_sync import reduction
from megascale.grad_sync.sharded_sync import ShardedGradSync
from megascale.grad_sync.sync import GradSync
from megascale.main_params.replica_check import require_same
from megascale.parallel import ParallelGroups
from megascale.utils.collectives import exchange_start
from tests.pool import RankPool
from tests.training import Tiny, bits_equal, grad_of, model

SMALL_BUCKET = 20
KINDS = {False: GradSync, True: ShardedGradSync}


def _data(step: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(97 * step + rank)).to(dtype)


def _main_grads(sync: GradSync, module: nn.Module) -> list[Tensor]:
    return [main for param in module.parameters() if (main := sync.main_grad(param)) is not None]


def _against_ddp(bucket_numel: int, overlap: bool) -> list[Any]:
    module, twin = model(torch.float32), model(torch.float32)
    sync = GradSync(module.named_parameters(), bucket_numel=bucket_numel, overlap=overlap)
    ddp = DistributedDataParallel(twin)
    equal = []
    for step in range(3):
        sync.zero_()
        ddp.zero_grad()
        data = _data(step, dist.get_rank())
        with CommDebugMode() as in_backward:
            module(data).square().mean().backward()
        with CommDebugMode() as in_finish:
            sync.finish()
            sync.finish()
        ddp(data).square().mean().backward()
        mains = _main_grads(sync, module)
        equal.append(all(bits_equal(m, grad_of(p)) for m, p in zip(mains, twin.parameters(), strict=True)))
        assert all(p.grad is None for p in module.parameters())
    return [all(equal), in_backward.get_total_counts(), in_finish.get_total_counts()]


@pytest.mark.parametrize(
    ("bucket_numel", "buckets", "overlap"),
    [
        (SMALL_BUCKET, 5, True),
        (10_000, 1, False),
        pytest.param(SMALL_BUCKET, 5, False, marks=pytest.mark.slow),
        pytest.param(10_000, 1, True, marks=pytest.mark.slow),
    ],
)
def test_equals_ddp_bitwise(ranks: RankPool, bucket_numel: int, buckets: int, overlap: bool) -> None:
    """On 2 ranks the reduced gradients are DDP's bits. One collective a bucket; with overlap all start in backward."""
    expected = [True, buckets, 0] if overlap else [True, 0, buckets]
    assert ranks.run(2, _against_ddp, bucket_numel, overlap) == [expected] * 2


def _micro_batches(dtype: torch.dtype) -> list[float]:
    module = model(dtype)
    sync = GradSync(module.named_parameters(), bucket_numel=SMALL_BUCKET)
    exact = [torch.zeros(p.shape, dtype=torch.float64) for p in module.parameters()]
    for micro in range(64):
        loss = module(_data(micro, dist.get_rank(), dtype)).float().square().mean()
        for total, grad in zip(exact, torch.autograd.grad(loss, list(module.parameters())), strict=True):
            total += grad.double()
        loss = module(_data(micro, dist.get_rank(), dtype)).float().square().mean()
        if micro < 63:
            with sync.no_sync():
                loss.backward()
        else:
            loss.backward()
    sync.finish()
    for total in exact:
        dist.all_reduce(total)
        total /= dist.get_world_size()
    mains = _main_grads(sync, module)
    assert {main.dtype for main in mains} == {torch.float32}
    return [
        (main - total).abs().max().item() / total.abs().max().item() for main, total in zip(mains, exact, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_micro_batches_add_up_in_fp32(ranks: RankPool, dtype: torch.dtype) -> None:
    """64 micro-batches of 16-bit gradients under no_sync() equal their fp64 sum to fp32 accuracy; 16-bit sums would
    not.
    """
    for errors in ranks.run(2, _micro_batches, dtype):
        assert max(errors) < 1e-5


def _sixteen_bit_reduction(reduction: str, sharded: bool) -> list[float]:
    param = nn.Parameter(torch.zeros(3))
    sync = KINDS[sharded]([("w", param)], reduce_dtype=torch.float16, reduction=reduction)
    (param * 40000.0).sum().backward()
    sync.finish()
    kept = sync.buckets[0].reduction.kept
    return sorted(set(kept.tolist()))


@pytest.mark.parametrize("sharded", [False, True])
def test_sixteen_bit_reduction_divides_first(ranks: RankPool, sharded: bool) -> None:
    """40000 + 40000 overflows fp16: what travels is divided first, and a sum is multiplied back in fp32."""
    for kind, value in (("mean", 40000.0), ("sum", 80000.0)):
        first, second = ranks.run(2, _sixteen_bit_reduction, kind, sharded)
        # Padding stays zero, and is all that the second shard has.
        assert (first, second) == ([0.0, value], [0.0] if sharded else [0.0, value])


def _tokens(sharded: bool, divisor: float) -> list[list[float]]:
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))]
    named = [("a", params[0]), ("b", params[1])]
    sync = KINDS[sharded](named)
    seen = []
    for step in range(4):
        sync.zero_()
        if step == 1:
            sync.set_divisor(torch.tensor(divisor))
        if step == 2:
            sync.set_divisor(divisor)
        ((params[0] + params[1]) * (1.0 + dist.get_rank())).sum().backward()
        sync.finish()
        seen.append(sorted({value for b in sync.buckets for value in b.reduction.kept.tolist() if value}))
    return seen


@pytest.mark.parametrize("sharded", [False, True])
def test_divisor_of_the_caller(ranks: RankPool, sharded: bool) -> None:
    """set_divisor(tokens), number or device tensor, divides the sum over ranks, for one step."""
    assert ranks.run(2, _tokens, sharded, 6.0) == [[[1.5], [0.5], [0.5], [1.5]]] * 2


def _checkpointed(module: Tiny, data: Tensor, reentrant: bool) -> Tensor:
    hidden = data
    for _ in range(2):  # the same layers twice: their gradient comes in two parts
        inner = checkpoint(lambda x: module.norm(module.first(x)), hidden, use_reentrant=reentrant)
        hidden = checkpoint(module.second, inner, use_reentrant=reentrant)
    out: Tensor = module.head(hidden).square().mean()
    return out


def _activation_checkpointing() -> list[Any]:
    outcome: list[Any] = []
    for reentrant, overlap in ((False, True), (True, False), (True, True)):
        module, twin = model(torch.float32), model(torch.float32)
        sync = GradSync(module.named_parameters(), bucket_numel=1, overlap=overlap)
        data = [_data(0, rank).requires_grad_() for rank in range(2)]
        try:
            _checkpointed(module, data[dist.get_rank()], reentrant).backward()
        except UsageError as error:
            outcome.append(str(error))
            continue
        sync.finish()
        torch.stack([_checkpointed(twin, one, False) for one in data]).mean().backward()
        mains = _main_grads(sync, module)
        outcome.append(all(torch.allclose(m, grad_of(p)) for m, p in zip(mains, twin.parameters(), strict=True)))
    return outcome


def test_activation_checkpointing_and_shared_layers(ranks: RankPool) -> None:
    """Layers used twice under checkpointing are right; reentrant checkpointing needs overlap=False, and says so."""
    for plain, reentrant, refused in ranks.run(2, _activation_checkpointing):
        assert plain is True
        assert reentrant is True
        assert "came after its bucket's reduction had begun" in refused
        assert "overlap=False (DistributedOptimizer: overlap_grad_reduce=False) with reentrant" in refused


def _differing() -> str:
    module = model()
    groups = ParallelGroups.of(None)
    require_same(module.named_parameters(), groups, {})
    with torch.no_grad():
        if dist.get_rank() == 1:
            module.second.weight[1, 1] += 0.5
            module.norm.bias[[0, 1]] = torch.tensor([1.0, 2.0]).half()
        else:
            module.norm.bias[[0, 1]] = torch.tensor([2.0, 1.0]).half()
    with pytest.raises(ArgumentError) as caught:
        require_same(module.named_parameters(), groups, {})
    return str(caught.value)


def test_parameters_that_differ_between_ranks_are_named(ranks: RankPool) -> None:
    """One element, or two elements swapped: found by name, on every rank alike."""
    first, second = ranks.run(2, _differing)
    assert first == second
    assert first.startswith("parameters differ between data-parallel ranks: 'norm.bias', 'second.weight'; seed")


def _split(size: int) -> list[Tensor]:
    module = model(torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction, "MESSAGE", size)
        patch.setattr(reduction, "CHUNK", max(1, size // 2))
        sync = ShardedGradSync(module.named_parameters())
        module(_data(0, dist.get_rank())).square().mean().backward()
        sync.finish()
    kept = [bucket.reduction.kept for bucket in sync.buckets]
    # Two messages from each of two other ranks, in memory that serves all buckets.
    assert getattr(sync._thread._memory, "numel", int)() == 4 * min(size, max(map(len, kept)))
    return kept


def test_messages_of_any_size_make_the_same_sum(ranks: RankPool) -> None:
    """A bucket in one message, in many, or in pieces that do not divide it: the same bits."""
    whole = ranks.run(3, _split, 1 << 21)
    for size in (1, 7, 64, 100):
        for ours, theirs in zip(ranks.run(3, _split, size), whole, strict=True):
            assert all(bits_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _zeroed(started: int) -> Any:
    module = model(torch.float32)
    sync = GradSync(module.named_parameters(), bucket_numel=SMALL_BUCKET)
    with CommDebugMode() as of_nothing:
        sync.zero_()
    for bucket in sync.buckets[:started]:
        for param in bucket.params.values():
            param.sum().backward()
    with CommDebugMode() as of_the_rest:
        sync.zero_()
    module(_data(0, dist.get_rank())).square().mean().backward()
    sync.finish()
    twin = model(torch.float32)
    other = GradSync(twin.named_parameters(), bucket_numel=SMALL_BUCKET)
    twin(_data(0, dist.get_rank())).square().mean().backward()
    other.finish()
    same = all(map(bits_equal, _main_grads(sync, module), _main_grads(other, twin)))
    return same, of_nothing.get_total_counts(), of_the_rest.get_total_counts()


@pytest.mark.parametrize(("started", "rest"), [(0, 0), (1, 4), (2, 3)])
def test_zero_ends_reductions_under_way(ranks: RankPool, started: int, rest: int) -> None:
    """zero_() in the middle of a step ends what was started, on every rank alike, and starts nothing where nothing was:
    the next step's gradients are those of a sync that never stopped.
    """
    assert ranks.run(2, _zeroed, started) == [(True, 0, rest)] * 2


def _broken_message(victim: int) -> str:
    module = model(torch.float32)
    sync = ShardedGradSync(module.named_parameters(), bucket_numel=10_000)
    assert len(sync.buckets) == 1

    class Broken:
        def __init__(self, pending: Any) -> None:
            self.pending = pending

        def wait(self) -> None:
            self.pending.wait()
            raise ConnectionError("the wire was cut")

    def start(*arguments: Any) -> Any:
        pending = exchange_start(*arguments)
        return Broken(pending) if dist.get_rank() == victim else pending

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reduction, "exchange_start", start)
        module(_data(0, dist.get_rank())).square().mean().backward()
        try:
            sync.finish()
        except ConnectionError as error:
            return str(error)
    return "finished"


@pytest.mark.parametrize("victim", [0, 1])
def test_lost_message_is_an_error_where_it_was_lost(ranks: RankPool, victim: int) -> None:
    """A message that fails on its way is raised by finish(); the other rank still gets all that it waits for."""
    expected = ["finished"] * 2
    expected[victim] = "the wire was cut"
    assert ranks.run(2, _broken_message, victim) == expected


def _failed_on_one_rank(is_sharded: bool, fails_at: str) -> list[bool]:
    module = model(torch.float32)
    sync = KINDS[is_sharded](module.named_parameters(), bucket_numel=SMALL_BUCKET)
    rank = dist.get_rank()
    is_same = []
    for step in range(3):
        params = list(module.parameters())
        handle = None
        if step == 1 and rank == 1 and fails_at == "backward":
            handle = params[0].register_hook(_fail)
        try:
            if step == 1 and rank == 1 and fails_at == "forward":
                _fail()
            module(_data(step, rank)).square().mean().backward()
        except ValueError:
            assert step == 1
        if handle is not None:
            handle.remove()
        sync.finish()
        local = [grad.clone() for param in params if (grad := sync.local_grad(param)) is not None]
        sync.zero_()
        for param in params:
            param.grad = None
        if step != 1:
            losses = [module(_data(step, one)).square().mean() for one in range(dist.get_world_size())]
            wanted = torch.autograd.grad(torch.stack(losses).mean(), params)
            squares = torch.stack([grad.square().sum() for grad in local]).sum()
            dist.all_reduce(squares)
            copies = 1 if is_sharded else dist.get_world_size()
            is_same.append(torch.allclose(squares / copies, torch.stack([g.square().sum() for g in wanted]).sum()))
    return is_same


def _fail(*_: Any) -> None:
    raise ValueError("a bad batch")


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("fails_at", ["forward", "backward"])
def test_training_goes_on_after_one_ranks_backward_has_failed(ranks: RankPool, is_sharded: bool, fails_at: str) -> None:
    """finish() takes part in the reductions that other ranks have begun; zero_() drops the step on all of them."""
    for is_same in ranks.run(2, _failed_on_one_rank, is_sharded, fails_at):
        assert all(is_same)
