"""Hooks on modules: what waits for which parameters, and what is left of the hooks."""

import copy
import gc
from collections.abc import Callable, Iterable
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


class _Odd(nn.Linear):
    """Its state is no dict, and its copy no module."""

    def __getstate__(self) -> Any:
        return ("state", 1)

    def __deepcopy__(self, memo: Any) -> Any:
        return "copy"


def test_modules_wait_for_what_their_forward_reads() -> None:
    """Their own parameters; of torch's modules also those inside, which they may use themselves, unless they only call
    what is inside.
    """
    waits, x = _Waits(), torch.ones(1, 2)
    users, calls, attention = _Users(), nn.Sequential(nn.Linear(2, 2)), nn.MultiheadAttention(2, 1)
    hooks = GatherHooks(waits)
    hooks.add([users, calls, attention])
    hooks.add([users])
    uses: list[tuple[Callable[[], Any], list[int | str]]] = [
        (lambda: users(x), [1, 2]),
        (lambda: calls(x), [0, 2]),
        (lambda: attention(x, x, x), [4]),
        (users.state_dict, ["all"] * 2),
        (lambda: calls.double(), ["all"] * 2),
        (lambda: calls(x.double()), [0, 2]),
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


@pytest.mark.parametrize("is_outer", [False, True])
def test_a_compiled_call_waits_for_the_gather_that_stays(is_outer: bool) -> None:
    """Of two optimizers of a module compiled in place one is dropped: its graph still begins after the other's wait."""
    module, kept, gone = nn.Linear(2, 2), _Waits(), _Waits()
    module.compile(backend="eager", fullgraph=True)
    for waits in (gone, kept) if is_outer else (kept, gone):
        GatherHooks(waits).add([module])
    del gone, waits
    gc.collect()
    module(torch.ones(1, 2))
    assert kept.seen == [2]


def test_what_a_module_does_itself_is_done_and_comes_back() -> None:
    """A method that was put on one module is called after the wait; a state or copy of any kind is passed on."""
    module, odd = nn.Linear(2, 2), _Odd(2, 2)
    calls: list[list[int | str]] = []

    def own(function: Any, recurse: bool = True) -> nn.Module:
        calls.append(list(waits.seen))
        return module

    module._apply = own  # type: ignore[method-assign]
    waits = _Waits()
    hooks = GatherHooks(waits)
    hooks.add([module, odd])
    module.double()
    assert calls == [["all"]]
    found: list[Any] = [odd.__getstate__(), copy.deepcopy(odd)]
    assert found == [("state", 1), "copy"]
    assert waits.seen == ["all"] * 3
    hooks.remove()
    assert module._apply is own
    assert not {"_apply", "__getstate__", "__deepcopy__"} & vars(odd).keys()


def test_one_of_two_gathers_stays() -> None:
    """When one is freed, modules still wait for the other."""
    module, first, second = nn.Linear(2, 2), _Waits(), _Waits()
    GatherHooks(first).add([module])
    GatherHooks(second).add([module])
    module.double()
    assert (first.seen, second.seen) == (["all"], ["all"])
    del first
    gc.collect()
    module.double()
    module(torch.ones(1, 2).double())
    assert second.seen == ["all", "all", 2]
