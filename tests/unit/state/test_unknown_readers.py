"""Whoever reads ``optimizer.state`` without knowing megascale: what loads, or the error with its remedy."""

import importlib.util
import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict as known
from torch.distributed.checkpoint.state_dict import StateDictOptions

from megascale import MixedPrecisionOptimizer
from megascale.errors import StateDictError
from tests.training import Tiny, bits_equal, model, same_bits, set_grads, snapshot, wrap

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
REMEDY = r"If megascale saved it.*set_optimizer_state_dict\(\)"


def _trained() -> tuple[Tiny, MixedPrecisionOptimizer]:
    module = model()
    optimizer = wrap(module)
    for step in range(3):
        set_grads(module, step, 1e6 if step == 1 else 1.0)
        optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


def _new() -> tuple[Tiny, MixedPrecisionOptimizer]:
    module = model(seed=1)
    return module, wrap(module, scale=2.0**3)


def _unknown() -> ModuleType:
    """Return torch's functions in a module of another name, which no list has."""
    spec = importlib.util.spec_from_file_location("somebodys_checkpoints", Path(str(known.__file__)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _pickled(optimizer: MixedPrecisionOptimizer, folder: Path) -> dict[str, Any]:
    """Copy ``optimizer.state`` by pickle, in the order of parameters."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = pickle.loads(pickle.dumps({at: optimizer.state[param] for at, param in enumerate(params)}))
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return {"state": state, "param_groups": [groups[0] | {"params": list(state)}]}


def _tensor_by_tensor(optimizer: MixedPrecisionOptimizer, folder: Path) -> dict[str, Any]:
    """Write each tensor of each parameter of the groups into a file of its own."""
    state: dict[int, dict[str, Any]] = {}
    [group] = optimizer.param_groups
    for at, param in enumerate(group["params"]):
        for name, value in optimizer.state[param].items():
            torch.save(value, folder / f"{at}.{name}")
            state.setdefault(at, {})[name] = torch.load(folder / f"{at}.{name}")
    options = {name: value for name, value in group.items() if name != "params"}
    return {"state": state, "param_groups": [options | {"params": list(state)}]}


@pytest.mark.parametrize("read", [_pickled, _tensor_by_tensor])
def test_a_copy_of_the_state_alone_is_refused_with_the_remedy(
    read: Callable[[MixedPrecisionOptimizer, Path], dict[str, Any]], tmp_path: Path
) -> None:
    """It has no main params: nothing is loaded in silence, and what the optimizer holds stays."""
    _, optimizer = _trained()
    copied = read(optimizer, tmp_path)
    module, resumed = _new()
    before = snapshot(resumed, module)
    with pytest.raises(StateDictError, match=REMEDY):
        resumed.load_state_dict(copied)
    assert same_bits(snapshot(resumed, module), before)


def test_functions_of_another_module_save_what_loads() -> None:
    """Flattened by a module that is not known: saved whole; its own load is refused, and the remedy loads the same."""
    module, optimizer = _trained()
    unknown = _unknown()
    saved = unknown.get_optimizer_state_dict(module, optimizer, options=unknown.StateDictOptions(**vars(FLAT)))
    other, resumed = _new()
    before = snapshot(resumed, other)
    with pytest.raises(StateDictError, match=REMEDY):
        unknown.set_optimizer_state_dict(other, resumed, saved, options=unknown.StateDictOptions(**vars(FLAT)))
    assert same_bits(snapshot(resumed, other), before)
    other.load_state_dict(module.state_dict())
    known.set_optimizer_state_dict(other, resumed, saved, options=FLAT)
    assert same_bits(snapshot(resumed, other), snapshot(optimizer, module))
    assert bits_equal(resumed.get_loss_scale(), optimizer.get_loss_scale())


def test_functions_of_another_module_without_flattening() -> None:
    """Nothing is flattened: names of the file are taken, and all of it loads."""
    module, optimizer = _trained()
    unknown = _unknown()
    saved = unknown.get_optimizer_state_dict(module, optimizer)
    other, resumed = _new()
    other.load_state_dict(module.state_dict())
    unknown.set_optimizer_state_dict(other, resumed, saved)
    assert same_bits(snapshot(resumed, other), snapshot(optimizer, module))
    assert bits_equal(resumed.get_loss_scale(), optimizer.get_loss_scale())
