"""Hooks on modules: what waits for which parameters, and what is left of the hooks."""

import copy
import gc
import pickle
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale.main_params.gather_hooks import GatherHooks


class _Waits:
    """Notes what is waited for: a number of parameters, or all of them."""

    def __init__(self) -> None:
        self.seen: list[int | str] = []

    def wait(self) -> None:
        """Note it."""
        self.seen.append("all")

    def wait_for(self, params: Iterable[nn.Parameter]) -> None:
        """Note how many."""
        self.seen.append(len(list(params)))


class _Users(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = nn.Linear(2, 2), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return shape [..., 2]."""
        out: Tensor = self.inner(x) * self.gain
        return out


def test_modules_wait_for_what_their_forward_reads() -> None:
    """Their own parameters; of torch's modules also those inside, which they may use themselves, unless they only call
    what is inside, and of those whose forward torch replays as a graph.
    """
    waits, x = _Waits(), torch.ones(1, 2)
    users, calls, attention = _Users(), nn.Sequential(nn.Linear(2, 2)), nn.MultiheadAttention(2, 1)
    graphed = _Users()
    graphed.forward = FunctionType(_Users.forward.__code__, vars(torch.cuda.graphs), closure=None).__get__(graphed)  # type: ignore[method-assign]
    hooks = GatherHooks(waits)
    hooks.add([users, calls, attention, graphed])
    hooks.add([users])
    uses: list[tuple[Callable[[], Any], list[int | str]]] = [
        (lambda: users(x), [1, 2]),
        (lambda: calls(x), [0, 2]),
        (lambda: attention(x, x, x), [4]),
        (lambda: graphed(x), [3, 2]),
        (users.state_dict, ["all"] * 2),
        (lambda: calls.load_state_dict(calls.state_dict()), ["all"] * 4),
    ]
    for use, expected in uses:
        waits.seen.clear()
        use()
        assert waits.seen == expected


def test_waits_come_before_other_hooks() -> None:
    """A hook that reads parameters before forward, as of spectral_norm, finds them whole, though registered before."""
    waits, module = _Waits(), nn.Linear(2, 2)
    module.register_forward_pre_hook(lambda *_: waits.seen.append("read"))
    GatherHooks(waits).add([module])
    module(torch.ones(1, 2))
    assert waits.seen == [2, "read"]


def test_one_of_two_gathers_stays() -> None:
    """When one is freed, modules still wait for the other."""
    module, first, second = nn.Linear(2, 2), _Waits(), _Waits()
    for waits in (first, second):
        GatherHooks(waits).add([module])
    module.state_dict()
    assert (first.seen, second.seen) == (["all"], ["all"])
    del first
    gc.collect()
    module(torch.ones(1, 2))
    assert second.seen == ["all", 2]


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_wait_for_nothing(how: str) -> None:
    """A copy's parameters are its own; a hook that reached the gather, or could not be pickled, failed the copy."""
    waits, module = _Waits(), nn.Sequential(nn.Linear(2, 2))
    GatherHooks(waits).add([module])
    made = COPIES[how](module)
    made(torch.ones(1, 2))
    made.load_state_dict(made.state_dict())
    assert waits.seen == []
    copy.copy(module)(torch.ones(1, 2))  # it shares the parameters
    assert waits.seen == [0, 2]
