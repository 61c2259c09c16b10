"""The recipes of examples/: on gloo ranks, and their first steps on the simulated device, each file as it stands."""

import io
import json
import os
import re
import runpy
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.fake_device.device import FakeDevice
from tests.fake_device.process import OnDevice
from tests.jobs import ROOT, printed_by

for _name in ("transformers", "peft", "trl", "datasets"):
    pytest.importorskip(_name, reason=f"needs {_name}: .ci/install_integrations")

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
STEPS = (
    "--data",
    str(ROOT / "LICENSE"),  # a text that no change of the library touches
    "--steps",
    "20",
    "--save-every",
    "10",
    "--length",
    "32",
    "--batch",
    "8",
    "--micro-batch",
    "2",
    "--lr",
    "3e-3",
)


def _losses(printed: str) -> dict[str, float]:
    return {step: float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+), .* 0 skipped", printed)}


def _first_steps(device: FakeDevice, recipe: str, folder: str) -> tuple[str, str]:
    """Run a recipe as this rank's program; return what it printed, and where its weights are."""
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "MEGASCALE_BACKEND": "reference"}
    for name in ("init_process_group", "destroy_process_group"):  # the ranks are connected already
        setattr(dist, name, lambda *_: None)
    sys.argv = [recipe, "--model", "tiny", "--folder", folder, *STEPS]
    with redirect_stdout(io.StringIO()) as printed:
        ran = runpy.run_path(str(EXAMPLES / f"{recipe}.py"), run_name="__main__")
    return printed.getvalue(), next(ran["model"].parameters()).device.type


@pytest.mark.parametrize(
    ("recipe", "ranks", "weights"), [("fsdp2", 2, "cuda"), ("zero1", 2, "cuda"), ("offload", 1, "cpu")]
)
def test_a_recipe_learns_and_goes_on(
    recipe: str, ranks: int, weights: str, on_device: OnDevice, tmp_path: Path
) -> None:
    """Two ranks; one that takes up their first checkpoint, from a folder of a model; ranks of the simulated device."""
    arguments = (f"{recipe}.py", "--folder", str(tmp_path), *STEPS)
    losses = _losses(printed_by(*arguments, "--model", "tiny"))
    assert losses["20"] < losses["10"] - 0.5
    shutil.rmtree(tmp_path / "step_00000020")
    resumed = printed_by(*arguments, "--model", f"{tmp_path}/model", ranks=1)
    assert "resumed after step 10\n" in resumed
    assert _losses(resumed) == pytest.approx({"20": losses["20"]}, rel=1e-3)
    (printed, device), *_ = on_device.ranks(ranks, _first_steps, recipe, str(tmp_path / "on_device"))
    assert device == weights
    assert _losses(printed) == pytest.approx(losses, rel=1e-3)


def test_grpo_learns_to_write_digits(tmp_path: Path) -> None:
    """Two ranks in fp16: one log of both, in which the reward for digits rises, and no step is skipped."""
    arguments = ("--model", "tiny", "--tokens", "8", "--lr", "3e-3", "--steps", "20", "--folder", str(tmp_path))
    printed = printed_by("grpo.py", *arguments)
    rewards = [float(mean) for mean in re.findall(r"'rewards/digits/mean': '([\d.e-]+)'", printed)]
    assert len(rewards) == 2
    assert rewards[-1] > rewards[0] + 0.1
    assert set(re.findall(r"'skipped_steps': (\d+)", printed)) == {"0"}


def test_the_notebook_runs_the_recipe_with_lora_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell holds the file as it stands; its commands train in either way, and the last cell reads the result."""
    monkeypatch.chdir(tmp_path)
    cells = [cell["source"] for cell in json.loads((EXAMPLES / "finetune.ipynb").read_text())["cells"]]
    recipe, *commands, last = [cell for cell in cells if cell.startswith(("%%writefile", "!CUDA", "import"))]
    assert recipe == "%%writefile finetune.py\n" + Path(shutil.copy(EXAMPLES / "finetune.py", tmp_path)).read_text()
    losses = []
    for command in commands:
        _, *arguments = command.format(MODEL="tiny", STEPS=20, LENGTH=32).partition("python ")[2].split()
        printed = printed_by(tmp_path / "finetune.py", *arguments, "--lr", "5e-3", ranks=0)
        losses.append([float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", printed)])
    assert losses[0][-1] < losses[0][0]
    assert losses[1][-1] < losses[1][0] - 0.5
    exec(last, {})
