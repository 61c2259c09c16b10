"""Native code under the compiler's sanitizers: no report of memory, undefined behaviour or races, from real work.

The sanitized libraries are built as ours always are, in copies: CC is a command with the sanitizers' flags.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megascale.kernels.native import levels

pytestmark = pytest.mark.timeout(1800)

DRIVER = Path(__file__).with_name("native_threads.c")
ROOT = Path(__file__).parents[2]
GCC = shutil.which("gcc")
# A report ends the program, also one of undefined behaviour; and the compiler has nothing to warn of.
SANITIZED = (
    f"{GCC} -Wall -Wno-unknown-pragmas -Werror -g -fno-omit-frame-pointer "
    "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
)
SECONDS = 1500.0

STEP = """
import torch
from megascale import MixedPrecisionOptimizer, OptimizerConfig
params = [torch.nn.Parameter(torch.ones(33, dtype=torch.bfloat16)) for _ in range(300)]
optimizer = MixedPrecisionOptimizer(torch.optim.SGD(params, lr=0.5), OptimizerConfig(bf16=True, backend="native"))
for param in params:
    param.grad = torch.ones(33, dtype=torch.bfloat16)
optimizer.step()
"""


def _reports(done: "subprocess.CompletedProcess[str]") -> str:
    """Return what the sanitizers have reported, from the first line on."""
    told = done.stdout + done.stderr
    starts = [told.find(mark) for mark in ("runtime error:", "ERROR: AddressSanitizer", "WARNING: ThreadSanitizer")]
    found = [start for start in starts if start >= 0]
    return told[max(min(found) - 200, 0) :][:5000] if found else ""


def _run(
    command: list[str], environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command,
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=SECONDS,
    )


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """The variables of programs under the address and undefined-behaviour sanitizers; skips where there are none.

    Their runtimes have to be loaded before all others. They look for the function that throws C++ exceptions, torch's
    too, as soon as they are loaded: C++'s library comes next.
    """
    if GCC is None:
        pytest.skip("needs gcc")
    names = ("libasan.so", "libubsan.so", "libstdc++.so.6")
    runtimes = [_run([GCC, f"-print-file-name={name}"]).stdout.strip() for name in names]
    watched = os.environ | {
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps what it has until it ends
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    if not all(map(os.path.isabs, runtimes)) or _run([sys.executable, "-c", ""], watched).returncode != 0:
        pytest.skip("gcc has no address sanitizer here")
    return watched


def _copy(folder: Path) -> Path:
    """Copy package and tests, and compile native code there with sanitizers."""
    for part in ("megascale", "tests", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, folder / part)
    native = folder / levels.SOURCE.parent.relative_to(ROOT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(levels, "SOURCE", native / "native.c")
        level = levels.supported()[0]
        for command in levels.commands(SANITIZED.split(), level, levels.path(level, native / levels.FOLDER.name)):
            built = _run(command)
            assert built.returncode == 0, built.stderr
    return folder


PYTEST = ("-m", "pytest", "-qs", "--timeout=1400", "-p", "no:cacheprovider")
PROGRAMS = (
    (*PYTEST, "tests/unit/kernels/test_native.py"),
    (*PYTEST, "tests/unit/test_life.py", "-m", "slow or not slow"),
)
"""What uses the library: its own tests, with all that they draw; and lives, with gradients and weights that move."""


@pytest.mark.release
def test_real_work_is_clean(environment: dict[str, str], tmp_path: Path) -> None:
    """All rules, dtypes, odd lengths, misaligned starts, strides, skipped steps and thread counts."""
    copy = _copy(tmp_path)
    with ThreadPoolExecutor() as pool:
        commands = [[sys.executable, *program] for program in PROGRAMS]
        programs = list(pool.map(lambda command: _run(command, environment, copy), commands))
    for done in programs:
        assert _reports(done) == ""
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


@pytest.fixture
def threads(tmp_path: Path) -> Path:
    """A folder for programs under the thread sanitizer; skips where there is none, or where it cannot run."""
    if GCC is None:
        pytest.skip("needs gcc")
    source, program = tmp_path / "probe.c", tmp_path / "probe"
    source.write_text("int main(void) { return 0; }\n")
    built = _run([GCC, "-fsanitize=thread", str(source), "-o", str(program)])
    if built.returncode != 0:
        pytest.skip(f"gcc has no thread sanitizer here: {built.stderr.strip()[-200:]}")
    ran = _run([str(program)])
    if ran.returncode != 0:
        pytest.skip(f"the thread sanitizer cannot run here: {ran.stderr.strip()[-200:]}")
    return tmp_path


def _threads_with(sources: Path, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Build the driver with a copy of native.c, and run it."""
    flags = ["-std=c11", "-O1", "-g", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp"]
    compiled, program = str(folder / "threads.o"), str(folder / "threads")
    for command in (
        [str(GCC), *flags, "-fsanitize=thread", f"-I{sources}", "-c", str(DRIVER), "-o", compiled],
        [str(GCC), "-fsanitize=thread", compiled, "-o", program, "-lm", "-lpthread"],
    ):
        built = _run(command)
        assert built.returncode == 0, built.stderr
    return _run([program], os.environ | {"TSAN_OPTIONS": "halt_on_error=1"})


@pytest.mark.release
def test_threads_do_not_race(threads: Path) -> None:
    """Statistics and updates by every rule, and chunks that threads take from one another: no race, and the same bits
    for any number of threads.
    """
    done = _threads_with(levels.SOURCE.parent, threads)
    assert (done.returncode, done.stdout.splitlines()[-1], done.stderr) == (0, "the same results", "")
