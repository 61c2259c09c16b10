"""Offload on streams that run late: the bits of the same life without offload, and each wait is needed for them."""

import ast
import copy
import gc
import importlib
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascale import DistributedOptimizer, MixedPrecisionOptimizer, OptimizerConfig
from megascale.errors import MegascaleError
from megascale.grad_sync import GradSync
from megascale.main_params import gather, grad_copies, update_unit, weight_arrivals
from megascale.utils.dtensors import to_local
from megascale.utils.nests import tensors_in
from tests.fake_device.device import FakeDevice, WrittenAfterFree
from tests.fake_device.process import OnDevice
from tests.fake_device.record import WAITS as WAIT_KINDS
from tests.fake_device.training import CODES, scaler
from tests.training import Sign, bits_equal

COUNT, WIDTH = 4, 8
STEPS = ("step", "overflow", "twice", "step")
OVERLAP: dict[str, Any] = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True}
WAIT: dict[str, Any] = {"optimizer_cpu_offload": True}
VISIT: dict[str, Any] = {"optimizer_cpu_offload": True, "optimizer_offload_compute": "device"}
RUNS = [("late", 0), ("side first", 0), *(("random", seed) for seed in range(4))]


@dataclass(frozen=True)
class Life:
    """What is trained, how, and what comes between steps.

    Attributes:
        held: how parameters are held.
        way: of offload; the other life has none.
        actions: one after the other, of ``ACTIONS``.
        inner: the optimizer.
        stored: what both lives have: how state is stored.
        slices: each parameter is a slice of its own.
    """

    held: str
    way: dict[str, Any]
    actions: tuple[str, ...] = STEPS
    inner: str = "adamw"
    stored: tuple[tuple[str, Any], ...] = ()
    slices: bool = False


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(COUNT)))
    with torch.no_grad():
        for param in layers.parameters():
            param.mul_(2)
    return layers.half().cuda()


def _fully_sharded(module: nn.Sequential) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cuda", (1,))
    for part in (*module, module):
        fully_shard(part, mesh=mesh)


def _optimizer(module: nn.Module, life: Life, way: dict[str, Any]) -> MixedPrecisionOptimizer:
    # The reference backend is made of operators, which this device can run.
    config = OptimizerConfig(fp16=True, clip_grad=0.5, backend="reference", **dict(life.stored), **way)
    named = module.named_parameters()
    own = Sign(named) if life.inner == "sign" else torch.optim.AdamW(named, lr=1e-2)
    if life.held in ("replicated", "fsdp2"):
        return MixedPrecisionOptimizer(own, config, scaler())
    if life.held == "synced":
        sync = GradSync(module.named_parameters(), bucket_numel=WIDTH * WIDTH)
        return MixedPrecisionOptimizer(own, config, scaler(), grad_sync=sync)
    return DistributedOptimizer(own, config, scaler(), modules=module, shard=life.held, bucket_numel=WIDTH * WIDTH)


Trained = tuple[nn.Sequential, MixedPrecisionOptimizer, Tensor]
"""A model, its optimizer, a batch."""


def _step(trained: Trained, passes: int = 1, factor: float = 1.0) -> list[Tensor]:
    module, optimizer, batch = trained
    optimizer.zero_grad()
    shown = []
    for at in range(passes):
        sync = optimizer._member.grad_sync
        with sync.no_sync() if isinstance(sync, GradSync) and at < passes - 1 else nullcontext():
            out = module(batch)
            optimizer.scale_loss(out.float().square().mean() * factor).backward()
            shown.append(out.detach())
    return [*shown, *optimizer.step()[:2]]


def _backward(trained: Trained) -> None:
    trained[1].scale_loss(trained[0](trained[2]).float().square().mean()).backward()


def _last(trained: Trained) -> list[Tensor]:
    """The last layer alone has a gradient."""
    trained[1].zero_grad()
    _backward(trained)
    for param in list(trained[0].parameters())[:-1]:
        param.grad = None
    return list(trained[1].step()[:2])


def _clipped(trained: Trained) -> list[Tensor]:
    """Gradients are written after backward, in place."""
    trained[1].zero_grad()
    _backward(trained)
    for param in trained[0].parameters():
        if param.grad is not None:
            param.grad.clamp_(-1, 1)
    return list(trained[1].step()[:2])


def _replaced(trained: Trained) -> list[Tensor]:
    """Gradients are other tensors after backward."""
    trained[1].zero_grad()
    _backward(trained)
    for param in trained[0].parameters():
        if param.grad is not None:
            param.grad = param.grad * 0.5
    return list(trained[1].step()[:2])


