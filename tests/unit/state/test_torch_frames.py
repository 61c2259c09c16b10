"""Python's frames are looked at where a file says why, and nowhere else."""

from pathlib import Path

import megascale

LOOKS = ("_getframe", "currentframe", ".f_back", "inspect.stack")


def test_frames_are_looked_at_in_few_files() -> None:
    """The line to blame in a warning, and what torch's functions know and do not pass on."""
    root = Path(megascale.__file__).parent
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if any(look in path.read_text(encoding="utf-8") for look in LOOKS)
    }
    assert found == {"state/torch_frames.py", "utils/call_site.py"}
