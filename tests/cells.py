"""The combinations in which a promise holds or does not exist: dtype x layout x kind of state, each built alike.

    @pytest.mark.parametrize("cell", CELLS, ids=str)
    def test_of_a_promise(cell: Cell, ranks: RankPool) -> None:
        assert ranks.run(cell.world_size, _promise, cell) == ...

    def _promise(cell: Cell) -> ...:                    # on each rank; a replicated cell may also run in this process
        model = cell.model()
        optimizer = cell.optimizer(model)
        cell.backward(optimizer, model, integers(cell.shapes, seed=1))    # these are the unscaled gradients
        optimizer.step()

A cell that is not in CELLS does not exist. fp32 parameters are their own main params, so that they have no remainders,
and "compact" of them is 8-bit moments alone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from megascale import DistributedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from tests.meshes import mesh_of

SHAPES = ((33, 47), (7,), (4, 64))
"""One that two ranks do not cut at rows, one of fewer elements than a group of codes, one of whole groups."""

SHAPES_OF_GROUPS = ((33, 64), (64,), (4, 64))
"""What FSDP2 may cut where moments are codes: parts of whole groups of 32 elements."""

Named = Iterable[tuple[str, nn.Parameter]]


def adamw(named: Named) -> torch.optim.Optimizer:
    """Return AdamW with a learning rate that every dtype holds exactly."""
    return torch.optim.AdamW(named, lr=2.0**-7)


class Given(nn.Module):
    """A model whose gradients are given: those of ``forward(grads)`` are ``grads``."""

    def __init__(self, shapes: Sequence[Sequence[int]], seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randint(-64, 65, tuple(shape), generator=generator) / 64) for shape in shapes
        )

    def forward(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Return a loss, shape [], whose gradient of each parameter is that of ``grads``; None: it is not used."""
        pairs = zip(self.weights, grads, strict=True)
        return torch.stack([(weight.float() * grad).sum() for weight, grad in pairs if grad is not None]).sum()


@dataclass(frozen=True)
class Cell:
    """One combination.

    Attributes:
        dtype: of the parameters: float16, bfloat16 or float32.
        layout: "replicated", "zero1" (by elements), "zero1-parameters" or "fsdp2".
        state: "fp32", or "compact": 8-bit moments and, of 16-bit parameters, remainders.
    """

    dtype: torch.dtype
    layout: str
    state: str = "fp32"

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}-{self.layout}-{self.state}"

    @property
    def world_size(self) -> int:
        """Two ranks where parameters are sharded."""
        return 1 if self.layout == "replicated" else 2

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the model's parameters."""
        return SHAPES_OF_GROUPS if (self.layout, self.state) == ("fsdp2", "compact") else SHAPES

    def config(self, **fields: Any) -> OptimizerConfig:
        """Return the config of this cell."""
        fp16, bf16 = self.dtype == torch.float16, self.dtype == torch.bfloat16
        compact: dict[str, Any] = {}
        if self.state == "compact":
            compact = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8, "store_param_remainders": True}
        return OptimizerConfig(**({"fp16": fp16, "bf16": bf16} | compact | fields))

    def model(self, shapes: Sequence[Sequence[int]] | None = None) -> Given:
        """Return a model in this dtype, spread over the ranks where the layout is FSDP2's."""
        model = Given(shapes or self.shapes).to(self.dtype)
        if self.layout == "fsdp2":
            fully_shard(model, mesh=mesh_of((dist.get_world_size(),), ("dp",)))
        return model

    def optimizer(
        self,
        model: nn.Module,
        inner: Callable[[Named], torch.optim.Optimizer] = adamw,
        fields: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> MixedPrecisionOptimizer:
        """Wrap ``inner`` of the named parameters. ``fields``: of the config; ``options``: of the wrapper.

        fp16 parameters get a dynamic scale that begins at 16, so that an overflow is seen and halves it.
        """
        scaler = DynamicGradScaler(2.0**4, 1.0, 2.0, 0.5, 1000, 1) if self.dtype == torch.float16 else None
        wrapped, config = inner(list(model.named_parameters())), self.config(**(fields or {}))
        if not self.layout.startswith("zero1"):
            return MixedPrecisionOptimizer(wrapped, config, scaler, **options)
        shard = "parameters" if self.layout == "zero1-parameters" else "auto"
        return DistributedOptimizer(wrapped, config, scaler, **{"modules": model, "shard": shard, **options})

    def backward(self, optimizer: MixedPrecisionOptimizer, model: nn.Module, grads: Sequence[Tensor | None]) -> None:
        """Leave ``grads`` times the loss scale as gradients; ranks that average them hold the same ones."""
        optimizer.scale_loss(model(grads)).backward()


CELLS = [
    Cell(*axes)
    for axes in product(
        (torch.float16, torch.bfloat16, torch.float32), ("replicated", "zero1", "fsdp2"), ("fp32", "compact")
    )
]
"""The eighteen cells of dtype, layout and state; all of them exist for Adam and AdamW."""

FP32_STATE = [cell for cell in CELLS if cell.state == "fp32"]
"""The nine cells that every optimizer has."""


def integers(shapes: Sequence[Sequence[int]], seed: int, unit: float = 2.0**-6) -> list[Tensor]:
    """Return an fp32 tensor per shape, of at most 64 multiples of ``unit`` per element: exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-64, 65, tuple(shape), generator=generator).mul(unit) for shape in shapes]
