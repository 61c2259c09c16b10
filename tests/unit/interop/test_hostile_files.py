"""Files that somebody else wrote: nothing in them is executed, and what cannot be read ends in a named error."""

import builtins
import collections
import io
import json
import os
import pickle
import tarfile
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.checkpoint import save
from megascale.checkpoint.files import SAFETENSORS
from megascale.errors import InteropError
from megascale.interop import load_scaler_state
from megascale.interop.files import read_file
from megascale.interop.records import InertRecord

GOOD = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 10, "_growth_tracker": 3}


class Calls:
    """Pickles as a call of ``function`` with ``arguments``."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def attacks(touched: Path) -> dict[str, Any]:
    """Return objects whose unpickling would create the file ``touched``."""
    code = f"open({str(touched)!r}, 'w').close()"
    return {
        "os.system": Calls(os.system, f"touch {touched}"),
        "eval": Calls(eval, code),
        "exec": Calls(exec, code),
        "open": Calls(open, str(touched), "w"),
        "chained": Calls(getattr, Calls(__import__, "os"), "system"),
        "torch.load": Calls(torch.load, str(touched) + ".pt"),
        "path": Calls(Path.touch, touched),
        "map": Calls(list, Calls(map, exec, [code])),
    }


@pytest.mark.parametrize("attack", sorted(attacks(Path("x"))))
@pytest.mark.parametrize("legacy", [False, True])
def test_nothing_is_executed(attack: str, legacy: bool, tmp_path: Path) -> None:
    """A hostile object beside a good scaler is a record of what it asked for; the scaler is read all the same."""
    touched = tmp_path / "touched"
    torch.save(attacks(touched)["exec"], tmp_path / "touched.pt")
    content = {"args": attacks(touched)[attack], "scaler": GOOD, "model": {"w": torch.ones(2)}}
    file = tmp_path / "checkpoint.pt"
    torch.save(content, file, _use_new_zipfile_serialization=not legacy)
    assert float(load_scaler_state(file).state["scale"]) == 8.0
    loaded = read_file(file)
    assert torch.equal(loaded["model"]["w"], torch.ones(2))
    assert isinstance(loaded["args"], InertRecord)
    assert not touched.exists()
    # The attack is real: torch's own reader, told to trust the file, runs it.
    if attack in ("os.system", "eval", "exec", "open"):
        torch.load(file, weights_only=False)
        assert touched.exists()


def _zip(file: Path, data: bytes) -> None:
    """Write ``data`` as the pickle of a file of torch.save."""
    torch.save(0, file)
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, data if name.endswith("data.pkl") else part)


@pytest.mark.parametrize(
    "name", ["ctorch._utils\n_rebuild_tensor_v2\n", "ccollections\nOrderedDict\n", "cos\nsystem\n", "ctorch\nSize\n"]
)
@pytest.mark.parametrize("slots", [False, True])
def test_a_pickle_cannot_change_what_it_is_given(name: str, slots: bool, tmp_path: Path) -> None:
    """BUILD on a function or class of the table, which would write into it for everybody, is refused."""
    before = torch._utils._rebuild_tensor_v2.__defaults__
    state = b"}S'__defaults__'\nNs" if not slots else b"N}S'__defaults__'\nNs\x86"
    _zip(tmp_path / "changes.pt", name.encode() + state + b"b.")
    with pytest.raises(InteropError, match="cannot be read"):
        read_file(tmp_path / "changes.pt")
    assert torch._utils._rebuild_tensor_v2.__defaults__ is before
    assert not hasattr(os.system, "__defaults__")
    assert not hasattr(collections.OrderedDict, "__defaults__")


def test_a_tensor_out_of_its_storage_is_refused(tmp_path: Path) -> None:
    """A tensor that claims more elements than its storage has ends in a named error, not in foreign memory."""
    torch.save(torch.zeros(4), tmp_path / "tensor.pt")
    with zipfile.ZipFile(tmp_path / "tensor.pt") as archive:
        data = next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    assert b"K\x04\x85" in data
    _zip(tmp_path / "large.pt", data.replace(b"K\x04\x85", b"M\xff\x7f\x85"))
    with pytest.raises(InteropError, match="cannot be read"):
        read_file(tmp_path / "large.pt")


def test_records_say_what_was_there(tmp_path: Path) -> None:
    """Objects of unknown classes keep their attributes, so that a scaler can be read without its class."""
    content = {"args": Namespace(loss_scale_window=7), "buffer": collections.deque([1, 2]), "set": {1, 2}}
    torch.save(content, tmp_path / "records.pt")
    loaded = read_file(tmp_path / "records.pt")
    assert loaded["args"].attributes == {"loss_scale_window": 7}
    assert loaded["args"].kind == "argparse.Namespace"
    assert loaded["set"] == {1, 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_are_read_as_torch_reads_them(dtype: torch.dtype, tmp_path: Path) -> None:
    """Parameters, views and tensors with attributes, as Megatron-Core's main params are, keep every bit."""
    plain = torch.arange(12).reshape(3, 4).to(dtype)
    marked = plain.clone()
    marked.tensor_model_parallel = True  # type: ignore[attr-defined]
    content = {"plain": plain, "view": plain[1:, 1:], "marked": marked}
    if dtype.is_floating_point:
        content["parameter"] = torch.nn.Parameter(plain.clone())
    torch.save(content, tmp_path / "tensors.pt")
    loaded = read_file(tmp_path / "tensors.pt")
    for key, value in content.items():
        assert torch.equal(loaded[key], value)
        assert loaded[key].dtype == dtype
    assert not loaded["view"].requires_grad


