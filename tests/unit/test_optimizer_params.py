"""Parameters: groups, frozen and added ones, weights that others write, main params that outgrow fp16."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale import ConstantGradScaler, DistributedOptimizer, MixedPrecisionOptimizer
from megascale.errors import ArgumentError, GradientError, MainParamOverflowError, UsageError
from megascale.grad_sync import GradSync
from tests.counting import OperatorCounter
from tests.training import (
    INNER,
    Bag,
    Sign,
    bits_equal,
    check_invariant_6,
    constant,
    grad_of,
    model,
    set_grads,
)


def test_frozen_then_unfrozen() -> None:
    """A frozen parameter has no main param and never moves; unfrozen, it starts from the model's weights and trains."""
    module = model()
    module.first.weight.requires_grad_(False)
    optimizer = constant(module, INNER["adamw_fused"], 1.0)
    frozen = module.first.weight.detach().clone()
    assert "first.weight" not in dict(optimizer.main_params())
    for param in module.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    optimizer.step()
    assert bits_equal(frozen, module.first.weight)
    module.first.weight.requires_grad_(True)
    set_grads(module, 0)
    optimizer.step()
    assert optimizer.state[module.first.weight]["step"].item() == 1
    assert optimizer.state[module.second.weight]["step"].item() == 2
    assert not bits_equal(frozen, module.first.weight)
    module.first.weight.requires_grad_(False)
    module.first.weight.grad = None
    kept = dict(optimizer.main_params())["first.weight"].clone()
    optimizer.step()
    assert bits_equal(kept, dict(optimizer.main_params())["first.weight"])


def test_frozen_beside_a_grad_sync() -> None:
    """The very next step leaves it alone: its main grad is there, and zeros would move it by momentum and decay."""
    module = model()
    sync = GradSync(module.named_parameters())
    inner = torch.optim.AdamW(module.named_parameters(), lr=1e-2)
    optimizer = MixedPrecisionOptimizer(inner, None, ConstantGradScaler(8.0), grad_sync=sync)
    for step in range(2):
        optimizer.zero_grad()
        optimizer.scale_loss(module(torch.ones(2, 4).half()).float().square().mean()).backward()
        optimizer.step()
        if step == 0:
            module.head.weight.requires_grad_(False)
            frozen = module.head.weight.detach().clone()
    assert bits_equal(module.head.weight.detach(), frozen)
    assert float(inner.state[module.head.weight]["step"]) == 1.0


def _of_inference(values: Tensor) -> Tensor:
    with torch.inference_mode():
        return values.clone()


ODD: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "negative": (lambda values: torch._neg_view(-values), "has torch's negative bit set: .* resolve_neg"),
    "expanded": (lambda values: values[:1].clone().expand(12), r"has elements that share memory, .* clone\(\)"),
    "of inference": (_of_inference, r"was made in torch.inference_mode\(\), .* clone\(\), made outside"),
}


@pytest.mark.parametrize("odd", ODD)
def test_tensors_that_no_kernel_reads_are_refused(odd: str) -> None:
    """Invariant 10: a weight at construction, in a new group and after an assignment; a gradient. Each is named with
    the remedy before a bit changes, and put right training goes on.
    """
    make, message = ODD[odd]
    values = torch.linspace(-1, 1, 12)
    bad = nn.Parameter(torch.zeros(12))
    bad.data = make(values)
    with pytest.raises(ArgumentError, match=f"parameter 'bad' {message}"):
        MixedPrecisionOptimizer(torch.optim.AdamW([("bad", bad)]))
    good = nn.Parameter(values.clone())
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW([("good", good)]))
    with pytest.raises(ArgumentError, match=f"parameter 'bad' {message}"):
        optimizer.add_param_group({"params": [("bad", bad)]})
    good.grad = torch.ones(12)
    assert optimizer.step().success
    for where in ("weight", "gradient"):
        before, grad = good.detach().clone(), torch.ones(12)
        if where == "weight":
            good.data = make(values)
        else:
            good.grad = make(grad)
        with pytest.raises(GradientError if where == "gradient" else UsageError, match=rf"good'.* {message}"):
            optimizer.step()
        good.data, good.grad = before, grad
        assert optimizer.step().success


def test_a_refused_group_is_not_added() -> None:
    """Invariant 10: add_param_group() adds a group that can be trained, or nothing; training goes on."""
    param = nn.Parameter(torch.ones(3))
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD([("weight", param)], lr=0.1))
    complex_, half = (nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.complex64, torch.float16))
    again = [("weight", nn.Parameter(torch.ones(2)))]
    for bad, message in (([("c", complex_)], "complex64"), (again, "'weight'"), ([("h", half)], "grad_scaler is None")):
        with pytest.raises(ArgumentError, match=message):
            optimizer.add_param_group({"params": bad})
        assert len(optimizer.param_groups) == 1
        param.grad = torch.ones(3)
        assert optimizer.step().success


def test_an_added_group_has_the_names_of_the_modules() -> None:
    """By position, parameters that are added in another order would have taken each other's state from a state dict."""
    module = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
    optimizer = DistributedOptimizer(torch.optim.SGD(module["a"].parameters(), lr=0.1), modules=module)
    for name in "cb":
        optimizer.add_param_group({"params": [*module[name].parameters()]})
    assert [name for name, _ in optimizer.main_params()] == ["a.weight", "c.weight", "b.weight"]


