"""The device that is not there: it tells what a GPU would, and computes what the CPU does."""

from collections.abc import Callable
from typing import Any

import torch

from tests.fake_device.device import FakeDevice
from tests.fake_device.process import OnDevice


def _seen(device: FakeDevice, name: str) -> tuple[int, list[str]]:
    """Return how often the host waited, and what it did, in one of the deeds."""
    here = torch.arange(6.0, device="cuda")
    pinned, pageable = torch.empty(6, pin_memory=True), torch.empty(6)
    event, stream = torch.Event("cuda"), torch.Stream("cuda")
    event.record()
    deeds: dict[str, Callable[[], Any]] = {
        "item": lambda: here[0].item(),
        "bool": lambda: bool(here.sum() > 0),
        "tolist": lambda: here.tolist(),
        "from a list": lambda: torch.tensor([1.0], device="cuda"),
        "blocking from pinned": lambda: here.copy_(pinned),
        "async to pageable": lambda: pageable.copy_(here, non_blocking=True),
        "index by a mask": lambda: here[here > 1],
        "equal": lambda: torch.equal(here, here),
        "stream": stream.synchronize,
        "device": torch.accelerator.synchronize,
        "async from pinned": lambda: here.copy_(pinned, non_blocking=True),
        "async to pinned": lambda: pinned.copy_(here, non_blocking=True),
        "async from pageable": lambda: here.copy_(pageable, non_blocking=True),
        "arithmetic": lambda: (here * 2 + torch.tensor(1.0)).clamp_(max=3).view(2, 3).t().sum(0),
        "full": lambda: torch.full((3,), 2.0, device="cuda"),
        "where": lambda: torch.where(here > 1, here, 0.0),
        "event": event.synchronize,
    }
    with device.watch() as seen:
        deeds[name]()
    return len(seen.syncs()), [call.kind for call in seen if call.kind != "operator"]


SYNCS = [
    ("item", ["scalar"]),
    ("bool", ["scalar"]),
    ("tolist", ["copy"]),
    ("from a list", ["copy"]),
    ("blocking from pinned", ["copy"]),
    ("async to pageable", ["copy"]),
    ("index by a mask", ["mask"]),
    ("equal", []),
    ("stream", ["wait"]),
    ("device", ["wait"]),
]
NO_SYNCS = [
    ("async from pinned", ["copy"]),
    ("async to pinned", ["copy"]),
    ("async from pageable", ["copy"]),
    ("arithmetic", []),
    ("full", []),
    ("where", []),
    ("event", ["wait"]),
]


def _all_seen(device: FakeDevice) -> dict[str, tuple[int, list[str]]]:
    return {name: _seen(device, name) for name, _ in SYNCS + NO_SYNCS}


def test_what_makes_the_host_wait_is_told_from_what_does_not(on_device: OnDevice) -> None:
    """The instrument itself: each way of waiting is reported, and nothing else is taken for one."""
    seen = on_device(_all_seen)
    for name, kinds in SYNCS + NO_SYNCS:
        syncs, reported = seen[name]
        assert reported == kinds, name
        assert bool(syncs) == ((name, kinds) in SYNCS), name
