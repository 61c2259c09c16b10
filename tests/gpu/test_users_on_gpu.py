"""What users do around the step, on an accelerator: wrappers of one rank, checkpoints that move, programs that run."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megascale import DistributedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.checkpoint import Checkpointer
from megascale.utils.dtensors import to_local
from tests.fake_device.training import CODES, OVERLAP
from tests.gpu import device
from tests.jobs import job
from tests.training import bits_equal

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
RECIPES = {
    "finetune": ("transformers", "peft", "datasets"),
    "fsdp2": ("transformers",),
    "grpo": ("transformers", "trl", "datasets"),
    "offload": ("transformers",),
    "zero1": ("transformers",),
}
"""Examples with --model, and the libraries that each needs."""


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 1))
    return nn.Sequential(*layers).half().to(device())


def _wrapped(module: nn.Module, **options: Any) -> MixedPrecisionOptimizer:
    config = OptimizerConfig(fp16=True, clip_grad=1.0, **options)
    scaler = DynamicGradScaler(2.0**8, growth_interval=3)
    return MixedPrecisionOptimizer(torch.optim.AdamW(module.named_parameters(), lr=1e-2), config, scaler)


def _train(module: nn.Module, optimizer: Any, steps: range) -> None:
    """Train; each fourth step overflows."""
    for step in steps:
        batch = torch.linspace(-1, 1, 8 * 32, device=device()).view(8, 32).half() * (1 + step % 3)
        optimizer.zero_grad()
        loss = module(batch).float().square().mean() * (math.inf if step % 4 == 2 else 1.0)
        optimizer.scale_loss(loss).backward()
        optimizer.step()
    optimizer.finish_param_gather()


def _same(module: nn.Module, other: nn.Module) -> bool:
    pairs = zip(module.parameters(), other.parameters(), strict=True)
    return all(bits_equal(to_local(one).detach(), to_local(two).detach()) for one, two in pairs)


def _ddp(module: nn.Module) -> tuple[nn.Module, Any]:
    return DistributedDataParallel(module), _wrapped(module)


def _fsdp2(module: nn.Module) -> tuple[nn.Module, Any]:
    mesh = init_device_mesh(device().type, (1,))
    for layer in (*(one for one in module.children() if isinstance(one, nn.Linear)), module):
        fully_shard(layer, mesh=mesh)
    return module, _wrapped(module)


def _sharded(module: nn.Module) -> tuple[nn.Module, Any]:
    config = OptimizerConfig(fp16=True, clip_grad=1.0)
    inner = torch.optim.AdamW(module.named_parameters(), lr=1e-2)
    return module, DistributedOptimizer(inner, config, DynamicGradScaler(2.0**8, growth_interval=3), modules=[module])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrap", [_ddp, _fsdp2, _sharded])
def test_one_rank_of_each_wrapper(wrap: Callable[[nn.Module], tuple[nn.Module, Any]]) -> None:
    """Its reductions and gathers are those of one rank: the bits of no wrapper."""
    plain, module = _model(), _model()
    optimizer = _wrapped(plain)
    wrapped, other = wrap(module)
    _train(plain, optimizer, range(8))
    _train(wrapped, other, range(8))
    assert _same(plain, module)
    assert optimizer.get_loss_scale().item() == other.get_loss_scale().item()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("options", [{}, CODES, OVERLAP], ids=["fp32", "codes", "offload"])
def test_a_checkpoint_goes_on_elsewhere(tmp_path: Path, options: dict[str, Any], asynchronous: bool) -> None:
    """Saved here, loaded on the CPU, saved there and loaded here: the bits of a run without interruption."""
    module, twin = _model(), _model()
    optimizer, whole = _wrapped(module, **options), _wrapped(twin, **options)
    _train(twin, whole, range(8))
    _train(module, optimizer, range(5))
    with Checkpointer(tmp_path / "here", async_save=asynchronous) as checkpoints:
        checkpoints.save(5, module, optimizer)
        _train(module, optimizer, range(5, 7))  # a save that is under way holds what was there before
    on_host = _model().cpu()
    hosted = _wrapped(on_host, **(CODES if options is CODES else {}))
    Checkpointer(tmp_path / "here").load(on_host, hosted)
    with Checkpointer(tmp_path / "there") as checkpoints:
        checkpoints.save(5, on_host, hosted)
    again = _model()
    resumed = _wrapped(again, **options)
    Checkpointer(tmp_path / "there").load(again, resumed)
    _train(again, resumed, range(5, 8))
    assert _same(again, twin)


def _printed(*program: str) -> str:
    """Return what a program prints under torchrun, with one process."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", *program]
    with job(command, {"PYTHONPATH": str(ROOT), "NCCL_SOCKET_IFNAME": "lo"}) as running:
        return running.finish(timeout=100)


@pytest.mark.parametrize("program", ["local_optimizer", "wrong_gradient", *RECIPES])
def test_an_example_runs(tmp_path: Path, program: str) -> None:
    """As its page says, with one process per device."""
    for library in RECIPES.get(program, ()):
        pytest.importorskip(library, reason=f"needs {library}: .ci/install_integrations")
    tiny = ["--model", "tiny", "--steps", "10", "--folder", str(tmp_path)] if program in RECIPES else []
    assert _printed(str(ROOT / "examples" / f"{program}.py"), *tiny)


def test_the_training_program_runs(tmp_path: Path) -> None:
    """README's first program, for a few steps."""
    assert _printed("-m", "megascale.train", "steps=4", f"output_dir={tmp_path}")
