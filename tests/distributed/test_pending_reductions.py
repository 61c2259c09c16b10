"""Reductions that are under way at the same time, and the memory that they hold."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascale.grad_sync import GradSync, reduction
from megascale.utils import collectives
from tests.pool import RankPool


class _Noted:
    """Notes which message is begun and waited for, by its number; several waits for one count once."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self._real = collectives.all_reduce_start
        patch.setattr(reduction, "all_reduce_start", self._start)

    def _start(self, tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        number = int(tensor[0])  # before the other rank's is added
        work = self._real(tensor, *arguments, **options)
        self.events.append(f"begin {number}")
        noted = self

        class Work:
            def wait(self) -> None:
                noted.events.append(f"wait {number}")
                assert work is not None
                work.wait()

        return Work()


def _order(reduce_dtype: torch.dtype | None) -> list[list[str]]:
    params = [nn.Parameter(torch.ones(8)) for _ in range(4)]
    sync = GradSync(
        [(str(index), param) for index, param in enumerate(params)],
        bucket_numel=1,
        reduce_dtype=reduce_dtype,
        reduction="sum",
        overlap=False,
    )
    world = dist.get_world_size()
    seen = []
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            noted = _Noted(patch)
            sync.zero_()
            for index, param in enumerate(params):
                # The payload is divided first where it is narrow.
                (param * (index * (world if reduce_dtype else 1))).sum().backward()
            sync.finish()
        seen.append(noted.events)
    return seen


@pytest.mark.parametrize(
    ("reduce_dtype", "order"),
    [
        (None, ["begin 3", "begin 2", "begin 1", "begin 0", "wait 3", "wait 2", "wait 1", "wait 0"]),
        (torch.bfloat16, ["begin 3", "begin 2", "wait 3", "begin 1", "wait 2", "begin 0", "wait 1", "wait 0"]),
    ],
)
def test_two_copies_are_under_way_at_most(ranks: RankPool, reduce_dtype: torch.dtype | None, order: list[str]) -> None:
    """Of what travels in another dtype than it has there is a copy. What needs none waits for nothing, in any step."""
    assert ranks.run(2, _order, reduce_dtype) == [[order] * 2] * 2
