"""Bytes of memory that the passes of one step read and write."""

from collections.abc import Iterable

import torch

from megascale.estimation.partition import Partition
from megascale.estimation.setup import main_dtype_of
from megascale.kernels.compact_moments import held_bytes
from megascale.utils.dtypes import HALF_DTYPES

ACCUMULATE, MEASURE, UPDATE = "accumulate gradients", "measure", "update"
TO_HOST, TO_DEVICE, ON_HOST = "gradients to the host", "weights to the device", "update in host memory"
STATE_TO_DEVICE, STATE_TO_HOST = "state to the device", "state to the host"


def traffic_per_element(
    model_dtype: torch.dtype, grad_dtype: torch.dtype, moments: Iterable[torch.dtype], main_itemsize: int = 4
) -> tuple[float, float]:
    """Return the bytes that the statistics and the update read and write for each element.

    The statistics read the gradient. The update reads it again, reads and writes main param and ``moments``, and writes
    a 16-bit model param. It also reads that one where the main param is held as a remainder. ``main_itemsize``: bytes
    of an element of a main param that is a copy, or of its remainder.
    """
    is_copy = model_dtype in HALF_DTYPES
    main = 2 * (main_itemsize if is_copy else main_dtype_of(model_dtype).itemsize)
    model = model_dtype.itemsize * (2 if main_itemsize < 4 else 1) if is_copy else 0
    state = sum(2 * held_bytes(dtype) for dtype in moments)
    return grad_dtype.itemsize, grad_dtype.itemsize + main + state + model


def moved_bytes(partition: Partition) -> dict[str, int]:
    """Return the bytes that this rank reads and writes on the device in a step of one backward, by pass."""
    setup = partition.setup
    moved = {ACCUMULATE: 0, MEASURE: 0, UPDATE: 0}
    for param in partition.sizes.params:
        grad_dtype = setup.grad_dtype_of(param.dtype)
        moments = setup.moment_dtypes(param)
        kept = partition.kept[param.name]
        measure, update = traffic_per_element(param.dtype, grad_dtype, moments, setup.main_itemsize)
        moved[MEASURE] += round(kept * measure)
        on_host = 0 if setup.state_visits_device else partition.there[param.name]
        moved[UPDATE] += round((kept - on_host) * update)
        if setup.has_main_grads:
            moved[ACCUMULATE] += param.numel * (param.dtype.itemsize + grad_dtype.itemsize)
    return moved


def offload_traffic(partition: Partition) -> dict[str, int]:
    """Return the bytes that cross the bus in a step, each way, and that the update moves in host memory.

    Empty without ``optimizer_cpu_offload``. What copies themselves read and write in host memory is not counted.
    """
    setup = partition.setup
    if setup.state_visits_device:
        return _visits(partition)
    moved = {TO_HOST: 0, TO_DEVICE: 0, ON_HOST: 0}
    for param in partition.sizes.params:
        there, grad_dtype = partition.there[param.name], setup.grad_dtype_of(param.dtype)
        _, update = traffic_per_element(param.dtype, grad_dtype, setup.moment_dtypes(param), setup.main_itemsize)
        moved[TO_HOST] += there * grad_dtype.itemsize
        moved[TO_DEVICE] += there * param.dtype.itemsize
        moved[ON_HOST] += round(there * update)
    return moved if any(moved.values()) else {}


def _visits(partition: Partition) -> dict[str, int]:
    """Return the bytes of main params and moments that visit the device: there, and back."""
    setup, moved = partition.setup, 0.0
    weights = 0
    for param in partition.sizes.params:
        there = partition.there[param.name]
        moved += there * (setup.main_itemsize + sum(held_bytes(dtype) for dtype in setup.moment_dtypes(param)))
        # A remainder counts from the weights, a copy of which stays beside it.
        weights += there * param.dtype.itemsize * setup.store_param_remainders
    return {STATE_TO_DEVICE: round(moved), STATE_TO_HOST: round(moved) + weights} if moved else {}
