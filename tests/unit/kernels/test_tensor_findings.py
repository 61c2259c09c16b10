"""What was found out about tensors is forgotten once one of them changes."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.kernels import ParamList
from megascale.kernels.tensors import tensor_reader
from megascale.main_params.main_param import MainParam
from megascale.main_params.write_tracker import WriteTracker
from tests.training import bits_equal
from tests.unit.kernels.test_tensor_reader import CODES

# The first of them may have to compile the library, which takes half a minute.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("native_reader")]


class _Owner:
    """Who finds out something."""


def _turned(param: nn.Parameter) -> None:
    param.data = torch.zeros(3, 2).t()


CHANGES: list[Callable[[nn.Parameter], object]] = [
    lambda p: setattr(p, "data", torch.zeros(2, 3)),
    lambda p: setattr(p, "data", torch.zeros(3, 2)),
    lambda p: setattr(p, "data", p.data.double()),
    _turned,
    lambda p: p.requires_grad_(False),
    lambda p: setattr(p, "grad", None),
    lambda p: setattr(p, "grad", torch.ones(3, 2).t()),
    lambda p: p.untyped_storage().resize_(0),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", [0, 4, 9])
def test_what_was_found_out_is_forgotten_when_a_tensor_changes(
    place: int, change: Callable[[nn.Parameter], object]
) -> None:
    """It is kept while torch writes and gradients move, and gone after any other change of a parameter or gradient."""
    params, room, owner = [nn.Parameter(torch.zeros(2, 3)) for _ in range(10)], tensor_reader.Room(), _Owner()
    for param in params:
        param.grad = torch.ones(2, 3)
    held = list(params)

    def found() -> dict[str, Any]:
        return ParamList(held, room=room).findings(owner)

    found()["answer"] = 42
    with torch.no_grad():
        params[place].add_(1)
    grads = [param.grad for param in params]  # alive: what comes later lies elsewhere
    memory = [param.data for param in params]
    params[place].grad = torch.ones(2, 3)
    assert found() == {"answer": 42}
    assert ParamList(held, room=room).findings(_Owner()) == {}
    change(params[place])
    assert found() == {}
    assert found() == {}
    del grads, memory


def test_what_was_found_out_is_forgotten_when_a_walk_fails() -> None:
    """Memory that may not be written ends the look at its tensor: what changed beside it counts all the same."""
    params, room, owner = [nn.Parameter(torch.zeros(3)) for _ in range(5)], tensor_reader.Room(), _Owner()
    params[1].grad, own = torch.ones(3), params[1].data
    held = list[Tensor](params)
    ParamList(held, room=room).findings(owner)["answer"] = 42
    locked = torch.zeros(3)
    torch._C._set_throw_on_mutable_data_ptr(locked)
    params[1].data, params[1].grad = locked, None
    assert ParamList(held, room=room).findings(owner) == {}
    params[1].data = own
    assert ParamList(held, room=room).findings(owner) == {}


def test_what_was_found_out_lets_go_of_memory() -> None:
    """A step's own findings hold neither an array that was read into nor a gradient."""
    watch = WriteTracker([nn.Parameter(torch.zeros(3)) for _ in range(5)])
    params = list(watch._tracked.params)
    gone: list[weakref.ref[Tensor]] = []
    addresses: set[int] = set()
    owner, others = _Owner(), list[bytearray]()
    for _ in range(4):
        for param in params:
            param.grad = torch.ones(3)
        snapshot = watch.snapshot()
        assert isinstance(snapshot, ParamList)
        assert watch.written(snapshot) == []
        grads = snapshot.grads(params, slice(None), owner)
        assert grads.fit()
        assert grads.dtype_codes(CODES).tolist() == [0] * 5
        addresses.add(snapshot.versions.ctypes.data)
        gone += [weakref.ref(param.grad) for param in params if param.grad is not None]
        for param in params:
            param.grad = None
        del snapshot, grads
        others += [bytearray(400) for _ in range(9)]  # would take what had been given back
    assert len(addresses) == 1
    assert all(reference() is None for reference in gone)


def test_gradients_that_no_longer_fit_are_found() -> None:
    """A gradient that becomes one of another kind, or of other memory, is looked at again; one that stays is not."""
    watch = WriteTracker([nn.Parameter(torch.zeros(3)) for _ in range(5)])
    params, owner = list(watch._tracked.params), _Owner()
    for param in params:
        param.grad = torch.ones(3)

    def fit() -> bool:
        snapshot = watch.snapshot()
        assert isinstance(snapshot, ParamList)
        return snapshot.grads(params, slice(None), owner).fit()

    assert [fit(), fit()] == [True, True]
    params[2].grad = torch._neg_view(torch.ones(3))
    assert [fit(), fit()] == [False, False]
    params[2].grad = torch.ones(3)
    assert fit()
    params[2].grad.untyped_storage().resize_(0)
    assert not fit()


