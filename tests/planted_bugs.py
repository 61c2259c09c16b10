"""Runs examples/wrong_gradient.py with a bug on rank 1 in one place of a gradient's path, one place after the other.

``torchrun --standalone --nproc-per-node 2 -m tests.planted_bugs``: prints the example's lines under each bug's name.
"""

import io
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megascale.grad_sync.reduction import BucketReduction
from megascale.grad_sync.sync import GradSync
from megascale.main_params.gather import GatheredBucket
from megascale.step.kernel_update import KernelUpdate
from megascale.step.local_grads import Found, ReadyGrads

EXAMPLE = Path(__file__).parents[1] / "examples/wrong_gradient.py"


@contextmanager
def _around(owner: type, method: str, planted: Callable[..., Any]) -> Iterator[None]:
    """Have ``planted(original, *arguments)`` in the place of a method, on rank 1."""
    original = getattr(owner, method)
    with mock.patch.object(owner, method, lambda *arguments: planted(original, *arguments)):
        yield


def _halved_by_the_hook(original: Any, sync: Any, name: str, param: Any, bucket: Any) -> None:
    if name == "3.weight":
        param.grad.mul_(0.5)
    original(sync, name, param, bucket)


def _changed_before_it_is_sent(original: Any, reduction: Any, divisor: Any) -> None:
    reduction.flat[:8].mul_(1.5)
    original(reduction, divisor)


def _changed_when_it_has_arrived(original: Any, reduction: Any, divisor: Any) -> None:
    original(reduction, divisor)
    reduction.kept[:8].mul_(1.5)


def _of_the_step_before(original: Any, grads: Any, unit: Any) -> Any:
    found = original(grads, unit)
    if isinstance(found, Found):
        now = [grad.clone() for grad in found.grads]
        before = grads.__dict__.setdefault("planted", {})
        found = found._replace(grads=type(found.grads)(before.get(id(unit), now)))
        before[id(unit)] = now
    return found


def _changed_for_the_kernel(original: Any, update: Any, prepared: Any, *rest: Any) -> Any:
    prepared.operands.grad = [grad.flip(0) for grad in prepared.operands.grad]
    return original(update, prepared, *rest)


def _rounded_wrongly(original: Any, update: Any, prepared: Any, *rest: Any) -> Any:
    flags = original(update, prepared, *rest)
    prepared.operands.model[-1].mul_(1.5)
    return flags


def _changed_in_the_gather(original: Any, bucket: Any) -> None:
    original(bucket)
    bucket.memory.flat[:4].add_(1.0)


BUGS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "hook": (GradSync, "_accumulate", _halved_by_the_hook),
    "before": (BucketReduction, "start", _changed_before_it_is_sent),
    "after": (BucketReduction, "finish", _changed_when_it_has_arrived),
    "stale": (ReadyGrads, "_synced", _of_the_step_before),
    "kernel": (KernelUpdate, "run", _changed_for_the_kernel),
    "rounding": (KernelUpdate, "run", _rounded_wrongly),
    "gather": (GatheredBucket, "end", _changed_in_the_gather),
}


def main() -> None:
    """Run the example once without a bug, and once with each."""
    dist.init_process_group("gloo")
    rank, end = dist.get_rank(), dist.destroy_process_group
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group", dist.barrier),
    ):
        for name in ("none", *BUGS):
            dist.barrier()
            if rank == 0:
                print(f"bug: {name}", flush=True)
            if name == "none" or rank != 1:
                runpy.run_path(str(EXAMPLE))
                continue
            with _around(*BUGS[name]):
                runpy.run_path(str(EXAMPLE))
    end()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Both ranks print into one pipe. Unbuffered, a line's text and its end are two writes, between which the other
        # rank's come; a line that is buffered up to its end is one.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    main()
