"""Saving and loading on several ranks: other world sizes, shards, and one error on all ranks."""

import os
import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from megascale import ChainedOptimizer, MixedPrecisionOptimizer
from megascale.checkpoint import Checkpointer, load, save
from megascale.errors import ArgumentError, ArgumentTypeError, CheckpointError, RankError
from megascale.utils.collectives import twin_group
from tests.checkpoint_cases import build, differences, message_of, state_of, train
from tests.pool import RankPool


def _build_ddp(seed: int) -> tuple[nn.Module, MixedPrecisionOptimizer]:
    """As `build`, with DistributedDataParallel around the model; the optimizer's names do not have its prefix."""
    model, optimizer = build(seed)
    return DistributedDataParallel(model), optimizer


def _save(directory: Path) -> dict[str, Any]:
    rank = dist.get_rank()
    model, optimizer = _build_ddp(0)
    train(model, optimizer, 0, 3, rank)
    save(
        directory, 3, model, optimizer, user_state={"epoch": 1}, rank_state={"rank": rank, "rng": torch.get_rng_state()}
    )
    return state_of(model.get_submodule("module"), optimizer)


def _load(directory: Path) -> tuple[dict[str, Any], Any]:
    model, optimizer = _build_ddp(1)
    loaded = load(directory, model, optimizer)
    assert (loaded.step, loaded.user_state) == (3, {"epoch": 1})
    return state_of(model.get_submodule("module"), optimizer), loaded.rank_state


def test_state_of_ranks_and_of_all(ranks: RankPool, tmp_path: Path) -> None:
    """Each rank gets its own state back, and none at another world size. Batch norm's buffers, which differ between
    ranks until DDP's next forward, are the first rank's. DDP's prefix is in no name.
    """
    saved, _ = ranks.run(2, _save, tmp_path)
    for size in (1, 2, 4):
        for rank, (state, rank_state) in enumerate(ranks.run(size, _load, tmp_path)):
            assert differences(state, saved) == []
            assert (rank_state["rank"] if size == 2 else rank_state) == (rank if size == 2 else None)


def _save_in_subgroup(directory: Path, backend: str) -> str | None:
    group = dist.new_group([1, 2], backend=backend)
    if dist.get_rank() not in (1, 2):
        return None
    model, _ = build(0)
    savers = [Checkpointer(directory, async_save=in_background, groups=group) for in_background in (False, True)]
    for step, saver in enumerate(savers, start=1):
        saver.save(step, model, rank_state=dist.get_rank())
    loaded = saver.load(model)
    assert loaded.rank_state == dist.get_rank()
    return str(loaded.path)


@pytest.mark.parametrize("backend", ["gloo", "cuda:gloo"])
def test_group_that_is_not_the_world(ranks: RankPool, tmp_path: Path, backend: str) -> None:
    """The ranks outside take no part, and the group's first rank is not the world's. Where a group carries tensors of a
    device alone, as NCCL does, objects travel beside it: ranks that waited for a slow disk in a kernel of NCCL would be
    ended by its watchdog.
    """
    path = str(tmp_path / "step_00000002")
    assert ranks.run(4, _save_in_subgroup, tmp_path, backend) == [None, path, path, None]


def _construct_on_a_missing_interface(directory: Path) -> str:
    with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="nosuch0"):
        return message_of(RankError, lambda: Checkpointer(directory, async_save=True))


def test_gloo_without_a_network_interface_is_told_at_construction(ranks: RankPool, tmp_path: Path) -> None:
    """And not hours later by the first asynchronous save, or by a comparison of ranks that NCCL connects."""
    for message in ranks.run(2, _construct_on_a_missing_interface, tmp_path):
        assert "no gloo group of ranks [0, 1]" in message
        assert "set GLOO_SOCKET_IFNAME to the name of the one that connects them" in message


def _groups_after_a_twin(step: int) -> list[float]:
    """Make two twins of a group of two of four ranks, then groups of all ranks; return sums over these."""
    inner = dist.new_group([1, 2])
    twins = [twin_group(inner) for _ in range(2)] if dist.get_rank() in (1, 2) else []  # the others know nothing of it
    sums = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(f"a{step}", f"b{step}"))
    for group in (*twins, dist.new_group([0, 1, 2, 3]), mesh.get_group(f"a{step}")):
        total = torch.ones(())
        dist.all_reduce(total, group=group)
        sums.append(total.item())
    return sums


def test_a_group_of_some_ranks_does_not_disturb_the_next_of_all(ranks: RankPool) -> None:
    """A Checkpointer of a part of the world makes a group for its thread. Torch 2.15 counted it on these ranks alone:
    the next mesh or group of the whole world waited for ever.
    """
    for step in range(2):
        assert ranks.run(4, _groups_after_a_twin, step) == [[4, 2], [2, 2, 4, 2], [2, 2, 4, 2], [4, 2]]


