"""Gradients that travel to host memory while backward runs: when, who waits, and which of them count."""

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale import MixedPrecisionOptimizer
from megascale.errors import GradientError
from megascale.grad_sync import GradSync
from megascale.main_params.grad_copies import GradCopies
from megascale.step.host_update import HostUpdate
from tests.fake_device.device import FakeDevice
from tests.fake_device.process import OnDevice
from tests.fake_device.record import Record
from tests.fake_device.training import COUNT, OVERLAP, WIDTH, layers, optimizer_of
from tests.host_kernel import change_host_kernel
from tests.training import bits_equal

RUNS = [("at once", 0), ("late", 0), ("side first", 0), *(("random", seed) for seed in range(8))]
Trained = tuple[nn.Sequential, MixedPrecisionOptimizer, Tensor]
"""A model, its optimizer, a batch."""


def _trained(held: str = "replicated", *, offload: bool = True) -> Trained:
    model = layers()
    batch = torch.ones(2, WIDTH, dtype=torch.float16, device="cuda")
    return model, optimizer_of(model, held, **(OVERLAP if offload else {})), batch


def _copies(seen: Record) -> int:
    """Return how many gradients travel: in 16 bits, or main grads."""
    sizes = [f"{size * WIDTH * WIDTH} from async pinned" for size in (2, 4)]
    return sum(what.startswith(tuple(sizes)) for what in seen.of("copy"))


HELD = [("replicated", 1), ("synced", 1), ("elements", 1), ("parameters", 1), ("synced", 2)]
"""How parameters are held, and the number of ranks, whose reductions end on a stream of the device."""


WITH_SLOW = ["replicated", *(pytest.param(held, marks=pytest.mark.slow) for held in ("synced", "elements"))]


def _steps(
    device: FakeDevice, passes: list[int], held: str = "replicated"
) -> tuple[list[list[int]], list[str], set[int]]:
    """Return, for each step, the gradients that travel in each of its passes and in step(); what waited; of where."""
    model, optimizer, batch = _trained(held)
    sync: Any = optimizer._member.grad_sync
    found, waits, streams = [], [], set()
    for number in passes:
        optimizer.zero_grad()
        counts = []
        for at in range(number):
            loss = model(batch).float().square().mean()
            is_held = isinstance(sync, GradSync) and at < number - 1
            with device.watch() as seen, sync.no_sync() if is_held else nullcontext():
                optimizer.scale_loss(loss).backward()
            counts.append(_copies(seen))
            waits += seen.syncs()
            streams |= {call.stream[1] for call in seen if call.kind == "copy" and " from " in call.what}
        with device.watch() as seen:
            optimizer.step()
        waits += [str(call) for call in seen if call.makes_host_wait() and call.thread == threading.get_ident()]
        optimizer.finish_param_gather()
        found.append([*counts, _copies(seen)])
    return found, waits, streams


@pytest.mark.parametrize(
    ("held", "ranks"),
    [pytest.param(*one, marks=() if one in (HELD[0], HELD[-1]) else pytest.mark.slow) for one in HELD],
)
def test_gradients_travel_in_backward(on_device: OnDevice, held: str, ranks: int) -> None:
    """From the second step on, when their size is known: each once, on another stream; nobody waits."""
    every = [on_device(_steps, [1, 1, 1], held)] if ranks == 1 else on_device.ranks(ranks, _steps, [1, 1, 1], held)
    assert len(every) == ranks
    for found, waits, streams in every:
        assert found == [[0, COUNT], [COUNT, 0], [COUNT, 0]]
        assert waits == []
        assert len(streams) == 1
        assert 0 not in streams


def test_micro_batches(on_device: OnDevice) -> None:
    """They travel with the pass that was the last one in the step before, and again with each pass after that."""
    found, _, _ = on_device(_steps, [2, 2, 2, 1, 1, 3])
    assert found == [
        [0, 0, COUNT],
        [0, COUNT, 0],
        [0, COUNT, 0],
        [0, COUNT],
        [COUNT, 0],
        [COUNT, COUNT, COUNT, 0],
    ]


