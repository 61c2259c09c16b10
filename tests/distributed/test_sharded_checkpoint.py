"""Checkpoints of DistributedOptimizer: every rank writes its own shard, and any number of ranks reads them back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megascale import ChainedOptimizer, DistributedOptimizer, MixedPrecisionOptimizer, ParallelGroups
from megascale.checkpoint import Checkpointer
from megascale.checkpoint.files import PlannedRead
from megascale.errors import CheckpointError
from tests.checkpoint_cases import differences, message_of, state_of
from tests.distributed.test_distributed_optimizer import INNER, batch, config_of, scaler
from tests.meshes import hybrid_groups
from tests.pool import RankPool

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


class Model(nn.Module):
    """Tensors of 0 to 407 elements and 0 to 3 dimensions, a buffer, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 37)
        self.norm = nn.BatchNorm1d(37)
        self.cube = nn.Parameter(torch.randn(3, 37, 5))
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return shape [..., 1]."""
        hidden = self.norm(self.first(x)).relu() @ self.cube.sum(0)
        out: Tensor = self.head(self.frozen(hidden) * self.scale)
        return out + self.empty.sum()


def build(seed: int, dtype: torch.dtype = FP16, inner: str = "adamw") -> tuple[nn.Module, DistributedOptimizer]:
    """Return a Model with the same values on all ranks, and its DistributedOptimizer of small buckets."""
    torch.manual_seed(seed)
    model = Model().to(dtype)
    return model, DistributedOptimizer(
        INNER[inner](model), config_of(dtype), scaler(dtype), modules=model, bucket_numel=300
    )


def train(model: nn.Module, optimizer: MixedPrecisionOptimizer, first: int, last: int) -> None:
    """Steps ``first`` to ``last - 1``; step 2 overflows on the last rank."""
    dtype = next(model.parameters()).dtype
    for step in range(first, last):
        poisoned = step == 2 and dist.get_rank() == dist.get_world_size() - 1
        optimizer.zero_grad()
        loss = model(batch(step, dist.get_rank(), dtype)).float().square().mean()
        optimizer.scale_loss(loss * (torch.inf if poisoned else 1.0)).backward()
        optimizer.step()


def full(model: nn.Module, optimizer: MixedPrecisionOptimizer) -> dict[str, Any]:
    """Return copies of everything, whole. Buffers are the first rank's, as what is not synchronized may differ."""
    state = state_of(model, optimizer)
    for name, _ in model.named_buffers():
        dist.broadcast(state["model"][name], 0)
    return state


def save(directory: Path, dtype: torch.dtype, inner: str) -> dict[str, Any]:
    """Train a few steps, and save them."""
    model, optimizer = build(0, dtype, inner)
    train(model, optimizer, 0, 4)
    Checkpointer(directory).save(4, model, optimizer)
    return full(model, optimizer)


def _go_on(directory: Path, async_save: bool) -> dict[str, Any]:
    model, optimizer = build(0)
    with Checkpointer(directory, async_save=async_save) as checkpointer:
        train(model, optimizer, 0, 4)
        checkpointer.save(4, model, optimizer)
        train(model, optimizer, 4, 8)
    return full(model, optimizer)


def _resume(directory: Path) -> dict[str, Any]:
    model, optimizer = build(1)
    assert Checkpointer(directory).load(model, optimizer).step == 4
    train(model, optimizer, 4, 8)
    return full(model, optimizer)


@pytest.mark.default("1-False")
@pytest.mark.parametrize(("world_size", "async_save"), [(1, False), (2, True), (3, False)])
def test_resumed_training_is_bitwise_the_same(
    ranks: RankPool, tmp_path: Path, world_size: int, async_save: bool
) -> None:
    """Also where training has gone on while the checkpoint was written: live pieces were copied first."""
    went_on = ranks.run(world_size, _go_on, tmp_path, async_save)
    for before, after in zip(went_on, ranks.run(world_size, _resume, tmp_path), strict=True):
        assert differences(before, after) == []


def _own_file(directory: Path) -> tuple[int, int]:
    model, optimizer = _wide(0)
    path = Checkpointer(directory).save(0, model, optimizer)
    owned = sum(main.numel() for _, main in optimizer.main_params())
    return owned, (path / f"rank_{dist.get_rank():05d}.safetensors").stat().st_size


def test_every_rank_writes_what_it_owns(ranks: RankPool, tmp_path: Path) -> None:
    """No gather, and nothing twice: 14 bytes for each element that a rank owns, and a header."""
    for owned, size in ranks.run(2, _own_file, tmp_path):
        assert owned < 650_000
        assert 14 * owned < size < 14 * owned + 300_000


