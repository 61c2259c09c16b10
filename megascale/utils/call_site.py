"""Warnings that show the line of the user's program which has called the library."""

import sys
import sysconfig
import warnings
from pathlib import Path
from traceback import walk_stack
from types import FrameType

import torch

_PACKAGE = Path(__file__).parents[1]
_PROGRAMS = tuple(f"{_PACKAGE / name}/" for name in ("train", "cli"))
_LIBRARIES = (f"{_PACKAGE}/", f"{Path(torch.__file__).parent}/", f"{sysconfig.get_path('stdlib')}/", "<")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's program that has called the library, however deep in it this is called.

    So Python shows a line that the user can change, and tells each such line once.
    """
    frames = enumerate(walk_stack(sys._getframe(1)), start=2)
    level = next((level for level, (frame, _) in frames if _is_user_code(frame)), 2)
    warnings.warn(message, category, stacklevel=level)


def _is_user_code(frame: FrameType) -> bool:
    """Return whether a frame is the user's: not torch's, the standard library's or megascale's, its programs aside."""
    name = frame.f_code.co_filename
    is_installed = "/site-packages/" in name and not name.startswith(_LIBRARIES[:2])
    return name.startswith(_PROGRAMS) or is_installed or not name.startswith(_LIBRARIES)
