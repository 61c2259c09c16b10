"""Main params and state in host memory, beside a device that is not there: who waits, and what travels."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

from megascale import MixedPrecisionOptimizer, OptimizerConfig
from tests.fake_device.device import FakeDevice
from tests.fake_device.process import OnDevice
from tests.fake_device.record import Record
from tests.fake_device.training import scaler

COUNT, WIDTH = 4, 8


def _train(
    device: FakeDevice, overlap: bool, options: dict[str, Any]
) -> tuple[list[Record], list[Record], list[str], int]:
    """Return what each step asked of the device, and each forward; where state lives; and this thread."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(COUNT))).half().cuda()
    config = OptimizerConfig(
        fp16=True, optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=overlap, clip_grad=1.0, **options
    )
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(model.named_parameters(), lr=1e-2), config, scaler())
    batch = torch.ones(2, WIDTH, dtype=torch.float16, device="cuda")
    steps, forwards = [], []
    for _ in range(4):
        with device.watch() as seen:
            loss = model(batch).float().square().mean()
        forwards.append(seen)
        optimizer.zero_grad()
        optimizer.scale_loss(loss).backward()
        with device.watch() as seen:
            optimizer.step()
            if overlap:  # the thread's calls belong to its step
                optimizer._member.main_params.wait()
        steps.append(seen)
    places = [value.device.type for entry in optimizer.state.values() for value in entry.values()]
    places += [main.device.type for _, main in optimizer.main_params()]
    return steps, forwards, places, threading.get_ident()


@pytest.mark.parametrize("overlap", [False, True])
def test_where_state_lives_and_what_travels(on_device: OnDevice, overlap: bool) -> None:
    """State and main params are in host memory; of each parameter 2 bytes go down and 2 up, from pinned memory."""
    steps, _, places, _ = on_device(_train, overlap, {})
    assert set(places) == {"cpu"}
    size = 2 * WIDTH * WIDTH
    for seen in steps[1:]:
        moved = [what for what in seen.of("copy") if what.startswith(f"{size} ")]
        assert sorted(moved) == sorted([f"{size} from async pinned"] * COUNT + [f"{size} to async pinned"] * COUNT)


def test_the_caller_waits_for_nothing(on_device: OnDevice) -> None:
    """With overlap neither step() nor forward makes the calling thread wait for the device; our thread does."""
    steps, forwards, _, caller = on_device(_train, True, {})
    for seen in (*steps, *forwards):
        assert [str(call) for call in seen if call.makes_host_wait() and call.thread == caller] == []
    for seen in steps:
        assert any(call.kind == "wait" and call.thread != caller for call in seen)
