"""state_dict and load_state_dict: named, portable, not aliasing, all or nothing."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale import ConstantGradScaler, MixedPrecisionOptimizer
from megascale.errors import MainParamOverflowError, StateDictError
from tests.training import (
    INNER,
    Inner,
    Tiny,
    bits_equal,
    grad_of,
    model,
    same_bits,
    set_grads,
    snapshot,
    wrap,
)

NAMES = ["first.weight", "first.bias", "norm.weight", "norm.bias", "second.weight", "second.bias", "head.weight"]


def _trained(
    inner: Inner = INNER["adamw_fused"], steps: int = 6, seed: int = 0
) -> tuple[Tiny, MixedPrecisionOptimizer]:
    module = model(seed=seed)
    optimizer = wrap(module, inner)
    for step in range(steps):
        set_grads(module, seed=step)
        if step == 3:
            grad_of(module.first.weight)[0, 0] = math.inf
        optimizer.step()
    return module, optimizer


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


def test_layout() -> None:
    """The documented keys, keyed by parameter name; Megatron's scaler keys; step counts and moments under torch's
    names.
    """
    _, optimizer = _trained()
    state = optimizer.state_dict()
    assert list(state) == ["optimizer", "main_params", "grad_scaler", "step_counts", "version"]
    assert list(state["main_params"]) == NAMES
    assert list(state["optimizer"]["state"]) == NAMES
    assert set(state["optimizer"]["state"]["first.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert state["optimizer"]["param_groups"][0]["params"] == NAMES
    assert set(state["grad_scaler"]) == {"scale", "growth_tracker", "hysteresis_tracker"}
    assert state["version"] == 1


def test_nothing_aliases_and_input_is_not_changed() -> None:
    """A state dict is a copy, and loading one copies again: neither side changes when the other trains."""
    module, optimizer = _trained()
    state = optimizer.state_dict()
    kept = copy.deepcopy(state)
    set_grads(module, 99)
    optimizer.step()
    optimizer.load_state_dict(state)
    set_grads(module, 98)
    optimizer.step()
    assert all(bits_equal(a, b) for a, b in zip(_tensors(state), _tensors(kept), strict=True))
    assert repr(state) == repr(kept)
    live = {tensor.data_ptr() for tensor in _tensors(optimizer.state_dict(copy=False)) if tensor.numel()}
    assert not live & {tensor.data_ptr() for tensor in _tensors(state)}


def test_a_live_main_param_goes_to_its_own_place_alone() -> None:
    """Two that were exchanged had one's values, in silence: they are copied one after the other. Clones are exchanged,
    and live tensors load where they lie.
    """
    first, second = "first.weight", "second.weight"
    module = model()
    module.second = nn.Linear(4, 6).half()  # of the same shape
    optimizer = wrap(module)
    state = optimizer.state_dict(copy=False)
    optimizer.load_state_dict(state)
    mains = {name: main.clone() for name, main in optimizer.main_params()}
    live = dict(optimizer.main_params())
    given = state | {"main_params": live | {first: live[second], second: live[first]}}
    with pytest.raises(StateDictError, match=f"'{first}' the live main param of '{second}'.*clone it"):
        optimizer.load_state_dict(given)
    assert all(torch.equal(main, mains[name]) for name, main in optimizer.main_params())
    optimizer.load_state_dict(state | {"main_params": mains | {first: mains[second], second: mains[first]}})
    found = dict(optimizer.main_params())
    assert torch.equal(found[first], mains[second])
    assert torch.equal(found[second], mains[first])


def test_names_by_argument_and_by_position() -> None:
    """Without named parameters the names are positions; named_parameters gives them names."""
    module = model()
    plain = MixedPrecisionOptimizer(
        torch.optim.SGD(module.parameters(), lr=1.0), None, ConstantGradScaler(1.0), grads_are_scaled=True
    )
    assert [name for name, _ in plain.main_params()] == [str(i) for i in range(7)]
    inner = torch.optim.SGD(module.parameters(), lr=1.0)
    named = MixedPrecisionOptimizer(
        inner, None, ConstantGradScaler(1.0), named_parameters=module.named_parameters(), grads_are_scaled=True
    )
    assert [name for name, _ in named.main_params()] == NAMES


def test_same_keys_before_and_after_the_first_step() -> None:
    """State exists from construction, so that keys do not depend on which rank has seen which gradient."""
    module = model()
    optimizer = wrap(module)
    before = optimizer.state_dict()["optimizer"]["state"]
    grad_holder = module.first.bias
    grad_holder.grad = torch.ones_like(grad_holder)
    optimizer.step()
    after = optimizer.state_dict()["optimizer"]["state"]
    assert {name: set(state) for name, state in before.items()} == {name: set(state) for name, state in after.items()}


def test_hooks_run_around_save_and_load() -> None:
    """Torch's four state dict hooks work, and may replace the dict."""
    _, optimizer = _trained()
    calls: list[str] = []

    def extend(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        calls.append("post save")
        return state | {"extra": 1}

    optimizer.register_state_dict_pre_hook(lambda _: calls.append("pre save"))
    optimizer.register_state_dict_post_hook(extend)
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append("pre load"))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("post load"))
    state = optimizer.state_dict()
    assert state["extra"] == 1
    optimizer.load_state_dict(state)
    assert calls == ["pre save", "post save", "pre load", "post load"]


