"""native.c for aarch64, where there is a cross compiler and an emulator.

Debian has them in gcc-aarch64-linux-gnu and qemu-user-static.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megascale.kernels.native import levels

DRIVER = Path(__file__).with_name("native_threads.c")
GCC, CROSS, EMULATOR = (shutil.which(name) for name in ("gcc", "aarch64-linux-gnu-gcc", "qemu-aarch64-static"))
pytestmark = [
    pytest.mark.release,
    pytest.mark.skipif(None in (GCC, CROSS, EMULATOR), reason="needs gcc, aarch64-linux-gnu-gcc, qemu-aarch64-static"),
]


def _printed(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True, timeout=250)
    return done.stdout


def test_the_wheels_library_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the commands of setup.py: it names no other library, and has the functions that are called."""
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    library = tmp_path / "library.so"
    for command in levels.commands([str(CROSS)], "baseline", library):
        _printed(*command)
    described = _printed("aarch64-linux-gnu-readelf", "--wide", "--file-header", "--dynamic", "--dyn-syms", library)
    assert "AArch64" in described
    assert "(NEEDED)" not in described
    assert {"measure", "update", "total", "decide", "rescale"} <= set(
        re.findall(r"FUNC +GLOBAL.* (\w+)$", described, re.M)
    )


def test_results_are_those_of_x86(tmp_path: Path) -> None:
    """Statistics and three updates by every rule, of gradients and state in fp32, fp16 and bf16: the same bits."""
    printed = []
    for compiler, emulator in ((GCC, ()), (CROSS, (EMULATOR,))):
        compiled, program = tmp_path / "driver.o", tmp_path / "driver"
        _printed(compiler, *levels.FLAGS, "-fopenmp", f"-I{levels.SOURCE.parent}", "-c", DRIVER, "-o", compiled)
        _printed(compiler, "-static", compiled, "-o", program, "-lm", "-lpthread")
        printed.append(_printed(*emulator, program))
    assert printed[0] == printed[1]
    assert printed[0].endswith("the same results\n")
