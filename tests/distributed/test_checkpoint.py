"""Saving and loading on several ranks: other world sizes, shards, and one error on all ranks."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from megascale import MixedPrecisionOptimizer
from megascale.checkpoint import Checkpointer, latest, load, save
from megascale.checkpoint import directory as checkpoint_directory
from megascale.errors import ArgumentTypeError, CheckpointError, RankError
from megascale.utils import progress
from megascale.utils.collectives import twin_group
from tests.checkpoint_cases import build, differences, message_of, state_of, train
from tests.pool import RankPool
from tests.terminal import terminal


def _build_ddp(seed: int) -> tuple[nn.Module, MixedPrecisionOptimizer]:
    """As `build`, with DistributedDataParallel around the model; the optimizer's names do not have its prefix."""
    model, optimizer = build(seed)
    return DistributedDataParallel(model), optimizer


def _save_and_go_on(directory: Path) -> dict[str, Any]:
    rank = dist.get_rank()
    model, optimizer = _build_ddp(0)
    train(model, optimizer, 0, 3, rank)
    save(
        directory, 3, model, optimizer, user_state={"epoch": 1}, rank_state={"rank": rank, "rng": torch.get_rng_state()}
    )
    train(model, optimizer, 3, 6, rank)
    return state_of(_inner(model), optimizer)


def _resume(directory: Path, train_on: bool) -> tuple[dict[str, Any], Any]:
    model, optimizer = _build_ddp(1)
    loaded = load(directory, model, optimizer)
    assert (loaded.step, loaded.user_state) == (3, {"epoch": 1})
    if train_on:
        train(model, optimizer, 3, 6, dist.get_rank())
    return state_of(_inner(model), optimizer), loaded.rank_state


def _inner(model: nn.Module) -> nn.Module:
    inner = model.module
    assert isinstance(inner, nn.Module)
    return inner


def test_resume_on_two_ranks_and_load_on_one_and_four(ranks: RankPool, tmp_path: Path) -> None:
    """6 steps = 3 + save + load into new objects + 3, bitwise, and the state loads at any world size.

    Each rank gets its own state back, and none at another world size. Batch norm's buffers, which differ between ranks
    until DDP's next forward, are the first rank's.
    """
    straight = ranks.run(2, _save_and_go_on, tmp_path)
    resumed = ranks.run(2, _resume, tmp_path, True)
    # Rank 1's own batch norm statistics of the last step come from its own data: all states are compared rank by rank.
    for rank in range(2):
        assert differences(resumed[rank][0], straight[rank]) == [], rank
        assert resumed[rank][1]["rank"] == rank
    [(alone, no_rank_state)] = ranks.run(1, _resume, tmp_path, False)
    assert no_rank_state is None
    for state, rank_state in ranks.run(4, _resume, tmp_path, False):
        assert rank_state is None
        assert differences(state, alone) == []


def _save_in_subgroup(directory: Path) -> str | None:
    group = dist.new_group([1, 2])
    if dist.get_rank() not in (1, 2):
        return None
    model, _ = build(0)
    checkpointer = Checkpointer(directory, async_save=True, groups=group)
    for step in (1, 2):
        checkpointer.save(step, model, rank_state=dist.get_rank())
    loaded = checkpointer.load(model)
    assert loaded.rank_state == dist.get_rank()
    return str(loaded.path)


def test_group_that_is_not_the_world(ranks: RankPool, tmp_path: Path) -> None:
    """The ranks outside take no part, and the group's first rank is not the world's."""
    path = str(tmp_path / "step_00000002")
    assert ranks.run(4, _save_in_subgroup, tmp_path) == [None, path, path, None]


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
    ranks.run(2, _save_and_go_on, tmp_path)
    path = tmp_path / "step_00000003" / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()
    if how == "damaged":
        path.write_bytes(content)
    messages = ranks.run(2, _load_damaged, tmp_path)
    assert messages[0] == messages[1]
    assert f"rank {finder}: {path} is {how}" in messages[0][0]
    assert messages[0][1] == []