def test_options_load_but_implementation_flags_stay() -> None:
    """lr, weight decay and scheduler keys come from the state dict; fused, foreach and the like stay live."""
    module, twin = model(), model()
    saved, live = wrap(module, INNER["adamw_fused"]), wrap(twin, INNER["adamw_foreach"])
    saved.param_groups[0].update(lr=0.5, initial_lr=0.7)
    live.load_state_dict(saved.state_dict())
    group = live.param_groups[0]
    assert (group["lr"], group["initial_lr"], group["fused"], group["foreach"]) == (0.5, 0.7, None, True)
    assert group["betas"] == (0.9, 0.999)
    assert group["params"] == list(twin.parameters())


def test_tensor_lr_keeps_its_identity() -> None:
    """An lr that is a device tensor is filled, not replaced: whoever holds it still steers the optimizer."""
    module = model()
    lr = torch.tensor(0.25)
    optimizer = wrap(module, lambda m: torch.optim.AdamW(m.named_parameters(), lr=lr, foreach=False))
    state = optimizer.state_dict()
    lr.fill_(0.75)
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.25
    optimizer.load_state_dict(state)
    assert lr.item() == 0.25
    assert optimizer.param_groups[0]["lr"] is lr
    set_grads(module, 0)
    assert optimizer.step().success


def test_loaded_options_are_copies() -> None:
    """A list or a tensor of the state dict stays its caller's: a change there is none of the optimizer's options."""
    module = model()
    optimizer = wrap(module, INNER["adamw_foreach"])
    state = optimizer.state_dict()
    saved = state["optimizer"]["param_groups"][0]
    saved |= {"betas": [0.8, 0.9], "weight_decay": torch.tensor(0.25)}
    optimizer.load_state_dict(state)
    saved["betas"][0] = 0.5
    saved["weight_decay"].fill_(0.75)
    [group] = optimizer.param_groups
    assert list(group["betas"]) == [0.8, 0.9]
    assert float(group["weight_decay"]) == 0.25


def test_not_strict_takes_what_both_have() -> None:
    """strict=False skips added and removed parameters and a missing scaler."""
    _, optimizer = _trained()
    state = optimizer.state_dict()
    for part in (state["main_params"], state["optimizer"]["state"]):
        part["gone"] = part.pop("head.weight")
    state["grad_scaler"] = {}
    fresh = model(seed=9)
    resumed = wrap(fresh)
    kept = fresh.head.weight.detach().clone()
    with pytest.raises(StateDictError, match=r"missing 'head.weight', unexpected 'gone'; .*; strict=False"):
        resumed.load_state_dict(state)
    resumed.load_state_dict(state, strict=False)
    assert bits_equal(fresh.head.weight, kept)
    assert bits_equal(dict(resumed.main_params())["first.bias"], state["main_params"]["first.bias"])
    assert resumed.get_loss_scale().item() == 2.0**10
    resumed.load_state_dict(optimizer.state_dict(), strict=False)
    assert resumed.get_loss_scale().item() == 2.0**9


