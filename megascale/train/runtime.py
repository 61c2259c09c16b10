"""Runtime: a rank's index, process group, device and signals."""

import gc
import os
import shlex
import signal
from collections.abc import Sequence
from datetime import timedelta
from types import FrameType, TracebackType

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megascale.train.config import DistributedConfig
from megascale.utils import call_site

FORCE_AFTER = 3  # signals; torchrun forwards the terminal's Ctrl-C, so one key press may arrive twice


class Runtime:
    """Joins the ranks of torchrun, or runs alone; CUDA with NCCL if there is a GPU, else the CPU with gloo.

    Inside its context, SIGINT and SIGTERM are only recorded; the third one ends the process.

    Args:
        threads: CPU threads of this rank; 0: the machine's cores divided by its ranks.
        distributed: how long ranks wait for one another.
    """

    def __init__(self, threads: int, distributed: DistributedConfig | None = None) -> None:
        self._distributed = distributed or DistributedConfig()
        self.rank = int(os.environ.get("RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        local_rank, local_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(threads or max(1, cores // local_size))
        self.under_torchrun = "RANK" in os.environ
        self.stop_signal = 0
        self._signals = 0
        self._handlers: dict[int, object] = {}

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank, which prints and logs for all."""
        return self.rank == 0

    @property
    def group(self) -> ProcessGroup | None:
        """The group of all ranks; None when alone."""
        return dist.group.WORLD if self.under_torchrun else None

    def __enter__(self) -> "Runtime":
        if self.under_torchrun:
            if self.is_first:
                _check_restarts()
            seconds = self._distributed.timeout
            dist.init_process_group(
                "nccl" if self.device.type == "cuda" else "gloo",
                timeout=None if seconds is None else timedelta(seconds=seconds),
            )
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self.under_torchrun and dist.is_initialized():
            # Gradient hooks make cycles that hold the process group, which must not outlive the interpreter.
            gc.collect()
            dist.destroy_process_group()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.stop_signal = self.stop_signal or number
        self._signals += 1
        if self._signals >= FORCE_AFTER:
            raise KeyboardInterrupt


def _check_restarts() -> None:
    """Warn of a torchrun whose restarted ranks would read the addresses of the old ones."""
    may_restart = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
    if may_restart and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        call_site.warn(
            "torchrun --max-restarts hands restarted ranks the store of those before them; they may fail to connect "
            "(https://github.com/pytorch/pytorch/issues/135712); set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun",
        )


def as_typed(arguments: Sequence[str]) -> str:
    """Return the command line that trains with ``arguments`` as this process does, on as many ranks."""
    program = ["-m", "megascale.train", *arguments]
    if "LOCAL_WORLD_SIZE" in os.environ:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = int(os.environ["WORLD_SIZE"]) // local
        hosts = ["--standalone"] if nodes == 1 else ["--nnodes", str(nodes)]
        return shlex.join(["torchrun", *hosts, "--nproc-per-node", str(local), *program])
    return shlex.join(["python", *program])
