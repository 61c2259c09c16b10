"""What the tests of other systems' checkpoints share: schedules of overflows, a model, a converted file."""

import random
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.cli import main
from megascale.interop.scaler_state import FoundScaler

ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.1}
BEFORE, AFTER = 61, 200
"""Steps that the peer takes before its checkpoint, and that both take after it."""


def schedule(steps: int, seed: int, share: float = 0.15) -> list[bool]:
    """Return which steps overflow, a ``share`` of them: single ones, and some in a row."""
    generator = random.Random(seed)
    found: list[bool] = []
    while len(found) < steps:
        run = generator.choice((1, 1, 1, 2, 4))
        found += [generator.random() < share] * run
    return found[:steps]


def follow(
    found: FoundScaler, peer: Callable[[bool], float], *, seed: int = 1, share: float = 0.15, **config: Any
) -> None:
    """Let ours and the peer go on over the same steps; every scale must be equal, and must move both ways."""
    ours = found.build_grad_scaler(**config)
    scales = [float(ours.scale)]
    for step, overflow in enumerate(schedule(AFTER, seed, share)):
        ours.update(overflow)
        scales.append(float(ours.scale))
        assert scales[-1] == peer(overflow), f"step {step}"
    moves = list(pairwise(scales))
    assert any(after > before for before, after in moves)
    assert any(after < before for before, after in moves)


def net(dtype: torch.dtype, seed: int = 0) -> nn.Sequential:
    """Return a model whose biases and norms differ from one another, as after some training."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    return model.to(dtype)


def grads(model: nn.Module, scale: float, step: int, overflow: bool) -> list[Tensor]:
    """Return gradients, scaled and rounded to the parameters' dtype; with an overflow one is inf."""
    generator = torch.Generator().manual_seed(step)
    made = [(torch.randn(p.shape, generator=generator) * 1e-2 * scale).to(p.dtype) for p in model.parameters()]
    if overflow:
        made[-1].fill_(torch.inf)
    return made


def converted(source: Path, out: Path, *arguments: str) -> dict[str, Any]:
    """Convert by the command line and return the file, as ``torch.load(weights_only=True)`` reads it."""
    assert main(["convert", str(source), str(out), *arguments]) == 0
    loaded: dict[str, Any] = torch.load(out, weights_only=True)
    return loaded


def ours(
    state: dict[str, Any], dtype: torch.dtype, scaler: DynamicGradScaler, **adamw: Any
) -> tuple[nn.Sequential, MixedPrecisionOptimizer]:
    """Return a model and an optimizer of ours in the state of a converted file."""
    model = net(dtype, seed=9)
    inner = torch.optim.AdamW(model.named_parameters(), **adamw)
    config = OptimizerConfig(fp16=dtype == torch.float16)
    optimizer = MixedPrecisionOptimizer(inner, config, scaler)
    optimizer.load_state_dict(state)
    return model, optimizer


def step_ours(model: nn.Module, optimizer: MixedPrecisionOptimizer, step: int, overflow: bool) -> float:
    """Take one step on the given gradients and return the scale after it."""
    given = grads(model, float(optimizer.get_loss_scale()), step, overflow)
    for param, grad in zip(model.parameters(), given, strict=True):
        param.grad = grad
    optimizer.step()
    return float(optimizer.get_loss_scale())


def assert_same(mains: Mapping[str, Tensor], peers: Mapping[str, Tensor]) -> None:
    """Main params equal the peer's but for the rounding of some dozen fp32 steps of 1e-2.

    Peers multiply in another order. A lost moment, or a step count that is off by one, moves a parameter by 1e-4.
    """
    assert mains.keys() == peers.keys()
    for name, mine in mains.items():
        torch.testing.assert_close(mine, peers[name], rtol=1e-6, atol=1e-7)
