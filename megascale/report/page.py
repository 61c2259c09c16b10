"""One HTML page of runs that asks no other host for anything: pictures lie in it as data."""

import base64
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, Literal

import numpy as np

from megascale.report.drawing import styles_of, svg
from megascale.report.hover import overlay
from megascale.report.panels import Panel, steps_by_parameter
from megascale.report.runs import Run, Series
from megascale.step.overflow_report import OverflowRow
from megascale.version import VERSION

NONE = "-"
"""A cell without a value."""
MOST_PARAMETERS = 100
"""Rows of the overflow table."""
STYLE = """
:root { color-scheme: light dark; --line: #d8d8d8; --grey: #555; --text: #1a1a1a; --page: #fff; }
@media (prefers-color-scheme: dark) { :root { --line: #444; --grey: #aaa; --text: #e4e4e4; --page: #181818; } }
body { margin: 0 auto; padding: 1rem; max-width: 92rem; background: var(--page); color: var(--text);
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif;
  overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: 0 0 .5rem; } h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); gap: 1rem; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 6px; padding: .6rem; min-width: 0; }
figure h3 { font-size: .95rem; margin: 0 0 .3rem; } figure img { width: 100%; height: auto; display: block; }
figcaption, .note { color: var(--grey); font-size: .85rem; }
.plot { position: relative; } .hover { position: absolute; inset: 0; width: 100%; height: 100%; }
.hover rect { fill: transparent; } .hover rect:hover { fill: rgba(128, 128, 128, .25); }
.legend { font-size: .85rem; margin: .3rem 0 0; }
.legend span { margin-right: 1rem; display: inline-block; max-width: 100%; }
pre { overflow-x: auto; font-size: .8rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child, .text { text-align: left; } thead th { color: var(--grey); font-weight: 600; }
.key { width: 2.2rem; height: .7rem; vertical-align: middle; margin-right: .4rem; }
.warning { border-left: 4px solid #D55E00; padding: .2rem .7rem; margin: .5rem 0; }
"""


def page(runs: Sequence[Run], panels: Sequence[Panel], command: str) -> str:
    """Return the page. ``command``: which drew it."""
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',
        f"<title>{escape(', '.join(run.label for run in runs[:4]))}: training report</title>",
        f"<style>{STYLE}</style></head><body>",
        "<h1>Training report</h1>",
        f'<p class="note">Drawn on {time.strftime("%Y-%m-%d %H:%M")} by megascale {escape(VERSION)}: '
        f"<code>{escape(command)}</code></p>",
        *_warnings(runs),
        _summary(runs),
        '<h2>Step by step</h2><div class="panels">',
        *(_figure(panel, runs) for panel in panels),
        "</div>",
        _overflows(runs),
        *_configs(runs),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _figure(panel: Panel, runs: Sequence[Run]) -> str:
    drawn = svg(panel, runs)
    data = base64.b64encode(drawn.document.encode()).decode()
    note = f"<figcaption>{escape(panel.note)}</figcaption>" if panel.note else ""
    return (
        f'<figure><h3>{escape(panel.title)}</h3><div class="plot"><img alt="{escape(panel.title)} over steps" '
        f'src="data:image/svg+xml;base64,{data}">{overlay(panel, runs, drawn.frame)}</div>'
        f"{_legend(runs)}{note}</figure>"
    )


def _legend(runs: Sequence[Run]) -> str:
    """Return the names of runs with their lines; empty for one run."""
    styles = styles_of(runs)
    if len(styles) < 2:
        return ""
    names = "".join(f"<span>{_key(*style)}{escape(label)}</span>" for label, style in styles.items())
    return f'<p class="legend">{names}</p>'


def _key(colour: str, dashes: str) -> str:
    """Return a piece of a run's line."""
    return (
        f'<svg class="key" viewBox="0 0 36 10" aria-hidden="true"><path d="M0 5H36" stroke="{colour}" '
        f'stroke-width="3" stroke-dasharray="{" ".join(str(2 * float(d)) for d in dashes.split())}"/></svg>'
    )


def _configs(runs: Sequence[Run]) -> Iterator[str]:
    """Yield each run's command and, folded away, its options with how to train with them again, where it left them."""
    if any(run.config for run in runs):
        yield "<h2>Commands and options</h2>"
    for run in runs:
        if run.command:
            yield f"<p><b>{escape(run.label)}</b>: <code>{escape(run.command)}</code></p>"
        if run.config:
            again = '<p class="note">megascale train config=FILE, with a file of these lines, trains so again.</p>'
            text = f"<pre>{escape(run.config)}</pre>"
            yield f"<details><summary>{escape(run.label)}</summary>{again}{text}</details>"


