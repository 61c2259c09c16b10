"""offload() and reload() on a device that is not there: what stays on it, and who waits."""

import gc
import re
from typing import Any

import pytest
from torch import Tensor

from megascale import MixedPrecisionOptimizer
from megascale.errors import UsageError
from megascale.grad_sync import GradSync
from tests.fake_device.device import FakeDevice
from tests.fake_device.models import CONFIG, adamw, loss_of, model
from tests.fake_device.process import OnDevice
from tests.fake_device.record import Record
from tests.fake_device.training import CODES, INNER, give_grads, parameters, scaler, wrap
from tests.training import bits_equal

COUNT, NUMEL = 5, 4096
MODELS = 2 * COUNT * NUMEL


def _device_bytes() -> int:
    """Return the bytes of all storages on the device that a tensor still refers to."""
    gc.collect()
    sizes = {}
    for one in gc.get_objects():
        if issubclass(type(one), Tensor) and one.device.type == "cuda":
            storage = one.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _trip(device: FakeDevice, options: dict[str, Any]) -> tuple[list[int], list[Record]]:
    """Return the device's bytes before offload(), after it and after reload(); and what the two calls asked of it."""
    params = parameters(COUNT, numel=NUMEL)
    optimizer = wrap(INNER["adamw"](params), **options)
    give_grads(params)
    optimizer.step()
    optimizer.zero_grad()
    found, records = [_device_bytes()], []
    for call in (optimizer.offload, optimizer.reload):
        with device.watch() as seen:
            call()
        records.append(seen)
        found.append(_device_bytes())
    give_grads(params)
    optimizer.step()
    return found, records


@pytest.mark.default("remainders", "fp32")
@pytest.mark.parametrize(
    ("options", "state"),
    [
        ({}, 12),
        ({"store_param_remainders": True}, 10),
        (CODES, 4 + 2),
        ({"store_param_remainders": True, **CODES}, 2 + 2),
    ],
    ids=["fp32", "remainders", "codes", "both"],
)
def test_what_stays_on_the_device(on_device: OnDevice, options: dict[str, Any], state: int) -> None:
    """Main params and moments leave: of 2 + 12 bytes per parameter the weights' 2 stay, and what does not grow."""
    (before, away, back), _ = on_device(_trip, options)
    assert before - away >= state * COUNT * NUMEL
    assert MODELS <= away < MODELS + 8192  # the codes' tables stay
    assert back == pytest.approx(before, abs=16384)


def test_who_waits(on_device: OnDevice) -> None:
    """The host waits once, for the copies to end; the way back waits for nothing. All copies are of pinned memory."""
    _, (leaving, returning) = on_device(_trip, {})
    assert [line for line in leaving.syncs() if not line.startswith("wait stream")] == []
    assert len(leaving.syncs()) == 1
    assert returning.syncs() == []
    assert len(leaving.of("copy")) == len(returning.of("copy")) > 0
    assert all(what.endswith("async pinned") for what in (*leaving.of("copy"), *returning.of("copy")))


def _move(optimizer: MixedPrecisionOptimizer, where: str) -> None:
    """Move the state as loops for SkyRL and Lightning do, tensor by tensor."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            entries = optimizer.state[param]
            for name, value in entries.items():
                if isinstance(value, Tensor) and name != "step":
                    entries[name] = value.to(where, non_blocking=True)


def _moved_by_a_loop(device: FakeDevice, options: dict[str, Any]) -> tuple[str, list[bool]]:
    """Return the error of a step while the state is on the host, and whether bits agree at last."""
    runs = []
    for moves in (True, False):
        params = parameters(COUNT, numel=NUMEL)
        optimizer = wrap(INNER["adamw"](params), **options)
        error = ""
        for step in range(3):
            give_grads(params)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 and moves:
                _move(optimizer, "cpu")
                give_grads(params)
                with pytest.raises(UsageError) as caught:
                    optimizer.step()
                error = str(caught.value)
                optimizer.zero_grad()
                _move(optimizer, "cuda")
        state = optimizer.state_dict()
        tensors = [value for entries in state["optimizer"]["state"].values() for value in entries.values()]
        runs.append((error, [value.cpu() for value in (*state["main_params"].values(), *tensors)]))
    (error, moved), (_, stayed) = runs
    return error, [bits_equal(one, other) for one, other in zip(moved, stayed, strict=True)]


@pytest.mark.default("fp32")
@pytest.mark.parametrize("options", [{}, CODES], ids=["fp32", "codes"])
def test_a_loop_that_moves_the_state_by_itself(on_device: OnDevice, options: dict[str, Any]) -> None:
    """A step meanwhile is an error that names offload(), and once the state is back no bit has changed."""
    error, same = on_device(_moved_by_a_loop, options)
    assert re.search(r"state\['0'\]\['\w+'\] is .* on cpu, .* on cuda:0; .* let optimizer.offload\(\)", error)
    assert all(same)


def _main_grads(device: FakeDevice) -> list[int]:
    module = model()
    sync = GradSync(module.named_parameters())
    optimizer = MixedPrecisionOptimizer(adamw(module), CONFIG, scaler(), grad_sync=sync)
    loss = loss_of(module)
    optimizer.scale_loss(loss()).backward()
    optimizer.step()
    found = []
    for zeroed in (False, True):
        if zeroed:
            optimizer.zero_grad()
        with device.watch() as seen:
            optimizer.offload()
        found.append(sum(bucket.memory.flat.untyped_storage().nbytes() for bucket in sync.buckets))
        found.append(len(seen.of("copy")))
        optimizer.reload()
    optimizer.scale_loss(loss()).backward()
    optimizer.step()
    return found


def test_main_grads_leave(on_device: OnDevice) -> None:
    """Main grads have no memory on the device meanwhile; after zero_grad() they are not copied."""
    kept, copies, kept_zeroed, copies_zeroed = on_device(_main_grads)
    assert kept == kept_zeroed == 0
    assert copies_zeroed == copies - 1