Change = Callable[[dict[str, Any]], Any]


def _set(*path: str, value: Any) -> Change:
    def change(state: dict[str, Any]) -> dict[str, Any]:
        target = state
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value
        return state

    return change


def _set_option(name: str, value: Any, **others: Any) -> Change:
    def change(state: dict[str, Any]) -> dict[str, Any]:
        state["optimizer"]["param_groups"][0] |= {name: value, **others}
        return state

    return change


def _drop(*path: str) -> Change:
    def change(state: dict[str, Any]) -> dict[str, Any]:
        target = state
        for key in path[:-1]:
            target = target[key]
        del target[path[-1]]
        return state

    return change


REFUSED: list[tuple[Change, type[Exception], str]] = [
    (lambda s: [s], StateDictError, "state dict must be a dict, got list"),
    (_drop("main_params"), StateDictError, r"state dict lacks \['main_params'\]; it has"),
    (_drop("grad_scaler"), StateDictError, r"state dict lacks \['grad_scaler'\].*load with strict=False to do without"),
    (_set("grad_scaler", value=None), StateDictError, "grad scaler state must be a dict, got NoneType"),
    (_set("version", value=2), StateDictError, "state dict has version 2; this megascale reads version 1"),
    (_set("optimizer", value={}), StateDictError, "'optimizer' must hold 'state' and 'param_groups'"),
    (_set("main_params", value=[1]), StateDictError, "'main_params' must map parameter names"),
    (_set("optimizer", "state", value={0: {}}), StateDictError, "'optimizer.state' must map parameter names"),
    (_set("optimizer", "param_groups", value=3), StateDictError, "'optimizer.param_groups' must be a list of dicts"),
    (_set("optimizer", "param_groups", value="ab"), StateDictError, "'optimizer.param_groups' must be a list of dicts"),
    (_set("optimizer", "param_groups", value=[3]), StateDictError, "'optimizer.param_groups' must be a list of dicts"),
    (_set("optimizer", "param_groups", value=[["params"]]), StateDictError, "must be a list of dicts with 'params'"),
    (_set("optimizer", "param_groups", value=[{"lr": 1.0}]), StateDictError, "must be a list of dicts with 'params'"),
    (_set("optimizer", "param_groups", value=[]), StateDictError, "state dict has 0 param groups, the optimizer has 1"),
    (
        lambda s: _set("optimizer", "param_groups", value=[s["optimizer"]["param_groups"][0] | {"params": NAMES[:-1]}])(
            s
        ),
        StateDictError,
        "param group 0 differs: 'head.weight' are on one side only",
    ),
    (_drop("main_params", "head.weight"), StateDictError, "main params: missing 'head.weight', unexpected none"),
    (_set("main_params", "other", value=torch.ones(1)), StateDictError, "main params: .* unexpected 'other'"),
    (
        lambda s: s | {"main_params": s["main_params"] | {f"other{index}": torch.ones(1) for index in range(9)}},
        StateDictError,
        "unexpected 'other0', .*'other7' and 1 more",
    ),
    (_drop("optimizer", "state", "head.weight"), StateDictError, "optimizer state: missing 'head.weight'"),
    (
        _set("main_params", "first.bias", value=torch.ones(5)),
        StateDictError,
        r"main param of 'first.bias' has shape \(5,\)",
    ),
    (
        _set("main_params", "first.bias", value=torch.ones(6).half()),
        StateDictError,
        "main param of 'first.bias' has dtype torch.float16; main params are fp32",
    ),
    (
        _set("main_params", "first.bias", value=[1.0]),
        StateDictError,
        r"main param of 'first.bias' must be a floating point tensor, got \[1.0\] of type list",
    ),
    (
        _set("main_params", "first.bias", value=torch.full((6,), 65520.0)),
        MainParamOverflowError,
        "main param of 'first.bias' holds values of 65520 or more",
    ),
    (
        _set("optimizer", "state", "first.bias", "exp_avg", value=torch.ones(3)),
        StateDictError,
        r"exp_avg of 'first.bias' has shape \(3,\), the parameter has \(6,\)",
    ),
    (
        _set("optimizer", "state", "first.bias", "exp_avg", value=torch.ones(6).long()),
        StateDictError,
        "exp_avg of 'first.bias' must be a floating point tensor or torch.int8 codes, got torch.int64 tensor",
    ),
    (
        _drop("optimizer", "state", "first.bias", "exp_avg_sq"),
        StateDictError,
        r"optimizer state of 'first.bias' lacks 'exp_avg_sq'; it has \['exp_avg', 'step'\]",
    ),
    (
        _set("optimizer", "state", "first.bias", "step", value="3"),
        StateDictError,
        "'first.bias' has a step that is not one number: '3' of type str",
    ),
    (
        _set("optimizer", "state", "first.bias", value=7),
        StateDictError,
        "state of 'first.bias' must be a dict, got int",
    ),
    (_set("optimizer", "state", "first.bias", value=torch.ones(3)), StateDictError, "must be a dict, got Tensor"),
    (_set("version", value=torch.ones(2)), StateDictError, "state dict has version tensor"),
    (_set("version", value=torch.ones((), device="meta")), StateDictError, "state dict has version tensor"),
    (_set_option("params", None), StateDictError, "'params', a list of parameter names"),
    (_set_option("params", [*NAMES[:-1], 3]), StateDictError, "'params', a list of parameter names"),
    (_set_option("lr", "1e-3"), StateDictError, r"param_groups\[0\] of the state dict .* lr .* must be a number"),
    (_set_option("lr", math.nan), StateDictError, r"options that no step could use: lr .* must be finite, got nan"),
    (_set_option("betas", (0.9, math.inf)), StateDictError, r"betas of a param group must be finite, got inf"),
    (_set_option("amsgrad", torch.ones(3)), StateDictError, r"no step could use: .* ambiguous"),
    (_set_option("amsgrad", torch.ones(3), eps=torch.tensor(1e-8)), StateDictError, r"no step could use: .* ambiguous"),
    (
        _set("main_params", "first.bias", value=torch.ones(6, device="meta")),
        StateDictError,
        "main param of 'first.bias' is on the meta device and has no values",
    ),
    (
        _set("optimizer", "state", "first.bias", "step", value=torch.ones((), device="meta")),
        StateDictError,
        "step of 'first.bias' is on the meta device and has no values",
    ),
    (_set("grad_scaler", "scale", value=torch.ones(1, device="meta")), StateDictError, "'scale' is on the meta device"),
    (_set("grad_scaler", "scale", value=math.nan), StateDictError, "'scale' must be finite, got nan"),
]