def _cut(file: Path) -> None:
    torch.save({"scaler": GOOD, "w": torch.zeros(1000)}, file)
    file.write_bytes(file.read_bytes()[:-900])


def _tar(file: Path) -> None:
    with tarfile.open(file, "w") as archive:
        archive.addfile(tarfile.TarInfo("storages"), io.BytesIO())


NO_CHECKPOINTS: dict[str, Callable[[Path], object]] = {
    "garbage": lambda file: file.write_bytes(b"\x80\x02garbage" * 20),
    "empty": lambda file: file.write_bytes(b""),
    "cut": _cut,
    "tar": _tar,
    "plain pickle": lambda file: file.write_bytes(pickle.dumps({"scaler": GOOD})),
}


@pytest.mark.parametrize("spoil", NO_CHECKPOINTS)
def test_what_is_no_checkpoint_is_refused_by_name(spoil: str, tmp_path: Path) -> None:
    """Damaged files, archives that torch would extract, and pickles of others: an InteropError that names the file."""
    file = tmp_path / "odd.pt"
    NO_CHECKPOINTS[spoil](file)
    with pytest.raises(InteropError, match=r"odd\.pt"):
        load_scaler_state(file)


@given(data=st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_any_bytes_end_in_a_named_error(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No bytes raise anything but InteropError."""
    file = tmp_path_factory.mktemp("bytes") / "any.pt"
    file.write_bytes(data)
    with pytest.raises(InteropError):
        load_scaler_state(file)


JUNK = st.one_of(
    st.none(), st.integers(-3, 3), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=2), st.just({})
)
NAMES = """scale growth_tracker hysteresis_tracker _growth_tracker growth_interval optimizer grad_scaler loss_scaler0
    loss_scale unskipped last_optimizer_state optimizer_history optimizer_states state_dict state param_groups params
    cur_scale loss_scaler fp32_groups_flat fp32_from_fp16_params optimizer_state_dict args cfg module"""
KEYS = st.sampled_from(NAMES.split())
TREES = st.recursive(JUNK, lambda inner: st.dictionaries(KEYS, inner, max_size=4), max_leaves=12)


@given(content=st.dictionaries(KEYS, TREES, max_size=5))
@settings(max_examples=150, deadline=None)
def test_any_content_under_known_keys_ends_in_a_named_error(content: dict[str, Any]) -> None:
    """Whatever lies under the keys that are looked up: a scaler that can be built on, or InteropError."""
    try:
        found = load_scaler_state(content)
    except InteropError:
        return
    assert found.scale is None or found.scale > 0


def test_builtins_are_as_they_were() -> None:
    """The table of what a pickle may call has nothing that opens, imports, evaluates or looks up attributes."""
    from megascale.interop.files import _MAKERS

    made = set(_MAKERS.values())
    assert not made & {builtins.open, builtins.eval, builtins.exec, builtins.getattr, builtins.__import__, os.system}


def test_every_dtype_of_a_checkpoints_file_is_read(tmp_path: Path) -> None:
    """The reader has the dtypes of the writer: 8-bit floats and unsigned integers too, and values without a size."""
    saved = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in SAFETENSORS}
    saved |= {"empty": torch.zeros(0, 2), "scalar": torch.tensor(3.0)}
    path = save(tmp_path, 1, torch.nn.Linear(1, 1), user_state=saved)
    found = {name.rpartition("/")[2]: value for name, value in read_file(path / "rank_00000.safetensors").items()}
    for name, value in saved.items():
        assert found[name].dtype == value.dtype
        assert found[name].float().tolist() == value.float().tolist()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}, "holds 'w' as F4, which is not read"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, r"'w' of shape \(2,\) lies at bytes 0 to 4"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}, "lies at bytes 4 to 12"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}, "is damaged"),
        ({"dtype": "F32", "shape": [2]}, "cannot be read"),
    ],
)
def test_a_damaged_safetensors_file_is_named(entry: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Places that are not in the file, or not the tensor's size; a dtype that torch lacks; a header that is cut off."""
    head = json.dumps({"w": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(8))
    with pytest.raises(InteropError, match=message):
        read_file(path)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(InteropError, match="is cut off"):
        read_file(path)
