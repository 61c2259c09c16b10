"""Command line: ``megascale COMMAND ...`` or ``python -m megascale COMMAND ...``.

Each command is a program of its own, which parses its arguments itself. An error of megascale ends it with status 1 and
one line; wrong usage with status 2.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from megascale.utils import spelling
from megascale.utils.program import run_program

COMMANDS = {
    "train": ("megascale.train.__main__:main", "train one of two small tasks, alone or under torchrun"),
    "experiment": ("megascale.train.experiment:program", "show what loss scaling does: five runs, a table, a picture"),
    "checkpoint": (
        "megascale.checkpoint.__main__:main",
        "list checkpoints and what is in them, or write one as one file",
    ),
    "convert": (
        "megascale.cli.convert:main",
        "read another system's checkpoint; write what MixedPrecisionOptimizer.load_state_dict takes",
    ),
    "info": (
        "megascale.cli.info:main",
        "print versions, devices, and the backends that work here and why others do not",
    ),
    "estimate": (
        "megascale.cli.estimate:main",
        "print the bytes that a run needs per rank and per parameter, by kind; nothing is allocated",
    ),
}
"""The function that runs a command, and what it does."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in COMMANDS:
        module, _, function = COMMANDS[words[0]][0].partition(":")
        status: int = getattr(import_module(module), function)(words[1:])
        return status
    return run_program(_explain, words)


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return a parser for the arguments of a command here."""
    parser = argparse.ArgumentParser(prog=f"{_name()} {command}", description=COMMANDS[command][1])
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    return parser


def _explain(arguments: list[str]) -> int:
    """Show the commands, or say what is wrong with ``arguments``, which begin with none of them; ends the program."""
    parser = argparse.ArgumentParser(
        prog=_name(), description="Tools around megascale: training, its state, its runs, and this machine."
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, what) in COMMANDS.items():
        commands.add_parser(name, help=what, add_help=False)
    first = next(iter(arguments), "-")
    if not first.startswith("-") and (meant := spelling.meant(first, [*COMMANDS])):
        parser.error(f"there is no command {first!r}{meant}")
    parser.parse_args(arguments)
    return 2


def _name() -> str:
    """Return how this program was called: by the console command's name, or as a module."""
    return "megascale" if Path(sys.argv[0]).stem == "megascale" else "python -m megascale"
