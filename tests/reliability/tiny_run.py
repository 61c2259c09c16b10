"""A whole training run on two ranks in a second or two: what the fault campaign kills, and starts again.

It is sharded, in fp16 with steps that are skipped, reads its data from generators whose state is saved with each rank,
and saves every few steps. Its end is one digest of all that training has made, so that two runs are compared by a word.

    torchrun --nproc-per-node 2 -m tests.reliability.tiny_run FOLDER [async]
"""

import hashlib
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megascale.checkpoint import Checkpointer
from megascale.grad_sync import message_thread
from megascale.rank_watch import RankWatch
from tests.distributed.test_distributed_optimizer import flat, net, sharded, weights

STEPS = 40
SAVE_EVERY = 4
OVERFLOWS = (3, 4, 17, 30)
"""Steps in which rank 1 has an inf."""


def train(folder: Path, asynchronous: bool, steps: int = STEPS) -> tuple[int, str]:
    """Train to the last step from the latest checkpoint in ``folder``. Returns where it resumed, and the digest."""
    rank = dist.get_rank()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"begun_{rank}").touch()
    message_thread.PROBE_INTERVAL_S = 0.5  # a lost message is known after two of these: 1 s here, else 10
    with RankWatch(20.0), Checkpointer(folder, keep_last=2, async_save=asynchronous) as checkpointer:
        module = net()
        optimizer = sharded(module, overlap_param_gather=True)
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
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        print("begun", flush=True)
    resumed_at, digest = train(folder / "checkpoints", "async" in sys.argv[2:])
    (folder / f"end_{dist.get_rank()}").write_text(digest)
    print(f"rank {dist.get_rank()} resumed at {resumed_at}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
