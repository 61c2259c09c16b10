"""Checkpoints of DistributedOptimizer: every rank writes its own shard, and any number of ranks reads them back."""

import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from megascale import ChainedOptimizer, DistributedOptimizer, MixedPrecisionOptimizer
from megascale.checkpoint import Checkpointer
from megascale.checkpoint import directory as checkpoint_directory
from megascale.checkpoint.files import PlannedRead
from megascale.errors import CheckpointError, RankError
from tests.checkpoint_cases import differences, state_of
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


def _hybrid(directory: Path) -> bool:
    torch.manual_seed(0)
    model, groups = Model().half(), hybrid_groups()
    inner = INNER["adamw"](model)
    optimizer = DistributedOptimizer(
        inner, config_of(FP16), scaler(FP16), modules=model, groups=groups, bucket_numel=300
    )
    path = Checkpointer(directory).save(4, model, optimizer)
    return (path / f"rank_{dist.get_rank():05d}.safetensors").exists()


def test_hybrid_replicas_are_written_once(ranks: RankPool, tmp_path: Path) -> None:
    """Ranks 2 and 3 hold the shards of ranks 0 and 1, and write nothing of them."""
    assert ranks.run(4, _hybrid, tmp_path) == [True, True, False, False]


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


# Failures of one rank


def _full_disk(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def _at_read(number: int) -> Callable[[pytest.MonkeyPatch, Any], None]:
    """Let the staged read fail, which is the first, or the one into live memory."""

    def plant(patch: pytest.MonkeyPatch, _: Any) -> None:
        read, reads = PlannedRead.read, count(1)
        patch.setattr(PlannedRead, "read", lambda self: _full_disk() if next(reads) == number else read(self))

    return plant


def _save_while_training(checkpointer: Checkpointer, model: nn.Module, optimizer: Any) -> None:
    checkpointer.save(2, model, optimizer)
    for _ in range(20):  # training's collectives go on meanwhile
        dist.all_reduce(torch.ones(1000))
    checkpointer.wait()


def _load(checkpointer: Checkpointer, model: nn.Module, optimizer: Any) -> None:
    checkpointer.load(model, optimizer, strict=False)


def _at_listing(patch: pytest.MonkeyPatch, _: Any) -> None:
    patch.setattr(checkpoint_directory, "complete", _full_disk)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch, Any], object], Callable[..., object], str]] = {
    "a full disk": (lambda patch, _: patch.setattr(os, "fsync", _full_disk), _save_while_training, "cannot write"),
    "a folder": (_at_listing, _load, ""),
    "a look": (_at_listing, lambda checkpointer, *_: checkpointer.latest(), "cannot look for checkpoints"),
    "a hook": (lambda _, optimizer: optimizer.register_state_dict_post_hook(_full_disk), _load, ""),
    "a late hook": (lambda _, optimizer: optimizer.register_load_state_dict_post_hook(_full_disk), _load, ""),
    "a read": (_at_read(1), _load, ""),
    "a late read": (_at_read(2), _load, "holds a part of the checkpoint now: load again"),
}
"""What fails on one rank: planted before the call, and what the message says beside it."""
VICTIM = {"a folder": 0, "a look": 0}
"""The first rank alone looks for checkpoints; all else fails on the last one of three."""


def _fails_on_one_rank(directory: Path, fault: str) -> tuple[str, list[str], list[str]]:
    plant, call, _ = FAULTS[fault]
    model, optimizer = build(0)
    train(model, optimizer, 0, 4)
    saved = full(model, optimizer)
    checkpointer = Checkpointer(directory, keep_last=2, async_save=True)
    checkpointer.save(1, model, optimizer)
    checkpointer.wait()
    model, optimizer = build(1)
    before = full(model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == VICTIM.get(fault, 2):
            plant(patch, optimizer)
        with pytest.raises((CheckpointError, RankError)) as caught:
            call(checkpointer, model, optimizer)
    changed = differences(before["optimizer"], optimizer.state_dict()) if "hook" not in fault else []
    model, optimizer = build(2)
    assert checkpointer.load(model, optimizer).step == 1
    return str(caught.value), changed, differences(full(model, optimizer), saved)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_fails_on_one_rank_is_every_ranks_error(ranks: RankPool, tmp_path: Path, fault: str) -> None:
    """While it writes in the background, looks for checkpoints, reads, or runs a user's hook: the others went on to
    their next collective. Nothing has changed, or the error says what has; and the next load is right.
    """
    results = ranks.run(3, _fails_on_one_rank, tmp_path, fault)
    assert len({message for message, *_ in results}) == 1
    for message, changed, after in results:
        assert f"rank {VICTIM.get(fault, 2)}: " in message
        assert FAULTS[fault][2] in message
        assert "No space left on device" in message
        assert (changed == []) == (fault != "a late read")
        assert after == []
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


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
    whole = optimizer.state_dict()
    peaks["whole"] = _peak(lambda: loaded.load_state_dict(whole))
    peaks["shard"] = sum(main.numel() for _, main in loaded.main_params())
    return peaks


def test_peak_memory_stays_within_one_bucket(ranks: RankPool, tmp_path: Path) -> None:
    """Of save and loads, beside the live state: bytes of torch's allocator. An async save copies this rank's shard."""
    for peaks in ranks.run(2, _peaks, tmp_path):
        assert 600_000 < peaks["shard"] < 650_000
        bucket = 4 * BUCKET_NUMEL
        assert peaks["save"] <= bucket + SLACK
        assert peaks["load"] <= bucket + SLACK
        assert peaks["whole"] <= bucket + SLACK
        assert 14 * peaks["shard"] <= peaks["async"] <= 14 * peaks["shard"] + bucket + SLACK
