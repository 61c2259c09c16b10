"""Lion's own step(), without a wrapper: the rule that the kernels follow."""

from typing import Any

import pytest
import torch
from torch import nn

from megascale import Lion
from megascale.errors import ArgumentError, UsageError


@pytest.mark.parametrize("maximize", [False, True])
def test_steps_are_those_of_the_rule(maximize: bool) -> None:
    """The sign of an interpolated momentum, times lr; weight decay is decoupled, and its rate is lr's, too."""
    lr, beta1, beta2, decay = 0.25, 0.5, 0.75, 0.5  # exact in fp32, as all numbers below
    param = nn.Parameter(torch.tensor([1.0, -2.0, 4.0, 8.0]))
    optimizer = Lion([param], lr=lr, betas=(beta1, beta2), weight_decay=decay, maximize=maximize)
    expected, average = param.detach().clone(), torch.zeros(4)
    for values in ([1.0, -1.0, 0.0, 2.0], [-0.125, 0.5, 0.0, 1.0], [1.0, 1.0, -1.0, -8.0]):
        param.grad = torch.tensor(values)
        grad = -param.grad if maximize else param.grad.clone()
        optimizer.step()
        expected = expected * (1 - lr * decay) - lr * (beta1 * average + (1 - beta1) * grad).sign()
        average = beta2 * average + (1 - beta2) * grad
        assert torch.equal(param, expected)
        assert torch.equal(optimizer.state[param]["exp_avg"], average)


def test_parameters_without_a_gradient_stay() -> None:
    """They have no state either. A closure is refused, before a bit changes."""
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = Lion(params, lr=0.5)
    params[0].grad = torch.ones(2)
    with pytest.raises(UsageError, match="takes no closure"):
        optimizer.step(lambda: 3.0)
    assert params[0].tolist() == [1.0, 1.0]
    optimizer.step()
    assert params[0].tolist() == [0.5, 0.5]
    assert params[1].tolist() == [1.0, 1.0]
    assert set(optimizer.state) == {params[0]}


def test_defaults_and_what_is_refused() -> None:
    """The defaults of the paper's optimizer; each option is checked by name."""
    param = nn.Parameter(torch.ones(2))
    assert Lion([param]).defaults == {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"lr": -1.0}, "lr must be 0 or more"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] must be in"),
        ({"weight_decay": -1.0}, "weight_decay must be 0 or more"),
        ({"maximize": 1}, "maximize must be True or False"),
    ]
    for options, message in refused:
        with pytest.raises(ArgumentError, match=message):
            Lion([param], **options)
