"""The device that is not there: it tells what a GPU would, and computes what the CPU does."""

import ctypes
import faulthandler
import multiprocessing
import re
import resource
import signal
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.fake_device.device import SOURCE, FakeDevice, why_not
from tests.fake_device.process import OnDevice
from tests.training import grad_of


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


def _values(device: FakeDevice) -> tuple[list[float], list[float]]:
    def compute(where: str) -> list[float]:
        torch.manual_seed(0)
        x = torch.randn(5, 7).to(where).requires_grad_()
        layer = torch.nn.Sequential(torch.nn.Linear(7, 3), torch.nn.LayerNorm(3)).to(where)
        loss = layer(x).square().sum()
        loss.backward()
        flat = [grad_of(tensor) for tensor in (*layer.parameters(), x)]
        torch._foreach_mul_(flat, 0.5)
        out = torch.empty(0, device=where)
        torch.cat([grad.reshape(-1) for grad in flat], out=out)
        view = out[3:9].view(2, 3).t()
        view.add_(1)
        return [loss.item(), *out.tolist(), *view.flatten().tolist(), view._version]

    return compute("cuda"), compute("cpu")


def test_operators_compute_what_the_cpu_does(on_device: OnDevice) -> None:
    """Values, views, outputs that grow, versions: what a step decides on the host is decided on real numbers.

    To the last bits: a layer's gradient is made of other operators there.
    """
    here, there = on_device(_values)
    assert here == pytest.approx(there, rel=1e-4, abs=1e-5)


def _places(device: FakeDevice) -> dict[str, bool]:
    second = torch.ones(3, device="cuda:1")
    param = torch.nn.Parameter(torch.ones(3, device="cuda"))
    before = torch.accelerator.current_device_index()
    with torch.accelerator.device_index(1):
        inside = torch.empty(1, device="cuda").device.index
    return {
        "types": (type(second), type(param)) == (torch.Tensor, torch.nn.Parameter),
        "devices": ((second * 2).device.index, before, inside) == (1, 0, 1),
        "addresses": len({second.data_ptr(), param.data_ptr(), second[1:].data_ptr(), 0}) == 4,
        "aligned": second.data_ptr() % 512 == 0,
        "pinned": torch.empty(1, pin_memory=True).is_pinned() and not torch.empty(1).is_pinned(),
        "accelerator": torch.accelerator.current_accelerator() == torch.device("cuda"),
    }


def test_tensors_look_as_on_a_gpu(on_device: OnDevice) -> None:
    """Plain tensors, at addresses of their own, on two devices."""
    assert all(on_device(_places).values())


def _view(tensor: Tensor) -> Any:
    return np.ctypeslib.as_array((ctypes.c_float * 4).from_address(tensor.data_ptr()))


TOUCHES: dict[str, Callable[[Tensor], Any]] = {
    "ctypes reads": lambda tensor: ctypes.c_float.from_address(tensor.data_ptr()).value,
    "numpy reads": lambda tensor: float(_view(tensor).sum()),
    "memcpy reads": lambda tensor: ctypes.memmove(ctypes.create_string_buffer(16), tensor.data_ptr(), 16),
    "memcpy writes": lambda tensor: ctypes.memmove(tensor.data_ptr(), bytes(16), 16),
    "memset writes": lambda tensor: ctypes.memset(tensor.data_ptr(), 0, 16),
}
"""What host code does with an address."""


def _touch(touch: Callable[[Tensor], Any], tensor: Tensor) -> None:
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    touch(tensor)


def _ends(device: FakeDevice) -> dict[str, tuple[int | None, int | None]]:
    """Return how processes end that touch memory of the device, and pinned memory."""
    here, pinned = torch.ones(8, device="cuda")[2:], torch.ones(4, pin_memory=True)
    context, found = multiprocessing.get_context("fork"), {}
    for name, touch in TOUCHES.items():
        processes = [context.Process(target=_touch, args=(touch, tensor)) for tensor in (here, pinned)]
        for process in processes:
            process.start()
            process.join()
        found[name] = processes[0].exitcode, processes[1].exitcode
    return found


