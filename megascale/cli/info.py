"""``megascale info``: show what megascale runs on here, and why faster alternatives do not work."""

import os
import platform
import shutil
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from megascale.cli import parser_of
from megascale.config import BACKENDS
from megascale.errors import MegascaleError
from megascale.kernels import select_backend, why_not
from megascale.utils.program import run_program
from megascale.version import VERSION

LABEL = 22


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, which takes no arguments. Returns the exit status."""
    return run_program(_run, arguments)


def _run(arguments: list[str]) -> int:
    """Print the report."""
    parser_of("info").parse_args(arguments)
    width = max(shutil.get_terminal_size((100, 24)).columns, 60)
    for label, text in facts():
        print(
            textwrap.fill(
                text, width, initial_indent=f"{label:<{LABEL}}", subsequent_indent=" " * LABEL, break_on_hyphens=False
            )
        )
    return 0


def facts() -> Iterator[tuple[str, str]]:
    """Yield (label, text) in the order of printing."""
    yield "megascale", f"{VERSION}, in {Path(__file__).parents[1]}"
    yield "torch", f"{torch.__version__}, Python {platform.python_version()}, {platform.platform()}"
    for device in _devices():
        yield str(device), _describe(device)
        yield from _backends(device)


def _devices() -> list[torch.device]:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return [torch.device("cpu")]
    indices = range(torch.accelerator.device_count())
    return [torch.device("cpu"), *(torch.device(accelerator.type, index) for index in indices)]


def _describe(device: torch.device) -> str:
    if device.type == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return f"{torch.get_num_threads()} threads on {cores} cores, {torch.backends.cpu.get_cpu_capability()}"
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"


def _backends(device: torch.device) -> Iterator[tuple[str, str]]:
    """Yield (label, text) for each backend, the chosen one first: whether it works, or why not."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # reported below
            chosen = select_backend("auto", device).name
    except MegascaleError as error:  # MEGASCALE_BACKEND names one that does not work
        chosen = None
        yield "  no backend", _one_line(error)
    # native passes tensors on other devices to the torch backend.
    names = [name for name in BACKENDS if name != "auto" and (name != "native" or device.type == "cpu")]
    for name in sorted(names, key=lambda name: name != chosen):
        reason = why_not(name, device)
        found = "works here" if reason is None else f"no: {_one_line(reason)}"
        yield f"  backend {name}", f"chosen; {found}" if name == chosen else found


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
