"""torch's own clipping where gradients lie in main grads is refused: it would clip nothing, and return 0."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_  # imported before any GradSync is built, as programs do

from megascale import MixedPrecisionOptimizer
from megascale.errors import UsageError
from megascale.grad_sync import GradSync
from tests.cells import Cell, integers
from tests.checkpoint_cases import message_of
from tests.pool import RankPool

CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "norm": lambda model: clip_grad_norm_(model.parameters(), 1.0),
    "norm, of the module": lambda model: torch.nn.utils.clip_grad_norm_(list(model.parameters()), max_norm=1.0),
    "norm of one": lambda model: clip_grad_norm_(next(model.parameters()), 1.0),
    "values": lambda model: clip_grad_value_(model.parameters(), 0.5),
}


def _refused(cell: Cell, call: str) -> tuple[str, bool]:
    """Return the message of clipping after backward, and whether the step has the gradients all the same."""
    model = cell.model()
    optimizer = cell.optimizer(model)
    cell.backward(optimizer, model, integers(cell.shapes, 1))
    message = message_of(UsageError, lambda: CALLS[call](model))
    other = nn.Linear(2, 2)  # of another optimizer
    other(torch.ones(1, 2)).sum().backward()
    assert CALLS["norm"](other) > 0
    expected = torch.cat([grad.flatten() for grad in integers(cell.shapes, 1)]).norm().item()
    return message, optimizer.step().grad_norm.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("call", CALLS)
def test_clipping_main_grads_by_hand_is_refused(call: str, ranks: RankPool) -> None:
    """On every rank alike, naming the way out; nothing has changed.

    Replicated and FSDP2 gradients stay in ``param.grad``, where torch finds them: such cells do not exist.
    """
    for message, is_whole in ranks.run(2, _refused, Cell(torch.float16, "zero1"), call):
        assert "lie in the main grads of DistributedOptimizer" in message
        assert "clip_grad=" in message
        assert is_whole


def test_torch_has_its_functions_back() -> None:
    """Once no GradSync is there, parameters without gradients are passed over, as torch does (invariant 11)."""
    model = nn.Linear(2, 2)
    sync = GradSync(model.named_parameters())
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1), grad_sync=sync)
    with pytest.raises(UsageError, match="main grads of GradSync"):
        clip_grad_norm_(model.parameters(), 1.0)
    del optimizer, sync
    gc.collect()
    assert clip_grad_norm_(model.parameters(), 1.0) == 0
    names = clip_grad_norm_.__code__.co_freevars
    assert clip_grad_norm_.__closure__ is not None
    assert not hasattr(clip_grad_norm_.__closure__[names.index("func")].cell_contents, "__wrapped__")
