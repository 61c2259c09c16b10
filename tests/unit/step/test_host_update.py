"""Main params and state in host memory: the bits of a life without, whoever reads meanwhile."""

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale import (
    ChainedOptimizer,
    DistributedOptimizer,
    DynamicGradScaler,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    build_optimizer,
)
from megascale.checkpoint import load, save
from megascale.errors import InnerStepError, MainParamOverflowError, UsageError
from megascale.grad_sync import GradSync
from tests.host_kernel import change_host_kernel
from tests.training import INNER, Tiny, bits_equal, model, same_values

HELD: dict[str, Any] = {"store_param_remainders": True}
WAIT: dict[str, Any] = {"optimizer_cpu_offload": True}
OVERLAP: dict[str, Any] = {**WAIT, "overlap_cpu_optimizer_d2h_h2d": True}


def _build(
    options: dict[str, Any], held: str = "replicated", inner: str = "adamw_fused", dtype: torch.dtype = torch.float16
) -> tuple[Tiny, MixedPrecisionOptimizer]:
    module = model(dtype)
    config = OptimizerConfig(fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16, clip_grad=0.5, **options)
    scaler, own = DynamicGradScaler(2.0**8, 1.0, 2.0, 0.5, 3, 1), INNER[inner](module)
    if held == "replicated":
        return module, MixedPrecisionOptimizer(own, config, scaler)
    if held == "synced":
        sync = GradSync(module.named_parameters())
        return module, MixedPrecisionOptimizer(own, config, scaler, grad_sync=sync)
    return module, DistributedOptimizer(own, config, scaler, modules=module, shard=held, bucket_numel=24)


def _backward(module: Tiny, optimizer: MixedPrecisionOptimizer, step: int, factor: float = 1.0) -> None:
    data = torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).to(module.head.weight.dtype)
    optimizer.scale_loss(module(data).float().square().mean() * factor).backward()


def _step(module: Tiny, optimizer: MixedPrecisionOptimizer, step: int, factor: float = 1.0) -> Any:
    optimizer.zero_grad()
    _backward(module, optimizer, step, factor)
    return optimizer.step()


@pytest.mark.default("False-way1")
@pytest.mark.parametrize("way", [WAIT, OVERLAP, OVERLAP | HELD])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_chain_with_muon(sharded: bool, way: dict[str, Any]) -> None:
    """Matrices stay beside the model, all else goes; the chain has the bits of one without offload."""

    def build(options: dict[str, Any]) -> tuple[nn.Sequential, ChainedOptimizer]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)).bfloat16()
        config = OptimizerConfig(
            bf16=True, lr=1e-2, optimizer="muon", clip_grad=0.5, use_distributed_optimizer=sharded, **options
        )
        chain = build_optimizer(config, module, overrides={"1.weight": {"optimizer": "muon"}})
        assert isinstance(chain, ChainedOptimizer)
        return module, chain

    stored = {name: way[name] for name in HELD if name in way}
    (module, chain), (other_module, other) = build(way), build(stored)
    mains = [param for one in chain._optimizers for param in one._member.main_params]
    assert {param.model.dim() for param in mains if param.on_host is None} == {2}
    assert any(param.on_host is not None for param in mains)
    for step in range(3):
        data = torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).bfloat16()
        for one, optimizer in ((module, chain), (other_module, other)):
            optimizer.zero_grad()
            optimizer.scale_loss(one(data).float().square().mean()).backward()
            optimizer.step()
    assert same_values(chain.state_dict(), other.state_dict())
    assert same_values(module.state_dict(), other_module.state_dict())


class _Held:
    """Lets the thread's updates begin only once :meth:`go` is called."""

    def __init__(self, optimizer: MixedPrecisionOptimizer) -> None:
        self.gate, self.caller = threading.Event(), threading.get_ident()

        def late(kernel: Callable[..., Any], *arguments: Any) -> Any:
            assert threading.get_ident() != self.caller
            assert self.gate.wait(60)
            return kernel(*arguments)

        change_host_kernel(optimizer, late)

    def go_soon(self) -> None:
        """Let updates begin, some time after the caller has begun to wait."""
        threading.Timer(0.1, self.gate.set).start()


def _weights(module: Tiny, optimizer: MixedPrecisionOptimizer) -> list[Tensor]:
    optimizer.finish_param_gather()
    return [param.detach().clone() for param in module.parameters()]


def _after_a_trip(_module: Tiny, optimizer: MixedPrecisionOptimizer) -> dict[str, Any]:
    optimizer.offload()
    saved = optimizer.state_dict()
    optimizer.reload()
    return saved


