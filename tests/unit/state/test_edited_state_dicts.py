"""What a program writes into ``state_dict()["state"]`` and ``["param_groups"]``, saved or not, is what is loaded."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale import MixedPrecisionOptimizer, OptimizerConfig
from megascale.errors import StateDictError
from tests.checkpoint_cases import reloaded
from tests.training import INNER, model, set_grads, wrap

RATE = 2.0**-5


ROADS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda state: state,
    "a file": reloaded,
    "a deep copy": copy.deepcopy,
    "a copy": lambda state: state.copy(),
    "dict()": dict,
}


def _trained() -> Any:
    module = model()
    optimizer = wrap(module, INNER["adamw_foreach"])
    set_grads(module, 0)
    optimizer.step()
    return optimizer


@pytest.mark.default("itself", "a deep copy")
@pytest.mark.parametrize("road", ROADS)
def test_what_was_written_is_loaded_by_every_road(road: str) -> None:
    """A rate, moments, a main param and the loss scale, through whatever copies a state dict: it was dropped."""
    optimizer = _trained()
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = RATE
    for entries in state["state"].values():
        entries["exp_avg"] = torch.full_like(entries["exp_avg"], 2.0)
        entries["exp_avg_sq"].zero_()
        entries["grad_scaler_scale"].fill_(8.0)
    state["state"][0]["main_param"] = torch.full_like(state["state"][0]["main_param"], 0.5)
    resumed = _trained()
    resumed.load_state_dict(ROADS[road](state))
    found = resumed.state_dict()
    assert found["optimizer"]["param_groups"][0]["lr"] == RATE
    for entries in found["optimizer"]["state"].values():
        assert (entries["exp_avg"] == 2.0).all()
        assert (entries["exp_avg_sq"] == 0.0).all()
    assert (found["main_params"]["first.weight"] == 0.5).all()
    assert found["grad_scaler"]["scale"].item() == 8.0


def test_it_has_one_layout_at_a_time() -> None:
    """Ours until torch's is asked for, and then torch's: what is written to it is all that there is."""
    optimizer = _trained()
    state = optimizer.state_dict()
    layout = state["state"]
    assert list(state) == list(dict(state)) == ["state", "param_groups"]
    assert state["state"] is layout
    assert "optimizer" not in state
    with pytest.raises(KeyError, match=r"main_params \(.*torch's layout: call state_dict\(\) again"):
        state["main_params"]
    assert state.get("main_params") is None


def _assigned(state: Any, groups: list[Any]) -> None:
    state["param_groups"] = groups


@pytest.mark.parametrize(
    "write",
    [
        _assigned,
        lambda state, groups: state.update(param_groups=groups),
        lambda state, groups: state.setdefault("param_groups", [])[0].update(groups[0]),
        lambda state, groups: state.update(state=state.setdefault("state", {}), param_groups=groups),
    ],
)
def test_a_write_makes_it_torchs_layout_as_a_read_does(write: Callable[[Any, list[Any]], object]) -> None:
    """An assignment stood beside our layout, which is loaded: it was refused, and setdefault() stored the default."""
    optimizer = _trained()
    state, other = optimizer.state_dict(), optimizer.state_dict()
    write(state, [group | {"lr": RATE} for group in other["param_groups"]])
    assert list(state) == ["state", "param_groups"]
    resumed = _trained()
    resumed.load_state_dict(state)
    assert resumed.param_groups[0]["lr"] == RATE
    del other["state"]
    assert list(other) == ["param_groups"]
    fresh = optimizer.state_dict()
    del fresh["state"]
    assert list(fresh) == ["param_groups"]
    with pytest.raises(KeyError):
        del fresh["state"]


def test_a_file_has_both_names_for_one_thing() -> None:
    """After a load of the file ``["param_groups"]`` was a KeyError; now what is written there is loaded, or refused."""
    optimizer = _trained()
    loaded = reloaded(optimizer.state_dict())
    for group in loaded["param_groups"]:
        group["lr"] = RATE
    loaded["state"]["first.weight"]["exp_avg"].fill_(2.0)
    for given in (loaded, copy.deepcopy(loaded), reloaded(loaded)):
        resumed = _trained()
        resumed.load_state_dict(given)
        assert resumed.param_groups[0]["lr"] == RATE
        assert (resumed.state_dict()["optimizer"]["state"]["first.weight"]["exp_avg"] == 2.0).all()
    parted = torch.utils._pytree.tree_map_only(Tensor, torch.clone, loaded)
    resumed.load_state_dict(parted)
    for key, new in (("param_groups", []), ("state", {})):
        with pytest.raises(StateDictError, match=f"{key!r} is another one.*leave {key!r} out"):
            resumed.load_state_dict(loaded | {key: new})
    parted["param_groups"][0]["lr"] = 1.0
    with pytest.raises(StateDictError, match="another one"):
        resumed.load_state_dict(parted)
    assert resumed.param_groups[0]["lr"] == RATE


@pytest.mark.parametrize("saver", ["ours", "torch's"])
def test_names_count_after_a_read(saver: str) -> None:
    """A rate that was logged made the dict torch's layout, which went by position: equal shapes were exchanged.

    A torch optimizer's dict has names beside its positions, too. Without strict, an optimizer of fewer takes its own.
    """
    named = [(name, nn.Parameter(torch.full((2,), value))) for name, value in (("one", 1.0), ("two", 2.0))]
    inner = torch.optim.SGD(named, lr=RATE, momentum=0.5)
    optimizer = MixedPrecisionOptimizer(inner)
    for _, param in named:
        param.grad = param.detach().clone()
    optimizer.step()

    def saved() -> dict[str, Any]:
        return optimizer.state_dict() if saver == "ours" else inner.state_dict()

    def loaded(state: dict[str, Any], names: list[str], *, strict: bool = True) -> dict[str, Any]:
        params = [(name, nn.Parameter(torch.zeros(2))) for name in names]
        resumed = MixedPrecisionOptimizer(torch.optim.SGD(params, lr=1.0, momentum=0.5))
        resumed.load_state_dict(state, strict=strict)
        state_of: dict[str, Any] = resumed.state_dict()["optimizer"]["state"]
        return {name: entries["momentum_buffer"][0].item() for name, entries in state_of.items()}

    logged = saved()
    assert logged["param_groups"][0]["lr"] == RATE
    for state in (logged, saved()):
        assert loaded(state, ["two", "one"]) == {"two": 2.0, "one": 1.0}
        assert loaded(state, ["module.two", "module.one"]) == {"module.two": 2.0, "module.one": 1.0}
        assert loaded(state, ["two"], strict=False) == {"two": 2.0}
        with pytest.raises(StateDictError, match="'one'"):
            loaded(state, ["two"])
    assert loaded(logged, ["a", "b"]) == {"a": 1.0, "b": 2.0}, "foreign names go by position"


@pytest.mark.parametrize("saved", [False, True], ids=["as it is", "from a file"])
def test_torchs_own_optimizer_gets_no_codes(saved: bool) -> None:
    """It would take them for moments. One call decodes them, and leaves a torch optimizer that steps by itself."""
    module = model(torch.bfloat16)
    codes = OptimizerConfig(bf16=True, exp_avg_dtype=torch.int8, exp_avg_sq_dtype=torch.uint8)
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(module.named_parameters()), codes)
    set_grads(module, 0)
    optimizer.step()
    state = reloaded(optimizer.state_dict()) if saved else optimizer.state_dict()
    plain = model(torch.float32)
    adamw = torch.optim.AdamW(plain.named_parameters())
    with pytest.raises(KeyError, match="state"):
        adamw.load_state_dict(state)
    MixedPrecisionOptimizer(adamw).load_state_dict(state)
    wide = MixedPrecisionOptimizer(torch.optim.AdamW(module.named_parameters()), OptimizerConfig(bf16=True))
    wide.load_state_dict(state)
    for name, param in plain.named_parameters():
        assert torch.equal(param, state["main_params"][name])
        for key, value in wide.state_dict()["optimizer"]["state"][name].items():
            assert torch.equal(adamw.state[param][key], value)
    set_grads(plain, 1)
    adamw.step()
    assert all(entries["step"] == 2 for entries in adamw.state.values())
