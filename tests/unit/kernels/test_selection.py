"""A backend that cannot work here is found out when it is chosen: by name an error, by default a warning and torch."""

import os
import uuid
import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from megascale import MixedPrecisionOptimizer
from megascale.errors import UsageError
from megascale.kernels import Backend, select_backend, selection
from megascale.kernels.selection import ENVIRONMENT_VARIABLE
from tests.fake_device.device import FakeDevice
from tests.fake_device.process import OnDevice

CUDA = torch.device("cuda", 0)


def _lose_compiler() -> None:
    """Let Triton build each kernel's launcher, as on a GPU, on a machine without a C compiler."""
    from triton.runtime import driver
    from triton.runtime.build import compile_module_from_src

    class Launcher:
        def __init__(self, source: Any, metadata: Any) -> None:
            compile_module_from_src(f"/* {uuid.uuid4()}: in nobody's cache */", "launcher")

    driver.active.launcher_cls = Launcher
    os.environ.pop("CC", None)
    os.environ["PATH"] = ""


def _chosen(device: FakeDevice, names: list[str]) -> tuple[list[str], list[str]]:
    """Return what was chosen, or why it was not, and the warnings."""
    _lose_compiler()
    outcomes = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in names:
            try:
                outcomes.append(select_backend(name, CUDA).name)
            except UsageError as error:
                outcomes.append(str(error))
    return outcomes, [str(warning.message) for warning in caught]


def _without_a_cache(device: FakeDevice, folder: str) -> str:
    """Return what is said where Triton can write no folder."""
    os.environ["TRITON_CACHE_DIR"] = folder
    try:
        return select_backend("triton", CUDA).name
    except UsageError as error:
        return str(error)


@pytest.mark.default("/proc")
@pytest.mark.parametrize("folder", ["/proc/nobody/.triton", "/proc", "/dev/null/.triton"])
def test_a_cache_that_cannot_be_written_is_named(on_device: OnDevice, folder: str) -> None:
    """A home that cannot be written, as in many containers. The folder may be there, lack a parent, or have one that is
    a file.
    """
    outcome = on_device(_without_a_cache, folder)
    assert "if that cannot be written, set TRITON_CACHE_DIR. Or choose backend 'torch'" in outcome


def _launches(device: FakeDevice) -> list[list[str]]:
    found = []
    for _ in range(2):
        with device.watch() as seen:
            assert select_backend("auto", CUDA).name == "triton"
        found.append(seen.launches() + seen.syncs())
    return found


def test_no_c_compiler_falls_back_loudly(on_device: OnDevice) -> None:
    """Triton looks for a compiler at its first launch: one is made when it is chosen. One warning names the remedy."""
    outcomes, caught = on_device(_chosen, ["auto", "auto"])
    assert outcomes == ["torch", "torch"]
    assert len(caught) == 1
    assert "Failed to find C compiler" in caught[0]
    assert "install gcc or clang" in caught[0]
    assert "Using the torch backend" in caught[0]


def test_the_warning_names_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that builds the optimizer, not one of the library."""

    def cannot(device: torch.device | None) -> Backend:
        raise UsageError(f"no backend today: {uuid.uuid4()}")  # each text is warned of once

    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setitem(selection._MAKERS, "native", cannot)
    with pytest.warns(UserWarning, match="Using the torch backend") as caught:
        optimizer = MixedPrecisionOptimizer(torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1))
    assert optimizer._backend.name == "torch"
    assert [warning.filename for warning in caught] == [__file__]


def test_no_c_compiler_is_an_error_where_triton_was_asked_for(on_device: OnDevice) -> None:
    """By name there is no fallback."""
    [outcome], caught = on_device(_chosen, ["triton"])
    assert "install gcc or clang" in outcome
    assert not caught


def test_one_launch_is_tried(on_device: OnDevice) -> None:
    """Once in a process, without waiting for the device."""
    assert on_device(_launches) == [["decide_kernel"], []]


@pytest.mark.parametrize(
    ("launcher", "own", "ranks", "expected"),
    [
        (16, 16, 4, 4),  # nobody is bound
        (16, 4, 4, 4),  # each rank to its own cores
        (16, 8, 4, 4),  # two ranks to each of two nodes
        (16, 2, 4, 2),  # to fewer than its share
        (8, 8, 4, 2),  # the launcher itself is bound
        (0, 8, 4, 2),  # nothing is told of the launcher
        (2, 2, 4, 1),
        (16, 16, 1, 16),
    ],
)
def test_host_threads_are_divided_once(
    monkeypatch: pytest.MonkeyPatch, launcher: int, own: int, ranks: int, expected: int
) -> None:
    """A launcher that binds ranks to cores has divided them: they were divided by the number of ranks once more."""

    def affinity(process: int) -> set[int]:
        if process == 0:
            return set(range(own))
        if launcher == 0:
            raise ProcessLookupError
        return set(range(launcher))

    asked: list[int] = []
    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(selection, "NativeBackend", asked.append)
    selection.host_backend()
    assert asked == [expected]
