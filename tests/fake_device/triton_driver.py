"""A Triton driver without a GPU: kernels take the JIT's own path up to the launch, which is reported, and not made.

What is compiled, for sm_90, is kept in Triton's own cache: a kernel is compiled once on a machine.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from megascale.kernels import NUM_STATISTICS, WITH_GRADS, Statistic
from tests.fake_device.device import FakeDevice, current_stream, library

Effect = Callable[[dict[str, Any]], None]


class _Device:
    """What Triton asks of the device that is current."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_current_device(self, index: int) -> None:
        torch.accelerator.set_device_index(index)

    def get_current_stream(self, index: int | None = None) -> int:
        return current_stream(index)[1]

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", self.get_current_device())

    def get_device_interface(self) -> Any:
        return torch.cuda

    @staticmethod
    def is_active() -> bool:
        return True


def install(device: FakeDevice, effects: dict[str, Effect]) -> None:
    """Let Triton launch here.

    Args:
        effects: by the kernel's name, what a launch does to its arguments, given by name. Other kernels do nothing.
    """

    class Utils:
        def get_device_properties(self, index: int) -> dict[str, int]:
            return {"max_shared_mem": 232448, "multiprocessor_count": 132}

        def load_binary(self, name: str, *_: Any) -> tuple[int, int, int, int, int]:
            device.report("load", name, current_stream())
            return 1, 1, 0, 0, 1024  # module, function, registers, spills, threads

        def unload_module(self, *_: Any) -> None:
            pass

    class Launcher:
        """Called for every launch, with the names of the kernel's arguments."""

        def __init__(self, source: Any, metadata: Any) -> None:
            self._name: str = source.fn.__name__
            self._arguments: list[str] = source.fn.arg_names
            self._effect = effects.get(self._name)

        def __call__(
            self, programs: int, y: int, z: int, stream: int, function: int, packed: Any, metadata: Any, enter: Any,
            leave: Any, *values: Any,
        ) -> None:  # fmt: skip
            if device.is_watched:
                device.report("launch", self._name, current_stream(), programs)
            if self._effect is not None:
                if device.order != "at once":  # an effect comes at once
                    torch.accelerator.current_stream().synchronize()
                self._effect(dict(zip(self._arguments, values, strict=False)))

    class Driver(_Device):
        utils = Utils()
        launcher_cls = Launcher

    driver.set_active(Driver())


@triton.jit
def _nothing_kernel() -> None:
    """Do nothing."""


def warm_up() -> None:
    """Let Triton do what it does once in a process, such as reading all of its files for a checksum."""
    _nothing_kernel[(1,)](enable_fp_fusion=False)


def clean_step(arguments: dict[str, Any]) -> None:
    """What ``total_kernel`` writes for finite gradients of a scaled loss: see ``Statistic``."""
    statistics = ctypes.c_double * NUM_STATISTICS
    clean = {Statistic.SUM_SQUARES: 1.0, Statistic.SCALED: 1.0 - WITH_GRADS}
    statistics.from_address(library().bytes_of_device(arguments["vector"].data_ptr()))[:] = [
        clean.get(field, 0.0) for field in Statistic
    ]