READS: dict[str, Callable[[Tiny, MixedPrecisionOptimizer], Any]] = {
    "forward": lambda module, _: module(torch.ones(1, 4).half()),
    "module.state_dict()": lambda module, _: module.state_dict(),
    "state_dict()": lambda _, optimizer: optimizer.state_dict(),
    "main_params()": lambda _, optimizer: {name: main.clone() for name, main in optimizer.main_params()},
    "state": lambda module, optimizer: optimizer.state[module.first.weight]["exp_avg"].clone(),
    "finish_param_gather()": _weights,
    "offload()": _after_a_trip,
}


@pytest.mark.default("offload()", "forward")
@pytest.mark.parametrize("read", READS)
def test_readers_wait(read: str) -> None:
    """step() returns before the update has begun; who reads weights or state then waits, and sees whole values."""
    module, optimizer = _build(OVERLAP)
    other_module, other = _build({})
    for step in range(2):
        _step(other_module, other, step)
    _step(module, optimizer, 0)
    optimizer.finish_param_gather()
    held = _Held(optimizer)
    before = module.first.weight.detach().clone()
    _step(module, optimizer, 1)
    assert bits_equal(module.first.weight, before)
    held.go_soon()
    assert same_values(READS[read](module, optimizer), READS[read](other_module, other))


def test_a_parameter_that_no_module_waits_for() -> None:
    """A loop that reads parameters without calling their module has them when step() returns, also with overlap."""
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    config = OptimizerConfig(bf16=True, **OVERLAP)
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=0.5), config, clip_grad=0.0)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight.detach().eq(0.5).all()


@pytest.mark.parametrize("way", [WAIT, OVERLAP])
def test_an_update_that_fails(way: dict[str, Any]) -> None:
    """What goes wrong in the thread is raised: at once, or at the next step where step() does not wait."""
    module, optimizer = _build(way)
    _step(module, optimizer, 0)
    with _failing(optimizer):
        if way is OVERLAP:
            _step(module, optimizer, 1)
        with pytest.raises(InnerStepError, match="broken"):
            _step(module, optimizer, 2)


@contextmanager
def _failing(optimizer: MixedPrecisionOptimizer) -> Iterator[None]:
    """Let updates in host memory fail meanwhile: those that are under way before and after are not among them."""
    optimizer.finish_param_gather()

    def fail(*_: Any) -> Any:
        raise ValueError("broken")

    end = change_host_kernel(optimizer, fail)
    yield
    optimizer.finish_param_gather()
    end()


def _failed() -> tuple[Tiny, MixedPrecisionOptimizer]:
    """Return an optimizer whose last update has failed in the thread, which nobody was told yet."""
    module, optimizer = _build(OVERLAP)
    _step(module, optimizer, 0)
    with _failing(optimizer):
        _step(module, optimizer, 1)
    return module, optimizer


def test_no_state_of_a_failed_update_is_saved_in_silence(tmp_path: Path) -> None:
    """Main params may be updated in part: who reads them out is told, once, and who loads others is not stopped."""
    module, optimizer = _failed()
    with pytest.raises(InnerStepError, match="broken"):
        optimizer.state_dict()
    whole = optimizer.state_dict()
    save(tmp_path, 1, module, optimizer)
    module, optimizer = _failed()
    with pytest.raises(InnerStepError, match="broken"):
        save(tmp_path, 2, module, optimizer)
    module, optimizer = _failed()
    load(tmp_path, module, optimizer)
    assert same_values(optimizer.state_dict(), whole)
    _step(module, optimizer, 2)


