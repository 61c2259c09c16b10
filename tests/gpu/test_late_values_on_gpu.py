"""What the host reads has arrived, however much work is queued before it, on whatever stream and device."""

import pytest
import torch

from megascale import DynamicGradScaler
from megascale.checkpoint.pieces import HostMemory, on_host
from megascale.host_view import HostView

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA's streams")]

CYCLES = 200_000_000
"""That a device is kept busy: a tenth of a second."""


def test_a_scaler_comes_to_the_host_whole() -> None:
    """With an update still queued: the scale after it."""
    scaler = DynamicGradScaler(1024.0, 1.0, 2.0, 0.5, 4, 1, device="cuda")
    torch.cuda._sleep(CYCLES)
    scaler.update(True)
    state = scaler.to("cpu").state_dict()
    assert state["scale"].tolist() == [512.0]
    assert (state["growth_tracker"], state["hysteresis_tracker"]) == (0, 0)


def test_late_values_of_a_device_that_is_not_current() -> None:
    """The event is behind the copy, on the stream of the values."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    view, value = HostView(), torch.ones((), device="cuda:1")
    with torch.cuda.device(1):
        torch.cuda._sleep(CYCLES)
    value.add_(1)
    view.push({"value": value})
    assert view.flush() == {"value": 2.0}


def test_staged_copies_are_behind_the_callers_stream() -> None:
    """A save in a loop on a stream of its own, of more tensors than one thread takes."""
    live = [torch.zeros(3, device="cuda") for _ in range(1500)] + [torch.ones(3)]
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(CYCLES)
        torch._foreach_add_(live[:-1], 1.0)
        held = HostMemory().copied(live)
    assert all(there == on_host(torch.ones(3)) for there in held)
