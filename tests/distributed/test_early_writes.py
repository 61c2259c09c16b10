"""Writes into parameters after a step, as a mask or a clamp, while weights are on their way; and into main params."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megascale import MixedPrecisionOptimizer
from megascale.errors import UsageError
from tests.cells import Cell, Given, integers
from tests.fsdp2_cases import whole
from tests.pool import RankPool

SHARDED = [
    Cell(torch.float16, "zero1"),
    Cell(torch.bfloat16, "zero1", "compact"),
    Cell(torch.float32, "zero1"),
    Cell(torch.float32, "zero1-parameters"),
]
"""A gather is the way of weights in ZeRO-1 alone; where a layout has none, step() returns with the weights in place."""

OFFLOADED = [Cell(torch.bfloat16, layout) for layout in ("replicated", "fsdp2")]
"""Weights come from host memory during forward; of ZeRO-1 the step waits. fp32 parameters stay where they are."""

OFFLOAD = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True}


def _model(cell: Cell) -> Given:
    """Return the cell's model, whose forward waits: a replicated parameter is awaited by the module that holds it."""
    model = cell.model()
    if cell.layout == "replicated":
        for index, weight in enumerate(list(model.weights)):
            model.register_parameter(f"weights_{index}", weight)
    return model


def _clamp(model: Given) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.clamp_(-0.25, 0.25)


def _train(cell: Cell, after_step: Callable[[MixedPrecisionOptimizer, Given], None], **built: Any) -> list[Tensor]:
    """Return the weights, and main params, after some steps each of which ``after_step`` follows."""
    model = _model(cell)
    optimizer = cell.optimizer(model, **built)
    for step in range(4):
        optimizer.zero_grad()
        cell.backward(optimizer, model, integers(cell.shapes, step))
        optimizer.step()
        after_step(optimizer, model)
    optimizer.finish_param_gather()
    main_params = [whole(main).clone() for _, main in optimizer.main_params()]
    return [*(whole(weight.detach()).clone() for weight in model.parameters()), *main_params]


def _finish_and_clamp(optimizer: MixedPrecisionOptimizer, model: Given) -> None:
    optimizer.finish_param_gather()
    _clamp(model)


def _clamped_with_and_without_overlap(cell: Cell, source: str) -> tuple[list[Tensor], list[Tensor]]:
    after: Any = _finish_and_clamp
    waits: dict[str, Any] = {"fields": {**OFFLOAD, "overlap_cpu_optimizer_d2h_h2d": False}}
    overlaps: dict[str, Any] = {"fields": OFFLOAD}
    if source != "the host":
        waits, overlaps = {}, {"overlap_param_gather": True}
    if source == "no other rank":
        after = lambda _, model: _clamp(model)  # noqa: E731
    return _train(cell, lambda _, model: _clamp(model), **waits), _train(cell, after, **overlaps)


@pytest.mark.default(
    "other ranks-float32-zero1-parameters-fp32", "other ranks-bfloat16-zero1-compact", "the host-*fsdp2*"
)
@pytest.mark.parametrize(
    ("source", "cell"),
    [
        *product(["other ranks"], SHARDED),
        *product(["the host"], [*OFFLOADED, Cell(torch.bfloat16, "zero1")]),
        ("no other rank", Cell(torch.bfloat16, "zero1")),
    ],
    ids=str,
)
def test_a_write_after_weights_have_arrived_is_followed(source: str, cell: Cell, ranks: RankPool) -> None:
    """The bits of a run without overlap, where no weights are on their way. A gather of one rank brings nothing: a
    write at once is followed, too.
    """
    world = 1 if source == "no other rank" else cell.world_size
    for together, overlapped in ranks.run(world, _clamped_with_and_without_overlap, cell, source):
        assert len(together) == len(overlapped)
        assert all(map(torch.equal, together, overlapped))


@pytest.mark.default(
    "all ranks-float32-zero1-parameters-fp32", "the last rank-bfloat16-zero1-compact", "the host-bfloat16-fsdp2-fp32"
)
@pytest.mark.parametrize(
    ("writers", "cell"), [*product(["all ranks", "the last rank"], SHARDED), *product(["the host"], OFFLOADED)], ids=str
)
def test_a_write_before_the_gather_has_ended_is_refused(writers: str, cell: Cell, ranks: RankPool) -> None:
    """It was replaced by what arrived, now and then, in silence. The next step, or state_dict(), says so on every rank
    and changes nothing; after a load all goes on. Likewise where weights come from host memory.
    """
    for message, is_unchanged, of_state_dict, norm in ranks.run(cell.world_size, _written_early, cell, writers):
        assert is_unchanged
        assert "finish_param_gather()" in message
        assert "finish_param_gather()" in of_state_dict
        assert writers == "the last rank" or "weights" in message
        assert norm > 0


def _written_early(cell: Cell, writers: str) -> tuple[str, bool, str, float]:
    model = _model(cell)
    options: dict[str, Any] = {"fields": OFFLOAD} if writers == "the host" else {"overlap_param_gather": True}
    optimizer = cell.optimizer(model, **options)

    def backward(step: int) -> None:
        optimizer.zero_grad()
        cell.backward(optimizer, model, integers(cell.shapes, step))

    def step_and_write(step: int) -> None:
        backward(step)
        optimizer.step()
        if writers != "the last rank" or dist.get_rank() == 1:
            _clamp(model)

    backward(0)
    optimizer.step()
    saved = optimizer.state_dict()
    step_and_write(1)
    backward(2)
    if writers == "the host":
        optimizer.finish_param_gather()  # the thread's update has ended
    before = [*(main.clone() for main in _held(optimizer)), optimizer.get_loss_scale()]
    with pytest.raises(UsageError) as refused:
        optimizer.step()
    is_unchanged = all(map(torch.equal, before, [*_held(optimizer), optimizer.get_loss_scale()]))
    optimizer.load_state_dict(saved)
    step_and_write(3)
    with pytest.raises(UsageError) as of_state_dict:
        optimizer.state_dict()
    step_and_write(4)
    optimizer.load_state_dict(saved)  # which replaces what was written, and what replaced it
    backward(5)
    return str(refused.value), is_unchanged, str(of_state_dict.value), optimizer.step().grad_norm.item()


def _held(optimizer: MixedPrecisionOptimizer) -> list[Tensor]:
    """Return local main params, or remainders, and state, as they lie in memory."""
    mains = [param.memory for param in optimizer._member.main_params if param.is_copy]
    state = [value for entry in optimizer._inner.state.values() for value in entry.values()]
    return [value.to_local() if hasattr(value, "to_local") else value for value in [*mains, *state]]
