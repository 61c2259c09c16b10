"""The apex backend where no CUDA extension is installed: its errors."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megascale.errors import UsageError
from megascale.kernels.apex_backend import ApexBackend

INSTALLED = [name for name in ("amp_C",) if importlib.util.find_spec(name) is not None]
absent = pytest.mark.skipif(bool(INSTALLED), reason=f"installed: {', '.join(INSTALLED)}")

InstallApex = Callable[[str], None]


@pytest.fixture
def install_apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InstallApex]:
    """Make ``amp_C`` importable for one test, with this source."""

    def install(source: str) -> None:
        (tmp_path / "amp_C.py").write_text(source)

    monkeypatch.syspath_prepend(tmp_path)
    yield install
    sys.modules.pop("amp_C", None)


@absent
def test_without_the_library_the_error_says_what_to_do() -> None:
    """The error names the missing module, how to get one, and another backend."""
    with pytest.raises(UsageError, match=r"module amp_C, which .* build NVIDIA apex .* backend 'torch'"):
        ApexBackend()


@absent
def test_broken_installation_is_not_taken_for_a_missing_one(install_apex: InstallApex) -> None:
    """An amp_C that is there and fails to import, for a missing module of its own or a symbol, says so itself."""
    install_apex("import a_library_that_amp_c_needs")
    with pytest.raises(ModuleNotFoundError, match="a_library_that_amp_c_needs"):
        ApexBackend()
    install_apex("raise ImportError('undefined symbol: _ZN3c10')")
    with pytest.raises(ImportError, match="undefined symbol"):
        ApexBackend()


@absent
def test_old_library_is_named(install_apex: InstallApex) -> None:
    """An apex from before the kernel with fp32 masters is refused at construction, not at the first step."""
    install_apex("def multi_tensor_adam_capturable(): ...\n")
    with pytest.raises(AttributeError, match="'amp_C' has no attribute 'multi_tensor_adam_capturable_master'"):
        ApexBackend()