def test_tied_weights_count_once() -> None:
    """A weight used twice is one parameter: counted once in the norm, stepped once."""
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).half()
    tied = nn.Parameter(torch.ones(4, 4).half())
    for layer in module:
        layer.weight = tied
    optimizer = constant(module, INNER["sgd"], 1.0)
    tied.grad = torch.ones(4, 4).half()
    assert optimizer.step().grad_norm.item() == 4.0
    assert [name for name, _ in optimizer.main_params()] == ["0.weight"]


def test_mixed_dtypes_in_one_optimizer() -> None:
    """fp16, bf16, fp32 and fp64 parameters together: 16-bit ones have copies, the others are their own main params."""
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    module = Bag(torch.ones(3, dtype=dtype) for dtype in dtypes)
    for inner in ("adamw_fused", "sgd_momentum_fused"):
        optimizer = constant(module, INNER[inner], 4.0)
        set_grads(module, 0)
        assert optimizer.step().success
        mains = [main for _, main in optimizer.main_params()]
        assert [main.dtype for main in mains] == [torch.float32, torch.float32, torch.float32, torch.float64]
        assert mains[2] is module[2]
        assert mains[3] is module[3]
        check_invariant_6(optimizer, module)


def test_following_keeps_the_bits_that_still_fit() -> None:
    """An outside write to some elements, or a swap there and back, loses no fp32 bit of the others."""
    module = model()
    optimizer = constant(module, INNER["sgd"], 1.0)
    for step in range(3):
        set_grads(module, step, scale=0.01)
        optimizer.step()
    before = {name: main.clone() for name, main in optimizer.main_params()}
    weights = copy.deepcopy(module.state_dict())
    module.load_state_dict(model(seed=5).state_dict())
    module.load_state_dict(weights)
    assert all(bits_equal(main, before[name]) for name, main in optimizer.main_params())
    with torch.no_grad():
        module.first.weight[0, 0] = 7.0
    mains = dict(optimizer.main_params())
    assert mains["first.weight"][0, 0].item() == 7.0
    assert torch.equal(mains["first.weight"][1:], before["first.weight"][1:])
    module.load_state_dict(weights)
    optimizer.reload_model_params()
    assert all(bits_equal(main, weights[name].float()) for name, main in optimizer.main_params())


def test_untouched_weights_cost_no_pass() -> None:
    """Only a model param that someone else wrote is compared with its main param, once: not after a step, not after a
    load or reload.
    """
    module = model()
    optimizer = constant(module, INNER["sgd"], 1.0)
    compared = torch.ops.aten.view.dtype
    for action in (optimizer.step, lambda: optimizer.load_state_dict(optimizer.state_dict())):
        set_grads(module, 0)
        action()
        with OperatorCounter() as counter:
            optimizer.step()
        assert counter.counts[compared] == 0
    module.load_state_dict(module.state_dict())
    counts = []
    for prepare in (lambda: None, lambda: None, optimizer.reload_model_params):
        prepare()
        with OperatorCounter() as counter:
            next(optimizer.main_params())
        counts.append(counter.counts[compared] > 0)
    assert counts == [True, False, False]


@pytest.mark.parametrize("inner", [INNER["sgd"], lambda m: Sign(m.named_parameters(), lr=1e-2)])
def test_main_param_that_outgrows_fp16_is_named(inner: Any) -> None:
    """Nobody checks the rounding of masters: ours raises, names the parameter, keeps the main
    param.
    """
    module = model()
    optimizer = constant(module, inner, 1.0)
    optimizer.param_groups[0]["lr"] = 70000.0
    for param in module.parameters():
        param.grad = torch.zeros_like(param)
    grad_of(module.second.bias)[1] = 1.0
    with pytest.raises(MainParamOverflowError, match=r"main param of 'second.bias' is 65520 or more"):
        optimizer.step()
    assert dict(optimizer.main_params())["second.bias"][1].item() == pytest.approx(-70000, rel=1e-4)
    with torch.no_grad():
        dict(optimizer.main_params())["second.bias"].clamp_(-100, 100)
    optimizer.param_groups[0]["lr"] = 0.0
    assert optimizer.step().success
    assert module.second.bias[1].item() == -100


def test_a_new_parameter_does_not_inherit_the_name_of_one_that_is_gone() -> None:
    """Names that were given go with their parameters, which stay as long as the names: no other one has their ``id``.

    They have no weak references either, with which ``torch.utils.swap_tensors()`` would refuse to move a module.
    """
    kept, gone = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    inner = torch.optim.SGD([{"params": [kept]}, {"params": [gone]}], lr=0.1)
    optimizer = MixedPrecisionOptimizer(inner, named_parameters=[("kept", kept), ("gone", gone)])
    place = id(gone)
    assert weakref.getweakrefcount(kept) == weakref.getweakrefcount(gone) == 0
    del inner.param_groups[1]
    inner.state.pop(gone, None)
    kept.grad = torch.ones(2)
    optimizer.step()  # takes note of what is there
    del gone
    others = [nn.Parameter(torch.ones(5)) for _ in range(10_000)]
    assert place not in map(id, others)
    optimizer.add_param_group({"params": [others[-1]]})
    assert optimizer._param_names() == ["kept", "1"]
