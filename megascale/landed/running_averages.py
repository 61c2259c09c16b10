"""Running averages of tensors, updated only by landed steps: the first copies, the others average."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim.swa_utils import get_swa_avg_fn

from megascale.kernels.protocol import runs_of
from megascale.utils.transfer import to_device_async

AvgFn = Callable[[Tensor, Tensor, Tensor], Tensor]
MultiAvgFn = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor], None]

CHUNK_NUMEL = 2**24
"""Elements that are averaged at once; an update needs scratch of this size."""


class RunningAverages:
    """Averages of local tensors, side by side in flat memory, so that few kernels serve many tensors.

    Attributes:
        averages: one for each tensor, of its shape, dtype and device: live views.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.averages: list[Tensor] = list(tensors)
        self._chunks: list[tuple[list[int], Tensor]] = []
        for indices in _chunked(tensors):
            flat = torch.cat([tensors[index].detach().reshape(-1) for index in indices])
            self._chunks.append((indices, flat))
            for index, view in zip(indices, _views(flat, [tensors[index] for index in indices]), strict=True):
                self.averages[index] = view

    def update(
        self, currents: Sequence[Tensor], landed: Tensor, n_averaged: Tensor, average: MultiAvgFn, has_started: bool
    ) -> None:
        """Average ``currents`` in if ``landed``, bool, 0-d; copy them if ``n_averaged`` is 0. No host sync.

        ``has_started``: the host knows that ``n_averaged`` is not 0.
        """
        for indices, flat in self._chunks:
            here = [currents[index] for index in indices]
            count = to_device_async(n_averaged, flat.device)
            candidate = flat.clone()
            proposed = _views(candidate, here)
            average(proposed, here, count)
            if not has_started:
                is_first = count == 0
                for new, current in zip(proposed, here, strict=True):
                    new.copy_(torch.where(is_first, current, new))
            torch.where(to_device_async(landed, flat.device), candidate, flat, out=flat)


def _chunked(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield indices of tensors that share device and dtype, up to CHUNK_NUMEL elements, or one tensor."""
    alike: defaultdict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        alike[tensor.device, tensor.dtype].append(index)
    for indices in alike.values():
        for run in runs_of([tensors[index] for index in indices], CHUNK_NUMEL):
            yield [indices[at] for at in run]


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def rule_of(avg_fn: AvgFn | None, multi_avg_fn: MultiAvgFn | None) -> MultiAvgFn:
    """Return an averaging rule in either of torch's forms as one that writes lists in place."""
    if multi_avg_fn is not None:
        return multi_avg_fn
    return _equal_weights_ if avg_fn is None else partial(_each_, avg_fn)


def _each_(avg_fn: AvgFn, averages: Sequence[Tensor], currents: Sequence[Tensor], n_averaged: Tensor) -> None:
    for average, current in zip(averages, currents, strict=True):
        average.copy_(avg_fn(average, current, n_averaged))


def _equal_weights_(averages: Sequence[Tensor], currents: Sequence[Tensor], n_averaged: Tensor) -> None:
    """The arithmetic of torch's ``get_swa_avg_fn``, in its order."""
    if averages[0].is_floating_point():
        diffs = torch._foreach_sub(list(currents), list(averages))
        torch._foreach_div_(diffs, n_averaged + 1)
        torch._foreach_add_(list(averages), diffs)
    else:
        _each_(get_swa_avg_fn(), averages, currents, n_averaged)


def copy_(averages: Sequence[Tensor], currents: Sequence[Tensor], n_averaged: Tensor) -> None:
    """Copy ``currents`` into ``averages``."""
    torch._foreach_copy_(list(averages), list(currents))
