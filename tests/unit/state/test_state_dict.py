"""state_dict and load_state_dict: named, portable, not aliasing, all or nothing."""

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale import ConstantGradScaler, MixedPrecisionOptimizer
from megascale.errors import ArgumentError, MainParamOverflowError, StateDictError
from tests.training import (
    INNER,
    Inner,
    Sign,
    Tiny,
    bits_equal,
    constant,
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


def test_weights_only_load_reads_it() -> None:
    """torch.load(weights_only=True) reads a saved state dict (DeepSpeed 8500, Megatron-LM 1884)."""
    module, optimizer = _trained()
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    before = snapshot(optimizer, module)
    optimizer.load_state_dict(loaded)
    assert same_bits(before, snapshot(optimizer, module))


def test_model_params_follow_the_loaded_main_params() -> None:
    """Megatron's load does not refresh model params from masters: ours does, without loading the model."""
    module, optimizer = _trained()
    fresh = model(seed=9)
    resumed = wrap(fresh)
    resumed.load_state_dict(optimizer.state_dict())
    for p, q in zip(module.parameters(), fresh.parameters(), strict=True):
        assert bits_equal(p, q)


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


def test_without_copy_it_is_live() -> None:
    """copy=False refers to the live tensors: a synchronous save needs no second set of them."""
    _, optimizer = _trained()
    live = optimizer.state_dict(copy=False)
    mains = dict(optimizer.main_params())
    assert all(live["main_params"][name].data_ptr() == main.data_ptr() for name, main in mains.items())


def test_dtypes_are_preserved() -> None:
    """Torch casts loaded state to the parameter's dtype and loses fp32 moments: ours keeps every dtype."""
    _, optimizer = _trained()
    resumed = wrap(model(seed=9))
    resumed.load_state_dict(optimizer.state_dict())
    assert {value.dtype for value in _tensors(resumed.state_dict()["optimizer"])} == {torch.float32}
    general = constant(model(), lambda m: Sign(m.named_parameters()), 1.0)
    state = general.state_dict()
    state["optimizer"]["state"]["first.bias"] = {
        "table": torch.arange(3),
        "exp_avg": torch.ones(6, dtype=torch.bfloat16),
    }
    general.load_state_dict(state)
    assert general.state_dict()["optimizer"]["state"]["first.bias"]["table"].dtype == torch.int64


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


def test_frozen_parameters_do_not_shift_names() -> None:
    """A parameter frozen on one side keeps everyone's names; its main param is kept for the day it thaws."""
    module, optimizer = _trained()
    fresh = model(seed=9)
    fresh.first.weight.requires_grad_(False)
    resumed = wrap(fresh)
    resumed.load_state_dict(optimizer.state_dict())
    fresh.first.weight.requires_grad_(True)
    assert same_bits(snapshot(optimizer, module), snapshot(resumed, fresh))


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
    with pytest.raises(StateDictError, match=r"missing \['head.weight'\], unexpected \['gone'\]; .*; strict=False"):
        resumed.load_state_dict(state)
    resumed.load_state_dict(state, strict=False)
    assert bits_equal(fresh.head.weight, kept)
    assert bits_equal(dict(resumed.main_params())["first.bias"], state["main_params"]["first.bias"])
    assert resumed.get_loss_scale().item() == 2.0**10
    resumed.load_state_dict(optimizer.state_dict(), strict=False)
    assert resumed.get_loss_scale().item() == 2.0**9


def test_16_bit_state_loads_into_fp32_training() -> None:
    """Main params of an fp16 run are the parameters of an fp32 run that goes on from it."""
    _, optimizer = _trained()
    fresh = model(torch.float32, seed=9)
    resumed = wrap(fresh)
    resumed.load_state_dict(optimizer.state_dict())
    for (_, main), param in zip(optimizer.main_params(), fresh.parameters(), strict=True):
        assert bits_equal(main, param)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_tensor_lr_of_another_shape_loads(shape: tuple[int, ...]) -> None:
    """One number is one number: a saved lr of shape [1] fills a live one of shape [], and the other way round."""
    optimizer = wrap(model(), lambda m: torch.optim.AdamW(m.named_parameters(), lr=torch.zeros(shape), foreach=False))
    state = optimizer.state_dict()
    state["optimizer"]["param_groups"][0]["lr"] = torch.full((1,) if shape == () else (), 0.5)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"].shape == shape
    assert optimizer.param_groups[0]["lr"].item() == 0.5


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
        r"param group 0 differs: \['head.weight'\] are on one side only",
    ),
    (_drop("main_params", "head.weight"), StateDictError, r"main params: missing \['head.weight'\], unexpected \[\]"),
    (_set("main_params", "other", value=torch.ones(1)), StateDictError, r"main params: .* unexpected \['other'\]"),
    (
        lambda s: s | {"main_params": s["main_params"] | {f"other{index}": torch.ones(1) for index in range(9)}},
        StateDictError,
        r"unexpected \['other0', .*'other7', \.\.\. 1 more\]",
    ),
    (_drop("optimizer", "state", "head.weight"), StateDictError, r"optimizer state: missing \['head.weight'\]"),
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("main_params", "other", value=torch.ones(1)), r"unexpected \['other'\]"),
        (
            _set("optimizer", "state", "first.bias", "note", value=object()),
            r"state\['first.bias'\]\['note'\] is a object",
        ),
        (_set_option("note", object()), r"param_groups\[0\]\['note'\] is a object"),
        (_set("grad_scaler", "scale", value=math.nan), "'scale' must be finite, got nan"),
        (_set("step_counts", "landed", value=-1), "landed"),
        (_set("optimizer", "shared_state", value=3), "'optimizer.shared_state' must be a list of dicts"),
    ],
)
def test_a_check_before_the_load_finds_it(change: Change, message: str) -> None:
    """A checkpoint asks, before anything is read into place, whether the state dict will load."""
    _, optimizer = _trained(steps=1)
    state = optimizer.live_state()
    state.check(optimizer.state_dict(), strict=True)
    with pytest.raises(StateDictError, match=message):
        state.check(change(optimizer.state_dict()), strict=True)


def test_group_options_that_cannot_travel_are_named() -> None:
    """A param group that holds an arbitrary object cannot be saved portably, and says so."""
    _, optimizer = _trained()
    optimizer.param_groups[0]["callback"] = object()
    with pytest.raises(ArgumentError, match=r"param_groups\[0\]\['callback'\] is a object"):
        optimizer.state_dict()
