"""Private names of torch: each that the library uses is in its list, and the torch that is installed has it."""

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from megascale import MixedPrecisionOptimizer, OptimizerConfig
from megascale.errors import UnsupportedTorchError
from megascale.utils import collectives
from megascale.utils.supported_torch import NEWEST, OLDEST, explained
from tests.torch_names import NAMES, listed_as, resolve, uses

ROOT = Path(__file__).parents[2]


def test_the_list_is_what_is_used() -> None:
    """Who uses another private name says what it is for; the list has no name that the library does without."""
    found = uses(ROOT / "megascale")
    assert {use: sorted(files) for use, files in found.items() if not listed_as(use)} == {}
    assert NAMES.keys() - {path for use in found for path in listed_as(use)} == set()


@pytest.mark.parametrize("path", NAMES)
def test_torch_has_it(path: str) -> None:
    """A torch that has lost a name is found by this test, before a release; where the name is not an attribute of a
    class it is in the class's source.
    """
    owner, _, name = path.rpartition(".")
    holder = resolve(owner)
    assert hasattr(holder, name) or re.search(rf"\b{name}\b", inspect.getsource(holder)), path


SUPPORTED = f"megascale supports torch {OLDEST} to {NEWEST}"


def test_a_name_that_is_gone_at_import() -> None:
    """Not an ImportError of torch: the message says what is missing, which torch is here, and which are supported."""
    program = "import torch._compile; del torch._compile._disable_dynamo; import megascale"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        f"megascale.errors.UnsupportedTorchError: torch {torch.__version__} lacks what megascale needs"
    )
    assert f"'_disable_dynamo'; {SUPPORTED}" in last


def test_a_name_that_is_gone_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not an AttributeError, and nothing has changed."""
    param = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    config = OptimizerConfig(bf16=True, clip_grad=1.0, backend="torch")
    optimizer = MixedPrecisionOptimizer(torch.optim.Adam([param], lr=0.5), config)
    param.grad = torch.ones_like(param)
    monkeypatch.delattr(torch, "_fused_adam_")
    with pytest.raises(UnsupportedTorchError, match=f"'_fused_adam_'; {SUPPORTED}"):
        optimizer.step()
    assert param.tolist() == [1.0] * 4


def test_errors_of_others_stay_what_they_are() -> None:
    """A user's code that asks torch for a name in a hook, and an attribute of the user's own."""

    def raised(code: str, module: str) -> Exception:
        try:
            exec(code, {"torch": torch, "__name__": module})
        except Exception as error:
            return error
        raise AssertionError

    for code, module in (("torch._gone", "train"), ("''._gone", "megascale.x"), ("torch.gone", "megascale.x")):
        error = raised(code, module)
        assert explained(error) is error
    for code in ("torch._gone", "torch.ones(())._gone", "torch.nn.Linear(1, 1)._gone", "import torch._gone.x"):
        with pytest.raises(UnsupportedTorchError, match=r"_gone.*; megascale supports"):
            collectives.raise_together(raised(code, "megascale.step.x"), None)


def test_versions_are_told_alike() -> None:
    """The oldest torch is that of pyproject.toml and the page; the page and the workflow name the newest, too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={OLDEST}" in project["dependencies"]
    for file in ("docs/platforms.md", ".github/workflows/release.yml"):
        told = (ROOT / file).read_text()
        assert OLDEST in told, file
        assert NEWEST in told, file
