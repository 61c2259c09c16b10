"""The table of docs/platforms.md says which feature works in which layout: each cell is tried, on two ranks.

The rows on CUDA graphs are tried in tests/unit/fake_device/test_graph_of_layouts.py.
"""

import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import get_ema_multi_avg_fn

from megascale import DistributedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig, ParallelGroups
from megascale.averages import AveragedMainParams
from megascale.checkpoint import Checkpointer
from megascale.errors import MegascaleError, UsageError
from megascale.grad_sync import GradSync
from tests.meshes import mesh_of
from tests.pool import RankPool

PAGE = Path(__file__).parents[2] / "docs" / "platforms.md"
HEADING = "## Features and layouts"
STEPS, BAD_STEP = 4, 1
CLIP = 1e-3


class Net(nn.Module):
    """Two matrices, without vectors, so that Muon takes both."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return shape [..., 32]."""
        out: Tensor = self.down(torch.relu(self.up(x)))
        return out


Inner = Callable[[Any], torch.optim.Optimizer]
Built = tuple[nn.Module, MixedPrecisionOptimizer]


class Feature(NamedTuple):
    """What a row of the table promises: a config, an optimizer, and a use of it."""

    config: dict[str, Any]
    inner: Inner = lambda named: torch.optim.AdamW(named, lr=1e-2)
    dtype: torch.dtype = torch.bfloat16
    use: str = ""


