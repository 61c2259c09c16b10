"""8-bit moments of DTensors: the bits of the unsharded optimizer wherever each rank has whole groups, else an error."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from megascale import ConstantGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.errors import ArgumentError
from tests.checkpoint_cases import message_of
from tests.meshes import mesh_of
from tests.pool import RankPool
from tests.training import same_bits

SHAPES = [(8, 32), (7, 64), (3, 2, 16), (128,), (8, 16), (1, 33)]
"""Even and uneven rows of whole groups, fewer rows than ranks, one dimension, rows of half a group."""
LAYOUTS: dict[str, tuple[tuple[int, ...], list[Placement], list[Placement]]] = {
    "rows": ((-1,), [Shard(0)], [Replicate()]),
    "copies of rows": ((2, 2), [Replicate(), Shard(0)], [Replicate(), Replicate()]),
    "rows of rows": ((2, 2), [Shard(0), Shard(0)], [Replicate(), Replicate()]),
}
"""By name: the mesh, how most parameters are placed, and the last one, which no cut fits."""
STEPS = 4


def _spread(value: Tensor, index: int, layout: str | None) -> Tensor:
    if layout is None:
        return value
    sizes, placements, whole = LAYOUTS[layout]
    sizes = tuple(dist.get_world_size() if size < 0 else size for size in sizes)
    mesh = mesh_of(sizes, ("a", "b")[: len(sizes)])
    return distribute_tensor(value, mesh, whole if index == len(SHAPES) - 1 else placements, src_data_rank=None)


class _Model(nn.Module):
    def __init__(self, layout: str | None, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        values = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
        self.params = nn.ParameterList([nn.Parameter(_spread(v, i, layout)) for i, v in enumerate(values)])


def _build(
    layout: str | None, dtype: torch.dtype, seed: int = 0, compact: bool = True, remainders: bool = False
) -> tuple[nn.Module, MixedPrecisionOptimizer]:
    model = _Model(layout, dtype, seed)
    moments: dict[str, Any] = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8} if compact else {}
    fp16 = dtype == torch.float16
    config = OptimizerConfig(fp16=fp16, bf16=not fp16, store_param_remainders=remainders, **moments)
    inner = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    scaler = ConstantGradScaler(64.0)
    return model, MixedPrecisionOptimizer(inner, config, scaler, grads_are_scaled=True, replicas_may_differ=True)


def _train(model: nn.Module, optimizer: MixedPrecisionOptimizer, layout: str | None, first: int, last: int) -> None:
    """Step on gradients that are the same whole tensors in every layout; the one of step 1 overflows."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for index, (param, shape) in enumerate(zip(model.parameters(), SHAPES, strict=True)):
            grad = torch.randn(shape, generator=generator).to(param.dtype)
            if step == 1 and index == 0:
                grad[-1, -1] = math.inf
            param.grad = _spread(grad, index, layout)
        assert bool(optimizer.step().success) == (step != 1)


def _whole(model: nn.Module, optimizer: MixedPrecisionOptimizer) -> dict[str, Tensor]:
    """Return everything, whole; scales flat, as their shape depends on how a parameter is placed."""
    found = {f"main {name}": main for name, main in optimizer.main_params()}
    for name, param in model.named_parameters():
        found[f"model {name}"] = param.detach()
        found |= {f"{key} {name}": value for key, value in optimizer.optimizer.state[param].items()}
    whole = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in found.items()}
    return {key: (value.reshape(-1) if "_scale" in key else value).clone() for key, value in whole.items()}


def _both(layout: str, dtype: torch.dtype, remainders: bool) -> bool:
    """Train spread and whole. Returns whether all bits agree."""
    found = []
    for one in (layout, None):
        model, optimizer = _build(one, dtype, remainders=remainders)
        _train(model, optimizer, one, 0, STEPS)
        found.append(_whole(model, optimizer))
    assert any(value.dtype == torch.int8 for value in found[0].values())
    return same_bits(*found)


CASES = [("rows", 2), *((layout, 4) for layout in LAYOUTS)]


@pytest.mark.parametrize(
    ("layout", "world"),
    [pytest.param(*case, marks=() if case[1] == 2 else pytest.mark.slow) for case in CASES],
)
def test_bits_of_whole_parameters(ranks: RankPool, layout: str, world: int) -> None:
    """Codes, scales, main params and weights of DTensors are those of whole parameters; a skip changes nothing."""
    for dtype, remainders in ((torch.float16, False), (torch.bfloat16, True)):
        assert ranks.run(world, _both, layout, dtype, remainders) == [True] * world


def _refused() -> list[str]:
    """Return the errors of cuts that leave a rank a part of a group."""
    mesh = mesh_of((dist.get_world_size(),), ("a",))
    messages = []
    for shape, placement in (((8, 64), Shard(1)), ((10,), Shard(0)), ((7, 16), Shard(0)), ((6, 16), Shard(0))):
        value = distribute_tensor(torch.zeros(shape).bfloat16(), mesh, [placement], src_data_rank=None)
        inner = torch.optim.AdamW([("w", nn.Parameter(value))])
        config = OptimizerConfig(bf16=True, exp_avg_dtype=torch.int8)
        build = lambda inner=inner, config=config: MixedPrecisionOptimizer(inner, config)  # noqa: E731
        messages.append(message_of(ArgumentError, build))
    return messages


def test_cut_groups_are_refused(ranks: RankPool) -> None:
    """Other dimensions, and rows that are no whole groups: on every rank alike, naming the parameter and the remedy."""
    first, second = ranks.run(2, _refused)
    assert first == second
    for message, shape in zip(first, ("(8, 64)", "(10,)", "(7, 16)", "(6, 16)"), strict=True):
        assert f"parameter 'w' is a DTensor of shape {shape} with placements" in message
        assert "which cut a group of 32 elements that share a scale; cut it along dimension 0" in message
