"""Which private names of torch megascale's sources use: found in the code, beside the list in utils/torch_names.py."""

import ast
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PRIVATE = re.compile(r"_(?!_)\w*[a-zA-Z]\w*")
IN_CPP = re.compile(r"\b(?:THP\w+|unsafe\w+)\b")
"""Names of torch's C++ that its documentation does not have."""

LIST = "utils/torch_names.py"

OTHERS = {
    "sys": {"_getframe", "_current_frames"},
    "typing": {"_make", "_replace"},  # documented methods of named tuples
    "triton": {"_elementwise_max", "_sum_combine"},
    "lightning": {"_after_closure", "_clip_gradients", "_optimizer"},
    "accelerate": {"_optimizers", "_use_scaler"},
    "megatron": {"_get_param_groups", "_weight_remat_world_size"},
    "verl": {"_is_offload_optimizer", "_is_offload_param", "_qat_enabled", "_rank_"},  # the last: part of a file's name
}
"""Private names of others, which no list of torch's has."""


def uses(package: Path) -> dict[str, set[str]]:
    """Return the private names of torch that the files of ``package`` use, each with these files.

    A name is a dotted path where the code has one (``torch._foreach_add_``, or what is imported), or one of a class
    that the code inherits from; else an attribute's or a string's bare name (``_version``).
    """
    found: dict[str, set[str]] = defaultdict(set)
    files = (path for path in sorted(package.rglob("*.py")) if path != package / LIST)  # the list does not use them
    trees = {path: ast.parse(path.read_text()) for path in files}
    defined = {path: _defined(tree) for path, tree in trees.items()}
    everywhere = set().union(*defined.values())
    for path, tree in trees.items():
        # Files of one folder may know one another's private names; any file inherits from any.
        own = set().union(*(names for other, names in defined.items() if other.parent == path.parent))
        own |= _of_self(tree) & everywhere
        names = {name for name in _named(tree) if "." in name or name not in own} | set(_inherited(tree))
        for name in names - set().union(*OTHERS.values()):
            if not any(other.startswith(name + ".") for other in names):
                found[name].add(str(path.relative_to(package)))
    for path in sorted((*package.rglob("*.cpp"), *package.rglob("*.h"))):
        for name in IN_CPP.findall(path.read_text()):
            found[f"C++ {name}"].add(str(path.relative_to(package)))
    return found


def listed_as(use: str, paths: Iterable[str]) -> list[str]:
    """Return the paths of the list that are this use: of the same name, or with the module that it names."""
    if "." in use or use.startswith("C++"):
        return [path for path in paths if path == use or path.startswith(use + ".")]
    return [path for path in paths if path.rpartition(".")[2] == use]


def page(package: Path) -> str:
    """Return the list as a page, with the files that use each name."""
    names = importlib.import_module("megascale.utils.torch_names").NAMES
    files: dict[str, set[str]] = defaultdict(set)
    for use, where in uses(package).items():
        for path in listed_as(use, [name.path for name in names]):
            files[path] |= where
    rows = [
        f"| `{name.path}` | {name.why} | {', '.join(f'`{one}`' for one in sorted(files[name.path]))} | {name.gone} |"
        for name in names
    ]
    return "\n".join(
        [
            "# Private names of torch",
            "",
            "Names that torch's documentation does not promise, and that megascale uses all the same: for what, in",
            "which files of `megascale/`, and what happens with a torch that does not have one. Tests compare the",
            "list with the sources and with the torch that is installed; `.ci/versions` runs them with several.",
            "",
            "| name | for | used in | without it |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _is_private(name: str) -> bool:
    return any(PRIVATE.fullmatch(part) for part in name.split("."))


def _defined(tree: ast.Module) -> set[str]:
    """Return the private names that a file makes itself: functions, classes, variables, attributes of its objects."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self")):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=ast.Tuple(elts=slots)):
                names |= {slot.value for slot in slots if isinstance(slot, ast.Constant)}
    return names


def _of_self(tree: ast.Module) -> set[str]:
    """Return the names that a file uses of ``self`` or ``super()``."""
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {one.attr for one in attributes if ast.unparse(one.value) in ("self", "super()")}


def _named(tree: ast.Module) -> Iterator[str]:
    """Yield the private names in imports, attributes and strings."""
    modules = {"module": "torch.nn.Module"} | _imported(tree)  # a variable of that name is never one of ours
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "torch":
                yield from (f"{module}.{one.name}" for one in names if _is_private(f"{module}.{one.name}"))
            case ast.Import(names=names):
                yield from (one.name for one in names if one.name.startswith("torch.") and _is_private(one.name))
            case ast.Attribute(attr=attr) if PRIVATE.fullmatch(attr):
                first, _, rest = ast.unparse(node).partition(".")
                yield f"{modules[first]}.{rest}" if first in modules and re.fullmatch(r"[\w.]+", rest) else attr
            case ast.Constant(value=str(text)) if re.fullmatch(r"[\w.]+", text) and _is_private(text):
                yield text


def _imported(tree: ast.Module) -> dict[str, str]:
    """Return what a file imports of torch: names in the file, and their paths."""
    found = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found |= {
                    one.asname or "torch": one.name if one.asname else "torch" for one in names if _torchs(one.name)
                }
            case ast.ImportFrom(module=str(module), names=names) if _torchs(module):
                found |= {one.asname or one.name: f"{module}.{one.name}" for one in names}
    return found


def _torchs(module: str) -> bool:
    return module.split(".")[0] == "torch"


def _inherited(tree: ast.Module) -> Iterator[str]:
    """Yield the private names of torch's classes that a class which inherits from them uses or overrides."""
    modules = _imported(tree)
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for base in map(ast.unparse, node.bases):
            first, dot, rest = base.partition(".")
            if first not in modules or base in ("Tensor", "torch.Tensor"):
                continue
            path = modules[first] + dot + rest
            theirs = _of_class(resolve(path))
            yield from (f"{path}.{name}" for name in set(_named(node)) & theirs)  # type: ignore[arg-type]
            yield from (
                f"{path}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef) and one.name in theirs
            )


def _of_class(kind: type) -> set[str]:
    """Return the private attributes and methods that torch's classes among a class's bases have in their source."""
    bases = [base for base in kind.__mro__ if _torchs(base.__module__) and not base.__module__.startswith("torch._C")]
    return {name for base in bases for name in re.findall(r"(?:self\.|def )(_(?!_)\w+)", inspect.getsource(base))}


def resolve(path: str) -> Any:
    """Return what a dotted path names; raises AttributeError or ImportError if it is not there."""
    first, *parts = path.split(".")
    found: Any = importlib.import_module(first)
    for part in parts:
        first = f"{first}.{part}"
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(first)
    return found
