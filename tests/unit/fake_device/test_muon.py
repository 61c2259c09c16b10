"""Muon on a device that is not there: nobody waits for the decision, in a step or in a graph of one."""

from collections import Counter

import pytest
import torch
from torch import nn

from megascale import StepGraph
from tests.fake_device.device import FakeDevice
from tests.fake_device.process import OnDevice
from tests.fake_device.record import Record
from tests.fake_device.training import give_grads, take_steps, wrap


def _matrices(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(6, 8, dtype=torch.float16, device="cuda")) for _ in range(count)]


def _train(device: FakeDevice) -> tuple[list[Record], list[Record], Record]:
    few, many, others = _matrices(3), _matrices(6), _matrices(3)
    records = [take_steps(device, wrap(torch.optim.Muon(params)), params) for params in (few, many)]
    give_grads(others)
    graph = StepGraph(wrap(torch.optim.Muon(others)))
    with device.watch() as replays:
        graph.replay()
    return records[0], records[1], replays


@pytest.mark.slow
def test_muon_waits_for_nothing(on_device: OnDevice) -> None:
    """Invariant 5: no host sync in any step, nor in a graph. A matrix costs three products an iteration."""
    few, many, graph = on_device(_train)
    assert [seen.syncs() for seen in (*few, *many, graph)] == [[]] * 9
    for seen, count in ((few, 3), (many, 6)):
        assert sum(n for name, n in seen[-1].operators().items() if "mm" in name.partition(".")[0]) == count * 15


def _train_held(device: FakeDevice, count: int, remainders: bool) -> Record:
    params = _matrices(count)
    return take_steps(device, wrap(torch.optim.Muon(params), store_param_remainders=remainders), params)[-1]


@pytest.mark.slow
def test_remainders_add_two_launches(on_device: OnDevice) -> None:
    """One decodes all matrices that fit into the scratch memory together, one encodes them, however many there are."""
    for count in (3, 6):
        plain, held = (on_device(_train_held, count, remainders) for remainders in (False, True))
        assert held.syncs() == []
        added = Counter(held.launches()) - Counter(plain.launches())
        assert added == {"hold_kernel": 2}
        assert sum(held.operators().values()) <= sum(plain.operators().values())
