"""Reads untrusted files without executing code in them.

Files of ``torch.save`` are pickles, which can call any function. Here only tensors and containers are built, and
everything else becomes an :class:`InertRecord`.
"""

import json
import pickle
import tarfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import torch
from torch import Tensor

from megascale.checkpoint.files import SAFETENSORS
from megascale.errors import InteropError
from megascale.interop.records import record_class

SAFETENSORS_DTYPES = {name: dtype for dtype, name in SAFETENSORS.items()}


def read_file(path: Path) -> Any:
    """Return the content of a file of ``torch.save``, or a ``.safetensors`` file as {name: tensor}, on the CPU.

    Tensors may be memory-mapped: do not change the file while they are in use. Nothing in the file is executed.

    Raises:
        InteropError: it cannot be read; the message says why.
    """
    try:
        return _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    except InteropError:
        raise
    except Exception as error:  # a damaged or malicious file may fail anywhere in the readers
        reason = str(error).partition("\n")[0]
        raise InteropError(
            f"{path} cannot be read ({type(error).__name__}: {reason}); is it a checkpoint, and whole?"
        ) from error


def _read_pickle(path: Path) -> Any:
    # torch would extract tar archives, its format before 2018.
    if tarfile.is_tarfile(path):
        raise InteropError(f"{path} is a tar archive of torch before 0.4; load and save it with such a torch first")
    with open(path, "rb") as stream:
        zipped = stream.read(4) == b"PK\x03\x04"
    if zipped:  # torch does not compare the checksums that it has written
        with ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise InteropError(f"{path} is damaged: the checksum of {damaged} in it differs; copy the file again")
    return torch.load(path, map_location="cpu", mmap=zipped or None, weights_only=False, pickle_module=_InertPickle)


class _Maker:
    """A function that a pickle may call but not change."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *arguments: Any) -> Any:
        return self._make(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("the pickle tries to change a function")


def _tensor(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
    tensor: Tensor = torch._utils._rebuild_tensor_v2(storage, offset, size, stride, False, OrderedDict())
    return tensor


def _from_type(rebuild: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """Return a tensor without its Python attributes, which Megatron-Core's main params have."""
    if isinstance(rebuild, _Maker):
        return rebuild(*arguments)
    return record_class("torch._tensor", "_rebuild_from_type_v2")(rebuild, kind, arguments, state)


_MAKERS: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): lambda *_: {},
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): lambda value, *_: value,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda value, *_: value,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
}
# Python 2's module name, which pickle protocol 2 of torch.save keeps.
_MAKERS |= {("__builtin__", name): make for (module, name), make in _MAKERS.items() if module == "builtins"}
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class _InertUnpickler(pickle.Unpickler):
    """Calls only functions of the table above; everything else that a pickle names becomes an inert record."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for ``module.name``. Imports nothing."""
        if (module, name) in _MAKERS:
            return _Maker(_MAKERS[module, name])
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        return record_class(module, name)


def _load(stream: Any, **options: Any) -> Any:
    return _InertUnpickler(stream, **options).load()


# The pickle_module for torch.load.
_InertPickle = SimpleNamespace(__name__="inert_pickle", Unpickler=_InertUnpickler, load=_load)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read the format of huggingface/safetensors: eight bytes of length, a JSON header, and the tensors' bytes."""
    size = path.stat().st_size
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > size - 8:
            raise InteropError(f"{path} is cut off: its header should have {length} bytes, the file has {size}")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return {name: _map_tensor(path, 8 + length, size, name, entry) for name, entry in header.items()}


def _map_tensor(path: Path, start: int, size: int, name: str, entry: dict[str, Any]) -> Tensor:
    if entry["dtype"] not in SAFETENSORS_DTYPES:
        raise InteropError(f"{path} holds {name!r} as {entry['dtype']}, which is not read")
    dtype, shape = SAFETENSORS_DTYPES[entry["dtype"]], torch.Size(entry["shape"])
    first, last = entry["data_offsets"]
    if last - first != shape.numel() * dtype.itemsize or not 0 <= first <= last <= size - start:
        raise InteropError(f"{path} is damaged: {name!r} of shape {tuple(shape)} lies at bytes {first} to {last}")
    with open(path, "rb") as stream:
        stream.seek(start + first)
        data = bytearray(stream.read(last - first))
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
