"""Which backend megascale takes here: benchmarks print it, and refuse torch's kernels in place of native.c."""

import os
import shutil
import sys
from pathlib import Path

import torch

from megascale.errors import UsageError
from megascale.kernels import select_backend
from megascale.kernels.native import levels
from megascale.kernels.native.library import library


def print_backend() -> None:
    """Print to stderr which backend each device gets, and native.c's level.

    Ends the program, with pip's command, where native.c's library is missing or of other sources and could be built.
    """
    try:
        native = f"native ({Path(library()._name).name.partition('-')[0]})"
    except UsageError as error:
        native = "native"
        has_compiler = "CC" in os.environ or any(map(shutil.which, ("cc", "gcc", "clang")))
        if levels.levels_here() and has_compiler:
            sys.exit(str(error))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    names = {
        str(device): select_backend("auto", device).name for device in (torch.device("cpu"), accelerator) if device
    }
    told = ", ".join(f"{name} on {device}" for device, name in names.items())
    print(f"megascale's backend: {told.replace('native', native)}", file=sys.stderr, flush=True)
