"""Slots that gradients share in host memory: how many bytes, what travels when, and whom the caller waits for."""

import threading
import time
from collections.abc import Sequence
from concurrent import futures
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale import MixedPrecisionOptimizer
from megascale.main_params import update_unit
from megascale.main_params.grad_copies import GradCopies
from megascale.main_params.main_param import MainParam
from megascale.main_params.weight_arrivals import WeightArrivals
from megascale.step.host_update import HostUpdate
from tests.cases import cases
from tests.fake_device.device import FakeDevice
from tests.fake_device.lives import (
    ACTIONS,
    COUNT,
    OVERLAP,
    SLOTS,
    WIDTH,
    Life,
    Trained,
    backward,
    lived,
    model_of_life,
    optimizer_of,
    steps_and,
)
from tests.fake_device.orders import differs
from tests.fake_device.process import OnDevice
from tests.fake_device.record import Record
from tests.training import bits_equal

LIMITS = {None: 4, 4: 4, 3: 1, 2: 0}
"""By the limit in units of 512 bytes, which each gradient takes: how many gradients have memory of their own."""


def _way(limit: int | None) -> dict[str, Any]:
    return OVERLAP if limit is None else OVERLAP | {"optimizer_offload_grad_bytes": 512 * limit}


def _trained(way: dict[str, Any], held: str = "replicated") -> tuple[nn.Sequential, MixedPrecisionOptimizer, Tensor]:
    update_unit.SLICE = 1
    model = model_of_life()
    batch = torch.ones(2, WIDTH, dtype=torch.float16, device="cuda")
    return model, optimizer_of(model, Life(held, way), way), batch


def _copies(seen: Record) -> int:
    sizes = tuple(f"{size * WIDTH * WIDTH} from async pinned" for size in (2, 4))
    return sum(what.startswith(sizes) for what in seen.of("copy"))


def _steps(
    device: FakeDevice, limit: int | None, held: str
) -> list[tuple[int, int, list[list[str]], list[str], int, set[int]]]:
    """Return, of each step: the gradients that travel in backward and in step(); whose updates the caller waited for;
    what of the device it waited for; the bytes of pinned memory that gradients have, and where they are.
    """
    model, optimizer, batch = _trained(_way(limit), held)
    awaited: list[list[str]] = []
    inner = WeightArrivals.wait_until_read

    def noted(own: WeightArrivals, params: Sequence[MainParam]) -> None:
        awaited.append([param.name for param in params])
        inner(own, params)

    found = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(WeightArrivals, "wait_until_read", noted)
        for _ in range(3):
            optimizer.zero_grad()
            loss = optimizer.scale_loss(model(batch).float().square().mean())
            with device.watch() as backward:
                loss.backward()
            with device.watch() as step:
                optimizer.step()
            caller = threading.get_ident()
            waits = [str(call) for call in step if call.makes_host_wait() and call.thread == caller]
            optimizer.finish_param_gather()
            grads = [param.twin.grad for param in optimizer._member.main_params if param.twin is not None]
            storages = {grad.untyped_storage().data_ptr(): grad.untyped_storage() for grad in grads if grad is not None}
            assert all(grad is not None and grad.is_pinned() for grad in grads)
            held_bytes = sum(storage.nbytes() for storage in storages.values())
            places = {grad.data_ptr() for grad in grads if grad is not None}
            found.append((_copies(backward), _copies(step), awaited.copy(), waits, held_bytes, places))
            awaited.clear()
    return found


HOLDERS = ("replicated", "synced", "elements", "parameters")


@pytest.mark.parametrize(
    ("held", "limit"),
    cases(HOLDERS, LIMITS, quick=lambda *case: case == ("replicated", 3), rest=pytest.mark.slow),
)
def test_what_travels_and_who_waits(on_device: OnDevice, held: str, limit: int | None) -> None:
    """Gradients with memory of their own travel in backward, and others in step(), which waits for the updates of those
    units that share slots, but for the last two; without a limit for none. Never for the device. The memory stays
    within the limit, and where it is.
    """
    own = LIMITS[limit]
    steps = on_device(_steps, limit, held)
    names = [f"{at}.weight" for at in range(COUNT)]
    for at, (in_backward, in_step, awaited, waits, nbytes, places) in enumerate(steps):
        assert (in_backward, in_step) == ((0, COUNT) if at == 0 else (own, COUNT - own))
        assert awaited == [[name] for name in names[: max(0, COUNT - own - 2)]]
        assert waits == []
        assert nbytes <= 512 * (limit or COUNT)
        assert len(places) == own + min(2, COUNT - own)
        assert places == steps[0][-1]


def _gated(limit: int, *, waits: bool) -> bool:
    """Return whether main params are right after steps whose updates begin late: where nobody waits, after step()."""
    lives = []
    for way in ({}, _way(limit)):
        model, optimizer, batch = _trained(way)
        gate = threading.Event()
        update = optimizer._member.update
        with pytest.MonkeyPatch.context() as patched:
            if isinstance(update, HostUpdate):
                inner = update._host.apply

                def late(*arguments: Any, inner: Any = inner, gate: threading.Event = gate) -> Any:
                    if waits:
                        time.sleep(0.005)
                    else:
                        assert gate.wait(60)
                    return inner(*arguments)

                patched.setattr(update._host, "apply", late)
                if not waits:
                    patched.setattr(WeightArrivals, "wait_until_read", lambda *_: None)
            for _ in range(2):
                optimizer.zero_grad()
                gate.clear()
                optimizer.scale_loss(model(batch).float().square().mean()).backward()
                optimizer.step()
                gate.set()
                optimizer.finish_param_gather()
        lives.append([main.cpu().clone() for _, main in optimizer.main_params()])
    return all(map(bits_equal, *lives))


