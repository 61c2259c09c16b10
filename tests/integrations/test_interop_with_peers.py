"""Checkpoints that the real peers wrote: their scalers go on step for step, their main params and moments too.

On CPU, so Accelerate and Lightning are given torch's scaler, which they make themselves on a GPU only.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from benchmarks.peers import megatron_on_cpu
from megascale import DynamicGradScaler, MixedPrecisionOptimizer
from megascale.interop import load_scaler_state
from tests.integrations.interop_cases import (
    ADAMW,
    BEFORE,
    assert_same,
    converted,
    follow,
    grads,
    net,
    ours,
    schedule,
    step_ours,
)


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A world of one rank, for peers that ask for one."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# torch, Accelerate, Lightning: torch.amp.GradScaler


class TorchLoop:
    """fp32 training with torch's GradScaler."""

    def __init__(self, scaler: Any, model: nn.Module | None = None, optimizer: Any = None) -> None:
        self.scaler = scaler
        self.model = net(torch.float32) if model is None else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW) if optimizer is None else optimizer

    def step(self, step: int, overflow: bool) -> float:
        """Take one step and return the scale after it."""
        scale = float(self.scaler.scale(torch.ones(())))
        for param, grad in zip(self.model.parameters(), grads(self.model, scale, step, overflow), strict=True):
            param.grad = grad
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return float(self.scaler.get_scale())

    def run(self) -> "TorchLoop":
        """Take the steps before the checkpoint."""
        for step, overflow in enumerate(schedule(BEFORE, 0)):
            self.step(step, overflow)
        return self

    def peer(self) -> Callable[[bool], float]:
        """Return a function that takes one step more."""
        return lambda overflow: self.step(0, overflow)


def torch_scaler(**options: Any) -> torch.amp.GradScaler:
    """Return torch's scaler, whose scale moves often."""
    return torch.amp.GradScaler("cpu", **({"init_scale": 2.0**10, "growth_interval": 4} | options))


def test_torch_scaler_goes_on(tmp_path: Path) -> None:
    """torch.amp.GradScaler, from itself and from its state in a file: the same scales for 200 steps."""
    loop = TorchLoop(torch_scaler(growth_factor=3.0, backoff_factor=0.25)).run()
    torch.save(loop.scaler.state_dict(), tmp_path / "scaler.pt")
    assert load_scaler_state(loop.scaler).state == load_scaler_state(tmp_path / "scaler.pt").state
    follow(load_scaler_state(tmp_path / "scaler.pt"), loop.peer())


def test_sharded_grad_scaler_goes_on(alone: None, tmp_path: Path) -> None:
    """FSDP's ShardedGradScaler: the same scales for 200 steps."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    loop = TorchLoop(ShardedGradScaler("cpu", init_scale=2.0**10, growth_interval=5)).run()
    torch.save({"scaler": loop.scaler.state_dict(), "epoch": 3}, tmp_path / "checkpoint.pt")
    follow(load_scaler_state(tmp_path / "checkpoint.pt"), loop.peer())


def go_on_like_torch(loop: TorchLoop, state: dict[str, Any]) -> None:
    """A converted file, in an fp32 model: main params, moments and scale go on as the loop's for 20 steps."""
    scaler = DynamicGradScaler(2.0, 2.0**-100, 2.0, 0.5, 4, 1)
    model, optimizer = ours(state, torch.float32, scaler, lr=0.5)
    assert_same(dict(optimizer.main_params()), dict(loop.model.named_parameters()))
    for step, overflow in enumerate(schedule(20, 3)):
        assert step_ours(model, optimizer, step, overflow) == loop.step(step, overflow)
    assert_same(dict(optimizer.main_params()), dict(loop.model.named_parameters()))


def test_torch_checkpoint_converts(tmp_path: Path) -> None:
    """A dict of model, optimizer and scaler: converted by the command line, it goes on in an optimizer of ours."""
    loop = TorchLoop(torch_scaler()).run()
    content = {"model": loop.model.state_dict(), "optimizer": loop.optimizer.state_dict()}
    torch.save(content | {"scaler": loop.scaler.state_dict()}, tmp_path / "last.pt")
    go_on_like_torch(loop, converted(tmp_path / "last.pt", tmp_path / "ours.pt"))


def test_accelerate_folder_converts(tmp_path: Path) -> None:
    """Accelerator.save_state: scaler.pt goes on for 200 steps; the folder converts, with the parameters' names."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.scaler = torch_scaler()
    model = net(torch.float32)
    inner = torch.optim.AdamW(model.named_parameters(), **ADAMW)
    loop = TorchLoop(accelerator.scaler, accelerator.prepare(model, inner)[0], inner).run()
    accelerator.save_state(str(tmp_path / "state"))
    assert (tmp_path / "state" / "model.safetensors").is_file()
    go_on_like_torch(loop, converted(tmp_path / "state", tmp_path / "ours.pt"))
    accelerator.save_state(str(tmp_path / "later"))
    follow(load_scaler_state(tmp_path / "later"), loop.peer())


def test_lightning_checkpoint_converts(tmp_path: Path) -> None:
    """A Trainer with its MixedPrecision plugin, trained with overflows: its .ckpt goes on, and converts."""
    pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", torch_scaler())

    class Module(pl.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net(torch.float32)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss: Tensor = self.net(batch).float().square().mean()
            return loss * torch.inf if index in (3, 4, 11) else loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), **ADAMW)

    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", plugins=[plugin], logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path,
    )  # fmt: skip
    module = Module()
    batches: Any = torch.randn(22, 4, generator=torch.Generator().manual_seed(0))
    trainer.fit(module, torch.utils.data.DataLoader(batches))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    state = converted(tmp_path / "last.ckpt", tmp_path / "ours.pt")
    for name, weight in module.named_parameters():
        moments = trainer.optimizers[0].state[weight]
        assert torch.equal(state["main_params"][name], weight)
        assert torch.equal(state["optimizer"]["state"][name]["exp_avg"], moments["exp_avg"])
        assert int(state["optimizer"]["state"][name]["step"]) == 22 - 3
    loop = TorchLoop(plugin.scaler)
    follow(load_scaler_state(tmp_path / "last.ckpt"), loop.peer())


# Megatron-Core


@pytest.fixture
def megatron(alone: None) -> Iterator[Any]:
    """Megatron-Core's optimizers, on the CPU, in a model-parallel group of one."""
    megatron_on_cpu.install()
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from megatron.core import optimizer, parallel_state

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    yield optimizer
    parallel_state.destroy_model_parallel()


