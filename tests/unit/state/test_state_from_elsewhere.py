"""State that the wrapper did not make: a trained torch optimizer's, a torch state dict's, one of no parameter."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale import (
    ConstantGradScaler,
    Lion,
    MixedPrecisionOptimizer,
    OptimizerConfig,
)
from megascale.checkpoint import Checkpointer
from megascale.errors import StateDictError
from tests.training import Sign, bits_equal, constant, model

Params = Sequence[nn.Parameter]
OWN: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1, lr_decay=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, t0=2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "muon": lambda p: torch.optim.Muon(p, lr=0.1),
}
"""Optimizers that run their own step on main params."""
KERNELS: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd_nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd_dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "lion": lambda p: Lion(p, lr=0.1),
}
"""Optimizers that run on our kernels."""
KINDS = OWN | KERNELS


def _wrap(
    inner: torch.optim.Optimizer, dtype: torch.dtype = torch.float32, scaler: ConstantGradScaler | None = None
) -> MixedPrecisionOptimizer:
    """Wrap an optimizer of parameters in ``dtype``. Muon iterates in bf16, as torch's does on every machine."""
    config = None
    if isinstance(inner, torch.optim.Muon):
        config = OptimizerConfig(bf16=dtype == torch.bfloat16, muon_ns_dtype=torch.bfloat16)
    return MixedPrecisionOptimizer(inner, config, scaler)


def _params(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(8, 6, generator=generator), torch.randn(6, 5, generator=generator)]
    return [nn.Parameter(value.to(torch.bfloat16).to(dtype)) for value in values]


def _give_grads(params: Params, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(torch.bfloat16).to(param.dtype)


def _train(params: Params, optimizer: Any, steps: range) -> None:
    for step in steps:
        _give_grads(params, step)
        optimizer.step()


def _close(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.allclose(one, other, rtol=0, atol=1e-6) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("trained", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrapped_optimizer_goes_on_as_torch_does(kind: str, trained: int) -> None:
    """Fresh or trained, on fp32 parameters: the steps after wrapping are those that torch would have taken."""
    plain, ours = _params(torch.float32), _params(torch.float32)
    theirs, inner = KINDS[kind](plain), KINDS[kind](ours)
    _train(plain, theirs, range(trained))
    _train(ours, inner, range(trained))
    _train(plain, theirs, range(trained, trained + 4))
    _train(ours, _wrap(inner), range(trained, trained + 4))
    assert _close(ours, plain)


@pytest.mark.default("sgd_momentum", "adamax", "rprop", "asgd")
@pytest.mark.parametrize("kind", KINDS)
def test_16_bit_parameters_train_as_fp32_ones(kind: str) -> None:
    """Main params go the way of fp32 parameters: state that torch makes at construction is not rounded to 16 bits."""
    plain, ours = _params(torch.float32), _params(torch.bfloat16)
    wrapped = _wrap(KINDS[kind](ours), torch.bfloat16, ConstantGradScaler(1.0))
    _train(plain, KINDS[kind](plain), range(4))
    _train(ours, wrapped, range(4))
    assert _close([main for _, main in wrapped.main_params()], plain)


@pytest.mark.default("adadelta", "sgd_dampening", "muon", "adagrad")
@pytest.mark.parametrize("kind", KINDS)
def test_state_trained_in_16_bits_goes_on_widened(kind: str) -> None:
    """An optimizer that was trained on bf16 parameters goes on in fp32 from the values that it has."""
    ours = _params(torch.bfloat16)
    inner = KINDS[kind](ours)
    _train(ours, inner, range(3))
    plain = [nn.Parameter(param.detach().float()) for param in ours]
    theirs = KINDS[kind](plain)
    theirs.load_state_dict(copy.deepcopy(inner.state_dict()))
    wrapped = _wrap(inner, torch.bfloat16)
    _train(plain, theirs, range(3, 7))
    _train(ours, wrapped, range(3, 7))
    assert _close([main for _, main in wrapped.main_params()], plain)


def _older(state_dict: dict[str, Any], change: Callable[[Tensor], Any]) -> dict[str, Any]:
    """Return a torch state dict with every 0-d tensor changed."""
    older = copy.deepcopy(state_dict)
    for state in older["state"].values():
        state.update({k: change(v) for k, v in state.items() if isinstance(v, Tensor) and v.dim() == 0})
    return older


COUNTS: dict[str, Callable[[Tensor], Any]] = {
    "as_saved": lambda value: value,
    "numbers": lambda value: int(value) if float(value).is_integer() else float(value),
    "fp64": lambda value: value.double(),
    "int64_steps": lambda value: value.long() if float(value).is_integer() and value > 1 else value,
    "one_element": lambda value: value.reshape(1) if float(value).is_integer() and value > 1 else value,
}


@pytest.mark.default("adafactor-fp64", "adamw-numbers", "adagrad-one_element", "lion-as_saved")
@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        *((kind, "as_saved") for kind in KINDS),
        *(
            (kind, counts)
            for kind in ("adafactor", "adamw", "adagrad", "nadam")
            for counts in COUNTS
            if counts != "as_saved"
        ),
    ],
)
def test_torchs_state_dict_loads(kind: str, counts: str) -> None:
    """Into the wrapper of fp32 parameters, also an older torch's, which kept ``step`` and the like as numbers."""
    plain = _params(torch.float32)
    theirs = KINDS[kind](plain)
    _train(plain, theirs, range(3))
    ours = [nn.Parameter(param.detach().clone()) for param in plain]
    wrapped = _wrap(KINDS[kind](ours))
    wrapped.load_state_dict(_older(theirs.state_dict(), COUNTS[counts]))
    _train(plain, theirs, range(3, 7))
    _train(ours, wrapped, range(3, 7))
    assert _close(ours, plain)


def test_state_in_lists_is_copied_and_loaded() -> None:
    """What an optimizer keeps in a list beside a main param travels as its tensors do, or is named."""
    module = model()
    optimizer = constant(module, lambda m: Sign(m.named_parameters()), 1.0)
    kept: dict[str, Any] = {"past": [torch.ones(2), 3]}
    optimizer.state[module.first.bias] = kept
    saved, live = optimizer.state_dict(), optimizer.state_dict(copy=False)
    kept["past"][0].zero_()
    tensor, number = saved["optimizer"]["state"]["first.bias"]["past"]
    assert (tensor.tolist(), number) == ([1.0, 1.0], 3)
    assert live["optimizer"]["state"]["first.bias"]["past"][0].tolist() == [0.0, 0.0]
    optimizer.load_state_dict(saved)
    tensor.zero_()
    assert optimizer.state[module.first.bias]["past"][0].tolist() == [1.0, 1.0]
    optimizer.state[module.first.bias]["note"] = object()
    with pytest.raises(StateDictError, match=r"state\['first.bias'\]\['note'\] is a object"):
        optimizer.state_dict()


# State that belongs to no parameter


class Counting(torch.optim.SGD):
    """Takes smaller steps as it goes, and counts them for all parameters together."""

    def step(self, closure: Any = None) -> Any:
        """Step, and count."""
        state: dict[Any, Any] = self.state
        count = state.setdefault("global", {"count": 0, "rates": torch.zeros(3)})
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + count["count"])
        count["rates"][count["count"] % 3] = self.param_groups[0]["lr"]
        count["count"] += 1
        return super().step(closure)


