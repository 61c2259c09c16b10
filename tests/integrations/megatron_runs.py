"""Small trainings in Megatron-Core's way, with its optimizer or ours: its DistributedDataParallel, its schedule."""

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.peers import megatron_on_cpu

megatron_on_cpu.install()

import megatron.core  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig as OptimizerConfig  # noqa: E402
from megatron.core.optimizer import get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from megascale.integrations import megatron as ours  # noqa: E402

OVERFLOWS = (3, 4, 5, 11)
"""Steps whose loss is inf on the last rank: with hysteresis 2 the scale backs off twice, then once more."""

VERSION: str = megatron.core.__version__

RELEASES = ("0.16.1", "0.19.2")
"""Those that were read to the end: every field of their configs is known, and :data:`DEFECTS` knows them."""

DEFECTS: dict[str, tuple[str, ...]] = {
    "whole experts of one rank alone count": ("0.16.1",),
    "bf16 steps on NaN gradients": ("0.16.1", "0.19.2"),
    "the hysteresis tracker falls below 0": ("0.16.1", "0.19.2"),
}
"""What Megatron does wrong, and the releases that do. A later one may, or may have mended it."""

MAKERS: dict[str, Callable[..., Any]] = {"theirs": get_megatron_optimizer, "ours": ours.get_megatron_optimizer}


class Net(nn.Module):
    """Dense layers, of which one may be frozen and a norm may be fp32, and an expert of each rank's own."""

    def __init__(self, dtype: torch.dtype, *, fp32_norm: bool, frozen: bool, expert: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6).to(dtype)
        self.still = nn.Linear(6, 6).to(dtype).requires_grad_(not frozen)
        self.norm = nn.LayerNorm(6).to(torch.float32 if fp32_norm else dtype)
        self.head = nn.Linear(6, 4).to(dtype)
        self.expert = nn.Linear(4, 4).to(dtype) if expert else None
        if self.expert is not None:
            for param in self.expert.parameters():
                param.allreduce = False  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Return shape [..., 4]."""
        x = self.still(self.first(x))
        x = self.norm(x.to(self.norm.weight.dtype)).to(self.head.weight.dtype)
        out: Tensor = self.head(x)
        return out if self.expert is None else self.expert(out)


@dataclass
class Run:
    """A model, its Megatron wrapper (None: the bare model), its optimizer and its schedule."""

    module: Net
    wrapped: DistributedDataParallel | None
    optimizer: Any
    scheduler: OptimizerParamScheduler

    def step(self, step: int, overflow: bool) -> tuple[Any, ...]:
        """Take one step of Megatron's ``train_step``; return what it logs: success, norm, zeros, scale, lr, decay."""
        rank = dist.get_rank()
        if self.wrapped is not None:
            self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = (self.wrapped or self.module)(x.to(self.module.first.weight.dtype)).float().square().mean()
        if overflow and rank == dist.get_world_size() - 1:
            loss = loss * math.inf
        self.optimizer.scale_loss(loss).backward()
        if self.wrapped is not None:
            self.wrapped.finish_grad_sync()
        success, norm, zeros = self.optimizer.step()
        if success is True:
            self.scheduler.step(1)
        decays = [group["weight_decay"] for group in self.optimizer.param_groups]
        scale = self.optimizer.get_loss_scale().item()
        return success, norm, zeros, scale, self.optimizer.param_groups[0]["lr"], decays

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's param groups."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def params(self) -> list[Tensor]:
        """Return copies of all model params."""
        return [param.detach().clone() for param in self.module.parameters()]


@contextmanager
def model_parallel(**sizes: int) -> Iterator[None]:
    """Megatron's process groups over the world, taken down at the end."""
    before = set(dist.distributed_c10d._world.pg_map)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **sizes)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        # Megatron leaves its process groups, some forty, to the end of the process; see tests/meshes.py for their cost.
        dist.barrier()
        for group in [group for group in dist.distributed_c10d._world.pg_map if group not in before]:
            dist.destroy_process_group(group)


def config(dtype: torch.dtype = torch.float16, **fields: Any) -> Any:
    """Return Megatron's OptimizerConfig."""
    fields = {
        "lr": 1e-2,
        "min_lr": 0.0,
        "weight_decay": 0.1,
        "initial_loss_scale": 2.0**10,
        "loss_scale_window": 3,
        "hysteresis": 2,
        "log_num_zeros_in_grad": True,
    } | fields
    return OptimizerConfig(fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16, params_dtype=dtype, **fields)


def wrap(module: nn.Module, dtype: torch.dtype = torch.float16, **options: Any) -> DistributedDataParallel:
    """Return ``module`` in Megatron's DistributedDataParallel, with fp32 main grads."""
    shape = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16
    )
    module.config = shape
    options = {"grad_reduce_in_fp32": True, "overlap_grad_reduce": True} | options
    return DistributedDataParallel(shape, DistributedDataParallelConfig(**options), module)


def start(
    maker: str,
    dtype: torch.dtype = torch.float16,
    *,
    fused: bool = False,
    bare: bool = False,
    fp32_norm: bool = False,
    frozen: bool = False,
    expert: bool = False,
    sharded: bool = False,
    mark: Callable[[Net], None] = lambda module: None,
    overrides: Any = None,
    **fields: Any,
) -> Run:
    """Return a run with "theirs" or "ours". ``fused``: torch's fused AdamW, whose order of arithmetic is ours.

    ``sharded``: Megatron's DistributedOptimizer, or, ``bare``, ours. ``mark`` may set attributes of parameters.
    ``overrides``: Megatron's ``config_overrides``.
    """
    module = Net(dtype, fp32_norm=fp32_norm, frozen=frozen, expert=expert)
    mark(module)
    wrapped = None if bare else wrap(module, dtype, use_distributed_optimizer=sharded)
    settings = config(dtype, use_distributed_optimizer=sharded, **fields)
    optimizer = MAKERS[maker](settings, [wrapped or module], overrides, use_gloo_process_groups=False)
    if fused:
        for group in optimizer.param_groups:
            group.update(fused=True, foreach=False)
    scheduler = OptimizerParamScheduler(optimizer, 0.0, 1e-2, 0.0, 5, 100, "cosine", 0.1, 0.2, 100, "linear")
    return Run(module, wrapped, optimizer, scheduler)


def train(run: Run, steps: Sequence[int], overflows: Sequence[int] = OVERFLOWS) -> list[Any]:
    """Train; return each step's log, and all model params after it."""
    return [(run.step(step, step in overflows), run.params()) for step in steps]


def check_defect(name: str, present: bool, mended: bool, record: Callable[[str, object], None]) -> None:
    """Fail unless Megatron does exactly one of the two, and a release that was read does what :data:`DEFECTS` says.

    ``record``: pytest's ``record_property``; it tells a reader of the report which of the two this version does.
    """
    assert present != mended, f"Megatron-Core {VERSION} does neither what is known nor what is right: {name}"
    if VERSION in RELEASES:
        assert present == (VERSION in DEFECTS[name]), f"Megatron-Core {VERSION}: {name}"
    record(name, f"Megatron-Core {VERSION}: {'as known' if present else 'mended'}")


def checkpoint(run: Run) -> dict[str, Any]:
    """Return what Megatron's ``--ckpt-format torch`` writes into ``model_optim_rng.pt``."""
    return {
        "args": Namespace(fp16=True, timers=print),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": run.module.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "opt_param_scheduler": run.scheduler.state_dict(),
        "rng_state": [{"torch_rng_state": torch.get_rng_state()}],
    }