def test_megatron_scaler_goes_on(megatron: Any, record_property: Callable[[str, object], None]) -> None:
    """Its DynamicGradScaler, past negative hysteresis trackers: the same scales for 200 steps."""
    from tests.integrations.megatron_runs import check_defect

    scaler = megatron.DynamicGradScaler(2.0**12, 2.0**4, 2.0, 0.5, 5, 3)
    for overflow in [*schedule(BEFORE, 5), True, True, True, True, True, False]:
        scaler.update(overflow)
    tracker = scaler.state_dict()["hysteresis_tracker"]
    check_defect("the hysteresis tracker falls below 0", tracker < 0, tracker == 0, record_property)

    def peer(overflow: bool) -> float:
        scaler.update(overflow)
        return float(scaler.scale)

    found = load_scaler_state(scaler.state_dict())
    follow(found, peer, growth_interval=5, hysteresis=3, min_scale=2.0**4)


class MegatronRun:
    """Its Float16 optimizer over a model with two param groups, as weight decay makes them."""

    def __init__(self, megatron: Any) -> None:
        from megatron.core import parallel_state

        self.model = net(torch.float16)
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        other = [p for p in self.model.parameters() if p.dim() == 1]
        config = megatron.OptimizerConfig(
            optimizer="adam", lr=ADAMW["lr"], adam_beta1=0.9, adam_beta2=0.98, adam_eps=1e-6, weight_decay=0.1,
            fp16=True, params_dtype=torch.float16, initial_loss_scale=2.0**10, min_loss_scale=2.0**-20,
            loss_scale_window=4, hysteresis=2, clip_grad=0.0,
        )  # fmt: skip
        self.optimizer = megatron._get_megatron_optimizer_based_on_param_groups(
            config,
            [self.model],
            [{"params": decayed, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}],
            model_parallel_group=parallel_state.get_model_parallel_group(),
        )

    def step(self, step: int, overflow: bool) -> float:
        """Take one step and return the scale after it."""
        given = grads(self.model, float(self.optimizer.get_loss_scale()), step, overflow)
        for param, grad in zip(self.model.parameters(), given, strict=True):
            param.grad = grad
        self.optimizer.step()
        return float(self.optimizer.get_loss_scale())

    def save(self, root: Path) -> None:
        """Write the files of ``--ckpt-format torch``."""
        folder = root / "iter_0000061" / "mp_rank_00"
        folder.mkdir(parents=True)
        (root / "latest_checkpointed_iteration.txt").write_text("61")
        args = Namespace(loss_scale=None, loss_scale_window=4, hysteresis=2, min_loss_scale=2.0**-20)
        content = {"args": args, "checkpoint_version": 3.0, "iteration": 61, "model": self.model.state_dict()}
        torch.save(content | {"optimizer": self.optimizer.state_dict()}, folder / "model_optim_rng.pt")

    def mains(self) -> list[Tensor]:
        """Return the main params in the model's order."""
        return [vars(param)["main_param"] for param in self.model.parameters()]


def test_megatron_checkpoint_converts(megatron: Any, tmp_path: Path) -> None:
    """Its Float16 optimizer's checkpoint: names are found by rounding, the window in args; it goes on for 40 steps."""
    run = MegatronRun(megatron)
    for step, overflow in enumerate(schedule(BEFORE, 0)):
        run.step(step, overflow)
    run.save(tmp_path / "checkpoints")
    scaler = load_scaler_state(tmp_path / "checkpoints").build_grad_scaler()
    assert isinstance(scaler, DynamicGradScaler)
    state = converted(tmp_path / "checkpoints", tmp_path / "ours.pt")

    model = net(torch.float16, seed=9)
    named = list(model.named_parameters())
    inner = torch.optim.AdamW(
        [{"params": [item for item in named if item[1].dim() > 1]}, {"params": [i for i in named if i[1].dim() == 1]}],
        **ADAMW,
    )
    optimizer = MixedPrecisionOptimizer(inner, None, scaler)
    optimizer.load_state_dict(state)
    mains = dict(optimizer.main_params())
    for (name, half), peer, main in zip(named, run.model.parameters(), run.mains(), strict=True):
        assert torch.equal(mains[name], main)
        assert torch.equal(half, peer)
    for step, overflow in enumerate(schedule(40, 3)):
        assert step_ours(model, optimizer, step, overflow) == run.step(step, overflow)
    assert_same(dict(optimizer.main_params()), {name: main for (name, _), main in zip(named, run.mains(), strict=True)})
