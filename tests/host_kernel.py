"""Puts another function in the place of the kernel that updates main params in host memory."""

from collections.abc import Callable
from functools import partial
from typing import Any

from megascale import MixedPrecisionOptimizer
from megascale.step.host_update import HostUpdate


def change_host_kernel(optimizer: MixedPrecisionOptimizer, now: Callable[..., Any]) -> Callable[[], None]:
    """Let ``now`` run in place of AdamW's kernel in host memory, with that before its arguments.

    Updates that are under way go on as they are. Returns what puts the kernel back.
    """
    update = optimizer._member.update
    assert isinstance(update, HostUpdate)
    backend: Any = update.host_backend
    kernel = backend.adam_

    def put(new: Callable[..., Any]) -> None:
        backend.adam_ = new
        update.release_memory(optimizer._member.main_params.units())  # calls that know the one before

    put(partial(now, kernel))
    return partial(put, kernel)
