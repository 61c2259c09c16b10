"""What a rank can say about itself: bytes that live, bytes at the peak, collectives."""

import gc
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

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
