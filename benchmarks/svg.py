"""Pictures as SVG text: transparent, with colours and a size of letters that stay readable on white, on black, and 390
pixels wide. No library draws them, so that they are the same on every machine.
"""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH = 460
"""Units of a picture's width, which a page shows at most 560 pixels wide."""
TEXT = "#808080"
"""Grey letters, which white and black pages both show."""
SIZE = 13
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
            shapes.append(f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{BAR}" fill="{piece.colour}"/>')
            x += width
        if bar.span is not None:
            low, high = (LABEL + min(end, largest) * scale for end in bar.span)
            shapes.append(f'<path d="M{low:.1f} {middle:g}H{high:.1f}" stroke="{TEXT}" stroke-width="1.5"/>')
            if bar.span[1] > largest:
                shapes.append(f'<path d="M{high:.1f} {middle - 4:g}l6 4l-6 4z" fill="{TEXT}"/>')
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
