"""Checkpoints that the real DeepSpeed wrote, on the CPU: its scaler goes on step for step, all else bit for bit."""

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from megascale.errors import InteropError
from megascale.interop import convert, load_scaler_state
from tests.integrations.interop_cases import ADAMW, BEFORE, converted, follow, net, schedule
from tests.pool import RankPool

WORLD = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def start() -> Any:
    """Return DeepSpeed over the ranks of torch.distributed, told that the CPU supports fp16: nothing is multiplied."""
    os.environ.update(WORLD, DS_ACCELERATOR="cpu", RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))
    deepspeed = import_module("deepspeed")
    import_module("deepspeed.accelerator").get_accelerator().is_fp16_supported = lambda: True
    # As where its shared memory collectives cannot be compiled; compiling them takes a minute.
    vars(import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    return deepspeed


@pytest.fixture(scope="module")
def deepspeed() -> Iterator[Any]:
    """DeepSpeed in a world of one rank."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    before = dict(os.environ)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield start()
    dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("hysteresis", [1, 3])
@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize(("window", "share"), [(1, 0.5), (4, 0.15)])
def test_deepspeed_scaler_goes_on(
    deepspeed: Any, hysteresis: int, consecutive: bool, window: int, share: float, tmp_path: Path
) -> None:
    """Its DynamicLossScaler, alive and pickled: the same scales for 200 steps from any of ten states."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    for stop in range(BEFORE, BEFORE + 10):
        scaler = DynamicLossScaler(2.0**10, window, 2.0**-100, hysteresis, consecutive)
        for overflow in schedule(stop, stop, share):
            scaler.update_scale(overflow)
        torch.save({"optimizer_state_dict": {"loss_scaler": scaler, "overflow": False}}, tmp_path / "optim_states.pt")

        def peer(overflow: bool, scaler: Any = scaler) -> float:
            scaler.update_scale(overflow)
            return float(scaler.loss_scale)

        found = load_scaler_state(tmp_path / "optim_states.pt")
        assert found.state == load_scaler_state(scaler).state
        follow(found, peer, seed=stop, share=share)


class DeepSpeedRun:
    """An engine, whose gradients come from a loss that is linear in the parameters."""

    def __init__(self, deepspeed: Any, stage: int) -> None:
        self.model = net(torch.float16)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "fp16": {
                "enabled": True, "initial_scale_power": 14, "loss_scale_window": 4, "hysteresis": 2,
            },
            "steps_per_print": 10**9,
        }  # fmt: skip
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.model.parameters() if p.dim() > 1]},
            {"params": [p for p in self.model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, **ADAMW)
        self.engine, *_ = deepspeed.initialize(model=self.model, optimizer=optimizer, config=config)

    def save(self, folder: Path) -> "DeepSpeedRun":
        """Take the steps before the checkpoint, and write it."""
        for step, overflow in enumerate(schedule(BEFORE, 2, share=0.25)):
            self.step(step, overflow)
        self.engine.save_checkpoint(str(folder))
        return self

    def step(self, step: int, overflow: bool) -> float:
        """Take one step and return the scale after it."""
        generator = torch.Generator().manual_seed(step)
        loss = torch.zeros(())
        for param in self.model.parameters():
            loss = loss + (param.float() * torch.randn(param.shape, generator=generator)).sum() * 1e-4
        self.engine.backward(loss * torch.inf if overflow else loss)
        self.engine.step()
        return float(self.engine.optimizer.loss_scale)


def assert_converted(run: DeepSpeedRun, state: dict[str, Any]) -> None:
    """Main params and second moments equal this rank's part of the peer's flat groups, bit for bit."""
    names = dict(run.model.named_parameters())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert state["main_params"].keys() == state["optimizer"]["state"].keys() == names.keys()
    assert all(torch.equal(main.half(), names[name]) for name, main in state["main_params"].items())
    for group, masters in enumerate(run.engine.optimizer.single_partition_of_fp32_groups):
        in_group = state["optimizer"]["param_groups"][group]["params"]
        assert sorted(in_group) == sorted(name for name, param in names.items() if (param.dim() == 1) == bool(group))
        states = [state["optimizer"]["state"][name] for name in in_group]
        for flat, peer in (
            (torch.cat([state["main_params"][name].reshape(-1) for name in in_group]), masters),
            (
                torch.cat([one["exp_avg_sq"].reshape(-1) for one in states]),
                run.engine.optimizer.optimizer.state[masters]["exp_avg_sq"],
            ),
        ):
            own = flat[rank * peer.numel() :][: peer.numel()]
            assert own.numel() >= peer.numel() - 2 * ranks
            assert torch.equal(own, peer[: own.numel()])
            assert own.count_nonzero() == own.numel()
    assert [group["weight_decay"] for group in state["optimizer"]["param_groups"]] == [0.1, 0.0]


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_checkpoint_converts(deepspeed: Any, stage: int, tmp_path: Path) -> None:
    """A checkpoint of its engine with ZeRO: main params and moments bit for bit, the scale goes on for 200 steps."""
    run = DeepSpeedRun(deepspeed, stage).save(tmp_path / "checkpoints")
    assert_converted(run, converted(tmp_path / "checkpoints", tmp_path / "ours.pt"))
    found = load_scaler_state(tmp_path / "checkpoints")
    assert (found.config.hysteresis, found.config.growth_interval, found.config.min_scale) == (2, 4, 1.0)
    follow(found, lambda overflow: run.step(0, overflow), share=0.25)


def _save_on_ranks(folder: Path) -> None:
    run = DeepSpeedRun(start(), 1).save(folder / "checkpoints")
    dist.barrier()
    state = converted(folder / "checkpoints", folder / f"ours{dist.get_rank()}.pt")
    assert_converted(run, state)


@pytest.mark.slow
def test_zero_checkpoint_of_two_ranks_converts(ranks: RankPool, tmp_path: Path) -> None:
    """Two ranks' files are put together: each rank finds its own part in the whole, bit for bit."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    with ranks.spawn(2, _save_on_ranks, tmp_path) as fresh:
        fresh.results(240.0)


def test_scaler_without_zero_continues(deepspeed: Any, tmp_path: Path) -> None:
    """Of its engine without ZeRO: the scaler, which has no hysteresis; main params are not read, and that is said."""
    run = DeepSpeedRun(deepspeed, 0).save(tmp_path / "checkpoints")
    with pytest.raises(InteropError, match=r"saved without ZeRO, .*; .*\(scaler_only=True, or"):
        convert(tmp_path / "checkpoints", None)
    convert(tmp_path / "checkpoints", None, scaler_only=True)
    found = load_scaler_state(tmp_path / "checkpoints")
    assert (found.config.hysteresis, found.config.min_scale) == (1, 1.0)
    follow(found, lambda overflow: run.step(0, overflow), share=0.25)
