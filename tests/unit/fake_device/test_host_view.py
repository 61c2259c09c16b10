"""HostView on a device: values come to the host through pinned memory, and whoever reads them waits for an event."""

import torch

from megascale.host_view import HostView
from tests.fake_device.device import FakeDevice
from tests.fake_device.process import OnDevice


def _carried(device: FakeDevice) -> tuple[dict[str, float] | None, list[str], list[str], list[tuple[str, bool]]]:
    view = HostView()
    there, here = torch.tensor(3.0, device="cuda:1"), torch.tensor([4.0])
    with device.watch() as pushed:
        view.push({"host": here, "number": 0.5, "device": there})
    there.zero_()
    with device.watch() as read:
        heard = view.flush()
    return heard, pushed.syncs(), pushed.unawaited(), [(call.kind, call.makes_host_wait()) for call in read]


def test_values_of_another_device_than_the_current_one(on_device: OnDevice) -> None:
    """Beside values of the host: pushing waits for nothing, and reading for that device's event alone."""
    heard, syncs, unawaited, read = on_device(_carried)
    assert heard == {"host": 4.0, "number": 0.5, "device": 3.0}
    assert (syncs, unawaited) == ([], [])
    assert read == [("wait", False)]