def test_a_watch_that_takes_a_param_asks_again() -> None:
    """What a param was found to be is no longer so once it was taken as it is now, and once it has moved again."""
    param, rest = nn.Parameter(torch.zeros(3)), [nn.Parameter(torch.zeros(3)) for _ in range(4)]
    watch = WriteTracker([param, *rest])
    first, second = param.data, torch.zeros(3)
    assert not watch.moved(watch.snapshot())
    param.data = second
    assert watch.written(watch.snapshot()) == [0]
    assert watch.moved(watch.snapshot())
    watch.take(0)
    assert not watch.moved(watch.snapshot())
    param.data = first
    assert watch.moved(watch.snapshot())
    other = WriteTracker([nn.Parameter(first), *rest])
    assert watch.moved(watch.snapshot())
    watch.remember(0, other, 0)
    assert not watch.moved(watch.snapshot())


def _train(reader: str, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Ten steps with an overflow, a weight written outside, one that moves, a frozen one, and a missing gradient."""
    monkeypatch.setenv(tensor_reader.ENVIRONMENT_VARIABLE, reader)
    torch.manual_seed(0)
    params: list[nn.Parameter] = [nn.Parameter(torch.randn(index % 7 + 1).half()) for index in range(80)]
    groups: list[dict[str, Any]] = [{"params": params[:50]}, {"params": params[50:], "lr": 1e-2}]
    inner = torch.optim.AdamW(groups, lr=1e-3)
    scaler = DynamicGradScaler(2.0**8, 1.0, 2.0, 0.5, 3, 1)
    optimizer = MixedPrecisionOptimizer(inner, OptimizerConfig(fp16=True, clip_grad=1.0), scaler, grads_are_scaled=True)
    for step in range(10):
        for param in params:
            param.grad = torch.randn_like(param) if param.requires_grad else None
        match step:
            case 3:
                params[60].grad.fill_(float("inf"))  # type: ignore[union-attr]
            case 4:
                with torch.no_grad():
                    params[5].mul_(2)
            case 5:
                params[6].data = params[6].data.clone() + 1
            case 6:
                params[7].requires_grad_(False).grad = None
            case 7:
                inner.state[params[9]]["exp_avg"] = torch.ones_like(inner.state[params[9]]["exp_avg"])
            case _:
                pass
        optimizer.step()
    mains = [main for _, main in optimizer.main_params()]
    return [*params, *mains, *(t for state in inner.state.values() for t in state.values()), scaler.scale]


def test_training_is_the_same_bits_with_either_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others write, move, freeze or replace between steps is followed alike."""
    native, python = _train("native", monkeypatch), _train("python", monkeypatch)
    assert all(bits_equal(a, b) for a, b in zip(native, python, strict=True))
    assert native[-1].item() != 2.0**8


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("reader", ["native", "python"])
def test_own_writes_are_not_taken_for_those_of_others(reader: str, odd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a step, landed or skipped, nothing is to be followed; a write of another's is, once.

    Also where a gradient is laid out otherwise than its parameter, which torch then updates beside the kernels.
    """
    monkeypatch.setenv(tensor_reader.ENVIRONMENT_VARIABLE, reader)
    followed: list[str] = []
    follow = MainParam.sync_from_model

    def noted(self: MainParam) -> None:
        followed.append(self.name)
        follow(self)

    monkeypatch.setattr(MainParam, "sync_from_model", noted)
    params = [nn.Parameter(torch.randn(5).half()) for _ in range(60)]
    if odd:
        params[40] = nn.Parameter(torch.randn(4, 6).half().t())
    inner = torch.optim.AdamW([{"params": params[:20]}, {"params": params[20:]}], lr=1e-3)
    optimizer = MixedPrecisionOptimizer(
        inner, None, DynamicGradScaler(2.0**8, 1.0, 2.0, 0.5, 3, 1), grads_are_scaled=True
    )
    for step in range(6):
        for param in params:
            param.grad = torch.full(param.shape, float("inf") if step == 2 else 1.0).half()
        if step == 4:
            with torch.no_grad():
                params[30].add_(1)
        optimizer.step()
        assert followed == (["30"] if step >= 4 else [])


def test_gradients_may_be_dropped_between_the_halves_of_a_step() -> None:
    """prepare_grads() holds the gradients that step_with_ready_grads() needs."""

    def trained(drop: bool) -> Tensor:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(300).half()) for _ in range(50)]
        optimizer = MixedPrecisionOptimizer(
            torch.optim.SGD(params, lr=1.0), None, DynamicGradScaler(1.0, 1.0, 2.0, 0.5, 10, 1), grads_are_scaled=True
        )
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.prepare_grads()
        if drop:
            optimizer.zero_grad()
            _overwritten = [torch.full((300,), 7.0).half() for _ in range(500)]
        optimizer.step_with_ready_grads()
        return torch.cat(list(params))

    assert bits_equal(trained(False), trained(True))
