"""Says what is done, once: on a terminal, or as INFO of the logger ``megascale`` where logging is set up for that.

MEGASCALE_QUIET=1 switches both off.
"""

import logging
import os
import sys
from collections.abc import Callable

import torch.distributed as dist

from megascale.utils import validate

QUIET_VARIABLE = "MEGASCALE_QUIET"
"""``1``: nothing is said. ``0``, the default: what this module says."""

_logger = logging.getLogger("megascale")
_told: set[str] = set()


def on_first_rank(make: Callable[[], str]) -> None:
    """Say what ``make`` returns, on rank 0 of the world, once per process and text. It is not called if nobody hears.

    Raises ArgumentError for a value of MEGASCALE_QUIET that is neither 0 nor 1.
    """
    quiet = os.environ.get(QUIET_VARIABLE) or "0"
    if not is_first_rank() or validate.one_of(QUIET_VARIABLE, quiet, ("0", "1")) == "1":
        return
    is_logged = _logger.isEnabledFor(logging.INFO) and _logger.hasHandlers()
    try:
        is_terminal = sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, it is a program's own object, or it is closed
        is_terminal = False
    if not (is_logged or is_terminal):
        return
    text = make()
    if text in _told:
        return
    _told.add(text)
    if is_logged:
        _logger.info("%s", text)
    else:
        print(f"megascale: {text}", file=sys.stderr, flush=True)


def is_first_rank() -> bool:
    """Return whether this is rank 0 of the world, or the only process."""
    return not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0