GRAPH_ROWS = ("CUDA graph of the step alone", "CUDA graph with forward and backward")
ROWS: dict[str, Feature] = {
    "fp16, dynamic loss scale": Feature({"fp16": True}, dtype=torch.float16),
    "bf16": Feature({"bf16": True}),
    "fp32 parameters": Feature({}, dtype=torch.float32),
    "clipping": Feature({"bf16": True, "clip_grad": CLIP}, lambda named: torch.optim.SGD(named, lr=1.0), use="clip"),
    "16-bit moments": Feature({"bf16": True, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}),
    "8-bit moments": Feature({"bf16": True, "exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}),
    "16-bit remainders": Feature({"bf16": True, "store_param_remainders": True}),
    "Muon": Feature({"bf16": True}, lambda named: torch.optim.Muon(named, lr=1e-2)),
    "Muon with remainders": Feature(
        {"bf16": True, "store_param_remainders": True}, lambda named: torch.optim.Muon(named, lr=1e-2)
    ),
    "Muon with 8-bit moments": Feature(
        {"bf16": True, "exp_avg_dtype": torch.int8}, lambda named: torch.optim.Muon(named, lr=1e-2)
    ),
    "any other optimizer (RMSprop)": Feature({"bf16": True}, lambda named: torch.optim.RMSprop(named, lr=1e-3)),
    "EMA, `AveragedMainParams`": Feature({"fp16": True}, dtype=torch.float16, use="ema"),
    "evaluation with the EMA, `applied()`": Feature({"fp16": True}, dtype=torch.float16, use="applied"),
    "`Checkpointer`": Feature({"fp16": True}, dtype=torch.float16, use="checkpoint"),
    "`last_overflow()`": Feature({"fp16": True}, dtype=torch.float16, use="overflow"),
    "`optimizer_cpu_offload`": Feature({"fp16": True, "optimizer_cpu_offload": True}, dtype=torch.float16),
    "`offload()`, `reload()`": Feature({"fp16": True}, dtype=torch.float16, use="offload"),
}


COLUMNS = ("one process", "DDP", "`GradSync`", "`DistributedOptimizer`", "FSDP2", "tensor parallel")


def _built(column: str, feature: Feature, config: OptimizerConfig, scaler: Any) -> Built:
    """Return a model that ranks share as the column says, and its optimizer."""
    model: nn.Module = Net().to(feature.dtype)
    options: dict[str, Any] = {"groups": ParallelGroups()} if column == "one process" else {}
    if column == "FSDP2":
        options["groups"] = mesh_of((2,), ("dp",))
        fully_shard(model, mesh=options["groups"])
    elif column == "tensor parallel":
        options["groups"] = mesh = mesh_of((1, 2), ("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    elif column == "`GradSync`":
        options["grad_sync"] = GradSync(model.named_parameters())
    inner = feature.inner(model.named_parameters())
    if column == "`DistributedOptimizer`":
        return model, DistributedOptimizer(inner, config, scaler, modules=[model])
    if column == "DDP":
        model = DistributedDataParallel(model)
    return model, MixedPrecisionOptimizer(inner, config, scaler, **options)


def _train(model: nn.Module, optimizer: Any, feature: Feature, averages: AveragedMainParams | None) -> list[bool]:
    """Take some steps, one of which overflows if the feature is about that. Returns which landed."""
    landed = []
    for step in range(STEPS):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).to(feature.dtype)
        if feature.use == "offload":
            optimizer.zero_grad()
            optimizer.offload()
            with pytest.raises(UsageError, match="reload"):
                optimizer.step()
            optimizer.reload()
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        scaled = optimizer.scale_loss(loss)
        scaled.backward(torch.tensor(math.inf) if feature.use == "overflow" and step == BAD_STEP else None)
        result = optimizer.step()
        landed.append(bool(result.success))
        if averages is not None:
            averages.update_parameters(success=result.success)
    return landed


def _weights(optimizer: Any) -> list[Tensor]:
    return [main.detach().clone() for _, main in optimizer.main_params()]


def _try(row: str, column: str) -> str:
    """Return "yes", or the error that the feature raises in this layout."""
    feature = ROWS[row]
    torch.manual_seed(0)
    try:
        scaler = DynamicGradScaler(2.0**8) if feature.dtype == torch.float16 else None
        model, optimizer = _built(column, feature, OptimizerConfig(**feature.config), scaler)
        averages = None
        if feature.use in ("ema", "applied"):
            averages = AveragedMainParams(
                getattr(model, "module", model), optimizer, multi_avg_fn=get_ema_multi_avg_fn(0.5)
            )
        before = _weights(optimizer)
        landed = _train(model, optimizer, feature, averages)
        if feature.use == "applied" and averages is not None:
            with averages.applied():
                model(torch.ones(8, 32, dtype=feature.dtype))
    except MegascaleError as error:
        return f"{type(error).__name__}: {error}"
    assert landed == [feature.use != "overflow" or step != BAD_STEP for step in range(STEPS)]
    moved = sum(float((new - old).square().sum()) for new, old in zip(_weights(optimizer), before, strict=True))
    assert moved > 0
    assert feature.use != "clip" or moved**0.5 < 1.01 * STEPS * CLIP
    _check_moments(optimizer, feature)
    if feature.use == "overflow":
        report = optimizer.last_overflow(gather=True)
        assert report is not None
        assert {entry.parameter for entry in report.entries} == {"up.weight", "down.weight"}
    if feature.use == "checkpoint":
        _save_and_load(model, optimizer, column)
    return "yes"


def _check_moments(optimizer: Any, feature: Feature) -> None:
    """Moments have the dtype that the feature asks for, so that a "yes" is about it."""
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            if name in state and f"{name}_dtype" in feature.config:
                assert state[name].dtype == feature.config[f"{name}_dtype"]


def _save_and_load(model: nn.Module, optimizer: Any, column: str) -> None:
    """Save, train on, load: the main params are those that were saved."""
    folders = [tempfile.mkdtemp()]
    groups = ParallelGroups() if column == "one process" else None
    if groups is None:
        dist.broadcast_object_list(folders)
    inner = getattr(model, "module", model)
    with Checkpointer(f"{folders[0]}/saved", groups=groups) as checkpointer:
        checkpointer.save(1, inner, optimizer)
        saved = _weights(optimizer)
        _train(model, optimizer, ROWS["bf16"]._replace(dtype=torch.float16), None)
        checkpointer.load(inner, optimizer)
    for new, old in zip(_weights(optimizer), saved, strict=True):
        assert bool(torch.equal(new, old))


def cells_of_page() -> dict[tuple[str, str], str]:
    """Return the cells of the page, by row and column."""
    section = PAGE.read_text().split(HEADING)[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    head, _, *rows = cells
    return {(row[0], column): cell for row in rows for column, cell in zip(head[1:], row[1:], strict=True)}


def test_the_table_is_complete() -> None:
    """Each feature and each layout of this file stands on the page, and no other."""
    assert set(cells_of_page()) == {(row, column) for row in (*ROWS, *GRAPH_ROWS) for column in COLUMNS}


@pytest.mark.default("`GradSync`")
@pytest.mark.parametrize("column", COLUMNS)
def test_every_cell_is_as_the_page_says(ranks: RankPool, column: str) -> None:
    """A cell is `yes`, or the error that every rank raises, with words of its message."""
    for row in ROWS:
        cell = cells_of_page()[row, column]
        for outcome in ranks.run(2, _try, row, column):
            if cell == "yes":
                assert outcome == "yes", (row, column)
            else:
                name, words = cell.strip("`").split(": ")
                assert outcome.startswith(f"{name}: "), (row, column, outcome)
                assert words in outcome, (row, column, outcome)
