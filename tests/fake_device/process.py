"""Processes with the device: one that is ready, and for each call one forked from it, as no cache may be warm."""

import faulthandler
import gc
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tests.fake_device.device import FakeDevice
from tests.pool import Outcome, RankSet, values_of

T = TypeVar("T")

CALL_TIMEOUT_S = 200.0

DIED = "a process with the device died: of SIGSEGV, if host code touched memory of the device; stderr says where"

_ready: FakeDevice | None = None


class OnDevice:
    """Calls functions in new processes that have the device."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=make_ready)

    def __call__(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return ``function(device, *arguments)``, or raise what it raised. Both travel by pickle."""
        return self._pool.submit(_fork, function, arguments).result(240)

    def ranks(
        self, world_size: int, function: Callable[..., T], *arguments: Any, timeout: float = CALL_TIMEOUT_S
    ) -> list[T]:
        """Return what ``function(device, *arguments)`` returns on each of ``world_size`` ranks, by rank.

        They are processes of their own, which torch.distributed connects: see ranks.py. Each has a device of its own,
        which is its current one. Raises RankFailure.
        """
        outcomes = self._pool.submit(_fork_ranks, world_size, function, arguments, timeout).result(timeout + 40)
        return values_of(function, outcomes)

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown()


def make_ready() -> FakeDevice:
    """Give this process the device, for good."""
    global _ready
    if _ready is None:
        os.environ["TRITON_INTERPRET"] = "0"  # read when triton is imported
        if not os.access(os.path.expanduser("~"), os.W_OK):  # where Triton keeps what it has compiled
            os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(tempfile.gettempdir(), "triton-of-tests"))
        import megascale.kernels.triton.kernels  # noqa: F401  # read, not compiled
        from tests.fake_device import torch_cuda, triton_driver
        from tests.fake_device.device import library

        faulthandler.enable()
        library()
        _ready = FakeDevice()
        torch_cuda.install(_ready)
        triton_driver.install(_ready, {"total_kernel": triton_driver.clean_step})
        triton_driver.warm_up()
        torch.optim.SGD([torch.zeros(1)], lr=0.1)  # what torch imports for its first optimizer takes seconds
        gc.freeze()  # what walks through all objects, as a GradSync does once, leaves these out: see tests/warm.py
    return _ready


def _fork(function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as forked:
        try:
            return forked.submit(_call, function, arguments).result()
        except BrokenProcessPool as error:
            raise BrokenProcessPool(DIED) from error


def _fork_ranks(
    world_size: int, function: Callable[..., T], arguments: tuple[Any, ...], timeout: float
) -> list[Outcome[T]]:
    import tests.fake_device.ranks  # noqa: F401  # from now on this process has "nccl"

    forked = RankSet(world_size, backend="nccl", context=multiprocessing.get_context("fork"))
    try:
        forked.submit(_call_of_rank, function, arguments)
        return forked.collect(timeout)
    finally:
        forked.kill_all()


def _call_of_rank(function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    torch.cuda.set_device(dist.get_rank())
    return _call(function, arguments)


def _call(function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    return function(make_ready(), *arguments)
