"""A loop in Accelerate and the same loop by hand, for tests in one process and on ranks."""

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn

from megascale import MixedPrecisionOptimizer
from megascale.integrations.accelerate import Accelerator

STEPS, MICRO_BATCHES = 9, 3
OVERFLOW_AT = (7, 12, 13)  # micro-batches
SKIPS = [step in (2, 4) for step in range(STEPS)]


@dataclass
class Seen:
    """What a loop reports, one entry a step."""

    skips: list[bool] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def reset() -> None:
    """Forget Accelerate's state, which a whole process shares."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@contextlib.contextmanager
def as_rank() -> Iterator[None]:
    """Make Accelerate see the ranks that torch.distributed sees, as a launcher's environment would."""
    before = dict(os.environ)
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    reset()
    try:
        yield
    finally:
        reset()
        os.environ.clear()
        os.environ.update(before)


def accelerator_of(**options: Any) -> Accelerator:
    """Return an accelerator on the CPU that accumulates three micro-batches."""
    return Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES, **options)


def loss_of(module: nn.Module, index: int, rank: int = 0, overflow: bool = True) -> Tensor:
    """Return the loss of a micro-batch: infinite at OVERFLOW_AT."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1000 * rank + index))
    loss: Tensor = module(x.to(next(module.parameters()).dtype)).float().square().mean()
    return loss * math.inf if overflow and index in OVERFLOW_AT else loss


def by_hand(module: nn.Module, optimizer: MixedPrecisionOptimizer, value: float | None = None, ranks: int = 1) -> Seen:
    """Run the loop that Accelerate is to equal, with the losses of all ranks; norms are clipped by ``clip_grad``."""
    seen = Seen()
    for step in range(STEPS):
        optimizer.zero_grad()
        for index in range(MICRO_BATCHES * step, MICRO_BATCHES * (step + 1)):
            losses = [loss_of(module, index, rank, overflow=rank == ranks - 1) for rank in range(ranks)]
            optimizer.scale_loss(torch.stack(losses).mean()).div(MICRO_BATCHES).backward()
        optimizer.prepare_grads()
        if value is not None:
            optimizer.clip_grad_value_(value)
        success, norm, _ = optimizer.step_with_ready_grads()
        seen.skips.append(not success)
        seen.norms.append(norm.item())
        seen.scales.append(optimizer.get_loss_scale().item())
    return seen


def with_accelerate(
    accelerator: Accelerator,
    module: nn.Module,
    optimizer: Any,
    *,
    norm: float | None = None,
    value: float | None = None,
    schedule: Any = None,
    steps: range = range(STEPS),
) -> Seen:
    """Run the loop of Accelerate's documentation with prepared objects. Of several ranks the last one overflows."""
    seen, rank = Seen(), accelerator.process_index
    overflow = rank == accelerator.num_processes - 1
    for index in range(MICRO_BATCHES * steps.start, MICRO_BATCHES * steps.stop):
        with accelerator.accumulate(module):
            accelerator.backward(loss_of(module, index, rank, overflow))
            if accelerator.sync_gradients and norm is not None:
                seen.norms.append(float(accelerator.clip_grad_norm_(module.parameters(), norm)))  # type: ignore[arg-type]
            if accelerator.sync_gradients and value is not None:
                accelerator.clip_grad_value_(module.parameters(), value)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            seen.skips.append(accelerator.optimizer_step_was_skipped)
            seen.rates.append(optimizer.param_groups[0]["lr"])
            if isinstance(optimizer.optimizer, MixedPrecisionOptimizer):
                seen.scales.append(optimizer.optimizer.get_loss_scale().item())
    return seen
