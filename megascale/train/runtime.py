"""Runtime: a rank's index, process group, device and signals."""

import gc
import os
import signal
from datetime import timedelta
from types import FrameType, TracebackType

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megascale.utils import validate

FORCE_AFTER = 3  # signals; torchrun forwards the terminal's Ctrl-C, so one key press may arrive twice


class Runtime:
    """Joins the ranks of torchrun, or runs alone; CUDA with NCCL if there is a GPU, else the CPU with gloo.

    Inside its context, SIGINT and SIGTERM are only recorded; the third one ends the process.

    Args:
        threads: CPU threads of this rank; 0: the machine's cores divided by its ranks.
        timeout: seconds that a rank waits for another one; None: torch's own.
    """

    def __init__(self, threads: int, timeout: float | None = None) -> None:
        seconds = None if timeout is None else validate.positive("distributed.timeout", timeout)
        self._timeout = None if seconds is None else timedelta(seconds=seconds)
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
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo", timeout=self._timeout)
            # A rank that refuses its configuration leaves at once, while others may still be connecting to it.
            dist.barrier()
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
