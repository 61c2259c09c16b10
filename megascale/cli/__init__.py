"""Command line: ``python -m megascale COMMAND ...``, a module here for each command.

A command's module offers ``NAME``, ``HELP``, ``AS_TYPED``, ``add_arguments(parser)`` and ``run(given) -> exit status``.
Errors of megascale's end a command with status 1 and one line; wrong usage with 2.
"""

import argparse
from collections.abc import Sequence
from typing import Protocol

from megascale.cli import bench, convert, info
from megascale.utils.program import run_program


class Command(Protocol):
    """What a command's module offers."""

    NAME: str
    HELP: str
    AS_TYPED: dict[str, str]
    """What error messages say of an argument in Python, and how it is typed here."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""

    def run(self, given: argparse.Namespace) -> int:
        """Run it; returns the exit status."""


COMMANDS: tuple[Command, ...] = (convert, info, bench)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    as_typed = {said: typed for command in COMMANDS for said, typed in command.AS_TYPED.items()}
    return run_program(_run, arguments, as_typed=as_typed)


def _run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m megascale", description="Tools around megascale: its state, and this machine."
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