def test_a_failed_update_that_nobody_was_told_of_is_a_warning() -> None:
    """The last step of a run has none after it."""
    held: list[Any] = [_failed()]

    def drop() -> None:
        held.clear()
        gc.collect()

    with pytest.warns(RuntimeWarning, match="the last update failed in host memory, ValueError: broken"):
        drop()
    module, optimizer = _failed()
    with pytest.raises(InnerStepError, match="broken"):
        _step(module, optimizer, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del optimizer
        gc.collect()


def test_what_is_dropped_is_gone() -> None:
    """Invariant 11: dropping the optimizer ends its thread, frees its memory, removes its hooks; the model is whole."""
    before = set(threading.enumerate())
    module, optimizer = _build(OVERLAP)
    other_module, other = _build({})
    for step in range(2):
        _step(module, optimizer, step)
        _step(other_module, other, step)
    main = weakref.ref(next(main for _, main in optimizer.main_params()))
    started = set(threading.enumerate()) - before
    assert {thread.name for thread in started} == {"megascale messages"}
    del optimizer
    gc.collect()
    assert main() is None
    assert all(map(bits_equal, module.parameters(), other_module.parameters()))
    assert not any(one._forward_pre_hooks for one in module.modules())
    for thread in started:
        thread.join(10)
        assert not thread.is_alive()


def _block(optimizer: MixedPrecisionOptimizer, task: Callable[[], object]) -> threading.Thread:
    """Let the thread of updates run ``task`` before those that follow. Returns the thread."""
    arrivals = optimizer._member.main_params.arrivals
    assert arrivals is not None

    def run() -> None:
        task()

    arrivals._thread.submit(run)
    thread = arrivals._thread._thread
    assert thread is not None
    return thread


@pytest.mark.default("replicated")
@pytest.mark.parametrize("held", ["replicated", "synced"])  # of shards step() waits for the updates
def test_who_drops_an_optimizer_waits_for_its_updates(held: str) -> None:
    """The thread has not begun the last step's when ``del`` begins: the model is whole when it ends."""
    module, optimizer = _build(OVERLAP, held)
    other_module, other = _build({})
    for step in range(2):
        if step == 1:
            is_dropping = threading.Event()
            thread = _block(optimizer, is_dropping.wait)
        _step(module, optimizer, step)
        _step(other_module, other, step)
    threading.Timer(0.2, is_dropping.set).start()
    del optimizer
    gc.collect()
    assert is_dropping.is_set()
    assert same_values(module.state_dict(), other_module.state_dict())
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.default("0.01-replicated")
@pytest.mark.parametrize("held", ["replicated", "elements", "parameters"])
@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.9])
def test_a_fraction(held: str, fraction: float) -> None:
    """At least that share of the elements goes; what forward needs first stays; a run with another one goes on from it.
    No bit differs.
    """
    module, optimizer = _build({**WAIT, "optimizer_offload_fraction": fraction}, held)
    other_module, other = _build({}, held)
    params = list(optimizer._member.main_params)
    gone = [param.on_host is not None for param in params]
    numels = [param.main.numel() for param in params]
    share = sum(numel for numel, is_gone in zip(numels, gone, strict=True) if is_gone) / sum(numels)
    assert fraction <= share < fraction + 0.5
    assert gone == sorted(gone)
    for step in range(4):
        _step(module, optimizer, step)
        _step(other_module, other, step)
        if step == 1:
            module, optimizer = _build({**WAIT, "optimizer_offload_fraction": 1.0}, held)
            optimizer.load_state_dict(other.state_dict())
    assert same_values(optimizer.state_dict(), other.state_dict())
    assert same_values(module.state_dict(), other_module.state_dict())


def test_an_overflow_in_the_thread_is_told_at_the_next_step() -> None:
    """A main param that its update has made too large for fp16 is named, although step() had returned."""
    module = nn.Linear(1, 1).half()
    module.weight.data.fill_(65440.0)
    scaler = DynamicGradScaler(1.0, 1.0, 2.0, 0.5, 1000, 1)
    inner = torch.optim.SGD(module.named_parameters(), lr=1.0)
    optimizer = MixedPrecisionOptimizer(inner, OptimizerConfig(fp16=True, **OVERLAP), scaler)

    def step(grad: float) -> None:
        optimizer.zero_grad()
        optimizer.scale_loss(module(torch.full((1, 1), grad).half()).float().sum()).backward()
        optimizer.step()

    step(-200.0)
    with pytest.raises(MainParamOverflowError, match="'weight'"):
        step(1.0)


def test_an_own_step_is_refused_in_host_memory() -> None:
    """A step hook needs it: the step changes nothing."""
    module, optimizer = _build(WAIT)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    hook = optimizer._inner.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UsageError, match=r"its own step\(\) must run"):
        _step(module, optimizer, 0)
    assert same_values(module.state_dict(), before)
    hook.remove()
    assert _step(module, optimizer, 0).success


def test_a_learning_rate_that_is_a_tensor_is_read_at_the_step() -> None:
    """A scheduler writes it in place after step(): the thread must not see that."""
    module, optimizer = _build(OVERLAP)
    other_module, other = _build({})
    held = _Held(optimizer)
    for own, one in ((module, optimizer), (other_module, other)):
        one.param_groups[0]["lr"] = torch.tensor(1e-2)
        _step(own, one, 0)
        one.param_groups[0]["lr"].fill_(7.0)
    held.go_soon()
    assert same_values(optimizer.state_dict()["main_params"], other.state_dict()["main_params"])
