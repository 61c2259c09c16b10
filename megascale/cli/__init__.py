"""Command line: ``megascale COMMAND ...`` or ``python -m megascale COMMAND ...``, with one module here per command.

A command's module offers ``NAME``, ``HELP``, ``AS_TYPED``, ``add_arguments(parser)`` and ``run(given) -> exit status``.
``train``, ``experiment`` and ``checkpoint`` are programs of their own, which parse their arguments themselves.
An error of megascale ends a command with status 1 and one line; wrong usage with status 2.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol

from megascale.cli import convert, estimate, info
from megascale.utils import spelling
from megascale.utils.program import run_program


class Command(Protocol):
    """The interface of a command's module."""

    NAME: str
    HELP: str
    AS_TYPED: dict[str, str]
    """Names of Python arguments in error messages, and their form on the command line."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""

    def run(self, given: argparse.Namespace) -> int:
        """Run the command. Returns the exit status."""


COMMANDS: tuple[Command, ...] = (convert, info, estimate)

PROGRAMS = {
    "train": ("megascale.train.__main__:main", "train one of two small tasks, alone or under torchrun"),
    "experiment": ("megascale.train.experiment:program", "show what loss scaling does: five runs, a table, a picture"),
    "checkpoint": (
        "megascale.checkpoint.__main__:main",
        "list checkpoints and what is in them, or write one as one file",
    ),
}
"""Commands that are programs of their own: the function that runs it, and what it does."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in PROGRAMS:
        module, _, function = PROGRAMS[words[0]][0].partition(":")
        status: int = getattr(import_module(module), function)(words[1:])
        return status
    chosen = [command for command in COMMANDS if command.NAME in words]
    as_typed = {said: typed for command in chosen for said, typed in command.AS_TYPED.items()}
    return run_program(_run, arguments, as_typed=as_typed)


def _run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=_name(), description="Tools around megascale: training, its state, its runs, and this machine."
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, what) in PROGRAMS.items():
        commands.add_parser(name, help=what, add_help=False)
    for command in COMMANDS:
        own = commands.add_parser(command.NAME, help=command.HELP, description=command.HELP)
        own.add_argument("--version", action="store_true", help="print the version and exit")
        command.add_arguments(own)
        own.set_defaults(run=command.run)
    first, known = next(iter(arguments), "-"), [*PROGRAMS, *(command.NAME for command in COMMANDS)]
    if not first.startswith("-") and first not in known and (meant := spelling.meant(first, known)):
        parser.error(f"there is no command {first!r}{meant}")
    given = parser.parse_args(arguments)
    status: int = given.run(given)
    return status


def _name() -> str:
    """Return how this program was called: by the console command's name, or as a module."""
    return "megascale" if Path(sys.argv[0]).stem == "megascale" else "python -m megascale"
