"""The apex backend where no CUDA extension is installed: its errors, and what of it needs no kernel."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megascale.errors import UsageError
from megascale.kernels import Operands
from megascale.kernels.apex_backend import ApexBackend, StepGroups

INSTALLED = [name for name in ("amp_C", "transformer_engine") if importlib.util.find_spec(name) is not None]
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
    """The error names the missing modules, how to get one, and another backend."""
    with pytest.raises(UsageError, match=r"module amp_C or transformer_engine.* build NVIDIA apex .* backend 'torch'"):
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
    install_apex("def multi_tensor_l2norm(): ...\ndef multi_tensor_adam_capturable(): ...\n")
    with pytest.raises(UsageError, match=r"amp_C without multi_tensor_adam_capturable_master: install a newer"):
        ApexBackend()


def _counts(*values: float) -> list[Tensor]:
    return [torch.tensor(float(value)) for value in values]


LANDS, SKIPPED = torch.tensor(0.0), torch.tensor(1.0)


def test_equal_step_counts_are_one_group() -> None:
    """Parameters with equal counts share a launch; those unfrozen or added later have one of their own."""
    operands, steps = Operands(), _counts(5, 0, 5, 0, 7)
    groups = StepGroups()
    for found_inf in (LANDS, SKIPPED, LANDS):
        assert groups.advance_(operands, steps, found_inf) == [[0, 2], [1, 3], [4]]
    assert torch.stack(steps).tolist() == [7, 2, 7, 2, 9]


def test_counts_written_by_others_are_looked_at_anew() -> None:
    """A state dict loaded in place, or a call for some of the parameters, never leaves unequal counts together."""
    operands, other, steps = Operands(), Operands(), _counts(3, 3, 3)
    groups = StepGroups()
    assert groups.advance_(operands, steps, LANDS) == [[0, 1, 2]]
    steps[1].fill_(9)
    assert groups.advance_(operands, steps, LANDS) == [[0, 2], [1]]
    assert groups.advance_(other, steps[:1], LANDS) == [[0]]
    assert groups.advance_(operands, steps, LANDS) == [[0], [1], [2]]
    assert torch.stack(steps).tolist() == [7, 11, 6]


def test_other_counts_of_the_same_operands_are_looked_at_anew() -> None:
    """The kernels may take other parameters of a call than they took before, as their gradients' dtypes change."""
    operands, steps = Operands(), _counts(1, 5, 1)
    groups = StepGroups()
    assert groups.advance_(operands, steps, LANDS) == [[0, 2], [1]]
    assert groups.advance_(operands, [steps[0], steps[2]], LANDS) == [[0, 1]]
    assert groups.advance_(operands, steps, LANDS) == [[0, 2], [1]]
