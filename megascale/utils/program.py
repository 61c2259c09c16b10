"""Runs the programs of megascale: ``--version``, exit status, and one line in place of a traceback.

Exit statuses: 0 done; 1 a failure; 2 bad arguments; 130 after Ctrl-C; 141 when the output's pipe was closed, as by ``|
head``.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from megascale.errors import MegascaleError
from megascale.version import VERSION

INTERRUPTED = 130
PIPE_CLOSED = 141

EXTRAS = {
    **{"omegaconf": "train", "sklearn": "train", "tqdm": "train", "tensorboard": "train", "matplotlib": "train"},
    **{"wandb": "wandb"},
}
"""The extra of megascale that installs a module."""


def run_program(
    main: Callable[[list[str]], int],
    arguments: Sequence[str] | None,
    *,
    prefix: str = "error",
    statuses: Mapping[type[MegascaleError], int] | None = None,
    as_typed: Mapping[str, str] | None = None,
) -> int:
    """Return the exit status of ``main(arguments)``; print an error as one line on stderr.

    Args:
        main: the program. This function handles ``--version``.
        arguments: None: those of the process.
        prefix: start of an error's line.
        statuses: exit statuses of errors by class, the first match counts; 1 for all others.
        as_typed: names of Python arguments in error messages, and their form on the command line.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        try:
            if "--version" in given:
                print(f"megascale {VERSION}")
                return 0
            return main(given)
        finally:
            sys.stdout.flush()  # here, where a closed pipe can be handled, not at exit
    except MegascaleError as error:
        message = str(error)
        for said, typed in (as_typed or {}).items():
            message = message.replace(said, typed)
        _complain(prefix, message)
        return next((status for kind, status in (statuses or {}).items() if isinstance(error, kind)), 1)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        _complain(prefix, f"this needs {module}, which is not installed: pip install 'megascale[{EXTRAS[module]}]'")
        return 1
    except BrokenPipeError:  # the interpreter flushes buffered output at exit: into the null device
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED


def non_negative(text: str) -> int:
    """Return ``text`` as an int, 0 or more: an argparse type."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be an integer, 0 or more, got {text!r}")
    return number


def _complain(prefix: str, message: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(f"{prefix}: {message}", file=sys.stderr, flush=True)
