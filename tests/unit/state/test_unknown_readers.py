"""Whoever saves what ``optimizer.state`` and ``param_groups`` hold, without knowing megascale: all of it loads."""

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions

from megascale import ChainedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer
from tests.training import INNER, Tiny, bits_equal, model, same_bits, set_grads, snapshot, wrap

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
Optimizer = MixedPrecisionOptimizer | ChainedOptimizer


def _trained(
    inner: str = "adamw_fused", dtype: torch.dtype = torch.float16, scale: float | None = 2.0**10, **options: Any
) -> tuple[Tiny, MixedPrecisionOptimizer]:
    module = model(dtype)
    optimizer = wrap(module, INNER[inner], scale, **options)
    for step in range(3):
        set_grads(module, step, 1e6 if step == 1 else 1.0)
        optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


def _with_groups(optimizer: Optimizer, state: dict[int, Any]) -> dict[str, Any]:
    """Return what was read of the state, by position, with the options of the groups, as torch's layout has them."""
    groups, position = [], 0
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        groups.append(options | {"params": list(range(position, position + len(group["params"])))})
        position += len(group["params"])
    return {"state": state, "param_groups": groups}


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _pickled(optimizer: Optimizer, folder: Path) -> dict[str, Any]:
    """Copy each parameter's entries by pickle, in the order of parameters."""
    state = {at: optimizer.state[param] for at, param in enumerate(_params(optimizer))}
    return _with_groups(optimizer, pickle.loads(pickle.dumps(state)))


def _copied_whole(optimizer: Optimizer, folder: Path) -> dict[str, Any]:
    """Go through all that ``state`` holds, whatever its keys are."""
    order = {id(param): at for at, param in enumerate(_params(optimizer))}
    return _with_groups(optimizer, {order[id(param)]: copy.deepcopy(held) for param, held in optimizer.state.items()})


def _tensor_by_tensor(optimizer: Optimizer, folder: Path) -> dict[str, Any]:
    """Write each tensor of each parameter of the groups into a file of its own."""
    state: dict[int, dict[str, Any]] = {}
    for at, param in enumerate(_params(optimizer)):
        for name, value in optimizer.state[param].items():
            if isinstance(value, Tensor):
                torch.save(value, folder / f"{at}.{name}")
                state.setdefault(at, {})[name] = torch.load(folder / f"{at}.{name}")
    return _with_groups(optimizer, state)


def _in_two_files(optimizer: Optimizer, folder: Path) -> dict[str, Any]:
    """Take the groups out of the state dict for a file of JSON, and flatten what is left, as lerobot does."""
    state = optimizer.state_dict()
    (folder / "groups.json").write_text(json.dumps(state.pop("param_groups")))
    flat = {f"{at}/{name}": value for at, entries in state["state"].items() for name, value in entries.items()}
    places = [value.untyped_storage().data_ptr() for value in flat.values() if value.numel()]
    assert len(set(places)) == len(places)  # safetensors refuses tensors that share memory
    torch.save(flat, folder / "flat.pt")
    found: dict[int, dict[str, Any]] = {}
    for path, value in torch.load(folder / "flat.pt").items():
        at, name = path.split("/")
        found.setdefault(int(at), {})[name] = value
    live = optimizer.state_dict()
    assert "param_groups" in live
    saved = json.loads((folder / "groups.json").read_text())
    assert [group.keys() for group in saved] == [group.keys() for group in live["param_groups"]]
    groups = [
        {key: type(live_group[key])(value) if live_group[key] is not None else value for key, value in group.items()}
        for group, live_group in zip(saved, live["param_groups"], strict=True)
    ]
    return {"state": found, "param_groups": groups}


