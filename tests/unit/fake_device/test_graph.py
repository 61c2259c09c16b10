"""A step captured into a graph, on a device that is not there: nothing that a GPU would refuse, or leave out."""

import threading
from typing import Any

import pytest
import torch

from megascale import StepGraph
from tests.fake_device.device import FakeDevice
from tests.fake_device.process import OnDevice
from tests.fake_device.record import Record
from tests.fake_device.training import CODES, INNER, give_grads, parameters, wrap

KINDS = [pytest.param(one, marks=() if one == "adamw" else pytest.mark.slow) for one in INNER]
WHOLE_STEP = {"measure_kernel", "total_kernel", "decide_kernel", "rescale_kernel"}


def _captured(device: FakeDevice, inner: str, where: str, options: dict[str, Any]) -> tuple[Record, Record]:
    params = parameters(3, device=where)
    optimizer = wrap(INNER[inner](params), **options)
    give_grads(params)
    with device.watch() as construction:
        graph = StepGraph(optimizer)
    with device.watch() as replays:
        graph.replay()
        optimizer.param_groups[0]["lr"] = 3e-3
        graph.replay()
    return construction, replays


@pytest.mark.parametrize("inner", KINDS)
def test_nothing_is_loaded_or_met_first_in_capture(on_device: OnDevice, inner: str) -> None:
    """A rehearsal runs all kernels and operators of a step, the scaler's too: CUDA loads none while it captures."""
    _check(*on_device(_captured, inner, "cuda", {}))


def test_a_step_on_remainders_and_codes_is_captured(on_device: OnDevice) -> None:
    """With the same kernels and operators as other steps."""
    _check(*on_device(_captured, "adamw", "cuda", {"store_param_remainders": True, **CODES}))


def _check(construction: Record, replays: Record) -> None:
    assert construction.refused_in_capture() == []
    assert construction.first_met_in_capture() == set()
    assert {call.what for call in construction if call.captured and call.kind == "launch"} > WHOLE_STEP
    assert replays.syncs() == []
    assert replays.launches() == []


def test_capture_is_of_the_parameters_device(on_device: OnDevice) -> None:
    """Of a model on the second device, while the first one is the current one: all goes into the graph."""
    construction, _ = on_device(_captured, "adamw", "cuda:1", {})
    assert construction.refused_in_capture() == []
    assert {call.stream[0] for call in construction if call.captured} == {1}


def _beside_a_loader(device: FakeDevice) -> Record:
    params = parameters(3)
    optimizer = wrap(INNER["adamw"](params))
    runs: list[torch.Tensor] = []

    def forward_backward() -> None:
        if not runs:
            give_grads(params)
        loader = threading.Thread(target=lambda: runs.append(torch.empty(4, pin_memory=True)))
        loader.start()
        loader.join()

    with device.watch() as seen:
        StepGraph(optimizer, forward_backward)
    return seen


def test_another_thread_may_pin_memory_meanwhile(on_device: OnDevice) -> None:
    """A DataLoader with ``pin_memory=True`` goes on while a step is captured."""
    seen = on_device(_beside_a_loader)
    assert any(call.kind == "pin" and call.captured for call in seen)
    assert seen.refused_in_capture() == []


def _rates(device: FakeDevice) -> list[tuple[torch.dtype, float]]:
    params = parameters(2)
    given: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:], "lr": torch.tensor(0.3)}]
    optimizer = wrap(torch.optim.AdamW(given, lr=1e-3))
    give_grads(params)
    graph = StepGraph(optimizer)
    groups = optimizer.param_groups
    seen = [(group["lr"].dtype, group["lr"].item()) for group in groups]
    groups[0]["lr"], groups[1]["lr"] = 3e-3, torch.tensor(0.7)
    graph.replay()
    return seen + [(group["lr"].dtype, group["lr"].item()) for group in groups]


def test_rates_keep_all_bits(on_device: OnDevice) -> None:
    """A graph reads a rate in fp64, as an eager step does: rounded to fp32 first, replays would have other bits."""
    numbers = [1e-3, torch.tensor(0.3).item(), 3e-3, torch.tensor(0.7).item()]
    assert on_device(_rates) == [(torch.float64, number) for number in numbers]


def _readme(device: FakeDevice) -> tuple[Record, list[float]]:
    from megascale import DynamicGradScaler, MixedPrecisionOptimizer

    model = torch.nn.Linear(64, 1).half().cuda()
    x = torch.randn(32, 64).half().cuda()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = MixedPrecisionOptimizer(inner, None, DynamicGradScaler(2.0**16, 1.0, 2.0, 0.5, 1000, 2))

    def forward_backward() -> Any:
        loss = model(x).float().square().mean()
        optimizer.scale_loss(loss).backward()
        return loss

    with device.watch() as seen:
        graph = StepGraph(optimizer, forward_backward)
    return seen, [graph.output.item()]


def test_the_example_of_the_documentation(on_device: OnDevice) -> None:
    """Forward, backward and step in one graph: docs/kernels.md's example."""
    seen, output = on_device(_readme)
    assert seen.refused_in_capture() == []
    assert seen.first_met_in_capture() == set()
    assert output[0] > 0
