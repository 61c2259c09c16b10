"""How every program of megascale begins and ends: its version, its exit status, and one line in place of a traceback.

Exit statuses: 0 done; 1 a failure; 2 bad arguments; 130 after Ctrl-C; 141 when the reader of the output has gone away,
as ``| head`` does.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from megascale.errors import MegascaleError
from megascale.version import VERSION

INTERRUPTED = 130
PIPE_CLOSED = 141

EXTRAS = {"omegaconf": "train", "sklearn": "train", "tqdm": "train", "tensorboard": "train", "wandb": "wandb"}
"""The extra of megascale that installs a module."""

Statuses = Mapping[type[MegascaleError], int]


def run_program(
    main: Callable[[list[str]], int],
    arguments: Sequence[str] | None,
    *,
    prefix: str = "error",
    statuses: Statuses | None = None,
    as_typed: Mapping[str, str] | None = None,
) -> int:
    """Return the exit status of ``main(arguments)``, and print what ends it early as one line on stderr.

    Args:
        main: the program. ``--version`` is answered here.
        arguments: None: those of the process.
        prefix: what the line of an error begins with.
        statuses: exit statuses of errors by their class, the first that fits; 1 for all others.
        as_typed: phrases of error messages that name an argument in Python, and how the program's user types it.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        try:
            if "--version" in given:
                print(f"megascale {VERSION}")
                return 0
            return main(given)
        finally:
            sys.stdout.flush()  # here, where a closed pipe can be told; not while the interpreter ends
    except MegascaleError as error:
        _complain(prefix, _replaced(str(error), as_typed or {}))
        return next((status for kind, status in (statuses or {}).items() if isinstance(error, kind)), 1)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        _complain(prefix, f"this needs {module}, which is not installed: pip install 'megascale[{EXTRAS[module]}]'")
        return 1
    except BrokenPipeError:
        _drop_output(sys.stdout)
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED


@contextlib.contextmanager
def outliving_its_reader() -> Iterator[None]:
    """Let a long run go on when the reader of its output has gone away: what it prints from then on is dropped."""
    with contextlib.redirect_stdout(_Outliving(sys.stdout)), contextlib.redirect_stderr(_Outliving(sys.stderr)):
        yield
        sys.stdout.flush()


def non_negative(text: str) -> int:
    """Return the number of an option, for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be an integer, 0 or more, got {text!r}")
    return number


class _Outliving:
    """A stream that drops what it is given once nobody reads it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            _drop_output(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            _drop_output(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _complain(prefix: str, message: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(f"{prefix}: {message}", file=sys.stderr, flush=True)


def _replaced(message: str, phrases: Mapping[str, str]) -> str:
    for said, typed in phrases.items():
        message = message.replace(said, typed)
    return message


def _drop_output(stream: TextIO) -> None:
    """Let ``stream``, and what it has not written yet, go to nowhere: the interpreter flushes it once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
