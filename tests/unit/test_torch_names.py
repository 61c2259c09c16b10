"""Private names of torch: each that the library uses is in its list, and the torch that is installed has it."""

import importlib.util
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megascale.amp import GradScaler
from megascale.errors import UnsupportedTorchError
from megascale.utils import torch_names
from megascale.utils.torch_names import NAMES

ROOT = Path(__file__).parents[2]
PATHS = [name.path for name in NAMES]


def _load() -> ModuleType:
    """Return the module that finds them in the source, as the site's hooks load it."""
    spec = importlib.util.spec_from_file_location("torch_names", ROOT / "docs/assets/torch_names.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


finder = _load()


@pytest.fixture(scope="module")
def uses() -> dict[str, set[str]]:
    """The private names that the library uses, with the files."""
    found: dict[str, set[str]] = finder.uses(ROOT / "megascale")
    return found


def test_every_use_is_listed(uses: dict[str, set[str]]) -> None:
    """Who uses another private name says what it is for, and what happens when it is gone."""
    assert {use: sorted(files) for use, files in uses.items() if not finder.listed_as(use, PATHS)} == {}


def test_every_listed_name_is_used(uses: dict[str, set[str]]) -> None:
    """The list has no name that the library does without, and none twice."""
    used = {path for use in uses for path in finder.listed_as(use, PATHS)}
    assert [path for path in PATHS if path not in used] == []
    assert len(set(PATHS)) == len(PATHS)
    assert not [files for files in uses.values() if "utils/torch_names.py" in files], "the list uses nothing itself"


@pytest.mark.parametrize("path", PATHS)
def test_torch_has_it(path: str) -> None:
    """A torch that has lost a name is found by this test, before a release; where the name is not an attribute of a
    class it is in the class's source, or in torch's headers.
    """
    if path.startswith("C++ "):
        headers = Path(torch.__file__).parent / "include"
        found = [headers / name for name in ("torch/csrc/autograd/python_variable.h", "c10/core/TensorImpl.h")]
        found += [headers / name for name in ("c10/core/Storage.h", "ATen/core/TensorBase.h")]
        assert any(re.search(rf"\b{path[4:]}\b", header.read_text()) for header in found)
        return
    owner, _, name = path.rpartition(".")
    holder = finder.resolve(owner)
    assert hasattr(holder, name) or re.search(rf"\b{name}\b", inspect.getsource(holder)), path


SOURCES = {
    "an import": ("from torch.x._y import z", "torch.x._y.z"),
    "a module's alias": ("import torch.distributed as dist\ndist._world", "torch.distributed._world"),
    "a chain": ("import torch\ntorch._C._dispatch.now()", "torch._C._dispatch"),
    "an attribute": ("def f(tensor):\n    return tensor._base", "_base"),
    "a string": ("def f(tensor):\n    return getattr(tensor, '_base', None)", "_base"),
    "a module's attribute": ("def f(module):\n    return module._own", "torch.nn.Module._own"),
    "a base's attribute": (
        "import torch\nclass Ours(torch.amp.GradScaler):\n    def f(self):\n        self._scale = 1",
        "torch.amp.GradScaler._scale",
    ),
    "a base's method": (
        "import torch\nclass Ours(torch.amp.GradScaler):\n    def _unscale_grads_(self): ...",
        "torch.amp.GradScaler._unscale_grads_",
    ),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_uses_are_found(kind: str, tmp_path: Path) -> None:
    """Each way to use a private name is found, and what a file defines itself is not one."""
    source, name = SOURCES[kind]
    ours = "\nclass Own:\n    def __init__(self):\n        self._own = 1\n    def g(self, other): return other._own"
    (tmp_path / "used.py").write_text(source + ours)
    assert finder.uses(tmp_path) == {name: {"used.py"}}


def test_a_name_that_is_gone_is_an_error_at_import() -> None:
    """Not an AttributeError in the middle of a step: the message says what is missing, which torch is here, and which
    are supported.
    """
    program = "import torch; del torch._foreach_copy_; import megascale"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        f"megascale.errors.UnsupportedTorchError: torch {torch.__version__} has no torch._foreach_copy_, which"
    )
    assert f"supports torch {torch_names.OLDEST} to {torch_names.NEWEST}" in last


@pytest.mark.parametrize(
    "path",
    [
        "torch.optim.Optimizer._no_such_hooks",
        "torch.nn.Module._no_such_parameters",
        "torch._no_such_module.name",
        "torch.distributed.distributed_c10d._no_such_store",
    ],
)
def test_names_of_instances_and_modules_are_missed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what torch makes in a constructor, and what is in a module."""
    monkeypatch.setattr(torch_names, "NAMES", (torch_names.TorchName(path, "a test"),))
    with pytest.raises(UnsupportedTorchError, match=re.escape(path)):
        torch_names.require()


def test_a_scaler_without_an_attribute_of_torchs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The subclass decides by attributes that torch's constructor makes."""
    gone = torch_names.TorchName("torch.amp.GradScaler._no_such_scale", "a test", torch_names.AT_CONSTRUCTION)
    monkeypatch.setattr(torch_names, "NAMES", (gone,))
    GradScaler("cpu", enabled=False)
    with pytest.raises(UnsupportedTorchError, match=r"no torch\.amp\.GradScaler\._no_such_scale"):
        GradScaler("cpu")


def test_versions_are_told_alike() -> None:
    """The oldest torch is that of pyproject.toml and the page; the page and the workflow name the newest, too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={torch_names.OLDEST}" in project["dependencies"]
    for file in ("docs/platforms.md", ".github/workflows/release.yml"):
        told = (ROOT / file).read_text()
        assert torch_names.OLDEST in told, file
        assert torch_names.NEWEST in told, file
