"""Offload on streams that run late: the bits of the same life without offload, and each wait is needed for them."""

import ast
import gc
import importlib
import inspect
import random
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megascale.main_params import gather, grad_copies, weight_arrivals
from tests.fake_device.device import FakeDevice, WrittenAfterFree
from tests.fake_device.lives import (
    HELD,
    LIVES,
    OVERLAP,
    WAYS,
    WIDTH,
    Life,
    actions_of,
    backward,
    lived,
    model_of_life,
    optimizer_of,
    steps_and,
)
from tests.fake_device.orders import RUNS, differing, differs, noticed, waits_of
from tests.fake_device.process import OnDevice


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "replicated, overlap" else pytest.mark.release) for name in LIVES]
)
def test_no_bit_differs(on_device: OnDevice, name: str) -> None:
    """Steps, overflows, clipping, accumulation, readers: in each order of streams the bits of a life without it."""
    assert on_device(differing, lived, LIVES[name]) == []


def _random_lives(device: FakeDevice, held: str, seed: int) -> list[tuple[Life, str, int]]:
    draw = random.Random(seed)
    lives = []
    for _ in range(4):
        way = draw.choice(list(WAYS.values()))
        known = [action for action in actions_of(held) if action != "streams" or way is OVERLAP]
        lives.append(Life(held, way, tuple(draw.choices(known, k=6))))
    return differing(device, lived, lives)


@pytest.mark.release
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("held", HELD)
def test_random_lives(on_device: OnDevice, held: str, seed: int) -> None:
    """Actions in a random order."""
    assert on_device(_random_lives, held, seed) == []


WAITS = {
    "main_params.grad_copies _copy": Life("replicated", OVERLAP),
    "main_params.grad_copies join": Life("replicated", OVERLAP),
    "utils.streams write": Life("synced", OVERLAP),
    "main_params.weight_arrivals _wait": Life("replicated", OVERLAP),
    "step.host_update task": Life("replicated", OVERLAP),
    "utils.host_memory host_copies": Life("replicated", {}, ("step", "trip", "step")),
    "utils.streams wait": Life("replicated", OVERLAP, steps_and("streams")),
}
"""The functions of the offload's way that wait for a device, and a life that goes wrong without."""


@pytest.mark.default("main_params.weight_arrivals _wait")
@pytest.mark.parametrize("key", WAITS)
def test_each_wait_is_needed(on_device: OnDevice, key: str) -> None:
    """Without one wait, bits differ in some order: removing it from the library makes this file fail."""
    found = on_device(noticed, lived, WAITS[key], key)
    assert found
    assert all(found.values()), found


WAITING = {"wait_event", "wait_stream", "synchronize"}
MODULES = (
    "main_params.grad_copies",
    "main_params.host_buffers",
    "main_params.residence",
    "main_params.weight_arrivals",
    "step.host_update",
    "utils.host_memory",
)
"""Of the offload's way. `utils.streams` is shared: tests/stream_model.py looks at all of it."""


def _waits_in(module: str) -> Iterator[str]:
    tree = ast.parse(inspect.getsource(importlib.import_module(f"megascale.{module}")))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in (node for function in functions for node in ast.walk(function)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAITING:
            yield f"{module}:{node.lineno}"


def _all_lines(device: FakeDevice) -> set[str]:
    return {line.split(" ")[0] for life in WAITS.values() for line in waits_of(device, lived, life)}


@pytest.mark.slow
def test_every_wait_of_the_source_is_among_them(on_device: OnDevice) -> None:
    """A wait that is added to the offload's way is looked at here too."""
    in_source = {line for module in MODULES for line in _waits_in(module)}
    assert in_source
    assert in_source <= on_device(_all_lines)


def _without_begin(device: FakeDevice, held: str) -> list[tuple[str, int]]:
    life = Life(held, OVERLAP)
    expected = lived(life, {})
    wait_for = gather.ParamGather.wait_for
    with pytest.MonkeyPatch.context() as patched:

        def no_begin(own: gather.ParamGather, params: Iterable[nn.Parameter]) -> None:
            with patched.context() as inner:
                inner.setattr(gather, "_begin", lambda _: None)
                wait_for(own, params)

        patched.setattr(gather.ParamGather, "wait_for", no_begin)
        return [run for run in RUNS if differs(device, lived, life, expected, run)]


@pytest.mark.slow
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
                module = model_of_life()
                optimizer = optimizer_of(module, Life("replicated", OVERLAP), OVERLAP)
                batch = torch.ones(2, WIDTH, dtype=torch.float16, device="cuda")
                for at in range(3):
                    optimizer.zero_grad()
                    backward((module, optimizer, batch))
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
            # It holds the weights until somebody has waited, on whatever stream.
            patched.setattr(weight_arrivals, "WriteWatch", lambda params: SimpleNamespace(written=lambda: []))
            found.append((written, bool(_dropped_meanwhile(device, steps=steps))))
    return found


def test_what_is_dropped_meanwhile_is_not_written(on_device: OnDevice) -> None:
    """A model, or its optimizer, that is dropped while bytes travel: memory is kept until they are there, by keep()."""
    assert on_device(_all_dropped_meanwhile) == [([], True)] * 2
