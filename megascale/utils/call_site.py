"""Where a thread is: the line of the user's program, and the library function that this line has called."""

import linecache
import re
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import NamedTuple

import torch

_PACKAGE = Path(__file__).parents[1]
_PROGRAMS = tuple(f"{_PACKAGE / name}/" for name in ("train", "cli"))
_WAITING = (f"{_PACKAGE}/", f"{Path(torch.__file__).parent}/")
_LIBRARIES = (*_WAITING, f"{sysconfig.get_path('stdlib')}/", "<")
_READING = re.compile(r"\.(item|tolist|cpu|numpy|wait|synchronize)\(")
"""Calls that wait for a device or for other ranks, and which Python's stack does not show, as they are not Python."""


class CallSite(NamedTuple):
    """A place in the user's program.

    Attributes:
        place: file, line and function, such as `train.py:40 in main`.
        source: the text of that line, "" where it cannot be read.
        call: the qualified name of the library function that the line has called; "" if it runs by itself.
        waits: whether the thread may wait for other ranks: it is inside torch or megascale, or the line reads a tensor.
    """

    place: str
    source: str
    call: str
    waits: bool

    def __str__(self) -> str:
        called = f"{self.call}, called at " if self.call else ""
        return f"{called}{self.place}" + (f": {self.source}" if self.source else "")


def of_thread(thread: int) -> CallSite | None:
    """Return where the thread with the identifier ``thread`` is; None if it has ended."""
    frame = sys._current_frames().get(thread)
    return None if frame is None else _innermost_user_call(list(walk_stack(frame)))


def of_error(error: BaseException) -> CallSite | None:
    """Return where ``error`` was raised; None if it was not."""
    frames = list(walk_tb(error.__traceback__))[::-1]
    return _innermost_user_call(frames) if frames else None


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's program that has called the library, however deep in it this is called.

    So Python shows a line that the user can change, and tells each such line once.
    """
    frames = enumerate(walk_stack(sys._getframe(1)), start=2)
    level = next((level for level, (frame, _) in frames if _is_user_code(frame)), 2)
    warnings.warn(message, category, stacklevel=level)


def _innermost_user_call(frames: Sequence[tuple[FrameType, int]]) -> CallSite:
    """Return the call site of a stack: frames with their line numbers, the innermost first."""
    index = next((index for index, (frame, _) in enumerate(frames) if _is_user_code(frame)), len(frames) - 1)
    frame, line = frames[index]
    name = frame.f_code.co_filename
    inwards = [frame.f_code.co_qualname for frame, _ in frames[:index][::-1]]
    # Not a decorator's wrapper, which has no name of its own.
    call = next((name for name in inwards if "<locals>" not in name), "".join(inwards[:1]))
    source = linecache.getline(name, line).strip()
    is_inside = frames[0][0].f_code.co_filename.startswith(_WAITING)
    waits = is_inside if index else _READING.search(source) is not None
    return CallSite(f"{Path(name).name}:{line} in {frame.f_code.co_name}", source, call, waits)


def _is_user_code(frame: FrameType) -> bool:
    """Return whether a frame is the user's: not torch's, the standard library's or megascale's, its programs aside."""
    name = frame.f_code.co_filename
    is_installed = "/site-packages/" in name and not name.startswith(_WAITING)
    return name.startswith(_PROGRAMS) or is_installed or not name.startswith(_LIBRARIES)