def _save_refused(directory: Path) -> list[str]:
    rank = dist.get_rank()
    model, optimizer = build(0)
    save(directory, 1, model, optimizer)
    other, _ = build(0, torch.float16 if rank == 0 else torch.bfloat16)
    return [
        message_of(ArgumentTypeError, lambda: save(directory, 2, model, user_state=None if rank == 0 else {1, 2})),
        message_of(CheckpointError, lambda: save(directory, 2, model, user_state={"epoch": rank})),
        message_of(CheckpointError, lambda: save(directory, 2 + rank, model)),
        message_of(CheckpointError, lambda: save(directory, 2, other)),
        message_of(CheckpointError, lambda: save(directory, 1, model)),
        message_of(CheckpointError, lambda: load(directory, model if rank == 0 else nn.Linear(1, 1))),
    ]


def test_refused_saves_and_loads_are_alike_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """What one rank refuses, all refuse, with that rank's message; what differs between ranks is noticed."""
    messages = ranks.run(2, _save_refused, tmp_path)
    assert messages[0] == messages[1]
    wrong_type, user, step, model, existing, unfit = messages[0]
    assert wrong_type.startswith("rank 1: user is a builtins.set")
    assert user.startswith("ranks save different contents: user is ")
    assert step.startswith("ranks save different contents: step is 2 on rank 0 and 3 on rank 1 ")
    assert model.startswith("ranks save different contents: model is ")
    assert "step_00000001 exists already" in existing
    assert unfit.startswith("rank 1: ")
    assert "does not fit the model" in unfit
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def _full_disk(*args: Any) -> None:
    raise OSError(28, "No space left on device")


def _background_error(directory: Path) -> str:
    model, optimizer = build(0)
    checkpointer = Checkpointer(directory, async_save=True)
    with pytest.MonkeyPatch.context() as broken:
        if dist.get_rank() == 1:
            broken.setattr(os, "fsync", _full_disk)
        checkpointer.save(1, model, optimizer, rank_state=torch.ones(1))  # else rank 1 would write no file
        # Training's collectives go on meanwhile.
        for _ in range(20):
            dist.all_reduce(torch.ones(1000))
        message = message_of(CheckpointError, checkpointer.wait)
    checkpointer.save(2, model, optimizer)
    checkpointer.wait()
    return message


