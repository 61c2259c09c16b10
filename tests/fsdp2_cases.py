"""What the tests of FSDP2 and tensor parallelism share: a model, data cut in four, and fp32 masters by hand."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.utils.collectives import full_tensor
from tests.meshes import mesh_of
from tests.training import bits_equal

PARTS = 4  # of every step's data: one, two or four for each rank
SCALE, WINDOW = 2.0**12, 4
CLIP = 0.05

Inner = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
INNER: dict[str, Inner] = {
    "adamw": lambda named: torch.optim.AdamW(named, lr=2e-3, weight_decay=0.1),
    "sgd": lambda named: torch.optim.SGD(named, lr=1e-2),
    "momentum": lambda named: torch.optim.SGD(named, lr=1e-2, momentum=0.9),
    "adadelta": lambda named: torch.optim.Adadelta(named, lr=1e-2),  # runs its own step(): no state before the first
}


class Net(nn.Module):
    """Shapes that four ranks cannot share evenly, some with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return shape [..., 1]."""
        out: Tensor = self.head(self.norm(x + self.down(torch.nn.functional.gelu(self.up(x)))))
        return out


class Row(NamedTuple):
    """One step, on the host."""

    landed: bool
    norm: float
    zeros: float
    scale: float


@dataclass(frozen=True)
class Case:
    """How a model is spread over ranks.

    Attributes:
        dtype: of the parameters.
        compute: FSDP2's ``param_dtype``; None: the parameters' own.
        reduce: FSDP2's ``reduce_dtype``.
        mesh: dimensions and their names; None: all ranks are "dp". "tp" cuts the linear layers, the others cut all.
        reshard: ``reshard_after_forward``.
        inner: of INNER.
    """

    dtype: torch.dtype = torch.float16
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = torch.float32
    mesh: tuple[tuple[int, ...], tuple[str, ...]] | None = None
    reshard: bool = True
    inner: str = "adamw"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of activations and, before they are reduced, gradients."""
        return self.compute or self.dtype

    def device_mesh(self) -> DeviceMesh:
        """The mesh over all ranks."""
        shape, names = self.mesh or ((dist.get_world_size(),), ("dp",))
        return mesh_of(shape, names)

    def build(self, seed: int = 0) -> tuple[Net, MixedPrecisionOptimizer]:
        """Return the spread model and its optimizer."""
        torch.manual_seed(seed)
        module = Net().to(self.dtype)
        mesh = self.device_mesh()
        names = mesh.mesh_dim_names or ()
        if "tp" in names:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(module, mesh["tp"], plan)
        data = tuple(name for name in names if name != "tp")
        if data:
            policy = MixedPrecisionPolicy(param_dtype=self.compute, reduce_dtype=self.reduce)
            sharded = {"mesh": mesh[data], "mp_policy": policy, "reshard_after_forward": self.reshard, **self.options}
            for layer in (module.up, module.down, module):
                fully_shard(layer, **sharded)
        return module, wrap(module, self.compute_dtype, self.inner, mesh)


def wrap(module: nn.Module, compute: torch.dtype, inner: str, groups: Any) -> MixedPrecisionOptimizer:
    """Wrap a module that computes in ``compute``."""
    config = OptimizerConfig(
        fp16=compute == torch.float16, bf16=compute == torch.bfloat16, clip_grad=CLIP, log_num_zeros_in_grad=True
    )
    scaler = DynamicGradScaler(SCALE, 1.0, 2.0, 0.5, WINDOW, 1)
    return MixedPrecisionOptimizer(INNER[inner](list(module.named_parameters())), config, scaler, groups=groups)


def data_of(step: int, part: int, dtype: torch.dtype) -> Tensor:
    """One part of a step's data, shape [4, 6]."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(PARTS * step + part)).to(dtype)


def loss_of(module: nn.Module, step: int, parts: Sequence[int], dtype: torch.dtype, bad: Mapping[int, int]) -> Tensor:
    """The mean over ``parts``; infinite where ``bad`` names one of them for this step."""
    losses = [module(data_of(step, part, dtype)).float().square().mean() for part in parts]
    loss = torch.stack(losses).mean()
    return loss * math.inf if bad.get(step) in parts else loss


def own_parts(world: int, rank: int) -> list[int]:
    """The parts of one data-parallel rank."""
    return list(range(rank * PARTS // world, (rank + 1) * PARTS // world))


def split(parts: list[int], micro: int) -> list[list[int]]:
    """A rank's parts as ``micro`` micro-batches."""
    return [parts[index * len(parts) // micro : (index + 1) * len(parts) // micro] for index in range(micro)]


def train(
    module: Net, optimizer: MixedPrecisionOptimizer, case: Case, steps: range, bad: Mapping[int, int], micro: int = 1
) -> list[Row]:
    """Take steps on this rank's parts, each in ``micro`` backward passes of which only the last one reduces."""
    mesh = case.device_mesh()
    data = [name for name in mesh.mesh_dim_names or () if name != "tp"]
    world = math.prod(mesh[name].size() for name in data)
    rank = 0
    for name in data:
        rank = rank * mesh[name].size() + mesh[name].get_local_rank()
    parts = own_parts(world, rank)
    seen = []
    for step in steps:
        optimizer.zero_grad()
        for index, chosen in enumerate(split(parts, micro)):
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(index == micro - 1)
            optimizer.scale_loss(loss_of(module, step, chosen, case.compute_dtype, bad) / micro).backward()
        success, norm, zeros = optimizer.step()
        seen.append(Row(bool(success), norm.item(), zeros.item(), optimizer.get_loss_scale().item()))
    return seen


def whole(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor, on every rank."""
    return full_tensor(tensor.detach()).clone()


def whole_state(optimizer: Any) -> dict[str, Any]:
    """Our state dict with every tensor whole, flat by path. The same on every rank, at any number of ranks."""
    found: dict[str, Any] = {}

    def visit(path: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                visit(f"{path}/{key}", item)
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                visit(f"{path}/{index}", item)
        else:
            found[path] = whole(value) if isinstance(value, Tensor) else value

    visit("", optimizer.state_dict())
    return found


def gathered_weights(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter, whole."""
    return {name: whole(param) for name, param in module.named_parameters()}


def unlike(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """The paths at which two flat states differ in keys, types, shapes, dtypes or bits."""
    return [
        path
        for path in sorted(left.keys() | right.keys())
        if path not in left or path not in right or not _same(left[path], right[path])
    ]


def _same(left: Any, right: Any) -> bool:
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return type(left) is type(right) and bool(left == right)
    return bits_equal(left, right)
