"""Whether an estimate fits into a GPU's memory, and if not, which setups do."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from megascale.errors import ArgumentError
from megascale.estimation import Estimate, ModelSizes, Setup
from megascale.estimation.memory import held_bytes, transient_bytes
from megascale.estimation.partition import Partition

GPUS = {
    **{"h100": 80, "h200": 141, "b200": 180, "a100": 80, "a100-40": 40, "l40s": 48, "a10": 24, "l4": 24, "t4": 16},
    **{"v100": 32, "v100-16": 16, "rtx3090": 24, "rtx4090": 24, "rtx5090": 32},
}
"""Memory of a card in GB, as its maker names it."""
RANKS = tuple(1 << power for power in range(11))
COMPACT: dict[str, Any] = {
    "store_param_remainders": True, "exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8
}  # fmt: skip
"""The smallest state that AdamW can have."""
COMPACT_OPTIONS = "--store-param-remainders --exp-avg-dtype int8 --exp-avg-sq-dtype uint8"

OFFLOAD_OPTIONS = "--optimizer-cpu-offload"


def memory_of(gpu: str) -> int:
    """Return the bytes of a card: a name of :data:`GPUS`, or a number of GB. Raises ArgumentError for others."""
    try:
        size = float(GPUS.get(gpu.lower(), gpu))
    except ValueError:
        size = 0.0
    if not 0 < size < 1e6:
        raise ArgumentError(f"gpu must be one of {', '.join(GPUS)}, or its memory in GB, got {gpu!r}")
    return int(size * 1e9)


def lines(found: Estimate, gpu: str) -> Iterator[str]:
    """Yield what to tell of an estimate on that card: whether it fits; if not, what would."""
    memory = memory_of(gpu)
    name = f"{gpu.upper()}, {memory / 1e9:g} GB" if gpu.lower() in GPUS else f"{memory / 1e9:g} GB"
    yield f"Does it fit? ({name})"
    if found.peak <= memory:
        yield f"  yes: {(memory - found.peak) / 1e9:,.1f} GB per rank are left for activations"
        return
    yield f"  no: {(found.peak - memory) / 1e9:,.1f} GB per rank too much, and activations come on top"
    setups = list(_smaller(found.setup, found.sizes, memory))
    yield from (f"  fits with {options}: {peak / 1e9:,.1f} GB per rank" for options, peak in setups)
    if not setups:
        yield f"  nor does it with compact state on up to {RANKS[-1]:,} sharded ranks: take a larger card"


def _smaller(setup: Setup, sizes: ModelSizes, memory: int) -> Iterator[tuple[str, int]]:
    """Yield options that fit, and their peak: more sharded ranks, compact state or host memory, and both."""
    offloads = setup.optimizer_cpu_offload
    is_compact = setup.optimizer == "adamw" and not all(
        getattr(setup, name) == value for name, value in COMPACT.items()
    )
    compact: list[tuple[str, dict[str, Any]]] = [("", {})]
    if is_compact and not offloads:
        compact.append((COMPACT_OPTIONS, COMPACT))
    if not offloads and setup.optimizer != "muon":
        compact.append((OFFLOAD_OPTIONS, {"optimizer_cpu_offload": True}))
    for options, fields in compact:
        for ranks in (count for count in RANKS if count >= setup.ranks):
            sharding = "distributed" if ranks > 1 else setup.sharding
            smaller = replace(setup, ranks=ranks, sharding=sharding, rank=0, **fields)
            peak = peak_of(sizes, smaller)
            if peak <= memory:
                typed = f"--ranks {ranks} --sharding {sharding} {options}" if ranks > 1 else options
                yield typed.strip(), peak
                break


def peak_of(sizes: ModelSizes, setup: Setup) -> int:
    """Return the most bytes that rank 0 holds at once, without activations."""
    partition = Partition(sizes, setup)
    return Estimate(sizes, setup, held_bytes(partition), transient_bytes(partition), 0, {}, [], {}).peak
