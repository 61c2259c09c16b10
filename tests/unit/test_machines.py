""".ci/machines: what it takes away is away in the tests that it runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import runs

ROOT = Path(__file__).parents[2]


machines = runs.load_script("machines")

PROBES = {
    "avx2": """
        from megascale.kernels.newton_schulz import iteration_dtype
        assert torch.backends.cpu.get_cpu_capability() in ("AVX2", "DEFAULT")
        assert iteration_dtype(torch.device("cpu")) == torch.float32
    """,
    "sse": """
        from megascale.kernels.native.library import library
        assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
        assert Path(library()._name).name.startswith("baseline-")
    """,
    "no-compiler": """
        from tests.needs import without_c, without_cxx, without_native
        assert without_c() and without_cxx() and without_native()
    """,
    "one-core": """
        assert len(os.sched_getaffinity(0)) == 1
    """,
    "elsewhere": """
        locale.setlocale(locale.LC_ALL, "")
        assert locale.localeconv()["decimal_point"] == ","
        assert time.timezone == -(12 * 3600 + 45 * 60)
        with pytest.raises(OSError):
            Path.home().joinpath("written").touch()
        with socket.socket() as connection, pytest.raises(OSError):
            connection.connect(("192.0.2.1", 80))  # of no network: RFC 5737
        socket.create_server(("127.0.0.1", 0)).close()
    """,
}


@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.parametrize("machine", machines.MACHINES)
def test_what_a_machine_lacks_is_away(machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each machine's tests run without what the table says. In a copy: other tests need the libraries."""
    needed = [*machines.MACHINES[machine].command[:1], *(["localedef"] if machine == "elsewhere" else [])]
    for program in needed:
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    if "unshare" in needed and subprocess.run(["unshare", "--map-root-user", "--net", "true"], check=False).returncode:
        pytest.skip("needs a kernel that lets one unshare the network")
    for name in ("ATEN_CPU_CAPABILITY", "CC", "CXX", "LC_ALL"):
        monkeypatch.delenv(name, raising=False)
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "build", "dist", ".*_cache", "runs"))
    imports = "import locale, os, socket, time\nfrom pathlib import Path\nimport pytest, torch\n\n"
    (copy / "tests/test_probe.py").write_text(f"{imports}def test_probe():{PROBES[machine]}")
    command = [sys.executable, ".ci/machines", machine, "--", "-n", "0", "tests/test_probe.py"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].split(" | ")[2:5] == ["1", "0", "0"]
    libraries = machines.LIBRARIES.relative_to(ROOT)
    assert sorted(path.name for path in (copy / libraries).iterdir()) == sorted(
        path.name for path in (ROOT / libraries).iterdir()
    )


def test_a_machine_that_is_unknown_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """With those that there are."""
    with pytest.raises(SystemExit):
        machines.main(["pdp11"])
    assert "no-compiler" in capsys.readouterr().err


def test_there_is_a_probe_for_each() -> None:
    """A machine that is added is tried."""
    assert PROBES.keys() == machines.MACHINES.keys()
    assert os.access(ROOT / ".ci/machines", os.X_OK)
