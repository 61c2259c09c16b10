"""A picture of an estimate: bytes per rank by kind, against the number of ranks."""

from dataclasses import replace
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from megascale.estimation.estimates import Estimate
from megascale.estimation.memory import held_bytes
from megascale.estimation.partition import Partition
from megascale.estimation.timeline import BACKWARD, FORWARD, LANES, WAIT, Timeline

COLORS = ("#0072B2", "#999999", "#D55E00", "#E69F00", "#009E73", "#56B4E9", "#CC79A7")
"""Okabe and Ito's palette, which colour-blind readers can tell apart, in the order of kinds."""


def draw(estimate: Estimate, path: Path) -> None:
    """Write a stacked bar for each power of two of ranks up to the estimate's own, to a file of any format."""
    ranks = [1 << power for power in range(estimate.setup.ranks.bit_length()) if 1 << power < estimate.setup.ranks]
    ranks.append(estimate.setup.ranks)
    setups = [replace(estimate.setup, ranks=count, rank=0) for count in ranks]
    bars = [held_bytes(Partition(estimate.sizes, setup)) for setup in setups]
    with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": "megascale"}):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        below = [0.0] * len(ranks)
        for kind, color in zip(estimate.held, COLORS, strict=True):
            heights = [bar[kind] / 1e9 for bar in bars]
            if any(heights):
                axes.bar([str(count) for count in ranks], heights, bottom=below, color=color, label=kind)
            below = [low + height for low, height in zip(below, heights, strict=True)]
        axes.set_xlabel("ranks")
        axes.set_ylabel("GB a rank, without activations")
        axes.set_title(f"{estimate.sizes.numel:,} parameters, {estimate.setup.sharding}, {estimate.setup.optimizer}")
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside right upper", frameon=False)
        figure.savefig(path, dpi=150)


def draw_timeline(timeline: Timeline, path: Path) -> None:
    """Write what each lane does in one iteration, in milliseconds, to a file of any format."""
    names = list(dict.fromkeys(span.name for span in timeline.spans))
    others = iter(COLORS[3:] + COLORS[1:3])
    colors = {BACKWARD: COLORS[0], FORWARD: COLORS[5], WAIT: "#DDDDDD"}
    with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": "megascale"}):
        figure = Figure(figsize=(8, 2.6), layout="constrained")
        axes = figure.add_subplot()
        for name in names:
            color = colors.get(name) or next(color for color in others if color != COLORS[5])
            spans = [span for span in timeline.spans if span.name == name]
            rows = [LANES.index(span.lane) for span in spans]
            widths = [(span.end - span.begin) * 1e3 for span in spans]
            axes.barh(rows, widths, left=[span.begin * 1e3 for span in spans], height=0.6, color=color, label=name)
        axes.set_yticks(range(len(LANES)), LANES)
        axes.invert_yaxis()
        axes.set_xlabel("ms from the begin of backward")
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside right upper", frameon=False)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
