"""A whole training run on two ranks in a second or two: what the fault campaign kills, and starts again.

It is sharded, in fp16 with steps that are skipped, reads its data from generators whose state is saved with each rank,
and saves every few steps. Main params may live in host memory, where a thread updates them slowly. Its end is one
digest of all that training has made, so that two runs are compared by a word.

    torchrun --nproc-per-node 2 -m tests.reliability.tiny_run FOLDER [async]
"""

import hashlib
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megascale import DistributedOptimizer
from megascale.checkpoint import Checkpointer
from tests.distributed.test_distributed_optimizer import INNER, config_of, flat, net, scaler, sharded, weights
from tests.host_kernel import change_host_kernel
from tests.pool import GLOO_TIMEOUT_S

STEPS = 40
SAVE_EVERY = 4
OVERFLOWS = (3, 4, 17, 30)
"""Steps in which rank 1 has an inf."""


UPDATE_S = 0.02
"""What a slow update of a bucket in host memory takes, in seconds."""


class How(NamedTuple):
    """How a run trains.

    Attributes:
        asynchronous: it saves in the background.
        in_host_memory: main params live there, and each rank has a file ``updating_RANK`` while its thread updates.
    """

    asynchronous: bool = False
    in_host_memory: bool = False


def _optimizer(module: torch.nn.Module, mark: Path, how: How) -> DistributedOptimizer:
    if not how.in_host_memory:
        return sharded(module, overlap_param_gather=True)
    dtype = next(module.parameters()).dtype
    config = replace(config_of(dtype), optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=True)
    optimizer = DistributedOptimizer(
        INNER["adamw"](module), config, scaler(dtype), modules=module, bucket_numel=300, grads_are_scaled=True
    )

    def marked(kernel: Callable[..., Any], *arguments: Any) -> Any:
        mark.touch()
        time.sleep(UPDATE_S / 2)
        flags = kernel(*arguments)
        time.sleep(UPDATE_S / 2)
        mark.unlink()
        return flags

    change_host_kernel(optimizer, marked)
    return optimizer


def train(folder: Path, how: How, steps: int = STEPS) -> tuple[int, str]:
    """Train to the last step from the latest checkpoint in ``folder``. Returns where it resumed, and the digest."""
    rank = dist.get_rank()
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / f"updating_{rank}"
    mark.unlink(missing_ok=True)
    (folder / f"begun_{rank}").touch()
    with Checkpointer(folder, keep_last=2, async_save=how.asynchronous) as checkpointer:
        module = net()
        optimizer = _optimizer(module, mark, how)
        torch.manual_seed(rank)
        done = 0
        if checkpointer.latest() is not None:
            loaded = checkpointer.load(module, optimizer)
            done = loaded.step
            assert loaded.rank_state is not None
            torch.set_rng_state(loaded.rank_state["rng"])
        resumed_at = done
        while done < steps:
            batch = torch.randn(6, 4).half()
            factor = math.inf if done in OVERFLOWS and rank == 1 else 1.0
            optimizer.zero_grad()
            optimizer.scale_loss(module(batch).float().square().mean() * factor).backward()
            optimizer.step()
            done += 1
            if done % SAVE_EVERY == 0:
                checkpointer.save(done, module, optimizer, rank_state={"rng": torch.get_rng_state()})
        optimizer.finish_param_gather()
        state = optimizer.state_dict()
        tensors = flat(state) | weights(module) | {"scale": state["grad_scaler"]["scale"], "rng": torch.get_rng_state()}
    digest = hashlib.sha256(repr((state["grad_scaler"]["growth_tracker"], optimizer.num_skipped_steps)).encode())
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return resumed_at, digest.hexdigest()


def main() -> None:
    """Join the ranks of torchrun, train, and write each rank's end beside the checkpoints."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=GLOO_TIMEOUT_S))
    if dist.get_rank() == 0:
        print("begun", flush=True)
    resumed_at, digest = train(folder / "checkpoints", How(asynchronous="async" in sys.argv[2:]))
    (folder / f"end_{dist.get_rank()}").write_text(digest)
    print(f"rank {dist.get_rank()} resumed at {resumed_at}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