def _counting(dtype: torch.dtype = torch.bfloat16, name: str = "") -> tuple[list[nn.Parameter], Any]:
    params = _params(dtype)
    named = [(f"{name}{index}", param) for index, param in enumerate(params)]
    return params, MixedPrecisionOptimizer(Counting(named, lr=0.1, momentum=0.9))


def test_state_of_no_parameter_is_saved_and_loaded(tmp_path: Path) -> None:
    """``optimizer.state["global"]`` comes back, from a state dict and from a checkpoint: the training goes on alike."""
    params, optimizer = _counting()
    _train(params, optimizer, range(2))
    packed = optimizer.state_dict()
    assert packed["optimizer"]["shared_state"][0]["global"]["count"] == 2
    assert packed["optimizer"]["shared_state"][0]["global"]["rates"] is not optimizer.state["global"]["rates"]
    torch.save(packed, tmp_path / "state.pt")
    module = nn.Module()
    for index, param in enumerate(params):
        module.register_parameter(f"p{index}", param)
    Checkpointer(tmp_path).save(2, module, optimizer)
    _train(params, optimizer, range(2, 5))
    for way in ("state dict", "checkpoint"):
        others, resumed = _counting()
        if way == "checkpoint":
            other = nn.Module()
            for index, param in enumerate(others):
                other.register_parameter(f"p{index}", param)
            Checkpointer(tmp_path).load(other, resumed)
        else:
            resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        _train(others, resumed, range(2, 5))
        assert all(map(bits_equal, others, params))
        assert resumed.state["global"]["count"] == 5


def test_shared_state_that_does_not_fit_is_named() -> None:
    """What lacks, what cannot be saved, and what torch's functions cannot carry."""
    params, optimizer = _counting()
    _train(params, optimizer, range(2))
    lacking = optimizer.state_dict()
    del lacking["optimizer"]["shared_state"]
    with pytest.raises(StateDictError, match=r"lacks the optimizer's state\['global'\].*strict=False"):
        optimizer.load_state_dict(lacking)
    optimizer.load_state_dict(lacking, strict=False)
    assert optimizer.state["global"]["count"] == 2
    with pytest.raises(StateDictError, match=r"optimizer.state\['global'\] belongs to no parameter, and torch.distr"):
        optimizer.state_dict()["state"]
    for damage in (3, [3], {"global": 1}):
        given = optimizer.state_dict()
        given["optimizer"]["shared_state"] = damage
        with pytest.raises(StateDictError, match=r"'optimizer.shared_state' must be a list of dicts"):
            optimizer.load_state_dict(given)
    optimizer.state["global"]["model"] = object()
    with pytest.raises(StateDictError, match=r"optimizer.state\['global'\]\['model'\] is a object"):
        optimizer.state_dict()
    del optimizer.state["global"]
    optimizer.state[(1, 2)] = 3
    with pytest.raises(StateDictError, match=r"optimizer.state has a key \(1, 2\) of type tuple"):
        optimizer.state_dict()


# A frozen parameter that has state


class _Coded(torch.optim.Optimizer):
    """A user's optimizer: an average, and a table of numbers in 16 bits that its arithmetic wants so."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1})
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            self.seen.append((state["average"].dtype, state["table"].dtype))
            param.sub_(state["average"].lerp_(param.grad, 0.5), alpha=0.1)


def test_only_state_of_the_parameters_shape_is_widened() -> None:
    """Of a user's optimizer: what else it holds in 16 bits, and why, is its own matter."""
    param = nn.Parameter(torch.ones(4).half())
    inner = _Coded([param])
    inner.state[param] = {"average": torch.zeros(4).half(), "table": torch.arange(3.0).half()}
    optimizer = MixedPrecisionOptimizer(inner, None, ConstantGradScaler(1.0), grads_are_scaled=True)
    param.grad = torch.ones(4).half()
    assert optimizer.step().success
    assert inner.seen == [(torch.float32, torch.float16)]
    assert inner.state[param]["table"].dtype == torch.float16
