"""Patterns of torch's page "Automatic Mixed Precision examples" that need our autocast, or ranks, with both imports.

https://docs.pytorch.org/docs/stable/notes/amp_examples.html. Only the names differ: the same code gets torch's
``autocast`` and ``GradScaler``, or ours. Parameters, scales and skips must agree in every bit.
test_grad_scaler_bits.py has the page's other patterns.
"""

import contextlib
import math
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.amp import custom_bwd, custom_fwd
from torch.nn.parallel import DistributedDataParallel

import megascale.amp
from tests.pool import RankPool
from tests.training import bits_equal


class Names(NamedTuple):
    """What a program imports."""

    autocast: Callable[..., Any]
    GradScaler: Callable[..., torch.amp.GradScaler]


TORCH = Names(torch.autocast, torch.amp.GradScaler)
OURS = Names(megascale.amp.autocast, megascale.amp.GradScaler)
Trace = list[Any]
Pattern = Callable[[Names, torch.dtype, bool], Trace]
PATTERNS: dict[str, Pattern] = {}


def pattern(function: Pattern) -> Pattern:
    """Add an example to those that run with both names."""
    PATTERNS[function.__name__] = function
    return function


# What the page leaves open


def net(seed: int = 0) -> nn.Module:
    """Return the page's Net(), in default precision."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))


def data(steps: int = 6, rank: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and targets; the third target lets the gradients overflow."""
    generator = torch.Generator().manual_seed(rank)
    pairs = [(torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)) for _ in range(steps)]
    pairs[2][1][0, 0] = math.inf
    return pairs


loss_fn = nn.functional.mse_loss


def opt(module: nn.Module, fused: bool) -> optim.Optimizer:
    """Return an optimizer that skips on the device, or one that the host has to stop."""
    if fused:
        return optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    return optim.SGD(module.parameters(), lr=1e-1, momentum=0.9)


def trace(scaler: torch.amp.GradScaler, *modules: nn.Module) -> Trace:
    """Return what the two runs must agree in: the scaler's state and copies of all parameters."""
    return [scaler.state_dict(), *(param.detach().clone() for module in modules for param in module.parameters())]


# The page's examples


class MultiplyAdd(torch.autograd.Function):
    """The page's function with several inputs: backward runs in the autocast state of forward."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        """Return ``a @ b``, in the dtype of the region."""
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of both."""
        a, b = ctx.saved_tensors
        return grads[0].mm(b.t()), a.t().mm(grads[0])


class Float32Only(torch.autograd.Function):
    """The page's function that needs one dtype: ``cast_inputs`` makes fp32 of floating inputs."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return ``x ** 3``; autocast is off here."""
        assert x.dtype is torch.float32
        assert not torch.is_autocast_enabled("cpu")
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return the gradient."""
        (x,) = ctx.saved_tensors
        result: Tensor = 3 * x**2 * grads[0]
        return result


@pattern
def custom_autograd_functions(names: Names, dtype: torch.dtype, fused: bool) -> Trace:
    """Custom autograd functions under autocast: torch.amp.custom_fwd and custom_bwd serve both."""
    model = net()
    mix = nn.Parameter(torch.eye(2))
    model.register_parameter("mix", mix)
    optimizer = opt(model, fused)
    scaler = names.GradScaler("cpu")
    seen = []
    for input, target in data():
        optimizer.zero_grad()
        with names.autocast(device_type="cpu", dtype=dtype):
            output = MultiplyAdd.apply(model(input), mix)
            assert output.dtype is dtype
            output = Float32Only.apply(output)
            assert output.dtype is torch.float32
            loss = loss_fn(output, target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        seen += trace(scaler, model)
    return seen


@pattern
def disabled(names: Names, dtype: torch.dtype, fused: bool) -> Trace:
    """One switch turns mixed precision off: ``enabled=False`` for both, and the loop is plain fp32."""
    model = net()
    optimizer = opt(model, fused)
    scaler = names.GradScaler("cpu", enabled=False)
    seen = []
    for input, target in data():
        optimizer.zero_grad()
        with names.autocast(device_type="cpu", dtype=dtype, enabled=False):
            output = model(input)
            assert output.dtype is torch.float32
            loss = loss_fn(output, target.nan_to_num(posinf=0.0))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        seen += trace(scaler, model)
    return seen


def _check_same(ours: Trace, theirs: Trace) -> None:
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert bits_equal(mine, other) if isinstance(other, Tensor) else mine == other


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PATTERNS)
def test_same_bits_with_either_import(name: str, dtype: torch.dtype, fused: bool) -> None:
    """The example runs with only the import changed, and leaves the same parameters, norms and scaler states."""
    ours, theirs = PATTERNS[name](OURS, dtype, fused), PATTERNS[name](TORCH, dtype, fused)
    _check_same(ours, theirs)
    if name != "disabled":
        assert min(state["scale"] for state in ours if isinstance(state, dict)) < 2.0**16  # something has overflowed
    assert not bits_equal(ours[-1], list(net().parameters())[-1].detach())  # and learnt


# Working with Multiple GPUs: DistributedDataParallel, one device per process


def _distributed(names: Names, fused: bool, accumulate: int) -> Trace:
    """Train under DistributedDataParallel; micro-batches before a step's last one run under ``no_sync``."""
    model = net()
    ddp = DistributedDataParallel(model)
    optimizer = opt(model, fused)
    scaler = names.GradScaler("cpu", init_scale=2.0**8)
    seen = []
    for i, (input, target) in enumerate(data(8, dist.get_rank())):
        last = (i + 1) % accumulate == 0
        with contextlib.nullcontext() if last else ddp.no_sync():
            with names.autocast(device_type="cpu", dtype=torch.float16):
                output = ddp(input)
                loss = loss_fn(output, target if dist.get_rank() else target.nan_to_num(posinf=0.0)) / accumulate
            scaler.scale(loss).backward()
        if last:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen += trace(scaler, model)
    return seen


def _distributed_both(fused: bool, accumulate: int) -> tuple[Trace, Trace]:
    return _distributed(OURS, fused, accumulate), _distributed(TORCH, fused, accumulate)


@pytest.mark.default("1-False", "2-True")
@pytest.mark.parametrize(("accumulate", "fused"), list(product([1, 2], [True, False])))
def test_distributed_data_parallel(ranks: RankPool, fused: bool, accumulate: int) -> None:
    """Two gloo ranks, with and without accumulation under ``no_sync``; an overflow on rank 1 skips on both."""
    results = ranks.run(2, _distributed_both, fused, accumulate)
    for ours, theirs in results:
        _check_same(ours, theirs)
        assert min(state["scale"] for state in ours if isinstance(state, dict)) == 2.0**7
    _check_same(results[0][0], results[1][0])