def test_host_code_that_touches_memory_of_the_device_dies(on_device: OnDevice) -> None:
    """As on a GPU: a host kernel that is handed an address of the device does not work by chance."""
    assert on_device(_ends) == dict.fromkeys(TOUCHES, (-signal.SIGSEGV, 0))


def _read_here(device: FakeDevice) -> None:
    _touch(TOUCHES["ctypes reads"], torch.ones(1, device="cuda"))


def test_such_a_death_is_told(on_device: OnDevice) -> None:
    """The error says what may have been; other calls go on."""
    with pytest.raises(BrokenProcessPool, match="host code touched memory of the device"):
        on_device(_read_here)
    assert all(on_device(_places).values())


def _moved() -> dict[str, list[float]]:
    """Return values of what changes its storage."""
    grown, storage, other = torch.arange(4.0, device="cuda"), torch.arange(4.0, device="cuda"), torch.Tensor().cuda()
    grown.resize_(1000)
    storage.untyped_storage().resize_(8)
    other.set_(torch.arange(4.0, device="cuda").untyped_storage(), 1, (2,), (1,))
    return {"grown": grown[:4].tolist(), "other": other.tolist(), "shrunk": storage[:2].tolist()}


def _moved_in(device: FakeDevice, order: str) -> dict[str, list[float]]:
    with device.running(order):
        return _moved()


@pytest.mark.parametrize("order", ["at once", "late"])
def test_storage_moves_on_the_device(on_device: OnDevice, order: str) -> None:
    """Tensors that grow, storages that shrink or are shared: torch's own way would copy them on the host."""
    expected = {"grown": [0.0, 1.0, 2.0, 3.0], "other": [1.0, 2.0], "shrunk": [0.0, 1.0]}
    assert on_device(_moved_in, order) == expected


def _mixed(device: FakeDevice) -> list[str]:
    here, host = torch.ones(3, device="cuda"), torch.ones(3)
    messages = []
    for mix in (lambda: here.add_(host), lambda: torch._foreach_add_([here], [host])):
        with pytest.raises(RuntimeError) as caught:
            mix()
        messages.append(str(caught.value))
    return messages


def test_a_tensor_of_the_host_among_those_of_the_device_is_refused(on_device: OnDevice) -> None:
    """As on a GPU, where only numbers may lie in host memory."""
    assert all("on the same device" in message for message in on_device(_mixed))


def _operators(device: FakeDevice) -> tuple[list[str], list[str]]:
    params = [torch.ones(3, device="cuda") for _ in range(2)]
    with device.watch() as seen:
        torch._foreach_mul_(params, 2.0)
        torch.nn.functional.layer_norm(params[0], (3,))
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    tables = {name: torch._C._dispatch_dump_table(name) for name in names if name.startswith("aten::")}
    entries = {name: re.search("^CUDA: .*", table, re.MULTILINE) for name, table in tables.items()}
    return seen.of("operator"), [name for name, entry in entries.items() if entry and SOURCE.name not in entry[0]]


def test_each_build_of_torch_runs_the_same_operators(on_device: OnDevice) -> None:
    """A build with CUDA has kernels that make one operator of many: none is reached, so counts do not depend on it."""
    operators, of_torch = on_device(_operators)
    assert operators == ["aten::mul.out", "aten::mul.out", "aten::native_batch_norm"]
    assert of_torch == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("accelerator.is_available", lambda: True), ("version.hip", "7.2"), ("__file__", "/nowhere/torch/__init__.py")],
)
def test_a_build_that_cannot_have_it_is_told_which_can(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that sees a device, one for AMD, where torch's hooks are laid out otherwise, and one without headers."""
    monkeypatch.setattr(f"torch.{name}", value)
    assert "pip install torch --index-url" in (why_not() or "")
