"""Which process of a run gets which tests: pytest-xdist's `--dist loadfile`, but for the simulated device's files."""

import functools
from pathlib import Path

from typing_extensions import override
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[1]
DEVICE = "tests with the simulated device"


class ByFile(LoadFileScheduling):
    """A file's tests stay together. All files that use the simulated device go to one process, which starts it once."""

    @override
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return DEVICE if uses_device(file) else file


@functools.cache
def uses_device(file: str) -> bool:
    """Return whether tests of a file take the fixture ``on_device``."""
    return "on_device: OnDevice" in (ROOT / file).read_text(encoding="utf-8")