@pytest.mark.parametrize("step", [torch.tensor([1.0, 2.0]), torch.tensor(1j), None, "3"])
def test_a_count_of_an_own_step_is_one_number(step: Any) -> None:
    """An optimizer without a kernel would fail half way through its step."""
    param = torch.nn.Parameter(torch.ones(4).bfloat16())
    optimizer = MixedPrecisionOptimizer(torch.optim.RMSprop([param]))
    param.grad = torch.ones_like(param)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["optimizer"]["state"]["0"]["step"] = step
    with pytest.raises(StateDictError, match="a step that is not one number"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize(("change", "kind", "message"), REFUSED)
def test_bad_state_is_refused_and_nothing_changes(change: Change, kind: type[Exception], message: str) -> None:
    """A state dict that does not fit raises a named error; parameters, state, options and scaler are as before."""
    _, source = _trained(seed=1)
    module, optimizer = _trained(steps=2, seed=2)
    before, scaler = snapshot(optimizer, module), optimizer.state_dict()["grad_scaler"]
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    damaged = change(source.state_dict())
    with pytest.raises(kind, match=message):
        optimizer.load_state_dict(damaged)
    assert same_bits(before, snapshot(optimizer, module))
    assert optimizer.state_dict()["grad_scaler"] == scaler
    assert {key: value for key, value in optimizer.param_groups[0].items() if key != "params"} == options