class Small(nn.Module):
    """Two elements: fewer than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return shape [..., 1]."""
        out: Tensor = self.line(x[..., :1])
        return out


def _small(seed: int) -> tuple[nn.Module, DistributedOptimizer]:
    torch.manual_seed(seed)
    model = Small().half()
    inner = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    return model, DistributedOptimizer(inner, config_of(FP16), scaler(FP16), modules=model)


def _empty_ranks(directory: Path) -> tuple[int, list[str]]:
    model, optimizer = _small(0)
    train(model, optimizer, 0, 4)
    Checkpointer(directory).save(4, model, optimizer)
    fresh, loaded = _small(1)
    Checkpointer(directory).load(fresh, loaded)
    owned = sum(main.numel() for _, main in loaded.main_params())
    return owned, differences(full(model, optimizer), full(fresh, loaded))


def test_rank_that_owns_nothing(ranks: RankPool, tmp_path: Path) -> None:
    """It writes and reads no piece, and has the whole model after a load."""
    results = ranks.run(3, _empty_ranks, tmp_path)
    assert sorted(owned for owned, _ in results)[0] == 0
    assert sum(owned for owned, _ in results) == 2
    assert [lines for _, lines in results] == [[], [], []]


def _hybrid(directory: Path) -> tuple[list[str], bool]:
    groups = hybrid_groups()

    def make(seed: int) -> tuple[nn.Module, DistributedOptimizer]:
        torch.manual_seed(seed)
        model = Model().half()
        inner = INNER["adamw"](model)
        return model, DistributedOptimizer(
            inner, config_of(FP16), scaler(FP16), modules=model, groups=groups, bucket_numel=300
        )

    model, optimizer = make(0)
    train(model, optimizer, 0, 4)
    path = Checkpointer(directory).save(4, model, optimizer)
    fresh, loaded = make(1)
    Checkpointer(directory).load(fresh, loaded)
    writes = (path / f"rank_{dist.get_rank():05d}.safetensors").exists()
    return differences(full(model, optimizer), full(fresh, loaded)), writes


def test_hybrid_replicas_are_written_once(ranks: RankPool, tmp_path: Path) -> None:
    """Ranks 2 and 3 hold the shards of ranks 0 and 1, and write nothing of them."""
    results = ranks.run(4, _hybrid, tmp_path)
    assert [lines for lines, _ in results] == [[]] * 4
    assert [writes for _, writes in results] == [True, True, False, False]


def _chained(directory: Path) -> list[str]:
    def make(seed: int) -> tuple[nn.Module, ChainedOptimizer]:
        torch.manual_seed(seed)
        model, shared = Model().half(), scaler(FP16)
        trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        return model, ChainedOptimizer(
            [
                DistributedOptimizer(
                    torch.optim.AdamW(part, lr=0.01), config_of(FP16), shared, modules=model, bucket_numel=300
                )
                for part in (trained[::2], trained[1::2])
            ]
        )

    model, optimizer = make(0)
    train(model, optimizer, 0, 4)  # type: ignore[arg-type]
    Checkpointer(directory).save(4, model, optimizer)
    fresh, loaded = make(1)
    Checkpointer(directory).load(fresh, loaded)
    return differences(full(model, optimizer), full(fresh, loaded))  # type: ignore[arg-type]


def test_chained_optimizer(ranks: RankPool, tmp_path: Path) -> None:
    """Several sharded optimizers over one model make one checkpoint."""
    assert ranks.run(2, _chained, tmp_path) == [[], []]


# What does not fit


def _without_pickles(directory: Path) -> dict[str, Any]:
    """Load where torch's readers of pickles raise; ranks still exchange objects."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "load"), (FileSystemReader, "read_metadata")):
            patch.setattr(owner, name, lambda *_, **__: pytest.fail("a pickle was opened"))
        model, optimizer = build(1)
        Checkpointer(directory).load(model, optimizer)
    return full(model, optimizer)


def test_shards_are_read_without_a_pickle(ranks: RankPool, tmp_path: Path) -> None:
    """Each rank finds its part of every piece by the manifest, and takes the bytes from the files."""
    saved = ranks.run(2, save, tmp_path, FP16, "adamw")
    loaded = ranks.run(2, _without_pickles, tmp_path)
    assert differences(loaded, saved) == []


# Failures of one rank


def _broken_read(directory: Path, late: bool) -> tuple[str, list[str], list[str]]:
    """The last rank's read fails: its staged one, or the one into live memory. Then it loads again."""
    model, optimizer = build(1)
    before = full(model, optimizer)
    patch = pytest.MonkeyPatch()
    reads: list[int] = []
    read = PlannedRead.read

    def fail(planned: PlannedRead) -> None:
        reads.append(1)
        if dist.get_rank() == dist.get_world_size() - 1 and len(reads) == 1 + late:
            raise OSError("disk gone")
        read(planned)

    patch.setattr(PlannedRead, "read", fail)
    message = message_of(CheckpointError, lambda: Checkpointer(directory).load(model, optimizer))
    patch.undo()
    changed = differences(before["optimizer"], optimizer.state_dict())
    Checkpointer(directory).load(model, optimizer)
    fresh, loaded = build(2)
    Checkpointer(directory).load(fresh, loaded)
    return message, changed, differences(full(model, optimizer), full(fresh, loaded))


