"""offload() and reload(): main params, state and main grads in host memory between rollouts, every bit kept."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megascale import (
    ChainedOptimizer,
    DistributedOptimizer,
    DynamicGradScaler,
    MixedPrecisionOptimizer,
    OptimizerConfig,
)
from megascale.errors import ArgumentTypeError, GradientError, UsageError
from megascale.grad_sync import GradSync
from tests.training import INNER, Tiny, bits_equal, model, same_values

STORED: dict[str, dict[str, Any]] = {
    "fp32": {},
    "remainders": {"store_param_remainders": True},
    "codes": {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8},
    "both": {"store_param_remainders": True, "exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8},
    "bf16": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
}

Build = Callable[[nn.Module, torch.optim.Optimizer, OptimizerConfig, DynamicGradScaler], MixedPrecisionOptimizer]

HELD: dict[str, Build] = {
    "replicated": lambda module, inner, config, scaler: MixedPrecisionOptimizer(inner, config, scaler),
    "synced": lambda module, inner, config, scaler: MixedPrecisionOptimizer(
        inner, config, scaler, grad_sync=GradSync(module.named_parameters())
    ),
    "elements": lambda module, inner, config, scaler: DistributedOptimizer(
        inner, config, scaler, modules=module, shard="elements"
    ),
    "parameters": lambda module, inner, config, scaler: DistributedOptimizer(
        inner, config, scaler, modules=module, shard="parameters"
    ),
}


def _build(
    held: str = "replicated", dtype: torch.dtype = torch.float16, inner: str = "adamw_fused", **options: Any
) -> tuple[Tiny, MixedPrecisionOptimizer]:
    module = model(dtype)
    config = OptimizerConfig(fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16, clip_grad=1.0, **options)
    scaler = DynamicGradScaler(2.0**8, 1.0, 2.0, 0.5, 3, 1)
    return module, HELD[held](module, INNER[inner](module), config, scaler)


def _backward(module: Tiny, optimizer: MixedPrecisionOptimizer, step: int) -> None:
    data = torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).to(module.head.weight.dtype)
    factor = float("inf") if step == 2 else 1.0
    optimizer.scale_loss(module(data).float().square().mean() * factor).backward()


def _step(module: Tiny, optimizer: MixedPrecisionOptimizer, step: int) -> None:
    optimizer.zero_grad()
    _backward(module, optimizer, step)
    optimizer.step()


@pytest.mark.default("sgd_dampening", "adamw_foreach", "sgd")
@pytest.mark.parametrize("inner", ["adam_amsgrad", "lion", "sgd", "sgd_dampening", "adamw_foreach"])
def test_other_optimizers(inner: str) -> None:
    """The same for other optimizers; and for one that runs its own step() on main params."""
    module, optimizer = _build(inner=inner)
    twin_module, twin = _build(inner=inner)
    for step in range(4):
        _step(module, optimizer, step)
        _step(twin_module, twin, step)
        optimizer.offload()
        optimizer.reload()
    assert same_values(optimizer.state_dict(), twin.state_dict())


def test_tensors_stay_the_same_objects() -> None:
    """Who holds a main param, or moves ``optimizer.state`` by himself, finds all values, in host memory meanwhile."""
    module, optimizer = _build()
    _step(module, optimizer, 0)
    mains = dict(optimizer.main_params())
    weight = module.first.weight
    moments = optimizer.state[weight]["exp_avg"]
    before = {name: (main.data_ptr(), main.clone()) for name, main in mains.items()}
    optimizer.offload()
    assert optimizer.state[weight]["exp_avg"] is moments
    for name, main in optimizer.main_params():
        assert main is mains[name]
        assert main.data_ptr() != before[name][0]
        assert bits_equal(main, before[name][1])


@pytest.mark.default("False-replicated-remainders", "True-synced-fp32")
@pytest.mark.parametrize("stored", ["fp32", "remainders"])
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("read", [False, True])
def test_weights_loaded_meanwhile_reach_the_main_params(held: str, stored: str, read: bool) -> None:
    """Weights that were loaded while the optimizer was away are what the next step starts from."""
    module, optimizer = _build(held, **STORED[stored])
    _step(module, optimizer, 0)
    loaded = {name: value * 0.5 for name, value in module.state_dict().items()}
    optimizer.offload()
    module.load_state_dict(loaded)
    if read:
        optimizer.state_dict()
    optimizer.reload()
    mains = optimizer.state_dict()["main_params"]
    assert all(bits_equal(mains[name].reshape(-1), loaded[name].float().reshape(-1)) for name in mains)
    _step(module, optimizer, 1)


@pytest.mark.default("replicated", "elements")
@pytest.mark.parametrize("held", HELD)
def test_what_needs_the_memory_is_refused(held: str) -> None:
    """step(), a backward into main grads, loading and new parameters raise an error that names reload()."""
    module, optimizer = _build(held)
    _step(module, optimizer, 0)
    saved = optimizer.state_dict()
    optimizer.offload()
    with pytest.raises(UsageError, match=r"load_state_dict\(\) needs .* call optimizer\.reload\(\)"):
        optimizer.load_state_dict(saved)
    with pytest.raises(UsageError, match=r"call optimizer\.reload\(\)"):
        _step(module, optimizer, 1)
    optimizer.reload()
    optimizer.load_state_dict(saved)
    _step(module, optimizer, 1)
    assert int(optimizer.num_landed_steps) == 2


def test_a_refused_step_changes_nothing() -> None:
    """A step() while offloaded leaves main params, state and weights as they were; the step can be taken later."""
    module, optimizer = _build()
    twin_module, twin = _build()
    for pair in ((module, optimizer), (twin_module, twin)):
        _step(*pair, 0)
        pair[1].zero_grad()
        _backward(*pair, 1)
    optimizer.offload()
    with pytest.raises(UsageError, match=r"step\(\) needs .* call optimizer\.reload\(\)"):
        optimizer.step()
    optimizer.reload()
    optimizer.step()
    twin.step()
    kept = ("main_params", "optimizer")
    mine, theirs = optimizer.state_dict(), twin.state_dict()
    assert all(same_values(mine[key], theirs[key]) for key in kept)


@pytest.mark.default("elements")
@pytest.mark.parametrize("held", ["synced", "elements", "parameters"])
def test_main_grads_between_micro_batches(held: str) -> None:
    """Main grads that hold the sum of earlier micro-batches keep it; a new parameter group waits for reload()."""
    module, optimizer = _build(held)
    twin_module, twin = _build(held)
    for own, one in ((module, optimizer), (twin_module, twin)):
        sync = one._member.grad_sync
        assert isinstance(sync, GradSync)
        one.zero_grad()
        with sync.no_sync():
            _backward(own, one, 0)
        if one is optimizer:
            one.offload()
            assert all(bucket.memory.flat.untyped_storage().nbytes() == 0 for bucket in sync.buckets)
            one.reload()
        _backward(own, one, 1)
        one.step()
    assert same_values(optimizer.state_dict(), twin.state_dict())


def test_what_is_under_way_is_refused() -> None:
    """A prepared step, and reductions that have not ended, are errors; nothing has moved then."""
    module, optimizer = _build("synced")
    _backward(module, optimizer, 0)
    with pytest.raises(UsageError, match="while gradients are being reduced"):
        optimizer.offload()
    optimizer.prepare_grads()
    with pytest.raises(UsageError, match=r"between prepare_grads\(\) and the update"):
        optimizer.offload()
    optimizer.step()
    optimizer.offload()
    with pytest.raises(ArgumentTypeError, match="pin"):
        optimizer.offload(pin=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("enough_for", [0, 1, 2])
def test_too_little_host_memory(monkeypatch: pytest.MonkeyPatch, enough_for: int) -> None:
    """The error names the bytes; nothing has moved, or it has come back."""
    module, optimizer = _build("synced")
    _step(module, optimizer, 0)
    before = [main for _, main in optimizer.main_params()]
    saved = optimizer.state_dict()
    grads = [grad.clone() for grad in map(optimizer.local_grad, optimizer._param_names()) if grad is not None]
    left = [enough_for]
    empty = torch.empty

    def scarce(size: Any, *args: Any, **options: Any) -> Tensor:
        if size and "pin_memory" in options and options.get("device") == "cpu":
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("no memory")
        return empty(size, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr("megascale.utils.host_memory.torch.empty", scarce)
        if enough_for < 2:  # one slab of main params and state, one of main grads
            with pytest.raises(UsageError, match=r"^\d+ bytes of host memory are needed.*no memory"):
                optimizer.offload()
        else:
            optimizer.offload()
            optimizer.reload()
    assert all(main is other for main, (_, other) in zip(before, optimizer.main_params(), strict=True))
    assert same_values(optimizer.state_dict(), saved)
    assert same_values(
        grads, [grad for grad in map(optimizer.local_grad, optimizer._param_names()) if grad is not None]
    )
    _step(module, optimizer, 1)


def test_a_chain() -> None:
    """A chain moves what all of its members keep."""
    shared = DynamicGradScaler(2.0**8, 1.0, 2.0, 0.5, 3, 1)
    module = model()
    named = list(module.named_parameters())
    config = OptimizerConfig(fp16=True)
    parts = [MixedPrecisionOptimizer(torch.optim.AdamW(part), config, shared) for part in (named[:3], named[3:])]
    chain = ChainedOptimizer(parts)
    before = chain.state_dict()
    chain.offload()
    assert all(part._member.main_params.residence.is_away for part in parts)
    assert same_values(chain.state_dict(), before)
    with pytest.raises(UsageError, match=r"call optimizer\.reload\(\)"):
        _step(module, chain, 0)  # type: ignore[arg-type]
    chain.reload()
    _step(module, chain, 0)  # type: ignore[arg-type]


def test_main_grads_stay_away_after_a_gradient_that_is_refused() -> None:
    """finish() brings them back for the reductions that other ranks wait for; the error comes after they left again."""
    module = model()
    sync = GradSync(module.named_parameters())
    sync.leave(pin=False)
    module.head.weight.grad = torch.ones_like(module.head.weight)
    module.head.weight.grad.untyped_storage().resize_(0)
    with pytest.raises(GradientError, match=r"'head\.weight' has lost its memory"):
        sync.finish()
    assert all(bucket.memory.flat.untyped_storage().nbytes() == 0 for bucket in sync.buckets)


@pytest.mark.parametrize("first", ["freeze", "offload"])
@pytest.mark.parametrize("held", HELD)
def test_parameters_are_frozen_while_all_is_away(held: str, first: str) -> None:
    """For a rollout: what only reads works, and unfrozen again they train. A new parameter is refused."""
    module, optimizer = _build(held)
    twin, other = _build(held)
    for one, its in ((module, optimizer), (twin, other)):
        _step(one, its, 0)
    if first == "offload":
        optimizer.offload(pin=False)
    module.requires_grad_(False)
    optimizer.offload(pin=False)
    assert same_values(optimizer.state_dict(), other.state_dict())
    assert all(bits_equal(a, b) for (_, a), (_, b) in zip(optimizer.main_params(), other.main_params(), strict=True))
    module.requires_grad_(True)
    added = nn.Parameter(torch.ones(2, dtype=torch.float16))
    with pytest.raises(UsageError, match="a new parameter needs"):
        optimizer.add_param_group({"params": [("added", added)]})
    optimizer.reload()
    for one, its in ((module, optimizer), (twin, other)):
        _step(one, its, 1)
    assert same_values(optimizer.state_dict(), other.state_dict())


def test_nothing_holds_what_was_moved() -> None:
    """Also not where a parameter was frozen since the last step, so that another unit has the others."""
    module, optimizer = _build()
    _step(module, optimizer, 0)
    module.head.weight.requires_grad_(False)
    optimizer.state_dict()
    moments = [state["exp_avg"].untyped_storage() for state in optimizer.state.values()]
    held = [*map(StorageWeakRef, moments)]
    del moments
    optimizer.offload(pin=False)
    gc.collect()
    assert [one.expired() for one in held] == [True] * len(held)
