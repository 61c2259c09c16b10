"""Main params and state in host memory, beside a device that is not there: who waits, and what travels."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

from megascale import DistributedOptimizer, MixedPrecisionOptimizer, OptimizerConfig
from tests.fake_device.device import FakeDevice
from tests.fake_device.process import OnDevice
from tests.fake_device.record import Record
from tests.fake_device.training import layers, optimizer_of, scaler
from tests.training import bits_equal

COUNT, WIDTH = 4, 8


def _train(
    device: FakeDevice, overlap: bool, options: dict[str, Any]
) -> tuple[list[Record], list[Record], list[str], int]:
    """Return what each backward and its step asked of the device, and each forward; where state lives; this thread."""
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
        with device.watch() as seen:
            optimizer.scale_loss(loss).backward()
            optimizer.step()
            if overlap:  # the thread's calls belong to its step
                optimizer._member.main_params.wait()
        steps.append(seen)
    places = [value.device.type for entry in optimizer._inner.state.values() for value in entry.values()]
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


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_the_caller_waits_for_nothing(on_device: OnDevice, fraction: float) -> None:
    """With overlap neither backward nor step() nor forward lets the calling thread wait for the device; ours does."""
    steps, forwards, _, caller = on_device(_train, True, {"optimizer_offload_fraction": fraction})
    for seen in (*steps, *forwards):
        assert [str(call) for call in seen if call.makes_host_wait() and call.thread == caller] == []
    for seen in steps:
        assert any(call.kind == "wait" and call.thread != caller for call in seen)


def _bytes_held(device: FakeDevice, overlap: bool, sharded: bool) -> float:
    """Return the most bytes per parameter that an iteration holds on the device."""
    width = 128
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(COUNT))).half().cuda()
    config = OptimizerConfig(
        fp16=True, optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=overlap, clip_grad=1.0
    )
    own = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    optimizer = (
        DistributedOptimizer(own, config, scaler(), modules=model)
        if sharded
        else MixedPrecisionOptimizer(own, config, scaler())
    )
    batch = torch.ones(1, width, dtype=torch.float16, device="cuda")
    for _ in range(3):
        device.take_most_bytes()
        optimizer.scale_loss(model(batch).float().square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish_param_gather()
    return device.take_most_bytes() / (COUNT * width * width)


@pytest.mark.default("False-4.1-True", "True-6.6-True")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("sharded", "most"), [(False, 4.1), (True, 6.6)])
def test_what_the_device_holds(on_device: OnDevice, overlap: bool, sharded: bool, most: float) -> None:
    """Bytes per parameter: weight and gradient, 4; with main grads 6, and the gradient that one layer has just made."""
    assert most - 0.3 < on_device(_bytes_held, overlap, sharded) <= most


def _exchange(device: FakeDevice) -> list[Any]:
    """Exchange entries of a parameter that stays on the device and of one in host memory."""
    model = layers()
    optimizer = optimizer_of(model, "replicated", optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    batch = torch.ones(2, WIDTH, dtype=torch.float16, device="cuda")
    optimizer.scale_loss(model(batch).float().square().mean()).backward()
    optimizer.step()
    first, *_, last = model.parameters()
    state, names = optimizer._inner.state, ("exp_avg", "exp_avg_sq")
    before = [state[param][name].cpu().clone() for param in (last, first) for name in names]
    state[first], state[last] = state[last], state[first]
    optimizer.state_dict()
    shown = [state[param][name] for param in (first, last) for name in names]
    return [
        [value.device.type for value in shown],
        [bits_equal(pair[0].cpu(), pair[1]) for pair in zip(shown, before, strict=True)],
    ]


def test_entries_are_exchanged_with_host_memory(on_device: OnDevice) -> None:
    """Each is copied to where the other's main param is; nothing is lost."""
    assert on_device(_exchange) == [["cuda", "cuda", "cpu", "cpu"], [True] * 4]
