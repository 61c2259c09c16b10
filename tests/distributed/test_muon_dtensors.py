"""Muon on DTensors: whole matrices travel to their owners and back, with the bits of the unsharded optimizer."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from megascale import ConstantGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.step.matrix_exchange import cuts_of
from megascale.utils.dtensors import to_local
from tests.meshes import mesh_of
from tests.pool import RankPool
from tests.training import bits_equal, same_bits

SHAPES = [(8, 6), (7, 5), (1, 9), (3, 3), (8, 6), (6, 8)]
LAYOUTS: dict[str, tuple[tuple[int, ...], list[list[Placement]]]] = {
    "rows": ((-1,), [[Shard(0)]]),
    "columns": ((-1,), [[Shard(1)], [Shard(-1)]]),
    "some whole": ((-1,), [[Replicate()], [Shard(0)], [Shard(1)]]),
    "2x2, copies": ((2, 2), [[Replicate(), Shard(0)]]),
    "2x2, other copies": ((2, 2), [[Shard(1), Replicate()], [Replicate(), Shard(0)]]),
    "2x2, cut twice": (
        (2, 2),
        [[Shard(0), Shard(1)], [Shard(0), Shard(0)], [Shard(1), Shard(0)], [Shard(1), Shard(1)]],
    ),
    "2x2, cut once or twice": ((2, 2), [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Replicate(), Replicate()]]),
}
MESSAGES = {"2x2, other copies": 4, "2x2, cut twice": 4, "2x2, cut once or twice": 6}
"""Packed messages of a step: two for each dimension of the mesh that matrices are joined along; else 2."""
STEPS = 5


def _matrices(layout: str | None, dtype: torch.dtype) -> list[nn.Parameter]:
    """Return the matrices, spread as ``layout`` says; None: whole."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    return [nn.Parameter(_spread(value, index, layout)) for index, value in enumerate(values)]


def _spread(value: Tensor, index: int, layout: str | None) -> Tensor:
    if layout is None:
        return value
    sizes, placements = LAYOUTS[layout]
    sizes = tuple(dist.get_world_size() if size < 0 else size for size in sizes)
    mesh = mesh_of(sizes, ("a", "b")[: len(sizes)])
    return distribute_tensor(value, mesh, placements[index % len(placements)], src_data_rank=None)


def _wrap(params: list[nn.Parameter], dtype: torch.dtype) -> MixedPrecisionOptimizer:
    inner = torch.optim.Muon([(f"w{index}", param) for index, param in enumerate(params)], lr=0.05)
    fp16 = dtype == torch.float16
    config = OptimizerConfig(fp16=fp16, bf16=not fp16, clip_grad=0.5)
    return MixedPrecisionOptimizer(
        inner, config, ConstantGradScaler(64.0), grads_are_scaled=True, replicas_may_differ=True
    )


def _train(
    optimizer: MixedPrecisionOptimizer, params: list[nn.Parameter], layout: str | None, begin: int = 0
) -> list[bool]:
    """Step on gradients that are the same whole tensors in every layout; in odd steps one of each rank is infinite."""
    landed = []
    for step in range(begin, begin + STEPS):
        generator = torch.Generator().manual_seed(step)
        for index, (param, shape) in enumerate(zip(params, SHAPES, strict=True)):
            grad = torch.randn(shape, generator=generator).to(param.dtype)
            if step % 2 and index == step // 2:
                grad[-1, -1] = math.inf  # on the last ranks
            param.grad = _spread(grad, index, layout)
        landed.append(bool(optimizer.step().success))
    return landed


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _state(optimizer: MixedPrecisionOptimizer, params: list[nn.Parameter]) -> dict[str, Tensor]:
    found = {f"main {name}": _whole(main).clone() for name, main in optimizer.main_params()}
    found |= {f"model {index}": _whole(param.detach()).clone() for index, param in enumerate(params)}
    buffers = {index: optimizer.state[param]["momentum_buffer"] for index, param in enumerate(params)}
    return found | {f"momentum {index}": _whole(buffer).clone() for index, buffer in buffers.items()}


def _both(layout: str, dtype: torch.dtype) -> tuple[bool, list[bool], dict[str, int]]:
    """Train spread and whole. Returns whether all bits agree, what landed, and the collectives of a step."""
    spread, whole = _matrices(layout, dtype), _matrices(None, dtype)
    ours, theirs = _wrap(spread, dtype), _wrap(whole, dtype)
    landed = _train(ours, spread, layout)
    assert landed == _train(theirs, whole, None)
    agree = same_bits(_state(ours, spread), _state(theirs, whole))
    for index, param in enumerate(spread):
        param.grad = _spread(torch.ones(SHAPES[index], dtype=dtype), index, layout)
    with CommDebugMode() as seen:
        ours.step()
    return agree, landed, {str(name).rpartition(".")[2]: count for name, count in seen.get_comm_counts().items()}


