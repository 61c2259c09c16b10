"""What a process can say about its work: bytes that live, bytes at the peak, collectives, operators, host reads."""

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

OPERATIONS = {
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter (list)",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "allgather_": "all_gather (list)",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "recv_": "recv",
}
"""Names of torch's collective operators, in the words of its Python functions."""


def count_collectives(work: Callable[[], object]) -> Counter[str]:
    """Run ``work`` and return the collectives that it issued, from whatever thread."""
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, experimental_config=every_thread) as profile:
        work()
    counts: Counter[str] = Counter()
    for event in profile.events():
        namespace, _, name = event.name.partition("::")
        if namespace == "c10d" and name != "barrier":
            counts[OPERATIONS.get(name, name)] += 1
    return counts


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Otherwise torch.compile would run what it has compiled operator by operator while we count.
        return True

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def count_operators(work: Callable[[], object]) -> tuple[int, int]:
    """Run ``work`` and return how many operators of torch it dispatched, and how many of them gave the host a value."""
    with _Operators() as operators:
        work()
    return sum(operators.counts.values()), operators.counts[torch.ops.aten._local_scalar_dense.default]


_LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaMemcpy", "cuMemcpy", "cudaMemset", "cuMemset", "cudaGraphLaunch")
"""How the names of CUDA's calls begin that give the device something to do."""


def count_launches(work: Callable[[], object]) -> int:
    """Run ``work`` and return how many kernels, copies and fills it launched on the CUDA device."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    return sum(event.name.startswith(_LAUNCHES) for event in profile.events())


def count_host_syncs(work: Callable[[], object]) -> int:
    """Run ``work`` and return how often torch let the host wait for the CUDA device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def transient_bytes(work: Callable[[], object]) -> int:
    """Run ``work`` and return how far torch's allocator for the CPU rose above its start."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        work()
    held = highest = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            highest = max(highest, held)
    return highest


def live_bytes(but: Tensor | None = None) -> int:
    """Return the bytes of all storages that some tensor of this process refers to, each counted once, ``but`` one.

    A tensor that only C++ refers to is not seen; the peak shows it.
    """
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.layout == torch.strided:
            with suppress(RuntimeError):  # wrapper subclasses have no storage; what they wrap is found by itself
                storage = thing.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    if but is not None:
        found.pop(but.untyped_storage().data_ptr(), None)
    return sum(found.values())


def held_bytes(device: torch.device) -> int | None:
    """Return what this process holds now: on CPU its resident memory, else what the device's allocator has given out.

    None on CPU where the system is not Linux.
    """
    if device.type != "cpu":
        return torch.accelerator.memory_allocated(device)
    return _status("VmRSS")


def reset_peak(device: torch.device) -> None:
    """Begin anew to watch :func:`peak_bytes`."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int | None:
    """Return the most that :func:`held_bytes` has been since :func:`reset_peak`."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    return _status("VmHWM")


def _status(field: str) -> int | None:
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    for line in status.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return None
