"""Debugging tools on a device that is not there: nobody waits for it while steps are clean."""

import torch
from torch import nn

from megascale.debug import UnderflowMeter, report_overflows, watch
from tests.fake_device.device import FakeDevice
from tests.fake_device.process import OnDevice
from tests.fake_device.record import Record
from tests.fake_device.training import INNER, wrap


def _train(device: FakeDevice) -> list[Record]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to("cuda", torch.float16)
    optimizer = wrap(INNER["adamw"](model.parameters()))
    reporter, meter, seen = report_overflows(optimizer, model=model), UnderflowMeter(optimizer, every=2), watch(model)
    records = []
    for _ in range(4):
        optimizer.zero_grad()
        with device.watch() as record:
            optimizer.scale_loss(model(torch.ones(2, 4, dtype=torch.float16, device="cuda")).sum()).backward()
            optimizer.step()
        records.append(record)
    assert reporter.num_skips == 0
    del meter, seen
    return records


def test_no_tool_waits_for_the_device(on_device: OnDevice) -> None:
    """Invariant 5: with reports, UnderflowMeter and watch(), forward, backward and step have no host sync."""
    records = on_device(_train)
    assert [seen.syncs() for seen in records] == [[]] * 4
