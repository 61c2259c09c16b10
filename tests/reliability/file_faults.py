"""Checkpoints with a flipped byte, cut short, or with a stranger's file: a CheckpointError, and no live bit changes."""

import io
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from megascale import MixedPrecisionOptimizer
from megascale.checkpoint import load, save
from megascale.errors import CheckpointError
from tests.distributed.test_distributed_optimizer import INNER, config_of, flat, net, same, scaler, weights
from tests.reliability.faults import Fault

MANIFEST = "megascale.json"


def _build(seed: int) -> tuple[nn.Module, MixedPrecisionOptimizer]:
    module = net(seed=seed)
    optimizer = MixedPrecisionOptimizer(
        INNER["adamw"](module), config_of(torch.float16), scaler(torch.float16), grads_are_scaled=True
    )
    for step in range(2):
        batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).half()
        optimizer.zero_grad()
        optimizer.scale_loss(module(batch).float().square().mean()).backward()
        optimizer.step()
    return module, optimizer


class Damage:
    """One checkpoint, which is damaged and mended again, and the training that it is loaded into each time."""

    def __init__(self, directory: Path) -> None:
        saved = _build(0)
        self.folder = save(directory, 2, *saved)
        self.live = _build(1)
        self._before, self._saved = self._state(self.live), self._state(saved)

    @property
    def files(self) -> list[Path]:
        """All its files."""
        return sorted(path for path in self.folder.iterdir() if path.is_file())

    def outcome(self, path: Path, content: bytes | None) -> tuple[str, bool]:
        """Load with other content of ``path``; None: without it. Returns what is seen, and whether it is as promised:
        an error, and no live bit has changed; or the very values that were saved, as where 1e-08 becomes 1E-08.
        """
        whole = path.read_bytes()
        try:
            path.unlink()
            if content is not None:
                path.write_bytes(content)
            load(self.folder, *self.live)
        except CheckpointError as error:
            named = str(error).replace(str(self.folder), "…").replace(f"…/{path.name}", "…")
            shown = re.sub(r"\d+ (bytes|were)", r"N \1", re.sub(r"(is damaged) .*", r"\1 …", named, flags=re.DOTALL))
            return f"CheckpointError: {shown}", same(self._before, self._state(self.live))
        finally:
            path.write_bytes(whole)
        loaded, self.live = self._state(self.live), _build(1)
        return "it loads, and holds what was saved", same(loaded, self._saved)

    @staticmethod
    def _state(trained: tuple[nn.Module, MixedPrecisionOptimizer]) -> dict[str, torch.Tensor]:
        module, optimizer = trained
        return flat(optimizer.state_dict()) | weights(module)


def flipped_bytes(directory: Path, stride: int) -> Iterator[Fault]:
    """Flip a bit of every ``stride``-th byte of the manifest, and of every 16th of these of the data."""
    damage = Damage(directory)
    for path in damage.files:
        whole = path.read_bytes()
        is_data = path.name != MANIFEST
        kind = "data" if is_data else path.name
        for place in range(0, len(whole), 16 * stride if is_data else stride):
            changed = bytearray(whole)
            changed[place] ^= 1 << place % 8
            yield Fault("files", f"a flipped bit in {kind}", *damage.outcome(path, bytes(changed)))


CONTENTS: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda whole: None,
    "empty": lambda whole: b"",
    "cut in half": lambda whole: whole[: len(whole) // 2],
    "a byte short": lambda whole: whole[:-1],
    "a byte longer": lambda whole: whole + b"\0",
    "a text": lambda whole: b"not a checkpoint\n",
    "a zip file": lambda whole: _zipped(),
    "a pickle": lambda whole: pickle.dumps({"model": [1.0, 2.0]}),
    "a file of torch.save": lambda whole: _torch_saved(),
}


def _zipped() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("data.pkl", b"nothing")
    return stream.getvalue()


def _torch_saved() -> bytes:
    stream = io.BytesIO()
    torch.save({"model": torch.ones(3)}, stream)
    return stream.getvalue()


def wrong_contents(directory: Path) -> Iterator[Fault]:
    """Give each file of a checkpoint each of CONTENTS; then that of another checkpoint of the same model."""
    damage = Damage(directory / "one")
    other = Damage(directory / "other")
    shutil.rmtree(other.folder)
    save(directory / "other", 2, *other.live)
    for path in damage.files:
        kind = path.name if path.name == MANIFEST else "data"
        for name, content in CONTENTS.items():
            yield Fault("files", f"{kind} is {name}", *damage.outcome(path, content(path.read_bytes())))
        foreign = (other.folder / path.name).read_bytes()
        if foreign != path.read_bytes():
            yield Fault("files", f"{kind} is another checkpoint's", *damage.outcome(path, foreign))
