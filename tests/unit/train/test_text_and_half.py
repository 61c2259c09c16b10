"""The text task, and multiplication with 16-bit operands on CPUs."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from megascale.train.config import TextConfig
from megascale.train.half import Conv2d, Linear
from megascale.train.text import TextTask
from tests.training import grad_of

SMALL = TextConfig(width=16, layers=2, heads=2, context=24, heldout_windows=6)


def test_batches_depend_on_seed_and_step_alone() -> None:
    """The same global batch whatever the number of ranks; another one for another step or seed."""
    task = TextTask(SMALL, seed=3)
    whole = task.batch(5, 0, 8)
    assert torch.equal(torch.cat([task.batch(5, i, i + 2).inputs for i in range(0, 8, 2)]), whole.inputs)
    assert torch.equal(TextTask(SMALL, seed=3).batch(5, 0, 8).targets, whole.targets)
    assert not torch.equal(task.batch(6, 0, 8).inputs, whole.inputs)
    assert not torch.equal(TextTask(SMALL, seed=4).batch(5, 0, 8).inputs, whole.inputs)
    assert torch.equal(whole.inputs[:, 1:], whole.targets[:, :-1])


def test_heldout_text_is_not_trained_on() -> None:
    """Held-out windows come from the tail, training windows from before it, whole."""
    task = TextTask(replace(SMALL, context=200), seed=0)  # no text of that length stands twice in Python's pages
    held = task.heldout(0, task.num_heldout)
    assert held.inputs.shape == (6, 200)
    assert len(task._train) > 8 * len(task._heldout)
    train = bytes(task._train.tolist())
    assert not any(bytes(window.tolist()) in train for window in torch.cat([held.inputs, held.targets[:, -1:]], 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_half_layers_round_like_tensor_cores(dtype: torch.dtype, kind: str) -> None:
    """Results and all three gradients are the fp64 result of the 16-bit operands, rounded to 16 bits once."""
    torch.manual_seed(0)
    layer: nn.Module = Linear(5, 4) if kind == "linear" else Conv2d(5, 4, 3, padding=1)
    plain: nn.Module = nn.Linear(5, 4) if kind == "linear" else nn.Conv2d(5, 4, 3, padding=1)
    layer = layer.to(dtype)
    plain = plain.double()
    plain.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    x = torch.randn((3, 5) if kind == "linear" else (2, 5, 6, 6)).to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    out, expected = layer(x), plain(exact)
    assert out.dtype == dtype
    weight = torch.randn(out.shape).to(dtype)
    out.backward(weight)
    expected.backward(weight.double())
    pairs = [(out, expected), (grad_of(x), grad_of(exact))]
    pairs += [(grad_of(p), grad_of(q)) for p, q in zip(layer.parameters(), plain.parameters(), strict=True)]
    for ours, theirs in pairs:
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=torch.finfo(dtype).eps, atol=1e-5)
