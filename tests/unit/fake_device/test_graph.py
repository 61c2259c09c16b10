"""A step captured into a graph, on a device that is not there: nothing that a GPU would refuse, or leave out."""

import gc
import threading
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megascale import MixedPrecisionOptimizer, StepGraph
from megascale.errors import SkippedStepsError, UsageError
from megascale.kernels import Statistic
from tests.fake_device.device import FakeDevice
from tests.fake_device.process import OnDevice
from tests.fake_device.record import Record
from tests.fake_device.training import CODES, INNER, give_grads, parameters, wrap

KINDS = [pytest.param(one, marks=() if one == "adamw" else pytest.mark.slow) for one in INNER]
WHOLE_STEP = sorted(["measure_kernel", "total_kernel", "decide_kernel", "rescale_kernel", "update_kernel"])


def _captured(device: FakeDevice, inner: str, where: str, options: dict[str, Any]) -> tuple[Record, Record]:
    params = parameters(3, device=where)
    optimizer = wrap(INNER[inner]([{"params": params[:2]}, {"params": params[2:], "lr": 0.5}]), **options)
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
    # Both param groups share one update.
    assert sorted(call.what for call in construction if call.captured and call.kind == "launch") == WHOLE_STEP
    assert replays.syncs() == []
    assert replays.launches() == []


def test_capture_is_of_the_parameters_device(on_device: OnDevice) -> None:
    """Of a model on the second device, while the first one is the current one: all goes into the graph."""
    construction, _ = on_device(_captured, "adamw", "cuda:1", {})
    assert construction.refused_in_capture() == []
    assert {call.stream[0] for call in construction if call.captured} == {1}


def _on_two_devices(device: FakeDevice, other: str) -> None:
    params = parameters(2) + parameters(2, device=other)
    StepGraph(wrap(INNER["adamw"](params), backend="torch"))


@pytest.mark.parametrize("other", ["cuda:1", "cpu"])
def test_parameters_of_another_device_are_refused(on_device: OnDevice, other: str) -> None:
    """What is done there would be done once, while capturing, and in no replay."""
    message = f"the step cannot be captured into a graph: its parameters are on cuda:0 and on {other}"
    with pytest.raises(UsageError, match=message):
        on_device(_on_two_devices, other)


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


def _totals(optimizer: MixedPrecisionOptimizer) -> list[tuple[Tensor, "ref[Tensor]"]]:
    """Return a list of the statistics that are added up from now on, each with its weights."""
    found: list[tuple[Tensor, ref[Tensor]]] = []
    total = optimizer._backend.total

    def noted(stats: Any, weights: Any, *rest: Any) -> Tensor:
        vector = total(stats, weights, *rest)
        found.append((vector, ref(weights.shares)))
        return vector

    optimizer._backend.total = noted  # type: ignore[method-assign, assignment]
    return found


def _move(param: nn.Parameter) -> None:
    param.data = param.data.clone()


def _write_and_move(param: nn.Parameter, _: MixedPrecisionOptimizer) -> None:
    param.detach().fill_(0.5)
    _move(param)


def _leave_and_return(_: nn.Parameter, optimizer: MixedPrecisionOptimizer) -> None:
    optimizer.offload()
    optimizer.reload()


MOVED: dict[str, Callable[[nn.Parameter, MixedPrecisionOptimizer], object]] = {
    "a weight": lambda param, _: _move(param),
    "a moment": lambda param, optimizer: optimizer._inner.state[param].update(exp_avg=torch.zeros_like(param)),
    "weight_decay": lambda _, optimizer: optimizer.param_groups[0].update(weight_decay=0.5),
    "clip_grad": lambda _, optimizer: setattr(optimizer, "clip_grad", 0.25),
}
"""What a program changes between two replays. Each is found out while the next one runs."""
ENDED: dict[str, Callable[[nn.Parameter, MixedPrecisionOptimizer], object]] = {
    "loaded": lambda _, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "away": lambda _, optimizer: optimizer.offload(),
    "back": _leave_and_return,
    "written and moved": _write_and_move,
    "a param group": lambda _, optimizer: optimizer.add_param_group({"params": parameters(1)}),
    "no gradient": lambda param, _: setattr(param, "grad", None),
}
"""What is known before anything is launched."""


def _changed(device: FakeDevice, change: str) -> tuple[str, int]:
    """Return the error of a replay after ``change``, and how many graphs were launched in it."""
    params = parameters(3)
    optimizer = wrap(INNER["adamw"](params))
    give_grads(params)
    graph = StepGraph(optimizer)
    graph.replay()
    (MOVED | ENDED)[change](params[0], optimizer)
    with device.watch() as seen, pytest.raises(UsageError) as caught:
        graph.replay()
    return str(caught.value), sum(call.kind == "replay" for call in seen)


@pytest.mark.parametrize("change", MOVED)
def test_a_replay_finds_out_what_has_changed_while_it_runs(on_device: OnDevice, change: str) -> None:
    """The device does not wait for the comparison. The error names a setting, or says that memory is elsewhere."""
    message, launched = on_device(_changed, change)
    named = {"weight_decay": "weight_decay of param group 0 was 0.01", "clip_grad": "clip_grad was 1.0"}
    assert message.startswith(named.get(change, "parameters or optimizer state have moved"))
    assert launched == 1


