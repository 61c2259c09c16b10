"""The rows of docs/platforms.md on CUDA graphs, on devices that are not there: two ranks capture, by NCCL's rules.

Two layouts are not captured with forward and backward, DDP and FSDP2: the page says that nobody has tried them.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megascale import MixedPrecisionOptimizer, ParallelGroups, StepGraph
from megascale.errors import UsageError
from tests.distributed.test_support_table import COLUMNS, GRAPH_ROWS, cells_of_page
from tests.fake_device.device import FakeDevice
from tests.fake_device.models import CONFIG, Built, adamw, loss_of, model, sharded, synced, world_of_two
from tests.fake_device.process import OnDevice
from tests.fake_device.training import scaler

NOT_TRIED = "not tried"


def _alone() -> Built:
    module = model()
    return MixedPrecisionOptimizer(adamw(module), CONFIG, scaler(), groups=ParallelGroups()), loss_of(module)


def _ddp() -> Built:
    """DistributedDataParallel changes nothing of the step, which sees the inner module's parameters."""
    module = model()
    return MixedPrecisionOptimizer(adamw(module), CONFIG, scaler()), loss_of(module)


def _fsdp2() -> Built:
    module, mesh = model(), init_device_mesh("cuda", (2,))
    fully_shard(module, mesh=mesh)
    return MixedPrecisionOptimizer(adamw(module), CONFIG, scaler(), groups=mesh), loss_of(module)


def _tensor_parallel() -> Built:
    module = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False)).half().cuda()
    mesh = init_device_mesh("cuda", (1, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return MixedPrecisionOptimizer(adamw(module), CONFIG, scaler(), groups=mesh), loss_of(module)


BUILDERS = dict(
    zip(
        COLUMNS,
        (_alone, _ddp, lambda: synced(model()), lambda: sharded(model()), _fsdp2, _tensor_parallel),
        strict=True,
    )
)


def _capture(device: FakeDevice, row: str, column: str) -> tuple[str, list[str]]:
    """Return "yes", or the error; and what a capture would have refused."""
    optimizer, loss = BUILDERS[column]()
    whole = row == GRAPH_ROWS[1]

    def forward_backward() -> Any:
        optimizer.scale_loss(loss()).backward()

    if not whole:
        optimizer.scale_loss(torch.zeros((), device="cuda"))
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.zeros_like(param)
    with device.watch() as seen:
        try:
            StepGraph(optimizer, forward_backward if whole else None)
        except UsageError as error:
            return f"{type(error).__name__}: {error}", []
    return "yes", seen.refused_in_capture()


def _capture_backward_alone(device: FakeDevice) -> str:
    world_of_two()
    optimizer, loss = synced(model())
    optimizer.scale_loss(loss()).backward()  # what a program runs before it captures
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(UsageError) as raised, torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.scale_loss(loss()).backward()
    return str(raised.value)


def test_a_backward_that_a_program_captures_is_refused(on_device: OnDevice) -> None:
    """Replays would call no hook of GradSync, which would zero all main grads. A StepGraph holds the step, too."""
    message = on_device(_capture_backward_alone)
    assert "a graph captures the backward pass of" in message
    assert "StepGraph(optimizer, forward_backward)" in message


def _capture_forward_alone(device: FakeDevice) -> list[str]:
    """Return the errors of captures of a whole model's forward, and of a submodule's; one that is frozen has none."""
    world_of_two()
    module = nn.Sequential(nn.Linear(4, 4).half().cuda().requires_grad_(False), model())
    _optimizer, _ = sharded(module, overlap_param_gather=True)
    batch, errors = torch.ones(2, 4, dtype=torch.float16, device="cuda"), []
    for captured in (module, module.get_submodule("1.0"), module[0]):
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                captured(batch)
        except UsageError as error:
            errors.append(str(error))
    return errors


def test_a_forward_that_a_program_captures_is_refused_where_weights_arrive_in_it(on_device: OnDevice) -> None:
    """Replays would call no hook, and read weights that are on their way: also those of a part of the model."""
    whole, part = on_device(_capture_forward_alone)
    assert whole == part
    assert "a graph captures the forward pass of Linear: its replays call no hook" in part
    assert "overlap_param_gather" in part


@pytest.mark.slow
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("row", GRAPH_ROWS)
def test_a_graph_is_captured_as_the_page_says(on_device: OnDevice, row: str, column: str) -> None:
    """`yes`: all of it is captured, and nothing that a capture refuses is called; else the error's words."""
    cell = cells_of_page()[row, column]
    if cell == NOT_TRIED:
        assert row == GRAPH_ROWS[1]
        assert column in ("DDP", "FSDP2")
        return
    [(outcome, refused), other] = on_device.ranks(2, _capture, row, column)
    assert other == (outcome, refused)
    assert refused == []
    if cell == "yes":
        assert outcome == "yes"
    else:
        name, words = cell.strip("`").split(": ")
        assert outcome.startswith(f"{name}: ")
        assert words in outcome
