"""Draw a run that collapses, and what its overflow reports say: docs/assets/collapse.svg.

    python -m megascale.train config=configs/text.yaml text.width=96 text.layers=3 text.context=64 batch_size=8 \
        steps=80 evaluate_every=1000 threads=1 watch=true optimizer.name=sgd optimizer.lr=20 \
        optimizer.warmup_steps=1500 optimizer.clip_grad=0 checkpoint.every=0 wandb_name=collapse
    python benchmarks/collapse.py runs/collapse

A small GPT in fp16, whose learning rate is too high. First backward overflows: steps are skipped and
the scale falls. Then forward makes inf in one module, and no scale helps. The names come from overflows.jsonl.
"""

import argparse
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from megascale.report.drawing import GREY, ON_ANY_PAGE
from megascale.report.runs import Run, read_runs

OUT = Path(__file__).parents[1] / "docs" / "assets" / "collapse.svg"
LOSS, SCALE, BAD = "#1F83C4", "#2A9D74", "#D55E00"


def first_lost(run: Run) -> dict[str, Any]:
    """Return the first report of a step whose loss was not finite. Raises ValueError if there is none."""
    lost = [one for one in run.overflows if one.get("loss_finite") is False and one.get("module")]
    if not lost:
        raise ValueError("no loss of this run was inf or NaN while watch=true; raise optimizer.lr")
    return min(lost, key=lambda one: one["step"])


def draw(run: Run) -> str:
    """Return the picture: the loss and the loss scale, with the step at which forward broke, and where."""
    lost = first_lost(run)
    step = lost["step"]
    early = sorted({one["step"] for one in run.overflows if one.get("loss_finite") and one["step"] < step})
    with matplotlib.rc_context(ON_ANY_PAGE | {"font.size": 10, "axes.titlesize": 11}):
        figure = Figure(figsize=(5.2, 5.0), layout="constrained")
        loss, scale = figure.subplots(2, 1, sharex=True)
        loss.set(title="loss", yscale="log")
        scale.set(title="loss scale", xlabel="step")
        scale.set_yscale("log", base=2)
        values = run.get("loss")
        loss.plot(run.steps, values, color=LOSS)
        scale.step(run.steps, run.get("scale"), where="post", color=SCALE)
        for axes in (loss, scale):
            axes.axvline(step, color=BAD, linewidth=1)
            axes.vlines(early, 0, 0.05, color=GREY, transform=axes.get_xaxis_transform())
        value = "inf" if np.isinf(values[run.steps == step]).any() else "NaN"
        words = f"step {step}: the loss is {value},\nmade in forward of\n{lost['module']}"
        loss.text(0.04, 0.95, words, color=BAD, va="top", transform=loss.transAxes)
        end = {"color": BAD, "va": "top", "ha": "right"}
        scale.text(0.98, 0.95, "no scale helps", transform=scale.transAxes, **end)
        if early:
            words = "ticks: skipped steps\nwhose loss was finite"
            scale.text(0.04, 0.1, words, color=GREY, va="bottom", transform=scale.transAxes)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return stream.getvalue()


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the run of a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(arguments)
    (run,) = read_runs([given.run])
    given.out.write_text(draw(run), encoding="utf-8")
    print(given.out)


if __name__ == "__main__":
    main()
