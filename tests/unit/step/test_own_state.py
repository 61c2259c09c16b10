"""State and options that torch's own step() cannot use: refused whole, before the first param group is updated."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale import ConstantGradScaler, MixedPrecisionOptimizer
from megascale.errors import ArgumentError, UsageError
from tests.training import Bag, bits_equal, set_grads

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
State = dict[str, Any]

KINDS: dict[str, Make] = {
    "Adadelta": lambda groups: torch.optim.Adadelta(groups),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups),
    "Adamax": lambda groups: torch.optim.Adamax(groups),
    "ASGD": lambda groups: torch.optim.ASGD(groups),
    "NAdam": lambda groups: torch.optim.NAdam(groups),
    "RAdam": lambda groups: torch.optim.RAdam(groups),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.9, centered=True),
    "Rprop": lambda groups: torch.optim.Rprop(groups),
}
COUNTS = ("step", "mu_product", "eta", "mu")


def _moments(change: Callable[[Tensor], Any]) -> Callable[[State], State]:
    return lambda state: {name: value if name in COUNTS else change(value) for name, value in state.items()}


def _step(change: Callable[[Tensor], Any]) -> Callable[[State], State]:
    return lambda state: {**state, "step": change(state["step"])}


def _in_inference(value: Tensor) -> Tensor:
    with torch.inference_mode():
        return value.clone()


DAMAGES: dict[str, tuple[Callable[[State], State], str]] = {
    "step a number": (_step(lambda _: 1), r"\['step'\] is a int; it must be a tensor of one number: set it to a 0-d"),
    "step of two": (_step(lambda _: torch.ones(2)), r"\['step'\] has shape \(2,\) and dtype torch.float32; it must be"),
    "step complex": (
        _step(lambda step: step.to(torch.complex64)),
        r"\['step'\] has shape \(\) and dtype torch.complex64; it must be a tensor",
    ),
    "step a bool": (_step(Tensor.bool), r"\['step'\] has shape \(\) and dtype torch.bool; it must be a tensor of one"),
    "step expanded": (_step(lambda step: step.expand(3)), r"\['step'\] has shape \(3,\)"),
    "step of inference": (_step(_in_inference), r"\['step'\] was made in torch.inference_mode\(\), so that torch"),
    "moment of integers": (
        _moments(Tensor.long),
        "has dtype torch.int64, which .* cannot use beside a main param of t",
    ),
    "moment expanded": (
        _moments(lambda value: torch.zeros(()).expand(value.shape)),
        r"has elements that share memory, as expand\(\) makes them, so that torch cannot write it; replace it by a ten",
    ),
    "moment of zeros": (
        _moments(lambda value: torch._efficientzerotensor(value.shape)),
        "has no memory that holds its values, so that torch cannot write it",
    ),
    "moment of inference": (
        _moments(_in_inference),
        r"was made in torch.inference_mode\(\), so that torch cannot write",
    ),
    "moment short": (
        _moments(lambda value: value[:1, :1]),
        r"is of shape \(1, 1\), but its main param has shape \(3, 4\) and needs \(3, 1\); load",
    ),
    "moment a number": (_moments(lambda _: 0.0), r"is a float, but its main param has shape \(3, 4\)"),
    "moment None": (_moments(lambda _: None), "and lacks"),
    "without moments": (lambda state: {"step": state["step"]}, r"has \['step'\] and lacks"),
}

LOST = ("moment short", "moment a number", "moment None", "without moments")
"""Adafactor's moments depend on the shape; those of others are in tests/unit/step/test_own_step.py."""


def _trained(kind: str, **options: Any) -> tuple[Bag, MixedPrecisionOptimizer]:
    """Return an optimizer of two param groups after a step, with gradients for the next one."""
    torch.manual_seed(0)
    module = Bag([torch.randn(4, 3).half(), torch.randn(5), torch.randn(3, 4), torch.randn(3, 4).half()])
    groups = [{"params": list(module.params[:2])}, {"params": list(module.params[2:]), **options}]
    optimizer = MixedPrecisionOptimizer(KINDS[kind](groups), grad_scaler=ConstantGradScaler(8.0))
    set_grads(module, 0)
    optimizer.recipe.grads_are_scaled = True
    assert optimizer.step().success
    set_grads(module, 1)
    return module, optimizer


def _held(module: Bag, optimizer: MixedPrecisionOptimizer, state_of: slice = slice(None)) -> list[Tensor]:
    """Return copies of all params, counters and the state of the parameters ``state_of``."""
    mains = [main for _, main in optimizer.main_params()]
    states = [value for param in module.params[state_of] for value in optimizer.optimizer.state[param].values()]
    return [value.detach().clone() for value in (*module.params, *mains, *states, optimizer.num_landed_steps)]


