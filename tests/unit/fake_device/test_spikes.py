"""The norm threshold and the scale's minimum on a device that is not there: nobody waits for it, and a graph can hold
them.
"""

from typing import Any

import torch

from megascale import DynamicGradScaler, StepGraph
from megascale.step.stalls import ScaleFloor
from tests.fake_device.device import FakeDevice
from tests.fake_device.process import OnDevice
from tests.fake_device.record import Record
from tests.fake_device.training import INNER, give_grads, parameters, take_steps, wrap

RULES: dict[str, Any] = {"grad_norm_skip_threshold": 1e3, "max_consecutive_skips": 4}


def _steps_and_replays(device: FakeDevice) -> tuple[list[Record], Record, Record]:
    params = parameters(3)
    steps = take_steps(device, wrap(INNER["adamw"](params), **RULES), params)
    others = parameters(3)
    optimizer = wrap(INNER["adamw"](others), **RULES)
    give_grads(others)
    with device.watch() as construction:
        graph = StepGraph(optimizer)
    with device.watch() as replays:
        for _ in range(3):
            graph.replay()
    return steps, construction, replays


def test_the_norm_threshold_waits_for_nothing(on_device: OnDevice) -> None:
    """Invariant 5: no host sync in a step or a replay; a rehearsal meets all that a graph will hold. A step asks of the
    device what one without a threshold does.
    """
    steps, construction, replays = on_device(_steps_and_replays)
    assert [seen.syncs() for seen in [*steps, replays]] == [[]] * 5
    assert {len(seen.of("launch", "operator")) for seen in steps[2:]} == {7}
    assert construction.refused_in_capture() == []
    assert construction.first_met_in_capture() == set()


def _counts(device: FakeDevice) -> tuple[list[list[int]], Record]:
    scaler, floor = DynamicGradScaler(2.0, 1.0, 2.0, 0.5, 4, 1, device="cuda"), ScaleFloor()
    counts = []
    with device.watch() as seen:
        for _ in range(2):
            run = []
            for _ in range(4):
                run.append(floor.observe(True, scaler))
                scaler.update(torch.ones((), device="cuda"))
            counts.append(run)
            floor.observe(False, scaler)
    return counts, seen


def test_minimum_of_the_scale_is_known_one_step_late(on_device: OnDevice) -> None:
    """A copy that was started one step before is read: 2, then 1. In a second run of overflows, 1 throughout, the first
    overflow does not count: its scale is not known yet.
    """
    counts, seen = on_device(_counts)
    assert counts == [[0, 0, 1, 2], [0, 1, 2, 3]]
    assert seen.syncs() == []