def _dropped(trained: Trained) -> list[Tensor]:
    """A pass is dropped, another one is in its place; gradients are zeroed where they are, after the step too."""
    trained[1].zero_grad()
    _backward(trained)
    trained[1].zero_grad()
    _backward(trained)
    result = list(trained[1].step()[:2])
    trained[1].zero_grad(set_to_none=False)
    return result


def _prepared(trained: Trained) -> list[Tensor]:
    """A step is taken in two halves, and gradients are written between them."""
    trained[1].zero_grad()
    _backward(trained)
    trained[1].prepare_grads()
    for param in trained[0].parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)
    return list(trained[1].step_with_ready_grads()[:2])


def _read(trained: Trained) -> list[Tensor]:
    return [value.clone() for value in trained[0].state_dict().values()]


def _state(trained: Trained) -> list[Tensor]:
    mains = [to_local(main).clone() for _, main in trained[1].main_params()]
    return [*mains, *(to_local(one).clone() for entry in trained[1].state.values() for one in tensors_in(entry))]


def _copied(trained: Trained) -> list[Tensor]:
    return [param.detach() for param in copy.deepcopy(trained[0]).parameters()]


def _trip(trained: Trained) -> list[Tensor]:
    list(trained[1].main_params())  # takes over a parameter that was frozen: what is away does not
    trained[1].offload()
    kept = [to_local(main).clone() for _, main in trained[1].main_params()]
    trained[1].reload()
    return kept


def _load(trained: Trained) -> list[Tensor]:
    trained[1].load_state_dict(trained[1].state_dict())
    return []


def _halve(trained: Trained) -> list[Tensor]:
    trained[0].load_state_dict({name: value / 2 for name, value in trained[0].state_dict().items()})
    return []


def _freeze(trained: Trained) -> list[Tensor]:
    weight = trained[0][1].weight
    weight.requires_grad_(not weight.requires_grad)
    return []


def _move(trained: Trained) -> list[Tensor]:
    """Some main params, with their state, come back to the device, or go again."""
    optimizer = trained[1]
    if optimizer._member.config.optimizer_cpu_offload:
        optimizer.optimizer_offload_fraction = 1.5 - optimizer.optimizer_offload_fraction
    return []


def _rate(trained: Trained) -> list[Tensor]:
    trained[1].param_groups[0]["lr"] *= 0.5
    return []


def _on_two_streams(trained: Trained) -> list[Tensor]:
    """Two streams that nobody orders use the weights, one after the other."""
    module, _, batch = trained
    with torch.no_grad():
        first = module(batch)
        with torch.Stream("cuda") as side:
            second = module(batch)
            side.synchronize()
        return [first, second]


ACTIONS: dict[str, Callable[[Trained], list[Tensor]]] = {
    "step": _step,
    "overflow": lambda trained: _step(trained, factor=float("inf")),
    "twice": lambda trained: _step(trained, passes=2),
    "clipped": _clipped,
    "replaced": _replaced,
    "dropped": _dropped,
    "prepared": _prepared,
    "last": _last,
    "read": _read,
    "state": _state,
    "copy": _copied,
    "trip": _trip,
    "load": _load,
    "halve": _halve,
    "freeze": _freeze,
    "move": _move,
    "rate": _rate,
    "streams": _on_two_streams,
}


def _lived(life: Life, way: dict[str, Any]) -> list[Tensor]:
    """Return what a life shows: results of forward and of steps, what is read between them, and what is left."""
    with pytest.MonkeyPatch.context() as patched:
        if life.slices:
            patched.setattr(update_unit, "SLICE", 1)
        return _lived_so(life, way)


def _lived_so(life: Life, way: dict[str, Any]) -> list[Tensor]:
    module = _model()
    if life.held == "fsdp2":
        _fully_sharded(module)
    optimizer = _optimizer(module, life, way)
    batch = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).half().cuda()
    torch.accelerator.synchronize()
    shown = [value for action in life.actions for value in ACTIONS[action]((module, optimizer, batch))]
    optimizer.finish_param_gather()
    mains = [to_local(main) for _, main in optimizer.main_params()]
    states = [to_local(value) for entry in optimizer.state.values() for value in tensors_in(entry)]
    left = [*shown, *mains, *states, *map(to_local, module.parameters())]
    return [value.detach().cpu() for value in left]


def _differs(device: FakeDevice, life: Life, expected: list[Tensor], order: str, seed: int) -> bool:
    try:
        with device.running(order, seed):
            values = _lived(life, life.way)
    except (WrittenAfterFree, MegascaleError):
        return True
    return len(values) != len(expected) or not all(map(bits_equal, values, expected))


