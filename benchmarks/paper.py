"""Print one table of what a GPU's step should take, on paper, and what it took, from the tables of launch/gpu_check.sh.

    python benchmarks/paper.py benchmarks/results --out benchmarks/results/paper_gpu.md

On paper a step takes the bytes that its passes have to move over the bandwidth of a copy in the same run, and waits for
none. It launches five kernels of ours (statistics, total, decision, scale, update), four of torch's and a copy. A
graph's replay moves the same bytes. What was not measured is a line that says so.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

OURS = "megascale (triton)"
LAUNCHES, WAITS = 10, 0
BYTES = 30
"""That AdamW on fp16 parameters and gradients has to move, of each parameter."""
FILES = ("step_gpu.md", "sweep_gpu_tensors.md", "graph_gpu.md")


class Section(NamedTuple):
    """One Markdown table, its rows by the names of columns, and the heading above it."""

    heading: str
    rows: list[dict[str, str]]


class Line(NamedTuple):
    """One line of the result. ``paper`` is 0 where nothing is to be seen."""

    what: str
    paper: float
    measured: float

    def cells(self) -> list[str]:
        """Return what is printed."""
        ratio = f"{self.measured / self.paper:.2f}" if self.paper else "-"
        return [self.what, f"{self.paper:.4g}", f"{self.measured:.4g}", ratio]


def sections(text: str) -> Iterator[Section]:
    """Yield the tables of a page."""
    heading, heads, rows = "", [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if not heads:
                heads = cells
            elif set(line) - set("|-"):
                rows.append(dict(zip(heads, cells, strict=False)))
            continue
        if heads:
            yield Section(heading, rows)
        heads, rows = [], []
        if line.startswith("#"):
            heading = line.lstrip("# ")


def number(text: str) -> float:
    """Return a number that may have commas between its thousands."""
    return float(text.replace(",", ""))


def numel_of(heading: str) -> float:
    """Return how many parameters a heading speaks of. Raises ValueError."""
    found = re.search(r"([\d,]+) (?:fp16 )?parameters", heading)
    if found is None:
        raise ValueError(f"no number of parameters in the heading {heading!r}")
    return number(found[1])


def lines_of_row(what: str, row: dict[str, str], of_bandwidth: str) -> Iterator[Line]:
    """Yield what a row of ours says: time, launches, waits."""
    measured = number(row["median ms"])
    yield Line(f"{what}: ms", measured * number(row[of_bandwidth]), measured)
    yield Line(f"{what}: launches", LAUNCHES, number(row["launches"]))
    yield Line(f"{what}: host waits", WAITS, number(row["host waits"]))


def of_steps(text: str) -> Iterator[Line]:
    """Yield the lines of step.py's page."""
    for heading, rows in sections(text):
        for row in rows:
            if row.get("step") == OURS and "host waits" in row:
                yield from lines_of_row(heading, row, "of the bandwidth (medians)")


def of_sweep(text: str) -> Iterator[Line]:
    """Yield the lines of sweep.py's page over numbers of tensors."""
    for heading, rows in sections(text):
        for row in rows:
            if row.get("step") == OURS and "host waits" in row:
                tensors = next(iter(row.values()))  # that column's name is the whole axis
                what = f"{numel_of(heading):,.0f} parameters in {tensors} tensors"
                yield from lines_of_row(what, row, "of the bandwidth")


def bandwidth_of(text: str) -> float | None:
    """Return the bandwidth, in GB/s, that step.py has measured; None where it has not."""
    found = re.search(r"bandwidth in the same run: median ([\d.]+) GB/s", text)
    return None if found is None else float(found[1])


def of_graphs(text: str, bandwidth: float | None) -> Iterator[Line]:
    """Yield the lines of graph.py's page."""
    for heading, rows in sections(text):
        for row in rows:
            if row.get("step") == "replay" and "backend triton" in heading:
                paper = 0 if bandwidth is None else BYTES * numel_of(heading) / bandwidth / 1e6
                yield Line(f"replay of {heading.partition(', backend')[0]}: ms", paper, number(row["median ms"]))
                yield Line(f"replay of {heading.partition(', backend')[0]}: other bits", 0, "OTHER" in heading)


def table(folder: Path) -> str:
    """Return the Markdown of all that a folder's tables tell."""
    pages = {name: (folder / name).read_text() if (folder / name).is_file() else "" for name in FILES}
    bandwidth = bandwidth_of(pages["step_gpu.md"])
    found = {
        "step_gpu.md": [*of_steps(pages["step_gpu.md"])],
        "sweep_gpu_tensors.md": [*of_sweep(pages["sweep_gpu_tensors.md"])],
        "graph_gpu.md": [*of_graphs(pages["graph_gpu.md"], bandwidth)],
    }
    heads = ["AdamW on fp16 parameters, triton", "paper", "measured", "measured / paper"]
    cells = []
    for name, lines in found.items():
        cells += [line.cells() for line in lines] or [[f"nothing in {name}", "-", "not measured", "-"]]
    rule = "|---" * len(heads) + "|"
    text = "\n".join([f"| {' | '.join(heads)} |", rule, *(f"| {' | '.join(row)} |" for row in cells)])
    copied = "not measured" if bandwidth is None else f"{bandwidth:,.0f} GB/s"
    return f"## Paper and measured\n\n{text}\n\nBandwidth of a copy, read and written: {copied}.\n"


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where launch/gpu_check.sh has put its tables")
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    arguments = parser.parse_args()
    if not arguments.folder.is_dir():
        sys.exit(f"{arguments.folder} is not a folder; launch/gpu_check.sh FOLDER makes one")
    text = table(arguments.folder)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