def test_background_error_of_one_rank_surfaces_on_all(ranks: RankPool, tmp_path: Path) -> None:
    """One rank's full disk is every rank's error at wait(); the next save works."""
    messages = ranks.run(2, _background_error, tmp_path)
    assert messages[0] == messages[1]
    assert "rank 1: cannot write" in messages[0]
    assert "No space left on device" in messages[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


def _removal_errors(directory: Path) -> list[str]:
    model, optimizer = build(0)
    checkpointer = Checkpointer(directory, keep_last=2)
    checkpointer.save(1, model, optimizer)
    with pytest.MonkeyPatch.context() as broken:
        if dist.get_rank() == 0:
            broken.setattr(checkpoint_directory, "finish_removals", _full_disk)
        messages = [
            message_of(CheckpointError, lambda: checkpointer.load(model, optimizer)),
            message_of(CheckpointError, checkpointer.latest),
        ]
    assert checkpointer.load(model, optimizer).step == 1
    return messages


def test_failed_removal_of_old_checkpoints_is_one_error_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """The folder that rank 0 cannot clear before a load, or before it looks for the latest, is every rank's error."""
    messages = ranks.run(2, _removal_errors, tmp_path)
    assert messages[0] == messages[1]
    for message, action in zip(messages[0], ("remove old checkpoints", "look for checkpoints"), strict=True):
        assert f"rank 0: cannot {action}" in message
        assert "No space left on device" in message


def _hook_errors(directory: Path) -> list[str]:
    model, optimizer = build(0)
    save(directory, 1, model, optimizer)
    messages = []
    hooks: list[tuple[Any, type[Exception]]] = [
        (optimizer.register_load_state_dict_post_hook, RankError),
        (optimizer.register_state_dict_post_hook, CheckpointError),
    ]
    for register, kind in hooks:
        handle = register(_full_disk) if dist.get_rank() == 1 else None
        messages.append(message_of(kind, lambda: load(directory, model, optimizer, strict=False)))
        if handle is not None:
            handle.remove()
        assert load(directory, model, optimizer).step == 1
    return messages


def test_hook_that_fails_on_one_rank_while_loading_is_every_ranks_error(ranks: RankPool, tmp_path: Path) -> None:
    """The other ranks went on to their next collective, which met another one of the rank that had failed."""
    first, second = ranks.run(2, _hook_errors, tmp_path)
    assert first == second
    assert all("rank 1: " in message and "No space left on device" in message for message in first)


def _save_and_die(directory: Path, dying_rank: int, event: str, name: str, async_save: bool) -> str:
    model, optimizer = build(0)
    checkpointer = Checkpointer(directory, async_save=async_save)
    checkpointer.save(1, model, optimizer)
    checkpointer.wait()
    train(model, optimizer, 0, 1)

    def hook(seen: str, args: tuple[Any, ...]) -> None:
        if seen == event and any(name in str(argument) for argument in args):
            os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == dying_rank:
        sys.addaudithook(hook)
    checkpointer.save(2, model, optimizer, rank_state=torch.ones(1))
    checkpointer.wait()
    return "saved"


def _load_latest(directory: Path) -> tuple[int, dict[str, Any]]:
    model, optimizer = build(1)
    step = load(directory, model, optimizer).step
    save(directory, 7, model, optimizer)
    return step, state_of(model, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dying_rank", "event", "name", "async_save"),
    [
        (1, "open", "rank_00001.safetensors", False),
        (0, "os.rename", "step_00000002", False),
        (1, "open", "rank_00001.safetensors", True),
    ],
    ids=["while writing", "before the rename", "in the background"],
)
def test_rank_killed_during_a_save(
    ranks: RankPool, tmp_path: Path, dying_rank: int, event: str, name: str, async_save: bool
) -> None:
    """SIGKILL of one rank: the other gets a CheckpointError, the previous checkpoint loads, and a new save works."""
    with ranks.spawn(2, _save_and_die, tmp_path, dying_rank, event, name, async_save) as fresh:
        outcomes = fresh.outcomes(timeout=50, grace=30)
    assert "exit code -9" in str(outcomes[dying_rank].error)
    assert "megascale.errors.CheckpointError" in str(outcomes[1 - dying_rank].error)
    assert latest(tmp_path) == tmp_path / "step_00000001"
    expected = state_of(*build(0))
    for step, state in ranks.run(2, _load_latest, tmp_path):
        assert step == 1
        assert differences(state, expected) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000007"]


def _parted(directory: Path, asynchronous: bool) -> list[Any]:
    """Train two copies of a model apart, and save."""
    module = nn.Linear(3, 2)
    torch.manual_seed(0)
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(0.5)
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(module.named_parameters()))
    found: list[Any] = []
    with Checkpointer(directory, async_save=asynchronous) as checkpointer:
        checkpointer.save(1, module, optimizer)
        with torch.no_grad():
            module.bias[1] += dist.get_rank()
        try:
            checkpointer.save(2, module, optimizer)
        except CheckpointError as error:
            found.append(str(error))
    Checkpointer(directory, check_replicas=False).save(3, module, optimizer)
    return [*found, sorted(path.name for path in directory.iterdir())]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_that_have_parted_are_named(ranks: RankPool, tmp_path: Path, asynchronous: bool) -> None:
    """A save compares checksums of what all ranks should hold alike, and raises on all of them; nothing is written."""
    for message, saved in ranks.run(2, _parted, tmp_path, asynchronous):
        assert "ranks hold other values of 'model/bias': the replicas have diverged" in message
        assert saved == ["step_00000001", "step_00000003"]


def _bars(directory: Path) -> str:
    model, optimizer = build(0)
    progress.LEAST_BYTES = 1
    try:
        with terminal() as shown:
            save(directory, 1, model, optimizer)
            load(directory, model, optimizer)
            return shown()
    finally:
        progress.LEAST_BYTES = 1 << 28


def test_first_rank_alone_shows_bars(ranks: RankPool, tmp_path: Path) -> None:
    """All ranks of one host share its terminal."""
    first, second = ranks.run(2, _bars, tmp_path)
    assert "saving:" in first
    assert "reading:" in first
    assert second == ""