def _load_damaged(directory: Path) -> tuple[str, list[str]]:
    model, optimizer = build(1)
    before = state_of(model, optimizer)
    message = message_of(CheckpointError, lambda: load(directory, model, optimizer))
    return message, differences(state_of(model, optimizer), before)


@pytest.mark.default("damaged-rank_00000.safetensors-0", "missing-rank_00001.safetensors-1")
@pytest.mark.parametrize(("name", "finder"), [("rank_00000.safetensors", 0), ("rank_00001.safetensors", 1)])
@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_damaged_file_is_one_error_on_all_ranks(
    ranks: RankPool, tmp_path: Path, name: str, finder: int, how: str
) -> None:
    """Each file is checked by one rank; every rank raises its error, and none is left waiting or changed."""
    ranks.run(2, _save, tmp_path)
    path = tmp_path / "step_00000003" / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content) if how == "damaged" else path.unlink()
    messages = ranks.run(2, _load_damaged, tmp_path)
    assert messages[0] == messages[1]
    assert f"rank {finder}: {path} is {how}" in messages[0][0]
    assert messages[0][1] == []


def _save_refused(directory: Path) -> list[str]:
    rank = dist.get_rank()
    model, optimizer = build(0)
    save(directory, 1, model, optimizer)
    recast, _ = build(0, torch.float16 if rank == 0 else torch.bfloat16)
    more = torch.optim.SGD([("more", nn.Parameter(torch.ones(1)))], 0.1)
    other = MixedPrecisionOptimizer(more, None, optimizer.grad_scaler)
    return [
        message_of(ArgumentTypeError, lambda: save(directory, 2, model, user_state=None if rank == 0 else {1, 2})),
        message_of(CheckpointError, lambda: save(directory, 2, model, user_state={"seed": 1, "epoch": rank})),
        *(
            message_of(
                CheckpointError, partial(save, directory, 2, model, user_state=torch.tensor([rank], dtype=dtype))
            )
            for dtype in (torch.int64, torch.bool, torch.complex64, torch.complex128)
        ),
        message_of(CheckpointError, lambda: save(directory, 2 + rank, model)),
        message_of(CheckpointError, lambda: save(directory, 2, recast)),
        message_of(CheckpointError, lambda: save(directory, 1, model)),
        message_of(CheckpointError, lambda: load(directory, model if rank == 0 else nn.Linear(1, 1))),
        message_of(CheckpointError, lambda: save(directory, 2, model, optimizer if rank == 0 else None)),
        message_of(CheckpointError, lambda: load(directory, model, optimizer if rank == 0 else None)),
        message_of(
            CheckpointError, lambda: save(directory, 2, model, ChainedOptimizer([optimizer, other][: 2 - rank]))
        ),
        message_of(ArgumentTypeError, lambda: load(directory if rank == 0 else 7, model)),  # type: ignore[arg-type]
        message_of(ArgumentError, lambda: Checkpointer(directory, keep_last=1 - rank, async_save=True)),
    ]


def test_refused_saves_and_loads_are_alike_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """What one rank refuses, all refuse, with that rank's message; what differs between ranks is noticed."""
    messages = ranks.run(2, _save_refused, tmp_path)
    assert messages[0] == messages[1]
    expected = (
        "rank 1: user is a builtins.set",
        "ranks save different contents: user/epoch is ",
        *["ranks hold other values of 'user'"] * 4,
        "ranks save different contents: step is 2 on rank 0 and 3 on rank 1 ",
        "ranks save different contents: model is ",
        ".*step_00000001 exists already",
        "rank 1: .*does not fit the model",
        *["rank 0 passes MixedPrecisionOptimizer as optimizer, rank 1 None;"] * 2,
        "rank 0 passes MixedPrecisionOptimizer [+] MixedPrecisionOptimizer as optimizer, rank 1 Mixed",
        "rank 1: path must be a path, got 7 of type int",
        "rank 1: keep_last must be",
    )
    assert all(re.match(words, message) for words, message in zip(expected, messages[0], strict=True))
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def _parted(directory: Path, asynchronous: bool) -> list[Any]:
    """Train two copies of a model apart, and save."""
    module = nn.Linear(3, 2)
    for param in module.parameters():
        nn.init.constant_(param, 0.5)
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(module.named_parameters()))
    with Checkpointer(directory, async_save=asynchronous) as checkpointer:
        checkpointer.save(1, module, optimizer)
        with torch.no_grad():
            module.bias[1] += dist.get_rank()
        message = message_of(CheckpointError, lambda: checkpointer.save(2, module, optimizer))
    Checkpointer(directory, check_replicas=False).save(3, module, optimizer)
    return [message, sorted(path.name for path in directory.iterdir())]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_that_have_parted_are_named(ranks: RankPool, tmp_path: Path, asynchronous: bool) -> None:
    """A save compares checksums of what all ranks should hold alike, and raises on all of them; nothing is written."""
    for message, saved in ranks.run(2, _parted, tmp_path, asynchronous):
        assert "ranks hold other values of 'model/bias': the replicas have diverged" in message
        assert saved == ["step_00000001", "step_00000003"]
