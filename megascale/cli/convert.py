"""``megascale convert SOURCE DEST``: convert another system's checkpoint to our state dict."""

import json
from collections.abc import Sequence
from pathlib import Path

from megascale.cli import parser_of
from megascale.errors import InteropError
from megascale.interop import convert
from megascale.interop.formats import AUTO, FORMATS
from megascale.interop.named_state import Names
from megascale.utils.program import run_program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    return run_program(_run, arguments)


def _run(arguments: list[str]) -> int:
    """Convert, and print what was mapped, what was not, and why."""
    parser = parser_of("convert")
    parser.add_argument("source", help="a checkpoint's file or folder; nothing in it is executed")
    parser.add_argument("destination", help="the file to write; it must not exist")
    parser.add_argument("--format", choices=(AUTO, *FORMATS), default=AUTO, help="whose checkpoint it is")
    parser.add_argument(
        "--model-names",
        type=Path,
        metavar="FILE",
        help="parameter names in the order of the optimizer's parameters: a JSON list, or a list of lists, one for "
        "each param group; or a text file, a name on each line",
    )
    parser.add_argument("--scaler-only", action="store_true", help="leave out main params and optimizer state")
    parser.add_argument("--dry-run", action="store_true", help="say what would be written; write nothing")
    given = parser.parse_args(arguments)
    converted = convert(
        given.source,
        None if given.dry_run else given.destination,
        format=given.format,
        names=None if given.model_names is None else read_names(given.model_names),
        scaler_only=given.scaler_only,
    )
    print(converted.report())
    print("nothing written: dry run" if given.dry_run else f"written     {given.destination}")
    return 0


def read_names(path: Path) -> Names:
    """Return parameter names, flat or by param group, from a JSON or text file. Raises InteropError if it has none."""
    try:
        text = path.read_text(encoding="utf-8")
        names = json.loads(text) if text.lstrip().startswith("[") else text.split()
    except (OSError, ValueError, RecursionError) as error:
        raise InteropError(f"--model-names {path} cannot be read as parameter names: {error}") from None
    groups = [[entry] if isinstance(entry, str) else entry for entry in names]
    if not names or not all(isinstance(g, list) and all(isinstance(name, str) for name in g) for g in groups):
        raise InteropError(f"{path} must hold a list of names, or a list of lists of them, one for each param group")
    if len({isinstance(entry, str) for entry in names}) > 1:
        raise InteropError(f"{path} mixes names and lists of names")
    given: Names = names
    return given
