"""Segments: flat memory in which main params, and state that our rules update, have their places. It never moves.

A segment holds tensors of one purpose and dtype, side by side in the order in which they are updated: an update of many
small tensors in memory of their own spends half of its time on TLB misses. Each tensor begins at a multiple of 32
elements, so that no vector and no group of codes reaches into two of them.

A segment has at most 256 MiB, so that no large block is needed to load, move or pin it; a larger tensor has one of its
own. It is freed with the last of its tensors.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megascale.utils.host_memory import fixed
from megascale.utils.multiples import rounded_up

LARGEST = 1 << 28
"""Bytes of a segment, at most, if it holds more than one tensor."""
ALIGNMENT = 32
"""Elements: each tensor begins at a multiple of it."""


class Form(NamedTuple):
    """What a tensor in a segment is to be like."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, tensor: Tensor, dtype: torch.dtype) -> "Form":
        """Return the form of a tensor, in ``dtype`` and without gaps between its elements."""
        dense = tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")
        return cls(tensor.shape, dense.stride(), dtype, tensor.device)


@torch.inference_mode(mode=False)  # of tensors that are made there nobody may write any, ever
@torch.no_grad()
def in_segments(forms: Sequence[Form], alignment: int = ALIGNMENT) -> list[Tensor]:
    """Return zeros of these forms, in new segments. ``alignment``: 1 for numbers, as step counts are."""
    runs: defaultdict[tuple[torch.dtype, torch.device], list[list[int]]] = defaultdict(list)
    begins, ends = [0] * len(forms), [0] * len(forms)
    for index, form in enumerate(forms):
        segments, numel = runs[form.dtype, form.device], form.shape.numel()
        begin = rounded_up(ends[segments[-1][-1]], alignment) if segments else 0
        if not segments or (begin + numel) * form.dtype.itemsize > LARGEST:
            segments.append([])
            begin = 0
        segments[-1].append(index)
        begins[index], ends[index] = begin, begin + numel
    tensors: dict[int, Tensor] = {}
    for (dtype, device), segments in runs.items():
        for segment in segments:
            memory = fixed(torch.zeros(ends[segment[-1]], dtype=dtype, device=device))
            for index in segment:
                # .data: no view to autograd, whose base would keep memory that offload() frees.
                tensors[index] = memory.as_strided(forms[index].shape, forms[index].strides, begins[index]).data
    return [tensors[index] for index in range(len(forms))]


def side_by_side(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return 1-D views of the memory of 0-d tensors of one dtype: one view for each run without gaps, in any order."""
    runs: list[list[Tensor]] = []
    for tensor in sorted(tensors, key=Tensor.data_ptr):
        before = runs[-1][-1] if runs else None
        if before is None or tensor.data_ptr() - before.data_ptr() != tensor.element_size():
            runs.append([])
        runs[-1].append(tensor)
    return [run[0].as_strided([len(run)], [1]).detach() for run in runs]