def _differing(device: FakeDevice, lives: Sequence[Life]) -> list[tuple[Life, str, int]]:
    """Return which lives, in which orders, have other bits than without offload and with streams that run at once."""
    found = []
    if any(life.held == "fsdp2" for life in lives):
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    for life in lives:
        expected = _lived(life, {})
        found += [(life, order, seed) for order, seed in RUNS if _differs(device, life, expected, order, seed)]
        with device.running("late"):  # without offload a second stream waits for weights if its user lets it
            plain = expected if "streams" in life.actions else _lived(life, {})
        if not all(map(bits_equal, plain, expected)):
            found.append((life, "without offload", 0))
    return found


def _actions(held: str) -> list[str]:
    """Return what can be done: FSDP2 refuses a deep copy, and main grads are not in ``param.grad``."""
    without = {"fsdp2": {"copy"}, "replicated": set[str]()}.get(held, {"last", "clipped", "replaced", "prepared"})
    return [action for action in ACTIONS if action not in without]


def _between(action: str) -> tuple[str, ...]:
    """Return steps with an action after each."""
    return tuple(one for step in STEPS for one in (step, action))


HELD = ("replicated", "synced", "elements", "parameters", "fsdp2")
WAYS = {"overlap": OVERLAP, "waits": WAIT, "visits": VISIT}
READS = ("read", "state", "trip", "load", "halve", "move")
LIVES: dict[str, list[Life]] = {
    **{f"{held}, {name}": [Life(held, way)] for held in HELD for name, way in WAYS.items()},
    **{f"replicated, visits, {action}": [Life("replicated", VISIT, _between(action))] for action in READS},
    "slices": [Life("replicated", way, slices=True) for way in (OVERLAP, VISIT)],
    "codes": [Life("replicated", OVERLAP, stored=tuple(CODES.items()))],
    "fraction": [Life("replicated", OVERLAP | {"optimizer_offload_fraction": 0.5})],
    "pageable": [Life("replicated", OVERLAP | {"pin_cpu_grads": False, "pin_cpu_params": False})],
    "own step": [Life("replicated", WAIT, inner="sign")],
    "own step, parameters": [Life("parameters", WAIT, inner="sign")],
    **{
        f"{held}, {action}": [Life(held, OVERLAP, _between(action))]
        for held in HELD
        for action in _actions(held)
        if action not in STEPS
    },
}
QUICK = {f"replicated, {name}" for name in ("overlap", "visits", "clipped", "last")}
QUICK |= {"codes", "fraction"}
"""The lives that are no slow tests."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LIVES]
)
def test_no_bit_differs(on_device: OnDevice, name: str) -> None:
    """Steps, overflows, clipping, accumulation, readers: in each order of streams the bits of a life without it."""
    assert on_device(_differing, LIVES[name]) == []


def _random_lives(device: FakeDevice, held: str, seed: int) -> list[tuple[Life, str, int]]:
    draw = random.Random(seed)
    lives = []
    for _ in range(4):
        way = draw.choice(list(WAYS.values()))
        known = [action for action in _actions(held) if action != "streams" or way is OVERLAP]
        lives.append(Life(held, way, tuple(draw.choices(known, k=6))))
    return _differing(device, lives)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("held", HELD)
def test_random_lives(on_device: OnDevice, held: str, seed: int) -> None:
    """Actions in a random order."""
    assert on_device(_random_lives, held, seed) == []


WAITS = {
    "main_params.grad_copies take": Life("replicated", OVERLAP),
    "main_params.grad_copies join": Life("replicated", OVERLAP),
    "main_params.weight_arrivals _wait": Life("replicated", OVERLAP),
    "main_params.weight_arrivals wait": Life("replicated", VISIT, _between("state")),
    "step.streamed_update apply": Life("replicated", VISIT, ("step", *["last", "step"] * 3), slices=True),
    "step.streamed_update _update": Life("replicated", VISIT, slices=True),
    "step.host_update task": Life("replicated", OVERLAP),
    "step.torch_step apply": Life("replicated", WAIT, inner="sign"),
    "utils.host_memory host_copies": Life("replicated", {}, ("step", "trip", "step")),
    "utils.streams wait": Life("replicated", OVERLAP, _between("streams")),
}
"""The functions of the offload's way that wait for a device, and a life that goes wrong without."""


def _key(line: str) -> str:
    """Return a line's module and function, as ``WAITS`` has them."""
    place, _, function = line.partition(" ")
    return f"{place.split(':')[0]} {function}"


def _waits(life: Life, device: FakeDevice) -> set[str]:
    with device.running("late"), device.watch() as seen:
        _lived(life, life.way)
    return {call.line() for call in seen if call.kind in WAIT_KINDS and call.line()}


