"""The state dict in torch's layout, and the functions of torch.distributed.checkpoint.state_dict in one process."""

import copy
import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.checkpoint.state_dict import StateDictOptions

from megascale import ChainedOptimizer, ConstantGradScaler, DynamicGradScaler, MixedPrecisionOptimizer
from megascale.errors import StateDictError
from megascale.state.torch_layout import ADDED
from tests.training import INNER, Tiny, constant, model, same_values, set_grads, wrap

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
get_optimizer_state_dict: Any = dsd.get_optimizer_state_dict
set_optimizer_state_dict: Any = dsd.set_optimizer_state_dict
KEYS = ["optimizer", "main_params", "grad_scaler", "step_counts", "version"]


def _trained(inner: str = "adamw_fused", dtype: torch.dtype = torch.float16) -> tuple[Tiny, MixedPrecisionOptimizer]:
    module = model(dtype)
    optimizer = wrap(module, INNER[inner])
    for step in range(3):
        set_grads(module, step, 1e6 if step == 1 else 1.0)
        optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


def test_our_layout_is_what_it_was() -> None:
    """Torch's two keys count as contained but do not show in iteration. In a file they are those of our layout, under
    its names. Taken out, one leaves the other.
    """
    _, optimizer = _trained()
    state = optimizer.state_dict()
    assert list(state) == KEYS
    assert "state" in state
    assert "other" not in state
    with pytest.raises(KeyError, match="'other'"):
        state["other"]
    taken = copy.deepcopy(state)
    assert taken.get("param_groups") is taken["param_groups"]
    [group] = taken.pop("param_groups")
    assert group["params"] == list(range(7))
    assert list(taken) == ["state"]
    assert "param_groups" not in taken
    assert taken.pop("param_groups", None) is None
    with pytest.raises(KeyError, match="optimizer"):
        taken.pop("optimizer")
    assert list(copy.deepcopy(state)) == KEYS
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded) is OrderedDict
    assert list(loaded) == [*KEYS, "state", "param_groups"]
    assert loaded["state"] is loaded["optimizer"]["state"]
    assert loaded["param_groups"] is loaded["optimizer"]["param_groups"]
    assert same_values({key: loaded[key] for key in KEYS}, state)
    optimizer.load_state_dict(loaded)
    assert same_values(optimizer.state_dict(), state)


def test_torch_layout() -> None:
    """What torch's functions see: positions, our main params and the scaler beside the moments, options by group."""
    module, optimizer = _trained()
    state = optimizer.state_dict()
    ours = dict(state)
    entries = state["state"][0]
    assert set(entries) == {"step", "exp_avg", "exp_avg_sq", *ADDED}
    assert entries["main_param"] is ours["main_params"]["first.weight"]
    assert entries["exp_avg"] is ours["optimizer"]["state"]["first.weight"]["exp_avg"]
    assert entries["num_states"].item() == 3
    assert entries["grad_scaler_scale"].item() == optimizer.get_loss_scale().item() == 2.0**9
    assert [entries[f"grad_scaler_{key}"].item() for key in ("growth_tracker", "hysteresis_tracker")] == [1, 0]
    [group] = state["param_groups"]
    assert group["params"] == list(range(7))
    assert group["param_names"] == [name for name, _ in module.named_parameters()]
    assert group["lr"] == 1e-2
    assert all(isinstance(value, Tensor) for value in entries.values())


