"""A CPU that verl takes for an NVIDIA GPU: VERL_USE_EXTERNAL_MODULES names this module, VERL_PLATFORM the platform."""

import contextlib
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry


@PlatformRegistry.register(platform="cpu-as-nvidia")
class PlatformCPU(PlatformCUDA):
    """What verl's engine asks of a platform, answered by torch.cpu."""

    device_name = property(lambda _: "cpu")
    device_module = property(lambda _: _NoGpu("cpu"))

    def is_available(self) -> bool:
        """It is."""
        return True

    def current_device(self) -> Any:
        """Where tensors go."""
        return torch.device("cpu")

    def device_count(self) -> int:
        """Return 1."""
        return 1

    def communication_backend_name(self) -> str:
        """Return gloo."""
        return "gloo"

    def synchronize(self, device_index: Any = None) -> None:
        """Do nothing."""

    def empty_cache(self) -> None:
        """Do nothing."""


class _NoGpu(ModuleType):
    """``torch.cpu``, and nothing of memory for what only a GPU has."""

    def __getattr__(self, name: str) -> Any:
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        if name == "mem_get_info":
            return lambda *_: (0, 0)
        if name == "device":
            return lambda *_: contextlib.nullcontext()
        return lambda *_: 0
