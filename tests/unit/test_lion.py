"""Lion's own step(), without a wrapper: the rule that the kernels follow."""

import pytest
import torch
from torch import nn

from megascale import Lion


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