def _warnings(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a sentence for each run that ended badly."""
    for run in runs:
        count = trailing_skips(run)
        if count > 1:
            scale = run.get("scale")[-1]
            at = f" The scale is {_power(scale)}." if np.isfinite(scale) else ""
            whole = "all" if count == len(run.steps) else "the last"
            named = " The table of overflows names the gradients." if run.overflows else ""
            yield (
                f'<p class="warning"><b>{escape(run.label)}</b>: {whole} {count:,} steps were skipped.{at}{named}</p>'
            )
        losses = run.get("loss")
        if len(losses) and np.isnan(losses[-1]) and not np.isnan(losses).all():
            yield f'<p class="warning"><b>{escape(run.label)}</b>: the last loss is NaN.</p>'


def trailing_skips(run: Run) -> int:
    """Return how many steps were skipped in a row at the end."""
    landed = np.flatnonzero(run.get("skipped") == 0)
    if np.isnan(run.get("skipped")).all():
        return 0
    return int(len(run.steps) - 1 - (landed[-1] if len(landed) else -1))


def _summary(runs: Sequence[Run]) -> str:
    """Return a table with one row for each run; its first column is the legend."""
    styles = styles_of(runs)
    accuracy = next((name for name in ("total_accuracy", "accuracy", "batch_accuracy") if _any(runs, name)), "")
    head = ["run", "ended", "took", "steps", "skipped", "skipped at the end", "last scale", "last loss"]
    head += ["last accuracy"] * bool(accuracy) + ["zero gradients"] * _any(runs, "zero_grad_fraction")
    rows = []
    for run in runs:
        skipped = run.get("skipped")
        known = not np.isnan(skipped).all()
        cells = [
            _key(*styles[run.label]) + escape(run.label),
            NONE if run.written is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(run.written)),
            _duration(run.seconds),
            f"{len(run.steps):,}",
            f"{int(np.nansum(skipped)):,} ({_share(skipped)})" if known else NONE,
            f"{trailing_skips(run):,}" if known else NONE,
            _power(_last(run, "scale")),
            _number(_last(run, "loss")),
        ]
        if accuracy:
            cells.append(_number(_last(run, accuracy)))
        if "zero gradients" in head:
            zeros = run.get("zero_grad_fraction")
            cells.append(NONE if np.isnan(zeros).all() else _share(zeros))
        rows.append(cells)
    return _table(head, rows)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return NONE
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s" if rest >= 60 else f"{rest} s"


def _overflows(runs: Sequence[Run]) -> str:
    """Return a table of parameters whose gradients overflowed; empty if no run has told of one."""
    rows = [row for run in runs for row in overflow_rows(run)]
    if not rows:
        return ""
    head = ["parameter", "run", "steps", "first", "last", "inf", "NaN", "origin", "on ranks", "scale", "largest finite"]
    rest = len(rows) - MOST_PARAMETERS
    more = f'<p class="note">and {rest:,} more parameters</p>' if rest > 0 else ""
    note = (
        '<p class="note">Steps in which a gradient held inf or NaN; elements in all; in how many of them it was the '
        "likely origin; scale and largest finite element at the last.</p>"
    ) + "".join(_lost_losses(run) for run in runs)
    return "<h2>Overflows by parameter</h2>" + note + _table(head, rows[:MOST_PARAMETERS], texts=(1,)) + more


def _lost_losses(run: Run) -> str:
    """Return a sentence on the steps whose loss itself was not finite, and where forward made it; empty if none was."""
    lost = [one for one in run.overflows if one["loss_finite"] is False]
    if not lost:
        return ""
    modules = Counter(one["module"] for one in {one["step"]: one for one in lost}.values() if one["module"])
    named = ", ".join(f"{escape(str(module))} ({count:,} steps)" for module, count in modules.most_common(3))
    made = f"Forward made it first in {named}." if named else "megascale.debug.watch(model) names the module."
    steps = len({one["step"] for one in lost})
    return (
        f'<p class="note"><strong>{escape(run.label)}: in {steps:,} skipped steps the loss itself was inf or NaN, '
        f"and no parameter below is at fault.</strong> {made}</p>"
    )


def overflow_rows(run: Run) -> Iterator[list[str]]:
    """Yield the cells of each parameter, that with most steps first."""
    by_name: dict[str, list[OverflowRow]] = {}
    for overflow in run.overflows:
        by_name.setdefault(overflow["parameter"], []).append(overflow)
    for name, steps in steps_by_parameter(run).items():
        own = sorted(by_name[name], key=lambda one: one["step"])
        last = own[-1]
        ranks = sorted({rank for one in own if isinstance(rank := one["rank"], int)})
        origins = {one["step"] for one in own if one["origin"]}
        yield [
            escape(name),
            escape(run.label),
            f"{steps:,}",
            f"{own[0]['step']:,}",
            f"{last['step']:,}",
            _total(own, "num_inf"),
            _total(own, "num_nan"),
            f"{len(origins):,}",
            ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "") or NONE,
            _power(last["scale"]),
            _number(last["largest_finite"]),
        ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[int] = ()) -> str:
    kinds = [' class="text"' if index in texts else "" for index in range(len(head))]
    lines = ["".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True)) for row in rows]
    titles = "".join(f"<th{kind}>{title}</th>" for kind, title in zip(kinds, head, strict=True))
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f'<div class="wide"><table><thead><tr>{titles}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _any(runs: Sequence[Run], column: str) -> bool:
    return any(bool(np.isfinite(run.get(column)).any()) for run in runs)


def _last(run: Run, column: str) -> float:
    """Return the last value that was measured; NaN if none was."""
    values = run.get(column)
    known = values if np.isnan(values).all() else values[~np.isnan(values)]
    return float(known[-1])


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) and not np.isnan(value) else NONE


def _total(overflows: Sequence[OverflowRow], key: Literal["num_inf", "num_nan"]) -> str:
    """Return the sum of counts that are known; a run on an accelerator may not know them."""
    counts = [count for one in overflows if (count := one[key]) is not None]
    return f"{sum(counts):,}" if counts else NONE


def _share(values: Series) -> str:
    mean = float(np.nanmean(values))
    return "&lt; 0.1%" if 0 < mean < 0.001 else f"{mean:.1%}"


def _power(scale: Any) -> str:
    """Return a loss scale as a power of two where it is one."""
    if not isinstance(scale, (int, float)) or not np.isfinite(scale) or scale <= 0:
        return NONE
    power = float(np.log2(scale))
    return f"{scale:.6g}" if abs(power) < 10 else f"2<sup>{f'{power:.1f}'.removesuffix('.0')}</sup>"