@pytest.mark.parametrize("late", [pytest.param(False, marks=pytest.mark.slow), True])
def test_failed_read_of_one_rank(ranks: RankPool, tmp_path: Path, late: bool) -> None:
    """One error on all ranks. Nothing has changed; or the error says what has, and loading again mends it."""
    ranks.run(2, save, tmp_path, FP16, "adamw")
    for message, changed, after in ranks.run(3, _broken_read, tmp_path, late):
        assert "rank 2: " in message
        assert "OSError: disk gone" in message
        assert ("holds a part of the checkpoint now: load again" in message) == late
        assert (changed == []) == (not late)
        assert after == []


def _expert(directory: Path, alone: bool) -> str:
    model = Model().half()
    model.cube.allreduce = False  # type: ignore[attr-defined]
    groups = ParallelGroups(dist.group.WORLD, expert_data_parallel=None)
    inner = INNER["adamw"](model)
    optimizer = DistributedOptimizer(inner, config_of(FP16), scaler(FP16), modules=model, groups=groups)
    checkpointer = Checkpointer(directory, groups=groups)
    if alone:
        checkpointer.save(0, model, optimizer)
        return ""
    return message_of(CheckpointError, lambda: checkpointer.save(0, model, optimizer))


def test_experts_of_one_name_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    """Each rank's expert would be saved under the same name, and all but the first be lost."""
    assert ranks.run(1, _expert, tmp_path, True) == [""]
    for message in ranks.run(2, _expert, tmp_path, False):
        assert "parameter 'cube' is an expert's (allreduce=False), not the same on all ranks" in message


# Memory


class Wide(nn.Module):
    """20 weights of 250 x 250."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(250, 250, bias=False) for _ in range(20)))


BUCKET_NUMEL = 125_000
SLACK = 100_000  # step counts, and the plans that the ranks exchange: they grow with the number of tensors


def _wide(seed: int) -> tuple[nn.Module, DistributedOptimizer]:
    torch.manual_seed(seed)
    model = Wide().half()
    inner = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    return model, DistributedOptimizer(inner, config_of(FP16), scaler(FP16), modules=model, bucket_numel=BUCKET_NUMEL)


def _peak(function: Callable[[], object]) -> int:
    """Return by how many bytes torch's CPU allocator was at most above its start: the profiler's list of its calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    results = profiler.profiler.kineto_results if profiler.profiler else None
    assert results is not None
    calls = [
        event for event in results.events() if event.name() == "[memory]" and event.device_type() == DeviceType.CPU
    ]
    peak = held = 0
    for event in sorted(calls, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert len(calls) > 100
    return peak


def _peaks(directory: Path) -> dict[str, int]:
    model, optimizer = _wide(0)
    checkpointer = Checkpointer(directory)
    background = Checkpointer(directory, async_save=True)
    peaks = {"save": _peak(lambda: checkpointer.save(0, model, optimizer))}
    peaks["async"] = _peak(lambda: background.save(1, model, optimizer))
    background.wait()
    fresh, loaded = _wide(1)
    peaks["load"] = _peak(lambda: checkpointer.load(fresh, loaded))
    assert differences(full(model, optimizer), full(fresh, loaded)) == []
    peaks["shard"] = sum(main.numel() for _, main in loaded.main_params())
    return peaks


def test_peak_memory_stays_within_one_bucket(ranks: RankPool, tmp_path: Path) -> None:
    """Of save and load, beside the live state: bytes of torch's allocator. An async save copies this rank's shard."""
    for peaks in ranks.run(2, _peaks, tmp_path):
        assert 600_000 < peaks["shard"] < 650_000
        bucket = 4 * BUCKET_NUMEL
        assert peaks["save"] <= bucket + SLACK
        assert peaks["load"] <= bucket + SLACK
        assert 14 * peaks["shard"] <= peaks["async"] <= 14 * peaks["shard"] + bucket + SLACK
