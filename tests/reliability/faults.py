"""What the campaign writes down of each injected fault, and its table."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One injected fault.

    Attributes:
        family: a section of the table.
        fault: what was done.
        seen: what the user saw, in few words, or the message.
        as_promised: whether it ended as docs/benchmarks.md promises.
    """

    family: str
    fault: str
    seen: str
    as_promised: bool


def table(faults: Iterable[Fault]) -> str:
    """Return a Markdown table: a row for each kind of fault with what was seen, and how often."""
    counted: dict[tuple[str, str, str], list[bool]] = defaultdict(list)
    for fault in faults:
        counted[fault.family, fault.fault, _cell(fault.seen)].append(fault.as_promised)
    lines = ["| fault | what the user sees | as promised |", "|---|---|---|"]
    lines += [
        f"| {family}: {fault} | {seen} | {sum(held)} of {len(held)} |"
        for (family, fault, seen), held in counted.items()
    ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Return a message as a table's cell, without the numbers that differ between machines and runs."""
    text = re.sub(r"process \d+ on \S+?(?=[).])", "process … on …", text)
    text = re.sub(r"\[\S*/(\w+\.cc):\d+\]", r"[\1]", text)
    text = re.sub(r"(incomplete-)\w+", r"\1…", text)
    return text.replace("|", "\\|").replace("\n", " ")