@pytest.mark.default(
    "dtype1-adam_amsgrad-nested", "dtype0-adamw_fused-flat", "dtype2-sgd_dampening-nested", "dtype1-lion-nested"
)
@pytest.mark.parametrize("options", [None, FLAT], ids=["nested", "flat"])
@pytest.mark.parametrize("inner", ["adamw_fused", "sgd", "lion", "sgd_dampening", "adam_amsgrad"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_round_trip(dtype: torch.dtype, inner: str, options: StateDictOptions | None) -> None:
    """Get and set: the same state to the bit for every kind of optimizer and parameter."""
    module, optimizer = _trained(inner, dtype)
    other = model(dtype, seed=1)
    resumed = wrap(other, INNER[inner])
    given = get_optimizer_state_dict(module, optimizer, options=options)
    set_optimizer_state_dict(other, resumed, given, options=options)
    assert same_values(resumed.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("options", [None, FLAT], ids=["nested", "flat"])
@pytest.mark.parametrize(
    "inner",
    [INNER["adamw_fused"], INNER["sgd"], lambda m: torch.optim.Adadelta(m.named_parameters())],
    ids=["adamw", "sgd", "its_own_step"],
)
def test_an_untouched_optimizer_stays_untouched(
    inner: Callable[[nn.Module], torch.optim.Optimizer], options: StateDictOptions | None
) -> None:
    """Neither get nor set takes a step: no scale, tracker, step count or parameter moves (a defect of torch's own)."""
    module = model()
    optimizer = wrap(module, inner)
    before = copy.deepcopy(optimizer.state_dict())
    weights = [param.detach().clone() for param in module.parameters()]
    given = get_optimizer_state_dict(module, optimizer, options=options)
    set_optimizer_state_dict(module, optimizer, given, options=options)
    assert same_values(optimizer.state_dict(), before)
    assert optimizer.num_skipped_steps.item() == 0
    assert all(map(torch.equal, module.parameters(), weights))
    assert all(param.grad is None for param in module.parameters())


def _chained(module: Tiny) -> ChainedOptimizer:
    named, scaler = list(module.named_parameters()), DynamicGradScaler(2.0**10)
    return ChainedOptimizer(
        [
            MixedPrecisionOptimizer(torch.optim.AdamW(part), None, scaler, grads_are_scaled=True)
            for part in (named[:3], named[3:])
        ]
    )


@pytest.mark.parametrize("options", [None, FLAT], ids=["nested", "flat"])
def test_a_chain(options: StateDictOptions | None) -> None:
    """As one optimizer: neither call takes a step, what is set is what was got, and others read the members' state."""
    module, other = model(), model(seed=1)
    optimizer, resumed = _chained(module), _chained(other)
    set_grads(module, 0)
    optimizer.step()
    optimizer.zero_grad()
    given = get_optimizer_state_dict(module, optimizer, options=options)
    set_optimizer_state_dict(other, resumed, given, options=options)
    assert resumed.num_landed_steps.item() == 1
    assert same_values(resumed.state_dict(), optimizer.state_dict())
    member = optimizer._optimizers[1]
    assert list(optimizer.state) == list(module.parameters())
    mine, theirs = optimizer.state[module.head.weight], member.state[module.head.weight]
    assert all(mine[key] is theirs[key] for key in ("step", "exp_avg", "exp_avg_sq", "main_param"))


def test_groups_and_options() -> None:
    """Options of several groups and a scheduler's entry arrive at their groups; how torch runs them stays."""

    def build(lr: float) -> tuple[Tiny, MixedPrecisionOptimizer]:
        module = model()
        groups = [
            {"params": list(module.first.named_parameters(prefix="first")), "lr": lr},
            {"params": list(module.second.named_parameters(prefix="second")), "weight_decay": lr},
        ]
        inner = torch.optim.AdamW(groups, lr=lr / 2, foreach=lr == 0.5)
        torch.optim.lr_scheduler.StepLR(inner, 1)
        return module, MixedPrecisionOptimizer(inner, None, ConstantGradScaler(2.0), grads_are_scaled=True)

    module, optimizer = build(0.5)
    for options in (None, FLAT):
        other, resumed = build(0.25)
        given = get_optimizer_state_dict(module, optimizer, options=options)
        set_optimizer_state_dict(other, resumed, given, options=options)
        assert [group["lr"] for group in resumed.param_groups] == [0.5, 0.25]
        assert resumed.param_groups[1]["weight_decay"] == 0.5
        assert [group["initial_lr"] for group in resumed.param_groups] == [0.5, 0.25]
        assert [group["foreach"] for group in resumed.param_groups] == [False, False]


def test_names_and_positions() -> None:
    """A state dict with names loads by name, in whatever order; one with positions, or foreign names, by position."""
    module, optimizer = _trained()
    given = get_optimizer_state_dict(module, optimizer)
    given["param_groups"][0]["params"].reverse()
    resumed = wrap(model(seed=1))
    resumed.load_state_dict(given)
    assert same_values(resumed.state_dict()["main_params"], optimizer.state_dict()["main_params"])
    state = optimizer.state_dict()
    by_position = {"state": state["state"], "param_groups": state["param_groups"]}
    for prefix in (None, "model."):
        resumed = wrap(model(seed=1))
        resumed.load_state_dict(by_position if prefix is None else _renamed(by_position, prefix))
        assert same_values(resumed.state_dict(), optimizer.state_dict())


def _renamed(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    groups = [group | {"params": [f"{prefix}{key}" for key in group["params"]]} for group in state["param_groups"]]
    return {"state": {f"{prefix}{key}": value for key, value in state["state"].items()}, "param_groups": groups}


def test_plain_torch_state() -> None:
    """A plain torch optimizer's state is taken. Main params are the model's weights, a scale stays, and it is said."""
    module = model(torch.float32)
    inner = INNER["adamw_fused"](module)
    set_grads(module, 0)
    inner.step()
    given = inner.state_dict()
    resumed = wrap(model(torch.float32), scale=None)
    resumed.load_state_dict(given)
    ours = resumed.state_dict()["optimizer"]["state"]["first.weight"]
    assert same_values(ours, inner.state_dict()["state"][0])
    halves = model()
    halves.load_state_dict(module.state_dict())
    optimizer = wrap(halves)
    with pytest.warns(UserWarning, match=r"no main params .*taken from the model's weights.*; .*no loss scale"):
        optimizer.load_state_dict(given)
    assert same_values(
        dict(optimizer.main_params()), {name: param.float() for name, param in halves.named_parameters()}
    )
    assert same_values(optimizer.state_dict()["optimizer"]["state"]["first.weight"], ours)
    assert optimizer.get_loss_scale().item() == wrap(model()).get_loss_scale().item()


def _fewer(state: dict[str, Any]) -> None:
    del state["param_groups"][0]["params"][0], state["state"]["first.weight"]
    state["param_groups"][0]["params"][0] = "other"
    state["state"]["other"] = state["state"].pop("first.bias")


def _with_groups(value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda state: state.update(param_groups=value)


BAD_GROUPS: list[Any] = [{"params": []}, {}, [["params"]], [{"lr": 0.1}]]
TRACKER = "grad_scaler_growth_tracker"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s["state"]["head.weight"].pop("main_param"), "holds main params, but none of 'head.weight'"),
        (lambda s: [entries.pop(TRACKER) for entries in s["state"].values()], "lacks 'growth_tracker'"),
        (
            lambda s: s["state"]["first.bias"].pop("exp_avg"),
            r"arrives with \['exp_avg_sq', 'step'\]",
        ),
        (
            lambda s: s["state"]["head.weight"].update(grad_scaler_scale=torch.tensor(3.0)),
            r"\[3.0, 512.0\]",
        ),
        (lambda s: s["state"]["head.weight"].pop("grad_scaler_scale"), "several values of 'grad_scaler_scale'"),
        (lambda s: s["state"].update(other={}), r"holds state of 'other', which none of its param groups has"),
        (_fewer, r"param groups of \[6\] parameters, the optimizer has \[7\]"),
        (lambda s: s.update(state=[1]), "'state' must map parameters to dicts"),
        (lambda s: s["state"].update({"first.bias": [1]}), "'state' must map parameters to dicts"),
        *((_with_groups(value), "'param_groups' must be a list of dicts with 'params'") for value in BAD_GROUPS),
        (
            lambda s: s["state"]["first.bias"].update(main_param=torch.zeros(2)),
            r"'first.bias' has shape \(2,\)",
        ),
    ],
)
def test_damage_is_named(damage: Callable[[dict[str, Any]], object], message: str) -> None:
    """What lacks or does not fit is named, and nothing has changed."""
    module, optimizer = _trained()
    given = copy.deepcopy(get_optimizer_state_dict(module, optimizer))
    damage(given)
    resumed = wrap(model(seed=1))
    before = copy.deepcopy(resumed.state_dict())
    with pytest.raises(StateDictError, match=message):
        resumed.load_state_dict(given)
    assert same_values(resumed.state_dict(), before)


def test_names_of_ours_are_taken() -> None:
    """An optimizer that has an entry of one of our names is refused by name, not mixed up."""
    module = model()
    optimizer = constant(module, INNER["sgd"], 1.0)
    optimizer._inner.state[module.first.weight]["main_param"] = torch.zeros(1)
    message = r"'first.weight' has entries called \['main_param'\]"
    with pytest.raises(StateDictError, match=message):
        get_optimizer_state_dict(module, optimizer)
    with pytest.raises(StateDictError, match=message):
        dict(optimizer.state[module.first.weight])
