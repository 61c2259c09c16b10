"""Command line: ``python -m megascale COMMAND ...``, a module here for each command.

A command's module offers ``NAME``, ``HELP``, ``add_arguments(parser)`` and ``run(given) -> exit status``. Errors of
megascale's end a command with status 1 and one line; wrong usage with 2.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Protocol

from megascale.cli import convert
from megascale.errors import MegascaleError


class Command(Protocol):
    """What a command's module offers."""

    NAME: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""

    def run(self, given: argparse.Namespace) -> int:
        """Run it; returns the exit status."""


COMMANDS: tuple[Command, ...] = (convert,)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m megascale", description="Tools around megascale's training state.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        own = commands.add_parser(command.NAME, help=command.HELP, description=command.HELP)
        command.add_arguments(own)
        own.set_defaults(run=command.run)
    given = parser.parse_args(arguments)
    try:
        status: int = given.run(given)
    except MegascaleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return status
