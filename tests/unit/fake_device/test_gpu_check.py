"""The parts of launch/gpu_check.sh run to their end on the simulated device: an hour with a GPU is short."""

import importlib
import io
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType

from tests.fake_device.device import FakeDevice
from tests.fake_device.process import OnDevice

ROOT = Path(__file__).parents[3]
SMALL = {
    "loop": "--numel 20000 --tensors 8 --tokens 32 --iterations 2 --rounds 2",
    "offload": "--numel 20000 --width 64 --tokens 32 --seconds 20 --rounds 2",
    "kernels": "--numel 20000 --tensors 2",
    "graph": "--numel 2000 --tensors 2 --rounds 2",
}
"""What replaces the sizes of a part. benchmarks/step.py is left out: its ranks are processes without the device."""


class _Profile:
    """torch's profiler, of one microsecond per launch."""

    def __init__(self, device: FakeDevice) -> None:
        self._watch = device.watch()

    def __enter__(self) -> "_Profile":
        self._seen = self._watch.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._watch.__exit__(*error)

    def events(self) -> list[Any]:
        """Return what was launched. An operator of torch has the name of its kernel's file."""
        took = SimpleNamespace(elapsed_us=lambda: 1.0)
        names = [call.what.replace("aten::_fused", "multi_tensor") for call in self._seen]
        return [SimpleNamespace(name=name, device_type=DeviceType.CUDA, time_range=took) for name in names]


def _table(device: FakeDevice, program: str, arguments: list[str]) -> str:
    """Run a benchmark with what this device lacks: names, times, generators, an allocator's numbers, a profiler."""
    generator, nothing = torch.Generator, lambda *_: 0
    for module in (torch.accelerator, torch.cuda):
        for name in ("empty_cache", "reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
            setattr(module, name, nothing)
    torch.cuda.Event.elapsed_time = lambda *_: 1.0  # type: ignore[method-assign]
    torch.cuda.get_device_name = lambda *_: "a simulated device"
    torch.Generator = lambda *_: generator()  # type: ignore[assignment, misc]
    torch.profiler.profile = lambda **_: _Profile(device)  # type: ignore[assignment, misc]
    sys.modules["torchao"] = None  # type: ignore[assignment]  # where it is installed: it compiles for the device
    sys.path.insert(0, str(ROOT / "benchmarks"))
    sys.argv = [f"{program}.py", *arguments]
    with redirect_stdout(io.StringIO()) as printed:
        status = importlib.import_module(program).main()
    return printed.getvalue() if not status else f"status {status}"


@pytest.mark.release
@pytest.mark.parametrize("program", SMALL)
def test_part_runs_to_its_end(program: str, on_device: OnDevice) -> None:
    """With the options of the script, at small sizes."""
    script = (ROOT / "launch/gpu_check.sh").read_text()
    [given] = re.findall(rf"^ .*table {program} \d+(.*?)(?: ;;)?$", script, re.MULTILINE)
    arguments = [*given.split(), *SMALL[program].split()]  # of an option that stands twice the second counts
    run: Callable[..., str] = on_device
    table = run(_table, program, arguments)
    assert "\n|---|" in table, table
    assert "Error" not in table, table
