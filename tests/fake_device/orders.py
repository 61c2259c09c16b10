"""Lives in each order of the device's streams, with all waits and without one: whether their bits differ.

A life has a way of offload, `life.way`. `lived(life, way)` lives it, with that or without, and returns what it shows.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from megascale.errors import MegascaleError
from tests.fake_device.device import FakeDevice, WrittenAfterFree
from tests.fake_device.record import WAITS
from tests.training import bits_equal

Lived = Callable[[Any, dict[str, Any]], list[Tensor]]
Run = tuple[str, int]
"""An order of the device's streams, and the seed of a random one."""
RUNS: list[Run] = [("late", 0), ("side first", 0), *(("random", seed) for seed in range(4))]


def differs(device: FakeDevice, lived: Lived, life: Any, expected: list[Tensor], run: Run) -> bool:
    """Return whether a life shows other bits in one order of the device's streams, or raises."""
    try:
        with device.running(*run):
            values = lived(life, life.way)
    except (WrittenAfterFree, MegascaleError):
        return True
    return len(values) != len(expected) or not all(map(bits_equal, values, expected))


def differing(device: FakeDevice, lived: Lived, lives: Sequence[Any], runs: Sequence[Run] = RUNS) -> list[Any]:
    """Return which lives, in which orders, have other bits than without offload and with streams that run at once."""
    found: list[Any] = []
    for life in lives:
        expected = lived(life, {})
        found += [(life, run) for run in runs if differs(device, lived, life, expected, run)]
        with device.running("late"):  # without offload a second stream waits for weights if its user lets it
            plain = expected if "streams" in life.actions else lived(life, {})
        if not all(map(bits_equal, plain, expected)):
            found.append((life, "without offload"))
    return found


def waits_of(device: FakeDevice, lived: Lived, life: Any) -> set[str]:
    """Return the lines that wait for the device in a life whose streams run late."""
    with device.running("late"), device.watch() as seen:
        lived(life, life.way)
    return {call.line() for call in seen if call.kind in WAITS and call.line()}


def noticed(
    device: FakeDevice, lived: Lived, life: Any, function: str, runs: Sequence[Run] = RUNS
) -> dict[str, list[Run]]:
    """Return the lines of ``function`` that wait, and the orders in which a life without that wait has other bits.

    ``function``: with its module, as in "utils.streams wait".
    """
    expected = lived(life, {})
    found = {}
    for line in sorted(line for line in waits_of(device, lived, life) if _function_of(line) == function):
        with device.without(line):
            found[line] = [run for run in runs if differs(device, lived, life, expected, run)]
    return found


def _function_of(line: str) -> str:
    place, _, function = line.partition(" ")
    return f"{place.split(':')[0]} {function}"
