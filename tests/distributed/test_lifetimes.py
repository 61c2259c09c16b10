"""Invariant 11, what is dropped is gone: no hook, thread or buffer outlives the object that made it."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megascale import ChainedOptimizer, DistributedOptimizer, MixedPrecisionOptimizer
from megascale.averages import AveragedMainParams
from megascale.checkpoint import Checkpointer
from megascale.errors import ArgumentError, InnerStepError, UsageError
from megascale.grad_sync import GradSync
from megascale.schedules import LandedLRScheduler
from megascale.step.kernel_update import KernelUpdate
from megascale.step.update import KernelCalls
from tests.distributed.test_distributed_optimizer import INNER, batch, config_of, net, same, scaler, sharded, weights
from tests.pool import RankPool

FP16 = torch.float16
Maker = Callable[[nn.Module], MixedPrecisionOptimizer]


def _synced(module: nn.Module, **options: Any) -> MixedPrecisionOptimizer:
    sync = GradSync(module.named_parameters(), bucket_numel=300, **options)
    return MixedPrecisionOptimizer(
        INNER["adamw"](module), config_of(FP16), scaler(FP16), grad_sync=sync, grads_are_scaled=True
    )


def _overlapped(module: nn.Module) -> MixedPrecisionOptimizer:
    return sharded(module, overlap_param_gather=True)


def _under_ddp(module: nn.Module) -> MixedPrecisionOptimizer:
    return MixedPrecisionOptimizer(INNER["adamw"](module), config_of(FP16), scaler(FP16), grads_are_scaled=True)


MAKERS: dict[str, Maker] = {"sync": _synced, "sharded": sharded, "overlapped": _overlapped}


def _backward(optimizer: MixedPrecisionOptimizer, module: nn.Module, step: int) -> None:
    optimizer.zero_grad()
    loss = module(batch(step, dist.get_rank(), FP16)).float().square().mean()
    optimizer.scale_loss(loss).backward()


def _train(optimizer: MixedPrecisionOptimizer, module: nn.Module, steps: range) -> None:
    for step in steps:
        _backward(optimizer, module, step)
        assert bool(optimizer.step().success)


def _hooks_on(module: nn.Module) -> int:
    """Count what hangs on a module and its parameters."""
    of_params = sum(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters())
    names = ("_forward_pre_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
    of_modules = sum(len(getattr(one, name)) for one in module.modules() for name in names)
    return of_params + of_modules


def _buffers_of(optimizer: MixedPrecisionOptimizer) -> list[Any]:
    """Return weak references to what an optimizer holds: itself, its GradSync, main grads, main params, state."""
    assert isinstance(optimizer._member.grad_sync, GradSync)
    held: list[Any] = [optimizer, optimizer._member.grad_sync]
    held += [bucket.memory.flat for bucket in optimizer._member.grad_sync.buckets]
    held += [param.main for param in optimizer._member.main_params if param.is_copy]
    held += [value for state in optimizer._inner.state.values() for value in state.values()]
    if isinstance(optimizer, DistributedOptimizer):
        held += [bucket.memory.flat for bucket in optimizer._gather.buckets]
    return [ref(thing) for thing in held]


@contextmanager
def _no_new_threads() -> Iterator[None]:
    """Threads that were started inside end when asked for, without a reduction to come."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive()


DROPS = ("between steps", "after backward", "in prepare", "error in step", "detached")


def _until(optimizer: MixedPrecisionOptimizer, module: nn.Module, moment: str) -> None:
    """Train up to the moment at which the optimizer is dropped."""
    _train(optimizer, module, range(2))
    if moment == "after backward":
        _backward(optimizer, module, 2)
    if moment == "in prepare":
        _backward(optimizer, module, 2)
        optimizer.prepare_grads()
    if moment == "error in step":
        _backward(optimizer, module, 2)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(KernelCalls, "run", _fail)
            optimizer.step()
        _backward(optimizer, module, 3)
        with pytest.raises(InnerStepError, match="ZeroDivisionError"):
            optimizer.step()
    if moment == "detached":
        assert isinstance(optimizer._member.grad_sync, GradSync)
        optimizer._member.grad_sync.detach()
        with pytest.raises(UsageError, match="this GradSync was detached from its parameters"):
            optimizer.step()


def _fail(*_: Any) -> Any:
    raise ZeroDivisionError


def _dropped(kind: str, moment: str) -> list[Any]:
    module = net()
    with _no_new_threads():
        optimizer = MAKERS[kind](module)
        _until(optimizer, module, moment)
        held = _buffers_of(optimizer)
        del optimizer
        gc.collect()
        hooks, fresh = _hooks_on(module), net()
        fresh.load_state_dict(module.state_dict())
        _wait_until(lambda: all(thing() is None for thing in held))
    alive = [type(thing).__name__ for thing in (thing() for thing in held) if thing is not None]
    for one in (module, fresh):
        one.zero_grad()  # what a prepared step has left
        _train(MAKERS["sync" if kind == "overlapped" else "sharded"](one), one, range(2))
    return [hooks, alive, weights(module), same(weights(module), weights(fresh))]