READERS = [_in_two_files, _pickled, _copied_whole, _tensor_by_tensor]
KINDS: dict[str, dict[str, Any]] = {
    "fp16": {},
    "bf16": {"dtype": torch.bfloat16, "scale": None},
    "fp32": {"dtype": torch.float32, "scale": None},
    "scaled fp32": {"dtype": torch.float32},
    "remainders": {"store_param_remainders": True},
    "8 bit": {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8},
    "amsgrad": {"inner": "adam_amsgrad"},
    "momentum": {"inner": "sgd_momentum_fused"},
    "lion": {"inner": "lion"},
    "no state": {"inner": "sgd"},
}


@pytest.mark.default("remainders-_in_two_files", "8 bit-_pickled")
@pytest.mark.parametrize(
    ("kind", "read"), [*((kind, _in_two_files) for kind in KINDS), *(("8 bit", read) for read in READERS[1:])]
)
def test_a_copy_of_the_state_loads(
    kind: str, read: Callable[[Optimizer, Path], dict[str, Any]], tmp_path: Path
) -> None:
    """Main params, moments, scale, trackers, counts and statistics come back with every bit, and training goes on."""
    options = KINDS[kind]
    module, optimizer = _trained(**options)
    copied = read(optimizer, tmp_path)
    other = model(options.get("dtype", torch.float16), seed=1)
    other.load_state_dict(module.state_dict())
    own = {name: value for name, value in options.items() if name not in ("inner", "dtype", "scale")}
    scale = None if options.get("scale", 1) is None else 2.0**3
    resumed = wrap(other, INNER[options.get("inner", "adamw_fused")], scale, **own)
    resumed.load_state_dict(copied)
    assert same_bits(snapshot(resumed, other), snapshot(optimizer, module))
    assert _shared(resumed) == _shared(optimizer)
    for each, of in ((module, optimizer), (other, resumed)):
        set_grads(each, 7)
        of.step()
    assert same_bits(snapshot(resumed, other), snapshot(optimizer, module))


def _shared(optimizer: Optimizer) -> str:
    """Return what a state dict holds once: scale, trackers, counts, statistics."""
    packed = optimizer.state_dict()
    return str({key: packed[key] for key in packed if key not in ("optimizer", "main_params")})


@pytest.mark.default("_copied_whole", "_tensor_by_tensor")
@pytest.mark.parametrize("read", READERS)
def test_a_copy_of_a_chain_loads(read: Callable[[Optimizer, Path], dict[str, Any]], tmp_path: Path) -> None:
    """A ChainedOptimizer's state is that of all of its optimizers."""

    def build(seed: int) -> tuple[Tiny, ChainedOptimizer]:
        module = model(seed=seed)
        named, scaler = list(module.named_parameters()), DynamicGradScaler(2.0**10 / (1 + seed))
        parts = [torch.optim.AdamW(part) for part in (named[:3], named[3:])]
        return module, ChainedOptimizer(
            [MixedPrecisionOptimizer(p, None, scaler, grads_are_scaled=True) for p in parts]
        )

    module, chain = build(0)
    set_grads(module, 0)
    chain.step()
    other, resumed = build(1)
    resumed.load_state_dict(read(chain, tmp_path))
    assert same_bits(snapshot(resumed, other), snapshot(chain, module))
    assert _shared(resumed) == _shared(chain)


def test_a_copy_without_the_added_entries_is_a_torch_optimizers() -> None:
    """As a program saves it that drops what a torch optimizer does not have: what it lacks is not lost in silence."""
    module, optimizer = _trained()
    inner = _with_groups(optimizer, dict(enumerate(copy.deepcopy(list(optimizer._inner.state.values())))))
    before = optimizer.state_dict()
    with pytest.warns(UserWarning, match="no main params .* taken from the model's weights"):
        optimizer.load_state_dict(inner)
    after = optimizer.state_dict()
    assert all(map(same_bits, before["optimizer"]["state"].values(), after["optimizer"]["state"].values()))
    assert all(
        bits_equal(main, dict(module.named_parameters())[name].float()) for name, main in optimizer.main_params()
    )
    assert before["grad_scaler"] == after["grad_scaler"]
