"""HostView on a device: values come to the host through pinned memory, and whoever reads them waits for an event."""

from typing import Any
from unittest.mock import Mock

import pytest
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


def _pinned(device: FakeDevice) -> tuple[list[float], list[str], int, list[dict[str, Any]]]:
    view, value, heard, make = HostView(), torch.zeros((), device="cuda"), [], Mock(wraps=torch.cuda.Event)
    with pytest.MonkeyPatch.context() as patched, device.watch() as seen:
        patched.setattr(torch.cuda, "Event", make)
        for _ in range(6):
            heard.append(view.push({"value": value}))
            value += 1
    return (
        [one["value"] for one in heard if one],
        seen.of("pin"),
        len(set(seen.of("record"))),
        [dict(call.kwargs) for call in make.call_args_list],
    )


def test_pinned_memory_and_events_serve_again(on_device: OnDevice) -> None:
    """Two of each, for which the host sleeps, however many steps there are."""
    heard, pinned, events, made = on_device(_pinned)
    assert heard == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert (len(pinned), events) == (2, 2)
    assert made == [{"blocking": True}] * 2
