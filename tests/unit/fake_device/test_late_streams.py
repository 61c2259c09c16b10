"""The simulated device's streams that run late: what nothing orders gives wrong values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fake_device.device import ORDERS, FakeDevice, WrittenAfterFree
from tests.fake_device.process import OnDevice

LATE = ORDERS[1:]
SEEDS = range(20)


def _read_too_early(waits: bool) -> bool:
    """Return whether the host reads what it has copied to pinned memory."""
    here, host = torch.ones(4, device="cuda"), torch.zeros(4, pin_memory=True)
    host.copy_(here * 2, non_blocking=True)
    if waits:
        torch.accelerator.current_stream().record_event().synchronize()
    return host.tolist() == [2.0] * 4


def _used_too_early(waits: bool) -> bool:
    """Return whether a product sees weights that come on another stream."""
    weights, host = torch.zeros(2, 2, device="cuda"), torch.ones(2, 2).pin_memory()
    torch.accelerator.synchronize()
    side = torch.Stream("cuda")
    with side:
        weights.copy_(host, non_blocking=True)
        sent = side.record_event()
    if waits:
        torch.accelerator.current_stream().wait_event(sent)
    return bool((weights @ weights).tolist() == [[2.0, 2.0], [2.0, 2.0]])


def _written_too_early(waits: bool) -> bool:
    """Return whether a product sees weights before they are replaced on another stream."""
    weights, host = torch.ones(2, 2, device="cuda"), torch.zeros(2, 2).pin_memory()
    torch.accelerator.synchronize()
    product = weights @ weights
    side = torch.Stream("cuda")
    if waits:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        weights.copy_(host, non_blocking=True)
    side.synchronize()
    return bool(product.tolist() == [[2.0, 2.0], [2.0, 2.0]])


def _freed_too_early(waits: bool) -> bool:
    """Return whether another stream can still read memory that was freed, and may be given to others."""
    here, side = torch.ones(4, device="cuda"), torch.Stream("cuda")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        twice = here * 2
    if waits:
        here.record_stream(side)
    del here
    torch.ones(4, device="cuda")
    torch.accelerator.current_stream().synchronize()
    with side:
        return bool(twice.tolist() == [2.0] * 4)


MISTAKES: dict[str, tuple[Callable[[bool], bool], set[str]]] = {
    "read": (_read_too_early, set(LATE)),
    "use": (_used_too_early, {"late", "random"}),  # a stream that is first is early enough
    "write": (_written_too_early, set(LATE)),
    "free": (_freed_too_early, set(LATE)),
}
"""What goes wrong without a wait, and the orders in which that shows."""


def _right(device: FakeDevice, mistake: str, waits: bool, order: str) -> list[bool]:
    found = []
    for seed in SEEDS if order == "random" else range(1):
        try:
            with device.running(order, seed):
                is_right = MISTAKES[mistake][0](waits)
        except WrittenAfterFree:
            is_right = False
        found.append(is_right)
    return found


@pytest.mark.default("write-late", "use-random", "free-side first", "read-random")
@pytest.mark.parametrize("order", LATE)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_missing_wait_shows(on_device: OnDevice, mistake: str, order: str) -> None:
    """With the wait values are right in every order; without it they are wrong where the order lets them."""
    assert all(on_device(_right, mistake, True, order))
    assert (not all(on_device(_right, mistake, False, order))) == (order in MISTAKES[mistake][1])


def _computed(where: str) -> list[Any]:
    torch.manual_seed(0)
    x = torch.randn(5, 7).to(where).requires_grad_()
    layer = torch.nn.Sequential(torch.nn.Linear(7, 3), torch.nn.LayerNorm(3)).to(where)
    loss = layer(x).square().sum()
    loss.backward()
    flat = [one.grad for one in (*layer.parameters(), x) if one.grad is not None]
    torch._foreach_mul_(flat, 0.5)
    out = torch.empty(0, device=where)
    torch.cat([grad.reshape(-1) for grad in flat], out=out)
    view = out[3:9].view(2, 3).t()
    view.add_(1)
    top, at = out.topk(2)
    chosen = out[out > 0.5]
    number = torch.tensor(2.0)
    scaled = out * number
    number.fill_(7.0)  # a kernel has been given its value
    tensors: list[Tensor] = [out, view, top, at, chosen, scaled, out.half().float(), torch.where(out > 0, out, 0.0)]
    return [loss.item(), torch.equal(out, out), bool(out.any()), *(one.tolist() for one in tensors), view._version]


def _all_computed(device: FakeDevice) -> list[list[Any]]:
    found = [_computed("cuda")]
    for order in LATE:
        with device.running(order, 1):
            found.append(_computed("cuda"))
    return found


def test_operators_compute_the_same_later(on_device: OnDevice) -> None:
    """Values, shapes that depend on values, outputs that grow, numbers of the host: as where operators run at once."""
    at_once, *late = on_device(_all_computed)
    assert all(one == at_once for one in late)


def _queries(device: FakeDevice) -> list[bool]:
    with device.running("late"):
        here = torch.ones(4, device="cuda") * 2
        event = torch.accelerator.current_stream().record_event()
        found = [event.query(), torch.accelerator.current_stream().query()]
        event.synchronize()
        return [*found, event.query(), here.tolist() == [2.0] * 4]


def test_an_event_is_reached_once_it_was_waited_for(on_device: OnDevice) -> None:
    """A query waits for nothing."""
    assert on_device(_queries) == [False, False, True, True]
