"""Options of param groups in a state dict: what it makes of numbers of numpy, dtypes, named tuples; what it refuses."""

import enum
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megascale.checkpoint
from megascale.errors import StateDictError
from tests.cells import Cell, integers
from tests.checkpoint_cases import reloaded
from tests.pool import RankPool
from tests.training import INNER, model, set_grads, wrap

LAYOUTS = [
    Cell(torch.bfloat16, "replicated"),
    Cell(torch.bfloat16, "zero1"),
    Cell(torch.float16, "fsdp2", "compact"),
    Cell(torch.float32, "fsdp2"),
]
"""Options know neither the parameters' dtype nor the form of state."""
Pair = namedtuple("Pair", "first second")


class _Word(str, enum.Enum):  # noqa: UP042  # whose str() is not its value
    LION = "lion"


class _Number(enum.IntEnum):
    TWO = 2


OPTIONS: dict[str, tuple[Any, Any]] = {
    "lr": (np.float32(0.003), float(np.float32(0.003))),
    "eps": (np.float64(2.0**-20), 2.0**-20),
    "weight_decay": (np.float16(0.125), 0.125),
    "betas": ((np.float64(0.5), np.float32(0.75)), (0.5, 0.75)),
    "zero_dim": (np.array(0.125), 0.125),
    "count": (np.int64(3), 3),
    "flag": (np.bool_(True), True),
    "name": (np.str_("mine"), "mine"),
    "dtype": (torch.bfloat16, torch.bfloat16),
    "device": (torch.device("cpu", 0), torch.device("cpu", 0)),
    "pair": (Pair(np.float16(0.5), torch.float32), (0.5, torch.float32)),
    "size": (torch.Size([2, 3]), (2, 3)),
    "word": (_Word.LION, "lion"),
    "number": (_Number.TWO, 2),
    "nest": ({"a": [np.float32(0.5), {np.int64(1): Pair(1, 2)}]}, {"a": [0.5, {1: (1, 2)}]}),
}
EXPECTED = {name: plain for name, (_, plain) in OPTIONS.items()}


def _kinds(value: Any) -> Any:
    """Return ``value`` with the types of all that is in it: 1 is not 1.0 there, nor a tuple a named one."""
    if isinstance(value, dict):
        return {key: _kinds(item) for key, item in value.items()}
    items = [_kinds(item) for item in value] if isinstance(value, (list, tuple)) else repr(value)
    return type(value).__name__, items


@pytest.mark.default("bfloat16-replicated-fp32")
@pytest.mark.parametrize("cell", LAYOUTS, ids=str)
def test_numbers_of_numpy_and_the_like_in_every_layout(cell: Cell, ranks: RankPool, tmp_path: Path) -> None:
    """Saved in every way they are Python's own numbers and words. numpy's were a file that `weights_only` refused, or
    an error at the first save; dtypes, devices and named tuples were errors.
    """
    expected = _kinds(EXPECTED)
    for found in ranks.run(cell.world_size, _life, cell, str(tmp_path)):
        for way, options in found.items():
            assert options == expected, way


def _life(cell: Cell, folder: str) -> dict[str, Any]:
    module = cell.model()
    optimizer = cell.optimizer(module)
    group = optimizer.param_groups[0]
    group.update({name: given for name, (given, _) in OPTIONS.items()})
    cell.backward(optimizer, module, integers(cell.shapes, 1))
    optimizer.step()
    state = optimizer.state_dict()
    saved = {"state_dict": state, "copy=False": optimizer.state_dict(copy=False), "file": reloaded(state)}
    megascale.checkpoint.save(folder, 0, module, optimizer, user_state={name: OPTIONS[name][0] for name in OPTIONS})
    found = {way: _kinds(_chosen(one["optimizer"]["param_groups"][0])) for way, one in saved.items()}
    found["torch's layout"] = _kinds(_chosen(state["param_groups"][0]))
    for way in ("file", "checkpoint"):
        other = cell.model()
        resumed = cell.optimizer(other)
        if way == "file":
            resumed.load_state_dict(saved["file"])
        else:
            found["user_state"] = _kinds(megascale.checkpoint.load(folder, other, resumed).user_state)
        found[f"loaded from {way}"] = _kinds(_chosen(resumed.param_groups[0]))
        resumed.param_groups[0]["pair"] = Pair(1, 2)
        resumed.load_state_dict(state)
        assert resumed.param_groups[0]["pair"].first == 0.5  # of the class that is there
    return found


def _chosen(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in OPTIONS}


@pytest.mark.parametrize(
    "value",
    [lambda: 1, np.ones(2), {1, 2}, 1j, torch.strided, object()],
    ids=["a function", "an array", "a set", "a complex number", "a layout", "an object"],
)
def test_what_cannot_be_saved_is_refused_before_the_first_step(value: Any) -> None:
    """And not hours later, at the first save. Nothing has changed."""
    module = model()
    optimizer = wrap(module, INNER["adamw_foreach"])
    optimizer.param_groups[0]["extra"] = [value]
    before = {name: main.clone() for name, main in optimizer.main_params()}
    set_grads(module, 0)
    with pytest.raises(StateDictError, match=r"param_groups\[0\]\['extra'\]\[0\] is a .*cannot hold; keep tensors"):
        optimizer.step()
    assert all(torch.equal(main, before[name]) for name, main in optimizer.main_params())
    del optimizer.param_groups[0]["extra"]
    assert optimizer.step().success


def test_a_key_that_cannot_be_saved_is_named() -> None:
    """The error said that a state dict cannot hold a dict."""
    optimizer = wrap(model(), INNER["adamw_foreach"])
    optimizer.param_groups[0]["rates"] = [{(0, 1): 0.5}]
    message = r"param_groups\[0\]\['rates'\]\[0\] has the key \(0, 1\), .*keep keys that are strings or numbers"
    with pytest.raises(StateDictError, match=message):
        optimizer.state_dict()


@pytest.mark.parametrize("cell", [cell for cell in LAYOUTS if cell.world_size > 1], ids=str)
def test_every_rank_refuses_what_one_cannot_save(cell: Cell, ranks: RankPool) -> None:
    """Cells of one rank have no other."""
    messages = ranks.run(cell.world_size, _refused, cell)
    assert all("param_groups[0]['extra'] is a object" in message for message in messages)


def _refused(cell: Cell) -> str:
    module = cell.model()
    optimizer = cell.optimizer(module)
    if torch.distributed.get_rank() == 1:
        optimizer.param_groups[0]["extra"] = object()
    cell.backward(optimizer, module, integers(cell.shapes, 1))
    with pytest.raises(Exception, match="extra") as caught:
        optimizer.step()
    return str(caught.value)
