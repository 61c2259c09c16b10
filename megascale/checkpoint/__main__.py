"""Command line: ``python -m megascale.checkpoint CHECKPOINT [OUT]`` writes one file, or lists what is in there."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from megascale.checkpoint import directory as folders
from megascale.checkpoint.consolidation import consolidate
from megascale.checkpoint.manifest import Manifest
from megascale.checkpoint.nest import leaves
from megascale.errors import MegascaleError

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m megascale.checkpoint", description=__doc__)
    parser.add_argument("checkpoint", help="a directory of checkpoints, or one checkpoint's folder")
    parser.add_argument("out", nargs="?", help="the file to write; without it, list the tensors")
    parser.add_argument("--step", type=int, help="which checkpoint of the directory; the latest if not given")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="round the weights to it, from their main params; as saved if not given"
    )
    parser.add_argument("--optimizer", action="store_true", help="the optimizer's state too")
    parser.add_argument("--overwrite", action="store_true", help="replace the file")
    given = parser.parse_args(arguments)
    try:
        if given.out is None:
            _list(folders.find(Path(given.checkpoint), given.step))
        else:
            written = consolidate(
                given.checkpoint,
                given.out,
                step=given.step,
                dtype=DTYPES.get(given.dtype),
                optimizer=given.optimizer,
                overwrite=given.overwrite,
            )
            print(written)
    except MegascaleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _list(folder: Path) -> None:
    manifest = Manifest.read(folder)
    print(f"{folder}: step {manifest.step}, saved by {manifest.world_size} ranks")
    for tree in manifest.trees.values():
        for key, shape, dtype in leaves(tree):
            print(f"{key}  {str(dtype).removeprefix('torch.')}{list(shape)}")


if __name__ == "__main__":
    sys.exit(main())
