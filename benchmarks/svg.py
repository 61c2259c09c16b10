"""Pictures as SVG text: transparent, with colours and a size of letters that stay readable on white, on black, and 390
pixels wide. No library draws them, so that they are the same on every machine.
"""

from collections.abc import Mapping, Sequence
from html import escape
from statistics import mean
from typing import NamedTuple

WIDTH = 460
"""Units of a picture's width, which a page shows at most 560 pixels wide."""
TEXT = "#808080"
"""Grey letters, which white and black pages both show."""
SIZE = 13
THIN = 1.1
"""Units of the thinnest line: a point, 4/3 of a pixel, where a page shows the picture 560 pixels wide."""
GRID = f'stroke="{TEXT}" stroke-opacity="0.35" stroke-width="{THIN}"'
"""Of lines across a plot."""
BAR, ROW = 17, 27
LABEL = 178
"""Units that bars' names have."""


class Piece(NamedTuple):
    """A part of a bar: its length in the bars' unit, and its colour."""

    length: float
    colour: str


class Bar(NamedTuple):
    """A bar of pieces, the numbers that its line leads from and to, and what stands behind it."""

    name: str
    pieces: Sequence[Piece]
    value: str
    span: tuple[float, float] | None = None
    bold: bool = False


def text(x: float, y: float, content: str, *, anchor: str = "start", bold: bool = False, size: int = SIZE) -> str:
    """Return a line of text whose foot is at ``y``."""
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"{weight}>{escape(content)}</text>'


def panel(title: str, bars: Sequence[Bar], top: float, largest: float) -> tuple[list[str], float]:
    """Return a title and bars below it, and where they end. A line that passes ``largest`` ends in an arrow."""
    scale = (WIDTH - LABEL - 48) / largest
    shapes = [text(0, top + SIZE, title, bold=True)]
    for index, bar in enumerate(bars):
        y = top + ROW + index * ROW
        middle = y + BAR / 2
        shapes.append(text(LABEL - 8, middle + 4.5, bar.name, anchor="end", bold=bar.bold))
        x = float(LABEL)
        for piece in bar.pieces:
            width = min(piece.length, largest) * scale
            # Pale below a line of its colour.
            pale = ' fill-opacity="0.55"' if bar.span is not None else ""
            place = f'x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{BAR}"'
            shapes.append(f'<rect {place} fill="{piece.colour}"{pale}/>')
            x += width
        if bar.span is not None:
            low, high = (LABEL + min(end, largest) * scale for end in bar.span)
            shapes.append(f'<path d="M{low:.1f} {middle:g}H{high:.1f}" stroke="{piece.colour}" stroke-width="2"/>')
            if bar.span[1] > largest:
                shapes.append(f'<path d="M{high:.1f} {middle - 4:g}l6 4l-6 4z" fill="{piece.colour}"/>')
            x = max(x, high + (6 if bar.span[1] > largest else 0))
        shapes.append(text(x + 5, middle + 4.5, bar.value, bold=bar.bold))
    return shapes, top + ROW + len(bars) * ROW


def legend(entries: Sequence[tuple[str, str]], top: float) -> tuple[list[str], float]:
    """Return squares of colour with names, as many in a row as fit, and where they end."""
    shapes, x, y = [], 0.0, top
    for name, colour in entries:
        width = 24 + 7.0 * len(name)
        if x + width > WIDTH:
            x, y = 0.0, y + 20
        shapes.append(f'<rect x="{x:g}" y="{y:g}" width="12" height="12" fill="{colour}"/>')
        shapes.append(text(x + 17, y + 11, name))
        x += width
    return shapes, y + 24


class Axes(NamedTuple):
    """A plot of curves over steps: its levels across from the lowest to the highest, and the steps between its marks.

    Attributes:
        right: units beside the plot, for what stands at the curves' ends.
    """

    levels: Sequence[float]
    every: int
    right: float = 62


LEFT, TOP, HEIGHT = 34, 26, 200
"""Units beside, above and of a plot."""


def bands(
    curves: Mapping[str, Mapping[int, Sequence[float]]],
    axes: Axes,
    strokes: Mapping[str, tuple[str, float]],
) -> list[str]:
    """Return curves, by name and step: the mean of several runs as a line, and a band from the lowest to the highest.

    ``strokes``: colour and width of each line. Steps of which a value is above the highest level are left out.
    """
    last = max(step for steps in curves.values() for step in steps)
    low, high = axes.levels[0], axes.levels[-1]

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - axes.right) * step / last

    def y(value: float) -> float:
        return TOP + HEIGHT * (high - value) / (high - low)

    shapes = []
    for level in axes.levels:
        line = f'<path d="M{LEFT} {y(level):.1f}H{x(last):.1f}" {GRID}/>'
        shapes += [line, text(LEFT - 6, y(level) + 4.5, f"{level:g}", anchor="end", size=12)]
    for step in range(0, last + 1, axes.every):
        shapes.append(text(x(step), TOP + HEIGHT + 18, f"{step}", anchor="middle", size=12))
    for name, steps in curves.items():
        shown = {step: values for step, values in sorted(steps.items()) if max(values) <= high}
        upper = [f"{x(step):.1f} {y(max(values)):.1f}" for step, values in shown.items()]
        lower = [f"{x(step):.1f} {y(min(values)):.1f}" for step, values in reversed(shown.items())]
        middle = [f"{x(step):.1f} {y(mean(values)):.1f}" for step, values in shown.items()]
        colour, width = strokes[name]
        shapes.append(f'<path d="M{"L".join(upper + lower)}Z" fill="{colour}" fill-opacity="0.2"/>')
        shapes.append(f'<path d="M{"L".join(middle)}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>')
    return shapes


def picture(title: str, shapes: Sequence[str], height: float, source: str) -> str:
    """Return the file: what it shows, for those who cannot see it, and what it was drawn from."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="560" '
            f'height="{height * 560 / WIDTH:.0f}" role="img" font-family="system-ui, sans-serif" fill="{TEXT}">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(source)}</desc>",
            *shapes,
            "</svg>",
            "",
        ]
    )
