"""GradScaler's steps on a device that is not there: with a fused optimizer nobody waits."""

import inspect
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from megascale import amp
from tests.fake_device.device import FakeDevice
from tests.fake_device.process import OnDevice
from tests.fake_device.record import Record
from tests.fake_device.training import give_grads, parameters

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, fused=True),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}
KINDS = [pytest.param(one, marks=() if one == "adamw" else pytest.mark.slow) for one in OPTIMIZERS]


def _train(device: FakeDevice, kind: str, unscales: bool) -> list[Record]:
    params = parameters(6, torch.float32)
    optimizer, scaler, look = OPTIMIZERS[kind](params), amp.GradScaler("cuda"), Mock(wraps=inspect.signature)
    pytest.MonkeyPatch().setattr(inspect, "signature", look)  # in a process of this test alone
    scaler.scale(torch.ones((), device="cuda"))
    records = []
    for _ in range(4):
        give_grads(params)
        with device.watch() as seen:
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        records.append(seen)
    assert [call.args[0].__name__ for call in look.call_args_list].count("step") == 1  # it takes as long as a launch
    return records


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_optimizer_waits_for_nothing(on_device: OnDevice, kind: str, unscales: bool) -> None:
    """``unscale_``, ``step`` and ``update``: no sync, the first time too, and one update by torch's fused kernel."""
    records = on_device(_train, kind, unscales)
    assert [seen.syncs() for seen in records] == [[]] * 4
    assert [sum(name.startswith("aten::_fused_") for name in seen.of("operator")) for seen in records] == [1] * 4


def _clip(device: FakeDevice) -> list[Record]:
    params = parameters(6, torch.float32)
    optimizer, scaler, look = OPTIMIZERS["adamw"](params), amp.GradScaler("cuda"), Mock(wraps=inspect.signature)
    pytest.MonkeyPatch().setattr(inspect, "signature", look)  # in a process of this test alone
    records = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.stack([param.sum() for param in params]).sum()
        with device.watch() as seen:
            amp.optimizer_step(loss, optimizer, scaler, max_gradient_norm=1.0)
        records.append(seen)
    assert [call.args[0].__name__ for call in look.call_args_list].count("step") == 1
    return records


def test_clipping_in_the_same_step(on_device: OnDevice) -> None:
    """``amp.optimizer_step`` with a norm: backward, clip and one update by our kernel, without a sync."""
    records = on_device(_clip)
    assert [seen.syncs() for seen in records] == [[]] * 3
    assert [seen.launches().count("update_kernel") for seen in records] == [1] * 3


def _plain(device: FakeDevice) -> list[Record]:
    params = parameters(6, torch.float32)
    optimizer, scaler = torch.optim.AdamW(params, lr=1e-3, foreach=True, capturable=True), amp.GradScaler("cuda")
    scaler.scale(torch.ones((), device="cuda"))
    records = []
    for _ in range(3):
        give_grads(params)
        with device.watch() as seen:
            scaler.step(optimizer)
            scaler.update()
        records.append(seen)
    return records


def test_any_other_optimizer_costs_one_host_read(on_device: OnDevice) -> None:
    """As documented, and as torch's."""
    assert [len(seen.syncs()) for seen in on_device(_plain)] == [1] * 3