def _same(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(bits_equal(mine, other) for mine, other in zip(one, two, strict=True))


@pytest.mark.default(
    "RMSprop-moment of integers-fp16",
    "NAdam-step a number-fp32",
    "Adafactor-moment of zeros-fp32",
    "Rprop-step of inference-fp16",
)
@pytest.mark.parametrize("at", [2, 3], ids=["fp32", "fp16"])
@pytest.mark.parametrize(
    ("kind", "damage"),
    [(kind, damage) for kind in KINDS for damage in DAMAGES if kind == "Adafactor" or damage not in LOST],
)
def test_damaged_state_of_the_second_group_changes_nothing(kind: str, damage: str, at: int) -> None:
    """Invariant 10: torch would update the first group, then raise, or count wrongly; put right, training goes on."""
    change, message = DAMAGES[damage]
    module, optimizer = _trained(kind)
    param = module[at]
    before, rest = _held(module, optimizer), _held(module, optimizer, slice(0, 2))
    right, damaged = optimizer.optimizer.state[param], change(optimizer.optimizer.state[param])
    optimizer.optimizer.state[param] = dict(damaged)
    with pytest.raises(UsageError, match=message):
        optimizer.step()
    assert _same(rest, _held(module, optimizer, slice(0, 2)))
    assert optimizer.optimizer.state[param].keys() == damaged.keys()
    assert all(optimizer.optimizer.state[param][name] is value for name, value in damaged.items())
    optimizer.optimizer.state[param] = right
    assert _same(before, _held(module, optimizer))
    assert optimizer.step().success
    assert optimizer.num_landed_steps == 2


OPTIONS: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "capturable": (
        [kind for kind in KINDS if kind not in ("Adagrad", "Adafactor")],
        {"capturable": True},
        r"capturable of a param group is True, but its parameter '2' is on cpu, .*; set capturable=False",
    ),
    "differentiable": (
        [kind for kind in KINDS if kind != "Adafactor"],
        {"differentiable": True, "foreach": True},
        "foreach and differentiable of a param group are both set, which torch's .* refuses; set foreach=None",
    ),
    "betas": (
        ["Adamax", "NAdam", "RAdam"],
        {"betas": (torch.tensor(0.9), 0.99), "foreach": True},
        "betas of a param group is .*, and the foreach loop of torch's .* takes no tensors there; give it numbers",
    ),
    "vector": (["RMSprop", "Rprop"], {"step_sizes": (torch.ones(1), 50), "eps": torch.ones(1)}, "must be (a|2) number"),
    "eps": (["Adafactor"], {"eps": (None, None)}, r"eps of a param group must be 2 numbers for Adafactor, got \(None,"),
}


@pytest.mark.default("betas-NAdam", "differentiable-Rprop", "capturable-Adadelta", "vector-RMSprop")
@pytest.mark.parametrize(("option", "kind"), [(option, kind) for option in OPTIONS for kind in OPTIONS[option][0]])
def test_option_of_the_second_group_changes_nothing(option: str, kind: str) -> None:
    """Invariant 10: where torch's step() raises for an option after it has updated the first group."""
    _, wrong, message = OPTIONS[option]
    module, optimizer = _trained(kind)
    group, before = optimizer.param_groups[1], _held(module, optimizer)
    right = {name: group[name] for name in wrong if name in group}
    group.update(wrong)
    with pytest.raises(ArgumentError, match=message):
        optimizer.step()
    assert _same(before, _held(module, optimizer))
    group.update(right)
    assert optimizer.step().success


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("Adagrad", "Adafactor")])
def test_capturable_is_refused_at_the_first_step(kind: str) -> None:
    """Invariant 10: no state tells yet where the parameter is; its own device does."""
    module, optimizer = _trained(kind)
    optimizer.optimizer.state.clear()
    before = _held(module, optimizer, slice(0))
    optimizer.param_groups[1]["capturable"] = True
    with pytest.raises(ArgumentError, match="set capturable=False"):
        optimizer.step()
    assert _same(before, _held(module, optimizer, slice(0)))
    assert not any(optimizer.optimizer.state.values())


@pytest.mark.parametrize("name", ["row_var", "col_var"])
def test_factors_of_adafactor_have_the_main_params_dtype(name: str) -> None:
    """Invariant 10: torch cannot blend bf16 factors with fp32 gradients; they are named before a bit changes."""
    module, optimizer = _trained("Adafactor")
    state, rest = optimizer.optimizer.state[module[3]], _held(module, optimizer, slice(0, 3))
    right = state[name]
    state[name] = right.bfloat16()
    with pytest.raises(UsageError, match=rf"\['{name}'\] has dtype torch.bfloat16, which Adafactor cannot use beside"):
        optimizer.step()
    assert _same(rest, _held(module, optimizer, slice(0, 3)))
    state[name] = right
    assert optimizer.step().success


