"""Command line: ``python -m megascale COMMAND ...``, with one module here per command.

A command's module offers ``NAME``, ``HELP``, ``AS_TYPED``, ``add_arguments(parser)`` and ``run(given) -> exit status``.
An error of megascale ends a command with status 1 and one line; wrong usage with status 2.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Protocol

from megascale.cli import bench, convert, estimate, info, report
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


COMMANDS: tuple[Command, ...] = (convert, info, bench, estimate, report)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    chosen = [command for command in COMMANDS if command.NAME in words]
    as_typed = {said: typed for command in chosen for said, typed in command.AS_TYPED.items()}
    return run_program(_run, arguments, as_typed=as_typed)


def _run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m megascale", description="Tools around megascale: its state, its runs, and this machine."
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        own = commands.add_parser(command.NAME, help=command.HELP, description=command.HELP)
        own.add_argument("--version", action="store_true", help="print the version and exit")
        command.add_arguments(own)
        own.set_defaults(run=command.run)
    given = parser.parse_args(arguments)
    status: int = given.run(given)
    return status
