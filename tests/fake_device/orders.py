"""A life in each order of the device's streams, with all waits and without one: whether it goes wrong."""

from collections.abc import Callable, Sequence

from tests.fake_device.device import FakeDevice
from tests.fake_device.record import WAITS

Run = tuple[str, int]
"""An order of the device's streams, and the seed of a random one."""
RUNS: list[Run] = [("late", 0), ("side first", 0), *(("random", seed) for seed in range(4))]


def waits_of(device: FakeDevice, live: Callable[[], object]) -> set[str]:
    """Return the lines that wait for the device in a life whose streams run late."""
    with device.running("late"), device.watch() as seen:
        live()
    return {call.line() for call in seen if call.kind in WAITS and call.line()}


def noticed(
    device: FakeDevice, live: Callable[[], object], function: str, runs: Sequence[Run] = RUNS[:2]
) -> dict[str, list[Run]]:
    """Return the lines of ``function`` that wait, and the orders in which a life without that wait goes wrong.

    ``function``: with its module, as in "utils.streams wait".
    """
    found = {}
    for line in sorted(line for line in waits_of(device, live) if _function_of(line) == function):
        with device.without(line):
            found[line] = [run for run in runs if _goes_wrong(device, live, run)]
    return found


def _goes_wrong(device: FakeDevice, live: Callable[[], object], run: Run) -> bool:
    try:
        with device.running(*run):
            live()
    except Exception:  # bits that differ, an error of the library's own, or memory that is written when it is free
        return True
    return False


def _function_of(line: str) -> str:
    place, _, function = line.partition(" ")
    return f"{place.split(':')[0]} {function}"
