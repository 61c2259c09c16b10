"""What against.py times beside single steps, with the megascale that Python finds: loops of amp, and two ranks."""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from peers.given import GivenModel, Setup, given_grads
from peers.work import Work, given_work

AMP = {"amp-step": "plain", "amp-clipped": "clipped", "amp-optimizer_step": "helped"}
"""Ends of an iteration on fp32 parameters, see step_amp.py, by name."""
ON_RANKS = {"replicated-2": "replicated", "sharded-2": "sharded"}
"""Optimizers of two ranks, see ours.py, by name."""

Turn = tuple[Callable[[], object], Callable[[], object]]
"""What is done before a step, and the step."""


def amp_turn(name: str, numel: int, tensors: int) -> Turn:
    """Return an end of an iteration; before it gradients are given anew."""
    module = import_module("peers.step_amp")
    cpu = torch.device("cpu")
    given = given_work(numel, tensors, torch.float32, cpu)
    work = Work(given.numel, tensors, torch.float32, cpu, given.grads, {"on": module.Trained(given)})
    loop = getattr(module, AMP[name])(work)
    return loop.prepare, loop.step


def ranks_turn(name: str, dtype: torch.dtype, numel: int, tensors: int, arguments: list[str], stack: ExitStack) -> Turn:
    """Return a step of two ranks; before it gradients are reduced. This process is rank 0, and starts the other.

    The other rank reads a line for each step, as this one does. ``arguments``: of this process.
    """
    rank, place = (1, sys.argv[-1]) if "--rank-1" in arguments else (0, "")
    other: Any = None
    if rank == 0:
        place = stack.enter_context(tempfile.TemporaryDirectory())
        command = [sys.executable, *arguments, "--rank-1", place]
        other = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL))
        stack.callback(other.stdin.close)
    dist.init_process_group("gloo", init_method=f"file://{Path(place, 'store')}", rank=rank, world_size=2)
    stack.callback(dist.destroy_process_group)
    setup = Setup(rank, 2, torch.device("cpu"), dtype, None, {})
    build = getattr(import_module("peers.ours"), ON_RANKS[name])
    contender = build(GivenModel(tensors, given_grads(numel // tensors * tensors, rank, dtype), setup), setup)

    def before() -> None:
        if other is not None:
            other.stdin.write(b"step\n")
            other.stdin.flush()
        contender.reduce()
        dist.barrier()

    return before, contender.step
