"""optimizer_offload_fraction="auto": what is measured, what ranks make of it, and that no bit differs."""

from collections.abc import Callable
from threading import Event
from typing import Any

import pytest
import torch

from megascale import OptimizerConfig
from megascale.errors import ArgumentError, UsageError
from megascale.main_params.offload_meter import OffloadMeter, OffloadSeconds
from megascale.step import offload_tuner
from megascale.step.offload_tuner import EVERY, OffloadTuner, Proposal, hidden_fraction, needed_fraction
from tests.unit.step.test_host_update import OVERLAP, WAIT, _build, _placed, _same, _step

AUTO: dict[str, Any] = {**OVERLAP, "optimizer_offload_fraction": "auto"}
CPU = torch.device("cpu")


class _Clock:
    """Returns what was set: no test of this reads the time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_meter_adds_up() -> None:
    """An update from its first gradients to its last weights, and all waits of its step; skipped steps do not count."""
    clock = _Clock()
    meter = OffloadMeter(CPU, clock)
    for landed in (True, False, True):
        with meter.waiting():  # for the step before, but before the first
            clock.now += 0.5
        record = meter.begin_step()
        assert record is not None
        for _ in range(2):
            clock.now += 1.0
            record.begin(landed=landed)
        clock.now += 2.0
        record.end()
        with meter.waiting():
            clock.now += 0.25
    assert meter.seconds() == [OffloadSeconds(3.0, 0.75), OffloadSeconds(3.0, 0.25)]
    meter.stop()
    assert meter.begin_step() is None
    assert meter.seconds() == []


@pytest.mark.parametrize(
    ("fraction", "busy", "stalled", "found"),
    [
        (1.0, 4.0, 0.0, 1.0),
        (1.0, 4.0, 0.05, 1.0),  # noise
        (1.0, 4.0, 1.0, 0.75),
        (0.5, 4.0, 1.0, 0.375),
        (1.0, 4.0, 1.3, 44 / 64),  # rounded up: 0.675
        (1.0, 4.0, 4.0, 1 / 64),  # nothing is hidden
        (1.0, 4.0, 9.0, 1 / 64),  # other ranks are slower
        (1.0, 0.0, 0.0, 1.0),
    ],
)
def test_what_is_hidden(fraction: float, busy: float, stalled: float, found: float) -> None:
    """The part of the update for which nobody stands still, by medians, without the first steps."""
    measured = [OffloadSeconds(99.0, 99.0)] * 2 + [OffloadSeconds(busy, stalled)] * 2
    assert hidden_fraction(fraction, measured) is None
    assert hidden_fraction(fraction, [*measured, OffloadSeconds(busy, stalled), OffloadSeconds(77.0, 0.0)]) == found


def test_what_the_device_has_room_for() -> None:
    """As much must stay in host memory as does not fit; where nobody knows, nothing must."""
    assert [needed_fraction(room, 1000) for room in (None, 2000, 1000, 500, 0, -5)] == [0.0, 0.0, 0.0, 0.5, 1.0, 1.0]


def test_ranks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the least that can be hidden, unless a device needs more in host memory; and not before all have measured."""
    every: list[Proposal | None] = []
    monkeypatch.setattr(offload_tuner, "all_gather_object", lambda *_: every)

    def agreed(*given: Proposal | None) -> tuple[float | None, bool]:
        every[:] = given
        tuner = OffloadTuner(OffloadMeter(CPU), None)
        return tuner.agree(given[0]), tuner.is_due(EVERY)

    assert agreed(Proposal(0.5, 0.0), Proposal(0.25, 0.0)) == (0.25, False)
    assert agreed(Proposal(0.5, 0.0), Proposal(0.25, 0.75)) == (0.75, False)
    assert agreed(Proposal(0.5, 0.0), None) == (None, True)


