"""A terminal in place of stderr."""

import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def terminal() -> Iterator[Callable[[], str]]:
    """Put a terminal in place of stderr; yield what returns all that was shown."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    stderr = sys.stderr
    sys.stderr = open(theirs, "w")  # noqa: SIM115 - closed below

    def shown() -> str:
        sys.stderr.flush()
        os.set_blocking(ours, False)
        text = b""
        while True:
            try:
                text += os.read(ours, 1 << 16)
            except BlockingIOError:
                return text.decode()

    try:
        yield shown
    finally:
        sys.stderr.close()
        sys.stderr = stderr
        os.close(ours)
