"""The scripts of examples/ run as their page says, and the page lists every one of them."""

import difflib
import itertools
import re
from pathlib import Path

import pytest

from tests.jobs import printed_by

EXAMPLES = Path(__file__).parents[2] / "examples"
ROOT = EXAMPLES.parent
STAGES = ("1_loop", "2_fp16", "3_two_ranks", "4_sharded", "5_checkpoint")


def _losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]


def test_page_lists_every_example() -> None:
    """examples/README.md has a link to each script, and the pages lead to it."""
    page = (EXAMPLES / "README.md").read_text()
    scripts = sorted(
        str(path.relative_to(EXAMPLES)) for kind in ("py", "ipynb") for path in EXAMPLES.rglob(f"*.{kind}")
    )
    assert sorted(set(re.findall(r"\]\(([\w/]+\.(?:py|ipynb))\)", page))) == scripts
    assert "(examples/README.md)" in (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_a_right_step_has_no_wrong_stage() -> None:
    """The example that searches for a wrong gradient finds the library's step to be plain torch's at each stage."""
    found = re.findall(r"rank (\d): (\d+) stages wrong", printed_by("wrong_gradient.py"))
    assert sorted(found) == [("0", "0"), ("1", "0")]


@pytest.mark.slow
def test_ranks_of_a_reducing_optimizer_skip_together() -> None:
    """One rank overflows before gradients are reduced: both skip, and hold the same weights to the end."""
    rows = re.findall(
        r"rank (\d) step (\d+) loss (\S+) scale (\d+) checksum (-?[\d.]+)", printed_by("local_optimizer.py")
    )
    by_rank = {rank: {step: rest for other, step, *rest in rows if other == rank} for rank in "01"}
    assert {row[2] for row in rows} >= {"inf"}
    for step in ("0", "5", "19"):
        assert by_rank["0"][step][1:] == by_rank["1"][step][1:]
    assert float(by_rank["0"]["5"][1]) == float(by_rank["0"]["0"][1]) / 2
    assert float(by_rank["0"]["19"][0]) < float(by_rank["0"]["0"][0])


def _diff(before: str, after: str) -> str:
    """Return what changes between two texts, with a line of context, and ``...`` for what stays."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=1, lineterm="")
    hunks = re.split(r"^@@.*\n", "\n".join(line.rstrip() for line in lines), flags=re.MULTILINE)[1:]
    return "\n...\n".join(hunk.strip("\n") for hunk in hunks)


def test_tutorial_shows_its_scripts() -> None:
    """The page has the first script whole, what changes from each to the next, and a start of each, in this order."""
    page = (ROOT / "docs" / "index.md").read_text()
    texts = [(EXAMPLES / "tutorial" / f"{stage}.py").read_text() for stage in STAGES]
    changes = [_diff(before, after) for before, after in itertools.pairwise(texts)]
    assert '--8<-- "examples/tutorial/1_loop.py"' in page
    assert re.findall(r"^```diff\n(.*?)\n```", page, flags=re.DOTALL | re.MULTILINE) == changes
    started = re.findall(r"^\w+ .*examples/tutorial/(\w+)\.py$", page, flags=re.MULTILINE)
    assert started == [*STAGES, STAGES[-1]]  # the last one twice: it resumes


@pytest.mark.release
def test_tutorial_learns_as_well_in_fp16() -> None:
    """Stages 1 and 2: the losses of fp16 are those of fp32 to 1 %, and not the same ones."""
    fp32, fp16 = (_losses(printed_by(f"tutorial/{stage}.py", ranks=0)) for stage in STAGES[:2])
    assert fp32[-1] < fp32[0] - 0.2
    assert fp16 == pytest.approx(fp32, rel=0.01)
    assert fp16 != fp32


@pytest.mark.release
def test_tutorial_learns_as_well_sharded() -> None:
    """Stages 3 and 4: sharded or not, two ranks learn alike."""
    replicated, sharded = (_losses(printed_by(f"tutorial/{stage}.py")) for stage in STAGES[2:4])
    assert replicated[-1] < replicated[0] - 0.2
    assert sharded == pytest.approx(replicated, rel=0.01)


@pytest.mark.slow
def test_tutorial_resumes_on_three_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 5: what two ranks saved, three go on with, at the next step and near the loss that was reached."""
    monkeypatch.chdir(tmp_path)
    outputs = [printed_by("tutorial/5_checkpoint.py", ranks=ranks) for ranks in (2, 3)]
    steps = [int(step) for output in outputs for step in re.findall(r"step (\d+):", output)]
    assert steps == list(range(20, 241, 20))
    first, second = (_losses(output) for output in outputs)
    assert second[0] < first[0] - 0.5
