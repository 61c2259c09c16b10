"""optimizer_offload_compute="auto": both ways are tried, the faster one is taken, and no bit depends on it."""

from typing import Any

import pytest
import torch

from megascale.errors import ArgumentError
from megascale.step.compute_choice import STEPS, ComputeChoice
from megascale.step.host_update import HostUpdate
from megascale.step.streamed_update import StreamedUpdate
from tests.unit.step.test_host_update import CODES, HELD, WAIT, _build, _same, _step

AUTO: dict[str, Any] = {**WAIT, "optimizer_offload_compute": "auto"}


class _Clock:
    """A clock that goes on while an update runs: by what the way takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, taken: dict[type[HostUpdate], float]) -> None:
        self.now = 0.0
        for kind, seconds in taken.items():
            inner = kind.apply

            def apply(way: Any, *given: Any, inner: Any = inner, seconds: float = seconds, kind: Any = kind) -> Any:
                if type(way) is kind:
                    self.now += seconds
                return inner(way, *given)

            monkeypatch.setattr(kind, "apply", apply)

    def __call__(self) -> float:
        return self.now


def _choice(optimizer: Any, clock: _Clock) -> ComputeChoice:
    choice = optimizer._member.update
    assert isinstance(choice, ComputeChoice)
    choice._clock = clock
    return choice


@pytest.mark.default("elements-compact-2.0-3.0-HostUpdate")
@pytest.mark.parametrize(("host", "device", "chosen"), [(3.0, 2.0, StreamedUpdate), (2.0, 3.0, HostUpdate)])
@pytest.mark.parametrize("stored", [{}, CODES | HELD], ids=["fp32", "compact"])
@pytest.mark.parametrize("held", ["replicated", "synced", "elements", "parameters"])
def test_the_faster_way_is_taken(
    held: str,
    stored: dict[str, Any],
    host: float,
    device: float,
    chosen: type[HostUpdate],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each takes its steps, then the faster one all others; bits are those without offload all the while."""
    clock = _Clock(monkeypatch, {HostUpdate: host, StreamedUpdate: device})
    (module, optimizer), (other_module, other) = _build(stored | AUTO, held), _build(stored, held)
    choice = _choice(optimizer, clock)
    ways = []
    for step in range(2 * STEPS + 2):
        factor = float("inf") if step in (3, STEPS + 4) else 1.0
        assert _same(_step(module, optimizer, step, factor), _step(other_module, other, step, factor))
        update = optimizer._member.update
        ways.append(type(update.way if isinstance(update, ComputeChoice) else update))
    assert ways == [HostUpdate] * STEPS + [StreamedUpdate] * STEPS + [chosen] * 2
    assert optimizer._member.update is choice.way
    assert _same(optimizer.state_dict(), other.state_dict())
    assert _same(module.state_dict(), other_module.state_dict())


def test_too_few_landed_steps_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss scale that is still falling: nothing is chosen until enough steps of each way have landed."""
    clock = _Clock(monkeypatch, {HostUpdate: 3.0, StreamedUpdate: 2.0})
    module, optimizer = _build(AUTO)
    _choice(optimizer, clock)
    for step in range(2 * STEPS + 1):
        _step(module, optimizer, step, float("inf") if step < STEPS - 2 else 1.0)
    choice = optimizer._member.update
    assert isinstance(choice, ComputeChoice)
    assert choice.now == "host"
    for step in range(2 * STEPS):
        _step(module, optimizer, step)
    assert type(optimizer._member.update) is StreamedUpdate


def test_a_decided_step_is_taken_as_it_was_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the way that prepared it, where prepare_grads() and the update are two calls."""
    clock = _Clock(monkeypatch, {HostUpdate: 3.0, StreamedUpdate: 2.0})
    (module, optimizer), (other_module, other) = _build(AUTO), _build({})
    _choice(optimizer, clock)
    for step in range(3 * STEPS):
        for one, of in ((module, optimizer), (other_module, other)):
            of.zero_grad()
            of.scale_loss(one(_data(step)).float().square().mean()).backward()
            of.prepare_grads()
            of.step_with_ready_grads()
    assert type(optimizer._member.update) is StreamedUpdate
    assert _same(optimizer.state_dict(), other.state_dict())


def _data(step: int) -> Any:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).half()


def test_what_the_device_cannot_compute_stays_with_the_host() -> None:
    """A backend that cannot update remainders on the device, and an optimizer's own step(): no choice is left."""
    _, optimizer = _build({**AUTO, **HELD, "backend": "torch"})
    assert type(optimizer._member.update) is HostUpdate
    with pytest.raises(ArgumentError, match="optimizer_offload_compute='auto' lets the device update before the next"):
        _build({**AUTO, "overlap_cpu_optimizer_d2h_h2d": True})