@pytest.mark.parametrize("change", ENDED)
def test_a_replay_is_refused_before_it_runs(on_device: OnDevice, change: str) -> None:
    """The library itself has moved the memory, or the graph would write gradients that nobody reads."""
    message, launched = on_device(_changed, change)
    named = {"away": "a graph's replay needs", "no gradient": "gradients have moved"}
    assert message.startswith(named.get(change, "parameters or optimizer state have moved"))
    assert launched == 0


def _taken_in(device: FakeDevice) -> int:
    params = parameters(3)
    optimizer = wrap(INNER["adamw"](params))
    give_grads(params)
    graph = StepGraph(optimizer)
    MOVED["a moment"](params[0], optimizer)
    optimizer.step()
    with device.watch() as seen:
        graph.replay()
    return sum(call.kind == "replay" for call in seen)


def test_state_that_a_step_has_taken_in_lies_in_its_place(on_device: OnDevice) -> None:
    """An eager step has copied what a program assigned into the memory that the graph reads: replays go on."""
    assert on_device(_taken_in) == 1


def _held_memory(device: FakeDevice) -> list[bool]:
    """Return whether a weight's storage is there after it was replaced; after the graph has gone; after offload()."""
    params = parameters(3)
    optimizer = wrap(INNER["adamw"](params))
    give_grads(params)
    graph = StepGraph(optimizer)
    weight = StorageWeakRef(params[0].untyped_storage())
    moment = StorageWeakRef(optimizer._inner.state[params[0]]["exp_avg"].untyped_storage())
    decays = StorageWeakRef(next(iter(optimizer._backend._numbers.values())).untyped_storage())  # type: ignore[attr-defined]
    optimizer._backend._numbers = {}  # type: ignore[attr-defined]
    _move(params[0])
    optimizer.step()  # from now on the graph alone knows the memory of the weight, and of weight decays
    are_there = [not weight.expired() and not decays.expired()]
    del graph
    gc.collect()
    are_there.append(not weight.expired())
    graph = StepGraph(optimizer)
    optimizer.offload()
    are_there.append(not moment.expired())
    del graph
    return are_there


def test_a_graph_holds_the_memory_that_it_writes(on_device: OnDevice) -> None:
    """Until it goes, or the library moves what lies there: offload() leaves no memory on the device for its sake."""
    assert on_device(_held_memory) == [True, False, False]


def _two_graphs(device: FakeDevice) -> tuple[bool, list[int]]:
    """Return whether a replay's result is the last one, and which steps are reported as skipped."""
    params = parameters(3)
    optimizer = wrap(INNER["adamw"](params), max_consecutive_skips=2)
    totals = _totals(optimizer)
    give_grads(params)
    first = StepGraph(optimizer)
    mine, _ = totals[-1]
    StepGraph(optimizer)
    totals[-1][0].zero_()  # a GPU's memory before the first replay, as a capture runs nothing
    for _ in range(3):
        result = first.replay()
    is_told = optimizer._recipe.last_result is result
    optimizer.step()
    mine[Statistic.NON_FINITE] = 1.0
    reports = []
    for _ in range(3):
        first.replay()
        reports.append(optimizer.last_overflow())
    with pytest.raises(SkippedStepsError):
        first.replay()
    return is_told, [report.step for report in reports if report is not None]


def test_a_replay_is_judged_by_its_own_statistics(on_device: OnDevice) -> None:
    """Whatever was captured, or stepped, in between: the host, and metrics, read what this graph has left."""
    is_told, skipped = on_device(_two_graphs)
    assert is_told
    assert skipped == [4, 5, 6]


def _other_params(device: FakeDevice) -> list[bool]:
    params = parameters(3)
    optimizer = wrap(INNER["adamw"](params))
    totals = _totals(optimizer)
    give_grads(params)
    graph = StepGraph(optimizer)
    _, weights = totals[-1]
    totals.clear()
    more = parameters(1)
    optimizer.add_param_group({"params": more})
    give_grads([*params, *more])
    optimizer.step()
    alive = weights() is not None
    del graph
    return [alive, weights() is None]


def test_a_graph_keeps_the_weights_that_it_reads(on_device: OnDevice) -> None:
    """An eager step of other parameters replaces the cached ones: the graph's must not be freed under it."""
    assert on_device(_other_params) == [True, True]


def _readme(device: FakeDevice) -> tuple[Record, list[float], int]:
    from megascale import DynamicGradScaler

    model = torch.nn.Linear(64, 1).half().cuda()
    x = torch.randn(32, 64).half().cuda()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = MixedPrecisionOptimizer(inner, None, DynamicGradScaler(2.0**16, 1.0, 2.0, 0.5, 1000, 2))
    calls = []

    def forward_backward() -> Any:
        loss = model(x).float().square().mean()
        optimizer.scale_loss(loss).backward()
        calls.append(loss)
        return loss

    with device.watch() as seen:
        graph = StepGraph(optimizer, forward_backward)
    return seen, [graph.output.item()], len(calls)


def test_the_example_of_the_documentation(on_device: OnDevice) -> None:
    """Forward, backward and step in one graph: docs/numerics.md's example. DDP needs eleven runs before a capture."""
    seen, output, calls = on_device(_readme)
    assert calls == 11 + 1
    assert seen.refused_in_capture() == []
    assert seen.first_met_in_capture() == set()
    assert output[0] > 0