def _measuring(optimizer: Any, seconds: Callable[[], list[OffloadSeconds]], monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = optimizer._member.tuner
    assert tuner is not None
    monkeypatch.setattr(tuner.meter, "seconds", seconds)


@pytest.mark.parametrize("held", ["replicated", "synced", "elements", "parameters"])
def test_state_moves_once(held: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To where a run begun with that fraction has it, with the bits of a life without. Then nothing is measured."""
    (module, optimizer), (other_module, other) = _build(AUTO, held), _build({}, held)
    assert optimizer.optimizer_offload_fraction == 1.0
    _measuring(optimizer, lambda: [OffloadSeconds(1.0, 0.5)] * 6, monkeypatch)
    for step in range(EVERY + 2):
        assert optimizer.optimizer_offload_fraction == (1.0 if step <= EVERY else 0.5)
        factor = float("inf") if step == 1 else 1.0
        assert _same(_step(module, optimizer, step, factor), _step(other_module, other, step, factor))
    assert _placed(optimizer) == _placed(_build(OVERLAP | {"optimizer_offload_fraction": 0.5}, held)[1])
    tuner = optimizer._member.tuner
    assert tuner is not None
    assert not tuner.is_open
    assert not tuner.meter.is_on
    assert _same(optimizer.state_dict(), other.state_dict())
    assert _same(module.state_dict(), other_module.state_dict())


@pytest.mark.parametrize("held", ["replicated", "synced", "elements", "parameters"])
def test_waits_of_modules_are_measured(held: str) -> None:
    """Those of each step's next forward, for weights from host memory or for the gather of shards."""
    module, optimizer = _build(AUTO, held)
    tuner = optimizer._member.tuner
    assert tuner is not None
    for step in range(3):
        _step(module, optimizer, step)
    waits = [len(record.waits) for record in tuner.meter._records]
    assert len(waits) == 3
    assert all(number > 1 for number in waits[1:-1])


def test_what_is_measured_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step that landed is recorded, with the waits of its modules; too few of them: ranks look again later."""
    module, optimizer = _build(AUTO)
    tuner = optimizer._member.tuner
    assert tuner is not None
    for step in range(EVERY + 1):
        _step(module, optimizer, step, float("inf") if step < 5 else 1.0)
    assert tuner.is_open  # three have landed before it looked, of which two are left out
    for step in range(EVERY - 1):
        _step(module, optimizer, step)
    arrivals = optimizer._member.main_params.arrivals
    assert arrivals is not None
    ended = Event()
    arrivals.when_sent(ended.set)  # after the record of the last step has been closed
    assert ended.wait(60)
    found = tuner.meter.seconds()
    assert len(found) == 2 * EVERY - 5
    assert all(one.busy > 0 for one in found)
    monkeypatch.setattr(tuner.meter, "seconds", lambda: [OffloadSeconds(1.0, 0.0)] * 6)
    _step(module, optimizer, 0)
    assert not tuner.is_open
    assert optimizer.optimizer_offload_fraction == 1.0


def test_a_number_ends_it_and_auto_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both may be set between steps."""
    module, optimizer = _build(AUTO)
    first = optimizer._member.tuner
    assert first is not None
    optimizer.optimizer_offload_fraction = 0.5
    assert not first.is_open
    optimizer.optimizer_offload_fraction = "auto"
    assert optimizer.optimizer_offload_fraction == 1.0
    assert all(_placed(optimizer))
    _measuring(optimizer, lambda: [OffloadSeconds(1.0, 0.5)] * 6, monkeypatch)
    for step in range(EVERY + 1):
        _step(module, optimizer, step)
    assert optimizer.optimizer_offload_fraction == 0.5


def test_memory_that_is_missing_is_an_error_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all ranks, as any other; the message says how to go on."""
    module, optimizer = _build(AUTO)
    _measuring(optimizer, lambda: [OffloadSeconds(1.0, 0.5)] * 6, monkeypatch)
    for step in range(EVERY):
        _step(module, optimizer, step)

    def refuse(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("megascale.step.member.relocate", refuse)
    with pytest.raises(UsageError, match=r'"auto" found 0.5, and main params could not move: out of memory; give a'):
        _step(module, optimizer, EVERY)


def test_refusals() -> None:
    """Without overlap nothing can be hidden; other words mean nothing."""
    with pytest.raises(ArgumentError, match='="auto" needs overlap_cpu_optimizer_d2h_h2d=True'):
        OptimizerConfig(optimizer_offload_fraction="auto", **WAIT)
    with pytest.raises(ArgumentError, match="optimizer_offload_fraction must be"):
        OptimizerConfig(**OVERLAP | {"optimizer_offload_fraction": "half"})
    optimizer = _build(WAIT)[1]
    with pytest.raises(ArgumentError, match='="auto" needs overlap_cpu_optimizer_d2h_h2d=True'):
        optimizer.optimizer_offload_fraction = "auto"