def _with_and_without(_: FakeDevice) -> list[bool]:
    return [_gated(3, waits=True), _gated(3, waits=False), _gated(4, waits=False)]


def test_a_slot_is_awaited(on_device: OnDevice) -> None:
    """Without the wait for the thread a gradient would be overwritten before its update; no wait is needed where each
    has memory of its own.
    """
    assert on_device(_with_and_without) == [True, False, True]


def _late_freeze(trained: Trained) -> list[Tensor]:
    """A parameter is frozen between backward and step: units are made anew."""
    trained[1].zero_grad()
    backward(trained)
    trained[0][1].weight.requires_grad_(False)
    return list(trained[1].step()[:2])


def _not_forgotten(device: FakeDevice) -> tuple[bool, bool]:
    life = Life("replicated", SLOTS, ("step", "step", "late freeze", "step"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(ACTIONS, "late freeze", _late_freeze)
        expected = lived(life, {})
        right = not differs(device, lived, life, expected, ("late", 0))
        patched.setattr(GradCopies, "forget", lambda _: None)
        return right, not differs(device, lived, life, expected, ("late", 0))


@pytest.mark.slow
def test_copies_into_memory_from_before_do_not_count(on_device: OnDevice) -> None:
    """Where memory is assigned anew in step(), gradients that have travelled in backward travel again."""
    assert on_device(_not_forgotten) == (True, False)


def _too_little(_: FakeDevice, limit: int) -> tuple[str, bool]:
    """Return the error of the first step, and whether it has left all values as they were."""
    model, optimizer, batch = _trained(_way(None) | {"optimizer_offload_grad_bytes": limit})
    before = [value.clone() for value in model.state_dict().values()]
    optimizer.scale_loss(model(batch).float().square().mean()).backward()
    scale = optimizer.get_loss_scale()
    with pytest.raises(Exception, match="optimizer_offload_grad_bytes") as caught:
        optimizer.step()
    after = [*model.state_dict().values(), optimizer.get_loss_scale()]
    return str(caught.value), all(map(bits_equal, after, [*before, scale]))


def test_too_little(on_device: OnDevice) -> None:
    """The first step names the bytes that would do, and changes nothing."""
    message, is_unchanged = on_device(_too_little, 1023)
    assert is_unchanged
    assert message == (
        "optimizer_offload_grad_bytes=1023 is too little: copies of gradients take at least 1024 bytes of host memory "
        "here; give 1024 or more, or None for memory of its own for each gradient"
    )


def _measured(device: FakeDevice) -> int:
    """Return how many waits a step has measured, each of whose updates begins only when somebody waits for one."""
    model, optimizer, batch = _trained(_way(2) | {"optimizer_offload_fraction": "auto"})
    arrivals, update = optimizer._member.main_params.arrivals, optimizer._member.update
    assert arrivals is not None
    assert arrivals.meter is not None
    assert isinstance(update, HostUpdate)
    inner, wait, permits = update._host.apply, futures.wait, threading.Semaphore(0)

    def late(*arguments: Any) -> Any:
        assert permits.acquire(timeout=60)
        return inner(*arguments)

    def permitting(*arguments: Any) -> Any:
        permits.release()
        return wait(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(update._host, "apply", late)
        patched.setattr(futures, "wait", permitting)
        optimizer.zero_grad()
        optimizer.scale_loss(model(batch).float().square().mean()).backward()
        optimizer.step()
        count = len(arrivals.meter._records[-1].waits)
        permits.release(2)
        optimizer.finish_param_gather()
    return count


@pytest.mark.slow
def test_the_waits_are_measured(on_device: OnDevice) -> None:
    """A fraction of "auto" takes the waits for slots into account: they are not hidden."""
    assert on_device(_measured) == COUNT - 2


def _with_error(device: FakeDevice) -> list[str]:
    """Return what steps raise after one whose second update fails in the thread, while the caller waits."""
    model, optimizer, batch = _trained(_way(2))
    update = optimizer._member.update
    assert isinstance(update, HostUpdate)
    inner, calls, told = update._host.apply, [0], []

    def failing(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise RuntimeError("no such arithmetic")
        return inner(*arguments)

    for at in range(3):
        optimizer.zero_grad()
        optimizer.scale_loss(model(batch).float().square().mean()).backward()
        update._host.apply = failing if at == 0 else inner  # type: ignore[method-assign, assignment]
        try:
            optimizer.step()
            told.append("")
        except Exception as error:
            told.append(str(error))
        optimizer.finish_param_gather()
    return told


@pytest.mark.slow
def test_an_error_in_the_thread_is_told_at_the_next_step(on_device: OnDevice) -> None:
    """The caller, who waits for slots meanwhile, goes on to the end of the step."""
    first, second, third = on_device(_with_error)
    assert (first, third) == ("", "")
    assert second.startswith("the update of the step before failed in host memory, RuntimeError: no such arithmetic")


@pytest.mark.slow
@pytest.mark.parametrize("order", ["late", "side first"])
def test_slots_without_pinned_memory(on_device: OnDevice, order: str) -> None:
    """Pageable slots have the same bits."""
    assert on_device(_pageable, order)


def _pageable(device: FakeDevice, order: str) -> bool:
    life = Life("replicated", SLOTS | {"pin_cpu_grads": False}, steps_and("read"))
    return not differs(device, lived, life, lived(life, {}), (order, 0))
