"""Each wait for the device is needed for a life's bits, and what is dropped while bytes travel is not written.

The lives themselves are in test_life.py; those here are short.
"""

import gc
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megascale.main_params import weight_arrivals
from tests.fake_device.device import FakeDevice, WrittenAfterFree
from tests.fake_device.orders import RUNS, Run, noticed
from tests.fake_device.process import OnDevice
from tests.fake_device.training import OVERLAP, WIDTH, layers, optimizer_of
from tests.life import Setup, live

STEPS = ("step", "overflow", "accumulate", "step", "accumulate", "step")


def _setup(layout: str, *, ahead: bool = False, **fields: Any) -> Setup:
    return Setup("adamw", layout, torch.float16, {"backend": "reference"} | fields, ahead=ahead, reads_seldom=True)


WAITS: dict[str, tuple[str, int, Setup, tuple[str, ...]]] = {
    "gradients that travel in backward": ("main_params.grad_copies copy", 1, _setup("replicated", **OVERLAP), STEPS),
    "gradients that have travelled": ("main_params.grad_copies join", 1, _setup("replicated", **OVERLAP), STEPS),
    "weights": ("main_params.weight_arrivals _wait", 1, _setup("replicated", **OVERLAP), STEPS),
    "an update in host memory": ("step.host_update task", 1, _setup("replicated", **OVERLAP), STEPS),
    "state that leaves": (
        "utils.host_memory host_copies",
        1,
        _setup("replicated"),
        ("step", "offload", "read", "step"),
    ),
    "statistics of gradients": ("utils.collectives all_reduce_sum_", 2, _setup("elements", **OVERLAP), STEPS),
    "gathered params": ("utils.collectives wait", 2, _setup("elements", ahead=True), STEPS),
    "reduced gradients": ("grad_sync.reduction wait", 2, _setup("synced"), STEPS),
    "reduced shards": ("grad_sync.reduction wait", 2, _setup("parameters"), STEPS),
    "shards of two copies": ("grad_sync.reduction wait_for_replicas", 4, _setup("hybrid"), STEPS),
}
"""What is waited for; the function that waits, the number of ranks, and a life that goes wrong without."""


def _noticed(device: FakeDevice, awaited: str, folder: Path) -> dict[str, list[Run]]:
    function, _, setup, actions = WAITS[awaited]
    return noticed(device, partial(live, 0, folder, "cuda", setup, actions), function)


@pytest.mark.slow
@pytest.mark.parametrize("awaited", WAITS)
def test_each_wait_is_needed(on_device: OnDevice, awaited: str, tmp_path: Path) -> None:
    """Without one wait, bits differ in some order: removing it from the library makes this file fail."""
    ranks = WAITS[awaited][1]
    every = (
        [on_device(_noticed, awaited, tmp_path)] if ranks == 1 else on_device.ranks(ranks, _noticed, awaited, tmp_path)
    )
    assert every[0]
    # A rank may find other bits than another, or none, where the others' error ends a life.
    for line in every[0]:
        assert any(found[line] for found in every), line


def _dropped_meanwhile(device: FakeDevice, *, steps: bool) -> list[tuple[str, int]]:
    """Return the orders in which memory is written after a model and its optimizer were dropped.

    ``steps``: the last thing that they did was a step, else a backward. What waits for the weights of a step may be
    freed last, as in any cascade of references, and memory be allocated before: here both always happen.
    """
    found = []
    for order, seed in RUNS[:2]:  # a full garbage collection each
        try:
            with device.running(order, seed):
                module = layers()
                optimizer = optimizer_of(module, "replicated", **OVERLAP)
                batch = torch.ones(2, WIDTH, dtype=torch.float16, device="cuda")
                for at in range(3):
                    optimizer.zero_grad()
                    optimizer.scale_loss(module(batch).float().square().mean()).backward()
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
    for steps in (True, False):
        with pytest.MonkeyPatch.context() as patched:
            # In both runs: it holds the weights until somebody has waited, on whatever stream.
            patched.setattr(weight_arrivals, "WriteWatch", lambda params: SimpleNamespace(written=lambda: []))
            written = _dropped_meanwhile(device, steps=steps)
            patched.setattr(torch.Tensor, "record_stream", lambda *_: None)
            found.append((written, bool(_dropped_meanwhile(device, steps=steps))))
    return found


def test_what_is_dropped_meanwhile_is_not_written(on_device: OnDevice) -> None:
    """A model, or its optimizer, that is dropped while bytes travel: its memory is kept, by record_stream()."""
    assert on_device(_all_dropped_meanwhile) == [([], True)] * 2
