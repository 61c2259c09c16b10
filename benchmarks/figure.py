"""Draw the pictures of the pages: times of a step from the committed rounds, bytes per parameter from megascale's own
estimate, and how a step goes.

    python benchmarks/figure.py

Reads every round of benchmarks/results/step_cpu.csv and growth_cpu.csv, and writes docs/assets/*.svg. A picture names
the digest of the rounds it was drawn from, so that a test finds an old one.
"""

import argparse
import csv
import hashlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import svg

ROOT = Path(__file__).parents[1]
FIGURES = {"step_cpu.csv": "step_benchmark.svg", "growth_cpu.csv": "growth_benchmark.svg"}
BYTES, FLOW = "bytes_per_parameter.svg", "a_step.svg"
OURS, PEERS = "#1f83c4", "#9a9a9a"
NAMES = {
    "megascale": "megascale",
    "megascale, torch": "megascale (torch)",
    "megascale DistributedOptimizer": "DistributedOptimizer",
    "masters": "fp32 copies by hand",
    "torch amp": "torch.amp, fp32 weights",
    "Megatron-Core, fused AdamW": "Megatron, fused AdamW",
    "DeepSpeed FP16_Optimizer": "DeepSpeed FP16",
}
"""Contenders as readers know them."""
KINDS = {
    "model params": ("weights", "#1f83c4"),
    "gradients": ("gradients", "#9a9a9a"),
    "main grads": ("gradients", "#9a9a9a"),
    "main params": ("fp32 copies", "#d55e00"),
    "moments": ("AdamW's moments", "#2a9d74"),
}
"""Kinds of memory in an estimate: a name for readers, and a colour that colour-blind readers can tell from others."""
SHARES = 1.15
"""The axis ends at this multiple of the largest median: one slow round does not shrink all bars."""

Times = dict[str, list[float]]
"""Milliseconds of every round, by contender."""


def read_times(path: Path) -> dict[str, Times]:
    """Return the rounds' times by dtype and contender, in the file's order."""
    times: dict[str, Times] = {}
    with open(path, newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            times.setdefault(row["dtype"], {}).setdefault(row["contender"], []).append(float(row["ms"]))
    return times


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def draw(panels: Mapping[str, Times], title: str, source: str) -> str:
    """Return a picture with bars for each of ``panels``, the fastest first: medians, lines from minimum to maximum."""
    medians = {name: {who: statistics.median(ms) for who, ms in times.items()} for name, times in panels.items()}
    largest = SHARES * max(max(found.values()) for found in medians.values())
    shapes: list[str] = []
    end = 0.0
    for name, times in panels.items():
        bars = [
            svg.Bar(
                NAMES.get(who, who),
                [svg.Piece(median, OURS if who.startswith("megascale") else PEERS)],
                f"{median:.0f}",
                (min(times[who]), max(times[who])),
                who == "megascale",
            )
            for who, median in sorted(medians[name].items(), key=lambda pair: pair[1])
        ]
        drawn, end = svg.panel(name, bars, end, largest)
        shapes += drawn
        end += 10
    shapes.append(svg.text(0, end + 8, "ms per step: median; line from the fastest to the slowest round", size=12))
    return svg.picture(title, shapes, end + 16, source)


def step_panels(times: Mapping[str, Times]) -> dict[str, Times]:
    """Return one panel for each dtype."""
    return {f"{dtype}: 50M parameters in 200 tensors": kept for dtype, kept in times.items()}


def growth_panels(times: Mapping[str, Times]) -> dict[str, Times]:
    """Return one panel for each number of tensors, which ends the contenders' names."""
    panels: dict[str, Times] = {}
    for contender, rounds in next(iter(times.values())).items():
        name, _, tensors = contender.rpartition(", ")
        panels.setdefault(f"float16: 50M parameters in {tensors}", {})[name] = rounds
    return panels


def bytes_per_parameter() -> str:
    """Return stacked bars: what AdamW holds per parameter, by megascale's estimate of 1e9 parameters."""
    import torch

    from megascale import estimate

    remainders = {"store_param_remainders": True}
    moments = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}
    rows: dict[str, dict[str, Any]] = {
        "fp32": {"precision": "fp32"},
        "16 bits, fp32 copies": {},
        "with remainders": remainders,
        "with 8-bit moments": moments,
        "with both": remainders | moments,
    }
    layouts: dict[str, dict[str, Any]] = {
        "One GPU": {},
        "8 GPUs, state sharded": {"ranks": 8, "sharding": "zero1"},
    }
    shapes: list[str] = []
    end = 0.0
    for title, layout in layouts.items():
        bars = []
        for name, options in rows.items():
            held = {kind: nbytes / 1e9 for kind, nbytes in estimate(10**9, **options, **layout).held.items()}
            pieces = [svg.Piece(nbytes, KINDS[kind][1]) for kind, nbytes in held.items() if nbytes > 1e-3]
            bars.append(svg.Bar(name, pieces, f"{round(sum(held.values()), 2):g}", bold=name == "with both"))
        drawn, end = svg.panel(f"{title}: bytes per parameter with AdamW", bars, end, 16.0)
        shapes += drawn
        end += 10
    drawn, end = svg.legend(list(dict.fromkeys(KINDS.values())), end)
    title = "Bytes per parameter with AdamW, without activations, on one GPU and sharded over eight"
    return svg.picture(title, shapes + drawn, end, "megascale.estimate(10**9, ...)")