def test_buffers_are_made_only_where_all_state_fits() -> None:
    """Invariant 10: an option that asks for new state leaves none behind where other state is refused."""
    module, optimizer = _trained("RMSprop")
    for param in module.params:
        del optimizer.optimizer.state[param]["momentum_buffer"]
    optimizer.optimizer.state[module[3]]["step"] = 1
    with pytest.raises(UsageError, match="must be a tensor of one number"):
        optimizer.step()
    assert not any("momentum_buffer" in optimizer.optimizer.state[param] for param in module.params)
    optimizer.optimizer.state[module[3]]["step"] = torch.ones(())
    assert optimizer.step().success
    assert all("momentum_buffer" in optimizer.optimizer.state[param] for param in module.params)


USABLE: dict[str, Callable[[State], State]] = {
    "step of fp64": _step(Tensor.double),
    "step of bf16": _step(Tensor.bfloat16),
    "step of integers": _step(Tensor.long),
    "step of one element": _step(lambda step: step.reshape(1)),
    "step of two dimensions": _step(lambda step: step.reshape(1, 1)),
    "moments of bf16": _moments(lambda value: value.bfloat16() if value.shape == (3, 4) else value),
    "moments strided": _moments(lambda value: value.t().contiguous().t()),
    "moments negated": _moments(lambda value: torch._neg_view(-value)),
}


@pytest.mark.default(
    "ASGD-step of one element", "NAdam-step of two dimensions", "Adadelta-step of fp64", "Rprop-step of bf16"
)
@pytest.mark.parametrize("usable", USABLE)
@pytest.mark.parametrize("kind", KINDS)
def test_state_that_torch_can_use_is_accepted(kind: str, usable: str) -> None:
    """A step of any real dtype, and moments of 16 bits or any layout, are used as they are."""
    module, optimizer = _trained(kind)
    for param in module.params[2:]:
        optimizer.optimizer.state[param] = USABLE[usable](optimizer.optimizer.state[param])
    given = [[value.dtype for value in optimizer.optimizer.state[param].values()] for param in module.params]
    assert optimizer.step().success
    assert all(float(optimizer.optimizer.state[param]["step"]) == 2 for param in module.params)
    assert given == [[value.dtype for value in optimizer.optimizer.state[param].values()] for param in module.params]


@pytest.mark.parametrize(
    ("loop", "shape", "is_usable"), [(None, (1, 1, 1), False), (True, (1,), False), (None, (1, 1), True)]
)
def test_counts_of_asgd_have_no_more_dimensions_than_its_params(
    loop: bool | None, shape: tuple[int, ...], is_usable: bool
) -> None:
    """Invariant 10: it computes with the tensors, which would make the params larger; its foreach loop wants none."""
    module, optimizer = _trained("ASGD", foreach=loop)
    state, before = optimizer.optimizer.state[module[2]], _held(module, optimizer)
    state["step"] = state["step"].reshape(shape)
    if is_usable:
        assert optimizer.step().success
        return
    with pytest.raises(UsageError, match=r"\['step'\] has shape \(1,"):
        optimizer.step()
    state["step"] = state["step"].reshape(())
    assert _same(before, _held(module, optimizer))


def test_counts_of_others_may_have_any_number_of_dimensions() -> None:
    """Torch reads their values only."""
    module, optimizer = _trained("RMSprop")
    state = optimizer.optimizer.state[module[2]]
    state["step"] = state["step"].reshape(1, 1, 1)
    assert optimizer.step().success


@pytest.mark.parametrize(("kind", "name"), [("Adagrad", "sum"), ("RMSprop", "square_avg"), ("Adamax", "exp_inf")])
def test_moments_of_fp64_are_accepted_where_torch_takes_them(kind: str, name: str) -> None:
    """Beside fp32 params torch uses wider moments, except those that it blends by lerp_()."""
    module, optimizer = _trained(kind)
    state = optimizer.optimizer.state[module[2]]
    state[name] = state[name].double()
    assert optimizer.step().success
    assert state[name].dtype == torch.float64
    other = {"Adagrad": "sum", "RMSprop": "grad_avg", "Adamax": "exp_avg"}[kind]
    if other != name:
        state[other] = state[other].double()
        with pytest.raises(UsageError, match=rf"\['{other}'\] has dtype torch.float64, which {kind} cannot use beside"):
            optimizer.step()
