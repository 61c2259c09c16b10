"""Bytes of memory that the passes of one step read and write."""

from collections.abc import Iterable

import torch

from megascale.estimation.partition import Partition
from megascale.estimation.setup import main_dtype_of
from megascale.kernels.compact_moments import held_bytes
from megascale.utils.dtypes import HALF_DTYPES

ACCUMULATE, MEASURE, UPDATE = "accumulate gradients", "measure", "update"


def traffic_per_element(
    model_dtype: torch.dtype, grad_dtype: torch.dtype, moments: Iterable[torch.dtype], main_itemsize: int = 4
) -> tuple[float, float]:
    """Return the bytes that the statistics and the update read and write for each element.

    The first pass reads the gradient. The second reads it again, reads and writes the main param and the ``moments``,
    and writes the model param where that is a copy. A main param that is held as a remainder is decoded from the model
    param, which is then read, too. ``main_itemsize``: of what holds a copy.
    """
    is_copy = model_dtype in HALF_DTYPES
    main = 2 * (main_itemsize if is_copy else main_dtype_of(model_dtype).itemsize)
    model = model_dtype.itemsize * (2 if main_itemsize < 4 else 1) if is_copy else 0
    state = sum(2 * held_bytes(dtype) for dtype in moments)
    return grad_dtype.itemsize, grad_dtype.itemsize + main + state + model


def moved_bytes(partition: Partition) -> dict[str, int]:
    """Return bytes by pass, of this rank, in a step of one backward: kernels, and the sum into main grads."""
    setup = partition.setup
    moved = {ACCUMULATE: 0, MEASURE: 0, UPDATE: 0}
    for param in partition.sizes.params:
        grad_dtype = setup.grad_dtype_of(param.dtype)
        moments = setup.moment_dtypes(param)
        kept = partition.kept[param.name]
        measure, update = traffic_per_element(param.dtype, grad_dtype, moments, setup.main_itemsize)
        moved[MEASURE] += round(kept * measure)
        moved[UPDATE] += round(kept * update)
        if setup.has_main_grads:
            moved[ACCUMULATE] += param.numel * (param.dtype.itemsize + grad_dtype.itemsize)
    return moved
