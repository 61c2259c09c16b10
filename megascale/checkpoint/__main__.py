"""Command line: ``python -m megascale.checkpoint FOLDER [OUT]`` lists checkpoints, or writes one as a single file."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from megascale.checkpoint import directory as folders
from megascale.checkpoint.consolidation import consolidate
from megascale.checkpoint.manifest import Manifest
from megascale.checkpoint.nest import leaves
from megascale.errors import CheckpointError
from megascale.utils.program import non_negative, run_program

DESCRIPTION = """Without OUT: list the checkpoints of a directory, each with its size, whether it is whole (every byte
is read and compared with its checksum), and which is the latest; or, of one checkpoint, its tensors. With OUT: write
the model's weights, or with --optimizer the whole training state, as one file that torch.load(weights_only=True) reads.
"""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
AS_TYPED = {"pass overwrite=True": "give --overwrite"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0 done, 1 refused or a damaged checkpoint is listed, 2 wrong usage."""
    return run_program(_run, arguments, as_typed=AS_TYPED)


def _run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m megascale.checkpoint", description=DESCRIPTION)
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a directory of checkpoints, or one's folder")
    parser.add_argument("out", metavar="OUT", nargs="?", help="the file to write")
    parser.add_argument(
        "--step",
        type=non_negative,
        metavar="STEP",
        help="which checkpoint of the directory; if not given, OUT is made of the latest, and all are listed",
    )
    parser.add_argument("--quick", action="store_true", help="in a listing: check files' names and sizes only")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="round the weights to it, from their main params; as saved if not given"
    )
    parser.add_argument("--optimizer", action="store_true", help="the optimizer's state too")
    parser.add_argument("--overwrite", action="store_true", help="replace the file")
    given = parser.parse_args(arguments)
    path = Path(given.checkpoint)
    if given.out is None:
        for name in ("dtype", "optimizer", "overwrite"):
            if getattr(given, name):
                parser.error(f"--{name} says how to write OUT, which is not given")
        if given.step is None and path.is_dir() and not (path / folders.MANIFEST_NAME).is_file():
            return _list(path, checksums=not given.quick)
        _list_tensors(folders.find(path, given.step))
        return 0
    if given.quick:
        parser.error("--quick is for a listing; OUT is only ever written from a checkpoint whose checksums fit")
    written = consolidate(
        path,
        given.out,
        step=given.step,
        dtype=DTYPES.get(given.dtype),
        optimizer=given.optimizer,
        overwrite=given.overwrite,
    )
    print(written)
    return 0


def _list(directory: Path, *, checksums: bool) -> int:
    """Print a line for each checkpoint, lowest step first, then for saves that were killed or are running.

    Returns 1 if a checkpoint is damaged.
    """
    print(f"{'step':>10}  {'size':>10}  {'ranks':>5}  state")
    found, latest, status = folders.named(directory), folders.latest(directory), 0
    for step, folder in found.items():
        ranks, state = "-", "complete"
        try:
            manifest = Manifest.read(folder)
            ranks = str(manifest.world_size)
            manifest.verify(folder, checksums=checksums)
        except (CheckpointError, OSError) as error:
            state, status = f"damaged: {str(error).removesuffix('; load an earlier checkpoint')}", 1
        state += ", latest" if folder == latest else ""
        print(f"{step:>10}  {_size(folder):>10}  {ranks:>5}  {state}", flush=True)
    for folder in folders.unfinished_saves(directory):
        state = "incomplete: still being written, or its writer died"
        print(f"{folder.name:>10}  {_size(folder):>10}  {'-':>5}  {state}", flush=True)
    if not found:
        folders.find(directory, None)  # raises, with the expected layout
    return status


def _list_tensors(folder: Path) -> None:
    manifest = Manifest.read(folder)
    print(f"{folder}: step {manifest.step}, saved by {manifest.world_size} ranks")
    for tree in manifest.trees.values():
        for key, shape, dtype in leaves(tree):
            print(f"{key}  {str(dtype).removeprefix('torch.')}{list(shape)}")


def _size(folder: Path) -> str:
    """Return the bytes of a folder's files in the unit that leaves one to three digits before the point."""
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if size < 1000:
        return f"{size} B"
    amounts = [(size / 1024**power, unit) for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), 1)]
    amount, unit = next((one for one in amounts if one[0] < 1000), amounts[-1])
    return f"{amount:.1f} {unit}"


if __name__ == "__main__":
    sys.exit(main())