def _noticed(device: FakeDevice, key: str) -> dict[str, list[tuple[str, int]]]:
    """Return the lines of ``key`` that wait, and the orders in which a life without that wait has other bits."""
    life = WAITS[key]
    expected = _lived(life, {})
    found = {}
    for line in (line for line in _waits(life, device) if _key(line) == key):
        with device.without(line):
            found[line] = [run for run in RUNS if _differs(device, life, expected, *run)]
    return found


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=pytest.mark.slow if "streamed" in key else ()) for key in WAITS]
)
def test_each_wait_is_needed(on_device: OnDevice, key: str) -> None:
    """Without one wait, bits differ in some order: removing it from the library makes this file fail."""
    found = on_device(_noticed, key)
    assert found
    assert all(found.values()), found


WAITING = {"wait_event", "wait_stream", "synchronize"}
MODULES = (
    "main_params.grad_copies",
    "main_params.host_twin",
    "main_params.residence",
    "main_params.weight_arrivals",
    "step.host_own_step",
    "step.host_update",
    "step.streamed_update",
    "utils.host_memory",
)
"""Of the offload's way. `utils.streams` is shared: tests/stream_model.py looks at all of it."""


MEASURES = {"when_sent"}
"""Functions that wait in order to measure: without that wait a time is wrong, and no bit."""


def _waits_in(module: str) -> Iterator[str]:
    tree = ast.parse(inspect.getsource(importlib.import_module(f"megascale.{module}")))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    measuring = {id(node) for one in functions if one.name in MEASURES for node in ast.walk(one)}
    for node in (node for function in functions for node in ast.walk(function) if id(node) not in measuring):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAITING:
            yield f"{module}:{node.lineno}"


def _all_lines(device: FakeDevice) -> set[str]:
    return {line.split(" ")[0] for life in WAITS.values() for line in _waits(life, device)}


def test_every_wait_of_the_source_is_among_them(on_device: OnDevice) -> None:
    """A wait that is added to the offload's way is looked at here too."""
    in_source = {line for module in MODULES for line in _waits_in(module)}
    assert in_source
    assert in_source <= on_device(_all_lines)


def _without_begin(device: FakeDevice, held: str) -> list[tuple[str, int]]:
    life = Life(held, OVERLAP)
    expected = _lived(life, {})
    wait_for = gather.ParamGather.wait_for
    with pytest.MonkeyPatch.context() as patched:

        def no_begin(own: gather.ParamGather, params: Iterable[nn.Parameter]) -> None:
            with patched.context() as inner:
                inner.setattr(gather, "_begin", lambda _: None)
                wait_for(own, params)

        patched.setattr(gather.ParamGather, "wait_for", no_begin)
        return [run for run in RUNS if _differs(device, life, expected, *run)]


@pytest.mark.parametrize("held", [pytest.param("elements", marks=pytest.mark.slow), "parameters"])
def test_a_bucket_waits_for_its_shard(on_device: OnDevice, held: str) -> None:
    """A module whose gather has not begun would use old weights: forward begins it."""
    assert on_device(_without_begin, held)


def _dropped_meanwhile(device: FakeDevice, *, steps: bool) -> list[tuple[str, int]]:
    """Return the orders in which memory is written after a model and its optimizer were dropped.

    ``steps``: the last thing that they did was a step, else a backward. What waits for the weights of a step may be
    freed last, as in any cascade of references, and memory be allocated before: here both always happen.
    """
    found = []
    for order, seed in RUNS[:2]:  # a full garbage collection each
        try:
            with device.running(order, seed):
                module = _model()
                optimizer = _optimizer(module, Life("replicated", OVERLAP), OVERLAP)
                batch = torch.ones(2, WIDTH, dtype=torch.float16, device="cuda")
                for at in range(3):
                    optimizer.zero_grad()
                    _backward((module, optimizer, batch))
                    if steps or at < 2:
                        optimizer.step()
                arrivals = optimizer._member.main_params.arrivals
                assert arrivals is not None
                arrivals._thread.result(arrivals._thread.submit(lambda: None))  # all weights are queued
                del module, optimizer, batch
                gc.collect()
                torch.empty(1, device="cuda")
                del arrivals
        except WrittenAfterFree:
            found.append((order, seed))
    return found


def _all_dropped_meanwhile(device: FakeDevice) -> list[tuple[list[tuple[str, int]], bool]]:
    found = []
    for steps, module in ((True, weight_arrivals), (False, grad_copies)):
        written = _dropped_meanwhile(device, steps=steps)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(module, "keep", lambda *_: None)
            found.append((written, bool(_dropped_meanwhile(device, steps=steps))))
    return found


def test_what_is_dropped_meanwhile_is_not_written(on_device: OnDevice) -> None:
    """A model, or its optimizer, that is dropped while bytes travel: memory is kept until they are there, by keep()."""
    assert on_device(_all_dropped_meanwhile) == [([], True)] * 2
