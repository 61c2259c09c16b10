"""Native code under the compiler's sanitizers: no report of memory, undefined behaviour or races, from real work.

The sanitized libraries are built and loaded as ours always are: CC and CXX are commands with the sanitizers' flags.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megascale.kernels import library_build
from megascale.kernels.native import library as native_library

pytestmark = pytest.mark.timeout(1800)

DRIVER = Path(__file__).with_name("native_threads.c")
GCC, GXX = shutil.which("gcc"), shutil.which("g++")
# The compiler itself need not be watched. A report ends the program, also one of undefined behaviour.
SANITIZED = (
    "env -u LD_PRELOAD {} -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
)
SECONDS = 1500.0

STEP = """
import sys
from pathlib import Path
import torch
from megascale import MixedPrecisionOptimizer, OptimizerConfig
from megascale.kernels.native import library as native_library
native_library.SOURCE = Path(sys.argv[1]) / "native.c"
params = [torch.nn.Parameter(torch.ones(33, dtype=torch.bfloat16)) for _ in range(300)]
optimizer = MixedPrecisionOptimizer(torch.optim.SGD(params, lr=0.5), OptimizerConfig(bf16=True, backend="native"))
for param in params:
    param.grad = torch.ones(33, dtype=torch.bfloat16)
optimizer.step()
"""


class Watched:
    """Programs whose native code is watched for bad addresses and undefined behaviour.

    Args:
        folder: where the libraries lie.
        runtime: the address sanitizer's library, which has to be loaded before all others. It looks for the function
            that throws C++ exceptions, torch's too, as soon as it is loaded: C++'s library comes next.
    """

    def __init__(self, folder: Path, runtime: str) -> None:
        self.folder = folder
        self.environment = os.environ | {
            library_build.CACHE_VARIABLE: str(folder / "cache"),
            "CC": SANITIZED.format(GCC),
            "CXX": SANITIZED.format(GXX),
            "LD_PRELOAD": f"{runtime} {_run([str(GCC), '-print-file-name=libstdc++.so.6']).stdout.strip()}",
            # Python keeps what it has until it ends.
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run Python."""
        return _run([sys.executable, *arguments], self.environment)

    @property
    def libraries(self) -> set[str]:
        """What has been built."""
        return {path.name.split("-")[0] for path in (self.folder / "cache").glob("*.so")}


def _reports(done: "subprocess.CompletedProcess[str]") -> str:
    """Return what the sanitizers have reported, from the first line on."""
    told = done.stdout + done.stderr
    starts = [told.find(mark) for mark in ("runtime error:", "ERROR: AddressSanitizer", "WARNING: ThreadSanitizer")]
    found = [start for start in starts if start >= 0]
    return told[max(min(found) - 200, 0) :][:5000] if found else ""


def _run(command: list[str], environment: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, errors="replace", check=False, timeout=SECONDS
    )


def _copy_of_sources(folder: Path, name: str, old: str, new: str) -> Path:
    """Copy our native code, with one piece of one file replaced. Returns the copies' folder."""
    for source in native_library.SOURCE.parent.glob("*.[ch]"):
        text = source.read_text()
        if source.name == name:
            assert text.count(old) == 1, f"{name} has changed: {old!r}"
            text = text.replace(old, new)
        (folder / source.name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """Programs under the address and undefined-behaviour sanitizers; skips where there are none.

    They share the libraries, which take minutes to compile. A copy with a fault has a library of its own.
    """
    tmp_path = tmp_path_factory.mktemp("sanitized")
    if GCC is None or GXX is None:
        pytest.skip("needs gcc and g++")
    runtime = _run([GCC, "-print-file-name=libasan.so"]).stdout.strip()
    source, program = tmp_path / "probe.c", tmp_path / "probe"
    source.write_text("int main(void) { return 0; }\n")
    built = _run([GCC, "-fsanitize=address,undefined", str(source), "-o", str(program)])
    if built.returncode != 0 or not os.path.isabs(runtime) or _run([str(program)]).returncode != 0:
        pytest.skip(f"gcc has no address sanitizer here: {built.stderr.strip()[-200:]}")
    return Watched(tmp_path, runtime)


PYTEST = ("-m", "pytest", "-qs", "--timeout=1400", "-p", "no:cacheprovider")
MACHINE = ("-m", "tests.backend_machine")
WORK: dict[str, list[tuple[str, ...]]] = {
    "native": [
        (*PYTEST, "tests/unit/kernels/test_native.py"),
        (*MACHINE, "native", "--examples", "60", "--steps", "15"),
    ],
}
"""By library the programs that use it: its own tests, with all that they draw; and the random life of
tests.backend_machine, with parameters, gradients and state that move and change.
"""


@pytest.mark.release
@pytest.mark.parametrize("library", WORK)
def test_real_work_is_clean(library: str, watched: Watched) -> None:
    """All rules, dtypes, odd lengths, misaligned starts, strides, skipped steps and thread counts. Both programs run at
    once; one compiles, the other waits for the library.
    """
    with ThreadPoolExecutor() as pool:
        programs = list(pool.map(lambda arguments: watched.run(*arguments), WORK[library]))
    for done in programs:
        assert _reports(done) == ""
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert library in watched.libraries


LOAD = "Floats gradient = load(at.grad, kind.grad, {});"
SOON = "soon = index + SOON;"
OVERFLOW = "volatile int most = INT32_MAX; most = most + 1 + (int)chunk.start;"
FAULTS = [
    ("native.c", LOAD.format("at.n")[:-1], LOAD.format("WIDTH")[:-1], "heap-buffer-overflow"),
    (
        "native.c",
        f"int64_t index = chunk.row, {SOON}",
        f"int64_t index = chunk.row, {SOON} {OVERFLOW}",
        "signed integer",
    ),
]


@pytest.fixture(scope="module")
def faulty(watched: Watched, tmp_path_factory: pytest.TempPathFactory) -> "list[subprocess.CompletedProcess[str]]":
    """What became of a step with each of FAULTS. Two at a time: nearly all of it is compiling, on one core."""

    def step(fault: tuple[str, str, str, str]) -> "subprocess.CompletedProcess[str]":
        name, old, new, _ = fault
        folder = _copy_of_sources(tmp_path_factory.mktemp("faulty"), name, old, new)
        return watched.run("-c", STEP, str(folder))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(step, FAULTS))


@pytest.mark.release
@pytest.mark.parametrize("index", range(len(FAULTS)), ids=[f"{name}: {report}" for name, _, _, report in FAULTS])
def test_a_fault_is_reported(index: int, faulty: "list[subprocess.CompletedProcess[str]]") -> None:
    """The job can fail: copies that go beyond the last element, or whose numbers overflow, are reported."""
    done, report = faulty[index], FAULTS[index][-1]
    assert done.returncode != 0
    assert report in _reports(done), done.stderr[-5000:]


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
    done = _threads_with(native_library.SOURCE.parent, threads)
    assert (done.returncode, done.stdout.splitlines()[-1], done.stderr) == (0, "the same results", "")


@pytest.mark.release
def test_a_race_is_reported(threads: Path) -> None:
    """The job can fail: where a share is read and written in two steps, chunks are taken twice."""
    old = "while (!__atomic_compare_exchange_n(&share->left, &left, rest, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));"
    folder = _copy_of_sources(
        threads, "chunks.h", old, "while (share->left != left ? (left = share->left, 1) : (share->left = rest, 0));"
    )
    done = _threads_with(folder, threads)
    assert done.returncode != 0
    assert "ThreadSanitizer: data race" in done.stderr