def test_micro_batches_of_main_grads(on_device: OnDevice) -> None:
    """A GradSync knows the last pass, which reduces: they travel with that, once, however many there were before."""
    found, _, _ = on_device(_steps, [2, 2, 1, 3], "synced")
    assert found == [[0, 0, COUNT], [0, COUNT, 0], [COUNT, 0], [0, 0, COUNT, 0]]


def _write_uncounted(trained: Trained) -> None:
    module, optimizer, _ = trained
    if isinstance(sync := optimizer._member.grad_sync, GradSync):
        sync.finish()
    for param in module.parameters():
        grad = sync.local_grad(param) if isinstance(sync, GradSync) else param.grad
        if grad is not None:
            grad.data.mul_(2)


def _with_a_write(held: str, offload: bool) -> tuple[bool, list[Tensor]]:
    """Return whether a step after one with uncounted writes is refused, and the main params before it."""
    model, optimizer, batch = _trained(held, offload=offload)
    for at in range(3):
        optimizer.zero_grad()
        optimizer.scale_loss(model(batch).float().square().mean()).backward()
        if at == 2:
            _write_uncounted((model, optimizer, batch))
        optimizer.step()
    left = [main.cpu().clone() for _, main in optimizer.main_params()]
    optimizer.zero_grad()
    optimizer.scale_loss(model(batch).float().square().mean()).backward()
    try:
        optimizer.step()
    except GradientError as error:
        optimizer.step()
        return "a gradient was written after backward in a way that torch does not count" in str(error), left
    return False, left


def _outcomes(device: FakeDevice, held: str) -> list[str]:
    _, expected = _with_a_write(held, False)
    found = []
    for order, seed in RUNS:
        with device.running(order, seed):
            is_told, left = _with_a_write(held, True)
        is_right = all(map(bits_equal, left, expected))
        found.append("told" if is_told else "right" if is_right else "wrong")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("held", WITH_SLOW)
def test_a_write_that_nobody_counts(on_device: OnDevice, held: str) -> None:
    """Through ``grad.data``: if the gradient has travelled before, nothing is updated, and the next step says so."""
    at_once, *others = on_device(_outcomes, held)
    assert at_once == "told"
    assert set(others) <= {"told", "right"}


def _read_meanwhile(device: FakeDevice) -> tuple[int, int]:
    """Return how many gradients travel in backward while the thread has yet to read those before, and afterwards."""
    model, optimizer, batch = _trained()
    loss = model(batch).float().square().mean()

    def backward() -> int:
        optimizer.zero_grad()
        with device.watch() as seen:
            optimizer.scale_loss(loss).backward(retain_graph=True)
        return _copies(seen)

    for _ in range(2):
        backward()
        optimizer.step()
        optimizer.finish_param_gather()
    gate = threading.Event()

    def late(kernel: Callable[..., object], *arguments: object) -> object:
        assert gate.wait(60)
        return kernel(*arguments)

    change_host_kernel(optimizer, late)
    backward()
    optimizer.step()
    meanwhile = backward()
    gate.set()
    optimizer.finish_param_gather()
    return meanwhile, backward()


def test_what_the_thread_reads_is_not_overwritten(on_device: OnDevice) -> None:
    """A backward without a forward, before the update of the step before: its gradients travel with the next step."""
    assert on_device(_read_meanwhile) == (0, COUNT)


def _dropped(device: FakeDevice, held: str) -> tuple[bool, int]:
    model, optimizer, batch = _trained(held)
    update, sync = optimizer._member.update, optimizer._member.grad_sync
    assert isinstance(update, HostUpdate)
    assert isinstance(update._copies, GradCopies)
    copies = weakref.ref(update._copies)
    del update, optimizer
    gc.collect()
    model(batch).float().sum().backward()
    hooks = [param._post_accumulate_grad_hooks for param in model.parameters()]
    if isinstance(sync, GradSync):  # its own hooks are those of the parameters
        hooks = list(sync._reduced_hooks.values())
    return copies() is None, sum(map(len, filter(None, hooks)))


@pytest.mark.parametrize("held", ["replicated", "synced"])
def test_what_is_dropped_is_gone(on_device: OnDevice, held: str) -> None:
    """Invariant 11: no hook is left at the parameters, or at a GradSync that lives longer."""
    assert on_device(_dropped, held) == (True, 0)