def _wait_until(done: Callable[[], bool]) -> None:
    """Let what is on its way between ranks arrive: until then a message holds its memory."""
    deadline = time.monotonic() + 30
    while not done() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.default("overlapped-detached", "sharded-in prepare", "sync-between steps", "overlapped-after backward")
@pytest.mark.parametrize(("kind", "moment"), list(product(MAKERS, DROPS)))
def test_nothing_of_a_dropped_optimizer_stays(ranks: RankPool, kind: str, moment: str) -> None:
    """Invariant 11: hooks, main grads, main params, state, flat buckets and threads are gone, whenever it is dropped,
    and another optimizer trains the model as a fresh one. Old hooks took its gradients: steps landed with zeros.
    """
    results = ranks.run(2, _dropped, kind, moment)
    for hooks, alive, left, as_fresh in results:
        # The model's parameters lie in the flat buckets, whose memory they keep, not the objects.
        assert (hooks, alive, as_fresh) == (0, [], True)
        assert same(left, results[0][2])


def _owned(first: str, second: str) -> list[Any]:
    module = net()
    optimizer = MAKERS[first](module)
    untouched = [_hooks_on(module), [param.data_ptr() for param in module.parameters()]]
    with pytest.raises(ArgumentError) as caught:
        _under_ddp(module) if second == "plain" else MAKERS[second](module)
    assert [_hooks_on(module), [param.data_ptr() for param in module.parameters()]] == untouched
    _train(optimizer, module, range(1))
    del optimizer
    if second != "plain":
        _train(MAKERS[second](module), module, range(1))
    return [str(caught.value)]


@pytest.mark.default("overlapped-plain", "sync-sharded", "overlapped-sharded")
@pytest.mark.parametrize("second", ["sync", "sharded", "plain"])
@pytest.mark.parametrize("first", ["sync", "overlapped"])
def test_parameters_that_are_owned_are_refused_by_name(ranks: RankPool, first: str, second: str) -> None:
    """Two owners would share out the gradients by chance. Once the first is deleted, the second is taken."""
    owner = "GradSync" if first == "sync" else "DistributedOptimizer"
    for [message] in ranks.run(2, _owned, first, second):
        assert f"parameter 'first.weight' belongs to a live {owner}, which takes its gradients in backward" in message


def _failed_half_way() -> list[Any]:
    module = net()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(KernelUpdate, "create_states", _fail)
        with pytest.raises(ZeroDivisionError) as caught:
            sharded(module, overlap_param_gather=True)
    left = _hooks_on(module)
    assert caught.tb is not None  # holds what failed
    _train(sharded(module), module, range(2))
    return [left, weights(module)]


def test_a_construction_that_fails_leaves_no_hook(ranks: RankPool) -> None:
    """Out of memory for the state, say: what was hooked by then is let go at once, and another optimizer can be built
    while the error is still held.
    """
    results = ranks.run(2, _failed_half_way)
    for left, trained in results:
        assert left == 0
        assert same(trained, results[0][1])


def _chained(module: nn.Module) -> ChainedOptimizer:
    named = list(module.named_parameters())
    one = scaler(FP16)
    members = []
    for half in (named[:4], named[4:]):
        sync = GradSync(half, bucket_numel=300)
        inner = torch.optim.AdamW(half, lr=1e-2)
        members.append(MixedPrecisionOptimizer(inner, config_of(FP16), one, grad_sync=sync))
    return ChainedOptimizer(members)


WHOLE: dict[str, Callable[[nn.Module], Any]] = {"plain": _under_ddp, "chained": _chained, "overlapped": _overlapped}


def _with_everything(kind: str, folder: str) -> list[str]:
    module = net()
    with _no_new_threads():
        optimizer = WHOLE[kind](module)
        inner = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
        scheduler = LandedLRScheduler(inner)
        averages = AveragedMainParams(module, optimizer)
        checkpointer = Checkpointer(folder, async_save=True)
        network = nn.parallel.DistributedDataParallel(module) if kind == "plain" else module
        for step in range(2):
            _train(optimizer, network, range(step, step + 1))
            scheduler.step()
            averages.update_parameters()
        checkpointer.save(1, module, optimizer)
        optimizers = optimizer._optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
        held = [ref(thing) for thing in (optimizer, scheduler, averages, checkpointer, optimizer.grad_scaler)]
        held += [ref(average) for average in averages._params.averages]
        for one in optimizers:
            held += [ref(thing) for thing in (one, one._member, one._member.main_params, one._inner)]
            held += [ref(param.main) for param in one._member.main_params]
        del optimizer, optimizers, one, inner, scheduler, averages, checkpointer, network
        gc.collect()
        _wait_until(lambda: all(thing() is None for thing in held))
    return [type(thing).__name__ for thing in (thing() for thing in held) if thing is not None]


@pytest.mark.parametrize("kind", WHOLE)
def test_what_is_built_on_an_optimizer_goes_with_it(ranks: RankPool, kind: str, tmp_path: Any) -> None:
    """Optimizers, chains, schedules, averages, checkpointers and their threads: a run that was dropped, with a save in
    the background under way, leaves nothing in memory.
    """
    assert ranks.run(2, _with_everything, kind, str(tmp_path)) == [[], []]
