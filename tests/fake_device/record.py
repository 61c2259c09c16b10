"""What a device was asked to do, call by call, and what of it makes the host wait."""

import sys
from collections import Counter
from dataclasses import dataclass

SYNCING_OPERATORS = frozenset(
    f"aten::{name}"
    for name in (
        "nonzero",
        "masked_select",
        "equal",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "bincount",
        "repeat_interleave.Tensor",
        "histc",
    )
)
"""Operators whose result has a shape, or a value, that the host must know."""

COPIES = "aten::copy_"

WAITS = ("wait", "block", "scalar")
"""Kinds of calls that wait for work of a device: the host, or a stream."""


@dataclass(frozen=True)
class Call:
    """One call to the device.

    Attributes:
        kind: see device.cpp; besides, "load" and "launch" of a kernel, "capture" and "replay" of a graph.
        what: the operator, the kernel, the copy.
        stream: the device and its stream: (0, 0) is the default stream of the first device.
        site: the lines of megascale that made it, the innermost first.
        programs: of a launch.
        captured: whether a graph was being captured.
        thread: that made it.
    """

    kind: str
    what: str
    stream: tuple[int, int]
    site: str
    programs: int = 0
    captured: bool = False
    thread: int = 0

    def makes_host_wait(self) -> bool:
        """Whether the host waits for the device, except for an event: what is behind that may be long done."""
        if self.kind == "copy":
            return " blocking " in self.what or (" from " in self.what and self.what.endswith("pageable"))
        if self.kind == "wait":
            return not self.what.startswith("event")
        return self.kind in ("scalar", "mask") or (self.kind == "operator" and self.what in SYNCING_OPERATORS)

    def line(self) -> str:
        """Return the line of megascale that made it, with its function; "" for a call of others."""
        return self.site.split(" < ")[0]

    def __str__(self) -> str:
        return f"{self.kind} {self.what} at {self.site}"


class Record(list[Call]):
    """Calls, in their order. It travels by pickle."""

    def of(self, *kinds: str) -> list[str]:
        """Return what was called of these kinds."""
        return [call.what for call in self if call.kind in kinds]

    def launches(self) -> list[str]:
        """Return the names of the kernels that were launched."""
        return self.of("launch")

    def operators(self) -> Counter[str]:
        """Return how often each operator ran on the device."""
        return Counter(self.of("operator", "mask"))

    def syncs(self) -> list[str]:
        """Return what made the host wait, each with the lines that did it."""
        return [str(call) for call in self if call.makes_host_wait()]

    def unawaited(self) -> list[str]:
        """Return the asynchronous copies to the host that no event follows: who reads them reads them too early."""
        pairs = zip(self, [*self[1:], None], strict=True)
        return [
            str(call)
            for call, after in pairs
            if call.kind == "copy"
            and " from async" in call.what
            and not (after is not None and after.kind == "record" and after.stream == call.stream)
        ]

    def event_waits(self) -> list[str]:
        """Return the events that the host waited for."""
        return [call.what for call in self if call.kind == "wait" and call.what.startswith("event")]

    def refused_in_capture(self) -> list[str]:
        """Return what a GPU refuses, or does outside the graph, while it captures one.

        Streams that wait for an event of a captured one are captured, too, until the capture ends.
        """
        capture: Call | None = None
        refused, streams, events = list[str](), set[tuple[int, int]](), set[str]()
        for call in self:
            if call.kind == "capture":
                capture, streams, events = call, {call.stream}, set()
            if capture is None or not call.captured:
                continue
            if call.kind == "record" and call.stream in streams:
                events.add(call.what)
            if call.kind == "block" and call.what in events:
                streams.add(call.stream)
            is_unsafe = call.kind in ("load", "wait", "pin") or call.makes_host_wait()
            if is_unsafe and (call.thread == capture.thread or capture.what == "global"):
                refused.append(str(call))
            elif call.kind in ("launch", "operator", "copy") and call.stream not in streams:
                refused.append(f"{call}, on {call.stream}, not {capture.stream}")
            elif call.kind == "copy" and call.what.endswith("pageable"):
                refused.append(str(call))
        return refused

    def first_met_in_capture(self) -> set[str]:
        """Return the operators and kernels that ran while a graph was captured, and not before."""
        ran = [call for call in self if call.kind in ("launch", "operator")]
        return {call.what for call in ran if call.captured} - {call.what for call in ran if not call.captured}


def lines_of(package: str, limit: int = 4) -> str:
    """Return the innermost lines of the running thread that are in ``package``."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < limit:
        name = frame.f_globals.get("__name__", "")
        if name == package or name.startswith(package + "."):
            found.append(f"{name.removeprefix(package + '.')}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found)
