"""Arguments and calls that a MixedPrecisionOptimizer refuses, by name."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from megascale import ConstantGradScaler, Lion, MixedPrecisionOptimizer, OptimizerConfig
from megascale.errors import ArgumentError, ArgumentTypeError, GradientError, UsageError
from tests.training import (
    INNER,
    constant,
    model,
    same_bits,
    snapshot,
)


def test_sparse_gradients_are_refused_by_name() -> None:
    """A sparse gradient gets a clear error and changes nothing."""
    module = nn.Embedding(10, 4, sparse=True).half()
    optimizer = constant(module, INNER["sgd"], 1.0)
    optimizer.scale_loss(module(torch.tensor([1, 2])).float().sum()).backward()
    before = snapshot(optimizer, module)
    with pytest.raises(GradientError, match=r"the gradient of 'weight' has layout torch.sparse_coo; .* sparse=False"):
        optimizer.step()
    assert same_bits(before, snapshot(optimizer, module))


def _sgd(dtype: torch.dtype = torch.float16, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model(dtype).parameters(), lr=0.1, **options)


def _complex_parameter() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=0.1)


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: MixedPrecisionOptimizer("sgd"), ArgumentTypeError, "optimizer must be a torch.optim.Optimizer, got str"),  # type: ignore[arg-type]
    (lambda: MixedPrecisionOptimizer(_sgd()), ArgumentError, "grad_scaler is None, but fp16 gradients need one"),
    (
        lambda: MixedPrecisionOptimizer(_sgd(), OptimizerConfig(fp16=True)),
        ArgumentError,
        "grad_scaler is None, but fp16 gradients need one",
    ),
    (
        lambda: MixedPrecisionOptimizer(
            _sgd(), OptimizerConfig(bf16=True), ConstantGradScaler(1.0), grads_are_scaled=True
        ),
        ArgumentError,
        "config.fp16 is False, but the optimizer has fp16 parameters; set fp16=True",
    ),
    (
        lambda: MixedPrecisionOptimizer(_sgd(torch.bfloat16), OptimizerConfig()),
        ArgumentError,
        "config.bf16 is False, but the optimizer has bf16 parameters; set bf16=True",
    ),
    (
        lambda: MixedPrecisionOptimizer(_sgd(), {"fp16": True}, ConstantGradScaler(1.0), grads_are_scaled=True),  # type: ignore[arg-type]
        ArgumentTypeError,
        "config must be an OptimizerConfig or None, got dict",
    ),
    (
        lambda: MixedPrecisionOptimizer(_sgd(), ConstantGradScaler(1.0)),  # type: ignore[arg-type]
        ArgumentTypeError,
        "config must be an OptimizerConfig or None, got ConstantGradScaler; pass a scaler by its name, grad_scaler=$",
    ),
    (
        lambda: MixedPrecisionOptimizer(_sgd(), None, torch.amp.GradScaler("cpu"), grads_are_scaled=True),  # type: ignore[arg-type]
        ArgumentTypeError,
        "grad_scaler is a torch.amp.GradScaler, which drives a bare torch optimizer",
    ),
    (
        lambda: MixedPrecisionOptimizer(_sgd(torch.float32), groups=3),  # type: ignore[arg-type]
        ArgumentTypeError,
        "groups must be None, a ParallelGroups, a ProcessGroup or a DeviceMesh, got 3",
    ),
    (
        lambda: MixedPrecisionOptimizer(MixedPrecisionOptimizer(_sgd(torch.float32))),
        ArgumentTypeError,
        "optimizer is a MixedPrecisionOptimizer already",
    ),
    (
        lambda: MixedPrecisionOptimizer(torch.optim.LBFGS(model(torch.float32).parameters())),
        ArgumentError,
        "optimizer LBFGS needs a closure",
    ),
    (
        lambda: MixedPrecisionOptimizer(torch.optim.SparseAdam(model(torch.float32).parameters())),
        ArgumentError,
        "optimizer SparseAdam works on sparse gradients only",
    ),
    (
        lambda: MixedPrecisionOptimizer(_sgd(torch.float32, differentiable=True)),
        ArgumentError,
        "param group 0 has differentiable=True",
    ),
    (
        lambda: MixedPrecisionOptimizer(_complex_parameter()),
        ArgumentTypeError,
        "parameter '0' has dtype torch.complex64",
    ),
    (lambda: _duplicate_names(), ArgumentError, "two parameters are called 'w'"),
    (lambda: constant(model(), INNER["sgd"], 1.0).step(lambda: 0.0), UsageError, r"step\(\) takes no closure"),
    (lambda: copy.deepcopy(constant(model(), INNER["sgd"], 1.0)), UsageError, "cannot be pickled or deep-copied"),
]


def _duplicate_names() -> MixedPrecisionOptimizer:
    module = model(torch.float32)
    inner = torch.optim.SGD(module.parameters(), lr=0.1)
    return MixedPrecisionOptimizer(inner, named_parameters=[("w", param) for param in module.parameters()])


LION: list[tuple[dict[str, Any], str]] = [
    ({"lr": -0.1}, "lr must be"),
    ({"betas": (0.9, 1.0)}, r"betas\[1\] must be"),
    ({"betas": (-0.1, 0.9)}, r"betas\[0\] must be"),
    ({"weight_decay": -1.0}, "weight_decay must be"),
    ({"maximize": "yes"}, "maximize must be True or False"),
]


@pytest.mark.parametrize(("options", "message"), LION)
def test_options_of_lion_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    """When it is constructed, as torch's optimizers do."""
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        Lion([nn.Parameter(torch.ones(2))], **options)


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED)
def test_misuse_is_refused_by_name(call: Any, kind: type[Exception], message: str) -> None:
    """Every argument that does not fit gets an error that names it and says what to do."""
    with pytest.raises(kind, match=message):
        call()
