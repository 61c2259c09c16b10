"""The messages of all errors and warnings of megascale, as its source has them, with … in the place of what varies."""

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Message(NamedTuple):
    """A message and who gives it.

    Attributes:
        kind: the name of an error's class, or "warning".
        text: one line, with … for each value.
        module: the file, relative to the package.
    """

    kind: str
    text: str
    module: str


def messages(package: Path) -> Iterator[Message]:
    """Yield every message that a file of ``package`` writes out, in the order of files and lines."""
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            text = " ".join(re.sub("…+", "…", _text(node.args[0])).split())
            kind = _kind(node.func)
            if kind is not None and re.search("[a-z]{2}", text):
                yield Message(kind, text, str(path.relative_to(package)))


def page(package: Path) -> str:
    """Return all messages as a page, by kind."""
    found = sorted(set(messages(package)))
    lines = [
        "# All messages",
        "",
        "Each message of the library, with … for what varies, and the module that gives it.",
        "[Troubleshooting](troubleshooting.md) has causes and remedies.",
    ]
    for kind in dict.fromkeys(message.kind for message in found):
        lines += ["", f"## {kind}", ""]
        lines += [f"- {_code(message.text)} ({_code(message.module)})" for message in found if message.kind == kind]
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _kind(function: ast.expr) -> str | None:
    """Return what a call makes: the name of an error of megascale's, "warning", or None."""
    if isinstance(function, ast.Attribute):
        module = function.value.id if isinstance(function.value, ast.Name) else ""
        return "warning" if function.attr == "warn" and module in ("call_site", "warnings") else None
    name = function.id if isinstance(function, ast.Name) else ""
    return name if name.endswith("Error") and not hasattr(builtins, name) and name != "UnpicklingError" else None


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) for value in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return "…"