def _cuts() -> tuple[list[list[tuple[int, int]]], list[object]]:
    """Return the cuts of matrices of shape [8, 8] by their placements, and of those that no cuts have made."""
    whole, square, line = torch.ones(8, 8), mesh_of((2, 2), ("a", "b")), mesh_of((1, 4), ("a", "b"))
    cut: list[tuple[DeviceMesh, list[Placement]]] = [
        (square, [Shard(0), Shard(1)]),
        (square, [Shard(-1), Shard(1)]),
        (square, [Replicate(), Shard(-2)]),
        (line, [Shard(1), Replicate()]),
        (square, [_StridedShard(0, split_factor=2), Shard(0)]),
        (square, [_StridedShard(0, split_factor=1), Shard(1)]),
        (square, [_StridedShard(0, split_factor=2), _StridedShard(-2, split_factor=1)]),
    ]
    bad: list[tuple[DeviceMesh, list[Placement], int]] = [
        (square, [Partial(), Shard(0)], 2),
        (square, [_StridedShard(0, split_factor=2), Shard(1)], 2),
        (square, [_StridedShard(0, split_factor=3), Shard(0)], 2),
        (square, [Replicate(), Shard(0)], 3),
    ]
    found = []
    for mesh, placements in cut:
        value = whole
        for size, placement in zip(mesh.shape, placements, strict=True):
            if isinstance(placement, (Shard, _StridedShard)):
                value = value.chunk(size, placement.dim)[0]
        spread = DTensor.from_local(value, mesh, placements, run_check=False, shape=whole.shape, stride=(8, 1))
        found.append([(one.dim, one.mesh_dim) for one in cuts_of(spread) or []])
    unknown: list[object] = []
    for mesh, placements, rows in bad:
        spread = DTensor.from_local(
            torch.ones(rows, 8), mesh, placements, run_check=False, shape=whole.shape, stride=(8, 1)
        )
        unknown.append(cuts_of(spread))
    return found, unknown


def test_cuts_are_those_that_made_the_pieces(ranks: RankPool) -> None:
    """In the order of cutting: strided ones last, and of these that of the last dimension of the mesh first. Dimensions
    of one rank cut nothing. Sums, strides of no cut and pieces of another size are no cuts.
    """
    cuts = [[(0, 0), (1, 1)], [(1, 0), (1, 1)], [(0, 1)], [], [(0, 1), (0, 0)], [(1, 1), (0, 0)], [(0, 1), (0, 0)]]
    for found, unknown in ranks.run(4, _cuts):
        assert found == cuts
        assert unknown == [None] * 4


CASES = [("rows", 2), ("columns", 2), ("some whole", 2), *((layout, 4) for layout in LAYOUTS)]


@pytest.mark.default("rows-2")
@pytest.mark.parametrize(("layout", "world"), CASES)
def test_bits_of_whole_matrices(ranks: RankPool, layout: str, world: int) -> None:
    """However matrices are cut, also with pieces that are empty: main params, momentum and weights have the bits of
    whole ones; an overflow of any piece skips the step everywhere; messages do not grow with the matrices.
    """
    for agree, landed, counts in ranks.run(world, _both, layout, torch.float16):
        assert agree
        assert landed == [True, False, True, False, True]
        assert counts == {"allreduce_": 1, "alltoall_base_": MESSAGES.get(layout, 2)}


def _fsdp2_over_tp() -> tuple[bool, set[str]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False), nn.Linear(5, 7, bias=False))
    whole = [nn.Parameter(weight.detach().clone()) for weight in module.parameters()]
    mesh = mesh_of((2, 2), ("data", "tensor"))
    parallelize_module(module, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": ColwiseParallel()})
    for layer in module:
        fully_shard(layer, mesh=mesh["data"])
    spread = list(module.parameters())
    optimizers = [
        MixedPrecisionOptimizer(
            torch.optim.Muon([(f"w{index}", param) for index, param in enumerate(params)], lr=0.05),
            OptimizerConfig(),
            replicas_may_differ=True,
        )
        for params in (spread, whole)
    ]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for piece, param in zip(spread, whole, strict=True):
            param.grad = torch.randn(param.shape, generator=generator)
            piece.grad = _as_cut_by_fsdp2(param.grad, piece)
        for optimizer in optimizers:
            optimizer.step()
    agree = all(
        bits_equal(_as_cut_by_fsdp2(param.data, piece).to_local(), to_local(piece))
        for piece, param in zip(spread, whole, strict=True)
    )
    return agree, {type(one).__name__ for piece in spread if isinstance(piece, DTensor) for one in piece.placements}


def _as_cut_by_fsdp2(value: Tensor, like: Tensor) -> DTensor:
    """Cut by tensor parallelism first, then along rows by FSDP2."""
    assert isinstance(like, DTensor)
    data, tensor = (like.device_mesh.get_local_rank(dim) for dim in range(2))
    placement = like.placements[1]
    assert isinstance(placement, Shard)
    part = _chunk(value, placement.dim, tensor)
    return DTensor.from_local(
        _chunk(part, 0, data),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _chunk(value: Tensor, dim: int, index: int) -> Tensor:
    parts = value.chunk(2, dim)
    return parts[index] if index < len(parts) else value.narrow(dim, 0, 0)


@pytest.mark.slow
def test_fsdp2_over_tensor_parallelism(ranks: RankPool) -> None:
    """Rows that tensor parallelism cuts before FSDP2 does, in strides, an odd number of rows too: the same bits."""
    for agree, kinds in ranks.run(4, _fsdp2_over_tp):
        assert agree
        assert "_StridedShard" in kinds


def _warned() -> list[list[str]]:
    mesh = mesh_of((dist.get_world_size(),), ("a",))
    found = []
    for kind, placement in (
        (torch.optim.Adafactor, Shard(0)),
        (torch.optim.Adafactor, Replicate()),
        (torch.optim.RMSprop, Shard(0)),
        (torch.optim.Muon, Shard(0)),
    ):
        param = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [placement], src_data_rank=None))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            MixedPrecisionOptimizer(kind([("w", param)], lr=0.1), replicas_may_differ=True)
        found.append([str(one.message) for one in caught])
    return found


def test_optimizers_that_may_read_pieces_are_named(ranks: RankPool) -> None:
    """On every rank, where DTensors are cut and the optimizer is neither elementwise nor run by our kernels."""
    for [message], *others in ranks.run(2, _warned):
        assert message.startswith("Adafactor is not known to be elementwise, and runs its own step() on DTensors")
        assert others == [[], [], []]
