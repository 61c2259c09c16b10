"""An optimizer whose parameters no backward reaches, on any rank, says so in its first step."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascale import MixedPrecisionOptimizer, ParallelGroups
from megascale.errors import UsageError
from megascale.utils.collectives import full_tensor
from tests.cells import CELLS, FP32_STATE, Cell, integers
from tests.pool import RankPool
from tests.training import bits_equal, same_bits, snapshot

BF16 = [cell for cell in FP32_STATE if cell.dtype == torch.bfloat16]
Told = tuple[str, bool, bool, bool]


def _step_of_another_model(cell: Cell) -> Told:
    """Train another model than the optimizer's, then its own, then take an empty step.

    Returns the error of the first, whether it left everything as it was, and whether the two others succeeded.
    """
    model, other = cell.model(), cell.model()
    optimizer, grads = cell.optimizer(model), integers(cell.shapes, seed=1)

    def bits() -> dict[str, Tensor]:
        return {name: full_tensor(value) for name, value in snapshot(optimizer, model).items()}

    before, scale = bits(), optimizer.get_loss_scale().clone()
    cell.backward(optimizer, other, grads)
    with pytest.raises(UsageError) as caught:
        optimizer.step()
    kept = same_bits(before, bits()) and int(optimizer.num_landed_steps) == 0
    kept = kept and bits_equal(optimizer.get_loss_scale(), scale)
    optimizer.zero_grad()
    cell.backward(optimizer, model, grads)
    trained = bool(optimizer.step().success) and not same_bits(before, bits())
    optimizer.zero_grad()
    optimizer.get_loss_scale()
    return str(caught.value), kept, trained, bool(optimizer.step().success)


@pytest.mark.default("float16-replicated-compact", "bfloat16-zero1-fp32", "float32-fsdp2-compact")
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_an_optimizer_of_another_model_is_refused(cell: Cell, ranks: RankPool) -> None:
    """All cells exist: main grads of a DistributedOptimizer are zeros that no backward has made. Nothing has changed;
    once there were gradients, a step may be empty.
    """
    told = ranks.run(cell.world_size, _step_of_another_model, cell)
    assert len(set(told)) == 1
    message, kept, trained, empty = told[0]
    for cause in ("fully_shard()", "to_empty()", "another model"):
        assert cause in message
    assert kept
    assert trained
    assert empty


def _one_rank_has_gradients(cell: Cell) -> bool:
    """Train a stage per rank, of which only the first has gradients in the first step."""
    model = cell.model()
    inner, config = torch.optim.SGD(model.named_parameters(), lr=0.5), cell.config()
    scaler = cell.optimizer(cell.model()).grad_scaler
    optimizer = MixedPrecisionOptimizer(inner, config, scaler, groups=ParallelGroups(grad_stats=dist.group.WORLD))
    optimizer.get_loss_scale()
    if dist.get_rank() == 0:
        optimizer.scale_loss(model(integers(cell.shapes, seed=1))).backward()
    return bool(optimizer.step().success)


@pytest.mark.parametrize("cell", [cell for cell in BF16 if cell.layout == "replicated"], ids=str)
def test_gradients_on_one_rank_are_enough(cell: Cell, ranks: RankPool) -> None:
    """In a pipeline a stage may have none. Where ranks share parameters, one without a gradient is another error."""
    assert ranks.run(2, _one_rank_has_gradients, cell) == [True, True]


def _zeros(cell: Cell) -> bool:
    """Take a first step with gradients of zeros, as torch.distributed.checkpoint does to make state."""
    model = cell.model()
    optimizer = cell.optimizer(model)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.get_loss_scale()
    return bool(optimizer.step().success)


@pytest.mark.parametrize("cell", BF16, ids=str)
def test_gradients_of_zeros_are_gradients(cell: Cell, ranks: RankPool) -> None:
    """A program may make an optimizer's state by a first step of zeros."""
    assert all(ranks.run(cell.world_size, _zeros, cell))


def test_a_frozen_model_is_refused() -> None:
    """A variant: every parameter is frozen, so that backward leaves no gradient."""
    model = nn.Linear(2, 2)
    head = nn.Linear(2, 2)
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model.requires_grad_(False)
    head(model(torch.ones(1, 2))).sum().backward()
    with pytest.raises(UsageError, match="frozen"):
        optimizer.step()
