"""The ranks of tests/pool.py on the simulated device, for test bodies that name no device: what they make is on it."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megascale.step.deferred_errors import DeferredErrors
from tests.fake_device import process
from tests.fake_device.device import FakeDevice
from tests.pool import CALL_TIMEOUT_S, RankFailure, RankPool

T = TypeVar("T")


class SimulatedRanks(RankPool):
    """Ranks with a device each, whose collectives keep NCCL's rules: see ranks.py.

    Args:
        seed: of the order in which streams run.
        at_once: whether a step waits for its statistics, as beside a CPU: its errors are not one step late.
    """

    def __init__(self, on_device: process.OnDevice, seed: int, at_once: bool) -> None:
        super().__init__()
        self._on_device = on_device
        self._how = seed, at_once

    def run(
        self, world_size: int, function: Callable[..., T], /, *args: Any, timeout: float = CALL_TIMEOUT_S
    ) -> list[T]:
        """See :class:`RankPool`."""
        try:
            return self._on_device.ranks(
                world_size, _run, *self._how, function, args, timeout=max(timeout, process.CALL_TIMEOUT_S)
            )
        except RankFailure as failure:
            failure.add_note(f"streams ran in the order of seed {self._how[0]}")
            raise


def _run(device: FakeDevice, seed: int, at_once: bool, function: Callable[..., T], args: tuple[Any, ...]) -> T:
    os.environ["MEGASCALE_BACKEND"] = "reference"  # made of operators, which run here; kernels of Triton do not
    if at_once:
        DeferredErrors.on_host = property(lambda _: True, lambda *_: None)  # type: ignore[assignment]
    with device.running("random", seed), torch.device("cuda", dist.get_rank()):
        return tree_map_only(Tensor, lambda tensor: tensor.cpu(), function(*args))