def a_step() -> str:
    """Return the way of a number through a step, for those who meet it for the first time."""
    boxes = [
        ("16-bit weights", "forward and backward compute with them", "#1f83c4"),
        ("loss times scale", "so that small gradients do not become 0", "#9a9a9a"),
        ("16-bit gradients", "any inf or NaN, on any GPU?", "#9a9a9a"),
        ("fp32 copies", "gradients / scale, clipped, then AdamW", "#d55e00"),
    ]
    shapes: list[str] = []
    left, width, height, gap = 90, 280, 48, 34
    for index, (name, what, colour) in enumerate(boxes):
        y = 2 + index * (height + gap)
        frame = f'width="{width}" height="{height}" rx="6" fill="none" stroke="{colour}" stroke-width="2"'
        shapes.append(f'<rect x="{left}" y="{y}" {frame}/>')
        shapes.append(svg.text(left + width / 2, y + 20, name, anchor="middle", bold=True, size=14))
        shapes.append(svg.text(left + width / 2, y + 38, what, anchor="middle", size=12))
        if index:
            x = left + width / 2
            shapes.append(f'<path d="M{x:g} {y - gap + 4}V{y - 8}" stroke="{svg.TEXT}" stroke-width="2"/>')
            shapes.append(f'<path d="M{x - 5:g} {y - 9}h10l-5 7z" fill="{svg.TEXT}"/>')
    last, second = 2 + 3 * (height + gap), 2 + 2 * (height + gap)
    middle = left + width / 2
    shapes.append(svg.text(middle + 12, last - gap / 2 + 4, "no: the scale may grow", size=12))
    shapes.append(
        f'<path d="M{left} {last + 24}H40V{26}H{left - 8}" fill="none" stroke="#d55e00" stroke-width="2"/>'
        f'<path d="M{left - 9} 21v10l7 -5z" fill="#d55e00"/>'
    )
    shapes.append(f'<g transform="rotate(-90 30 {last / 2 + 24})">')
    shapes.append(svg.text(30, last / 2 + 24, "rounded to 16 bits", anchor="middle", size=12) + "</g>")
    right = left + width
    shapes.append(
        f'<path d="M{right} {second + 24}H420V26H{right + 8}" fill="none" stroke="{svg.TEXT}" stroke-width="2" '
        f'stroke-dasharray="5 4"/><path d="M{right + 9} 21v10l-7 -5z" fill="{svg.TEXT}"/>'
    )
    shapes.append(f'<g transform="rotate(90 430 {second / 2 + 24})">')
    shapes.append(svg.text(430, second / 2 + 24, "yes: skip, halve the scale", anchor="middle", size=12) + "</g>")
    title = (
        "A step: 16-bit weights, a scaled loss, 16-bit gradients; fp32 copies are updated unless a gradient overflowed"
    )
    return svg.picture(title, shapes, last + height + 4, "drawn by benchmarks/figure.py")


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the .csv files"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "assets", help="folder of the figures")
    options = parser.parse_args(arguments)
    titles = ("Milliseconds per step of each contender", "Milliseconds per step as the number of tensors grows")
    drawings: dict[str, Callable[[], str]] = {BYTES: bytes_per_parameter, FLOW: a_step}
    for name, drawing in drawings.items():
        (options.out / name).write_text(drawing(), encoding="utf-8")
        print(options.out / name)
    for (rounds, figure), panels, title in zip(FIGURES.items(), (step_panels, growth_panels), titles, strict=True):
        source = options.results / rounds
        drawn = draw(panels(read_times(source)), title, f"{rounds} {digest(source)}")
        (options.out / figure).write_text(drawn, encoding="utf-8")
        print(options.out / figure)


if __name__ == "__main__":
    main()
