"""Every run loads the checkpoint of every run, bit for bit: whatever its layout, number of ranks and form of state."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megascale import DistributedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.checkpoint import Checkpointer
from megascale.grad_sync import GradSync
from tests.cells import SHAPES, Given, adamw, integers
from tests.fsdp2_cases import gathered_weights, unlike, whole_state
from tests.meshes import mesh_of
from tests.pool import RankPool
from tests.whole_optimizers import WHOLE, named

CODES: dict[str, Any] = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}
REMAINDERS: dict[str, Any] = {"store_param_remainders": True}
ON_HOST: dict[str, Any] = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True}
STATES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "16bit": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "8bit": CODES,
    "remainders": REMAINDERS,
    "compact": CODES | REMAINDERS,
    "host": ON_HOST,
    "compact-host": CODES | REMAINDERS | ON_HOST | {"optimizer_offload_fraction": 0.5},
}
"""The config's fields of each form of state."""

SHAPES_OF_CODES = ((33, 64), (256,), (4, 64), (128,), (3, 2, 16))
"""What FSDP2 may cut over four ranks where moments are codes: parts of whole groups of 32 elements."""
MATRICES = ((33, 47), (5, 9), (4, 8))
STEPS = 3

Whole = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One row, and one column, of the table.

    Attributes:
        layout: "replicated", "elements" or "parameters" (ZeRO-1), "fsdp2", or "hsdp": two copies of two shards.
        state: of STATES.
        rule: "adamw", or of WHOLE: the optimizers whose update of an element reads the whole parameter.
        shapes: of the parameters.
    """

    layout: str
    ranks: int
    state: str = "fp32"
    rule: str = "adamw"
    shapes: tuple[tuple[int, ...], ...] = SHAPES

    def __str__(self) -> str:
        return f"{self.layout}-{self.ranks}-{self.state}"

    @property
    def form(self) -> str:
        """The form of state, wherever it lies."""
        return {"host": "fp32", "compact-host": "compact"}.get(self.state, self.state)

    def build(self, seed: int) -> tuple[nn.Module, MixedPrecisionOptimizer]:
        """Return a model with weights of ``seed``, and its optimizer."""
        module = Given(self.shapes, seed).half()
        if self.layout in ("fsdp2", "hsdp"):
            mesh = mesh_of((2, 2), ("copies", "shards")) if self.layout == "hsdp" else mesh_of((self.ranks,), ("dp",))
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        inner = WHOLE[self.rule](module) if self.rule in WHOLE else adamw(named(module))
        config, scaler = (
            OptimizerConfig(fp16=True, **STATES[self.state]),
            DynamicGradScaler(2.0**4, 1.0, 2.0, 0.5, 9, 1),
        )
        if self.layout in ("elements", "parameters"):
            return module, DistributedOptimizer(
                inner, config, scaler, modules=module, bucket_numel=600, shard=self.layout
            )
        is_synced = self.layout == "replicated" and self.ranks > 1
        sync = GradSync(module.named_parameters(), bucket_numel=600) if is_synced else None
        return module, MixedPrecisionOptimizer(inner, config, scaler, grad_sync=sync)

    def step(self, module: nn.Module, optimizer: MixedPrecisionOptimizer, number: int) -> None:
        """Step on gradients of which three equal ones have an exact mean; that of step 1 overflows."""
        grads = integers(self.shapes, number, unit=3 * 2.0**-8)
        if number == 1:
            grads[0].view(-1)[-1] = torch.inf
        optimizer.zero_grad()
        optimizer.scale_loss(module(grads)).backward()
        assert bool(optimizer.step().success) == (number != 1)

    def path(self, folder: Path) -> Path:
        """Return where it saves."""
        return folder / f"{self}"


def _everything(module: nn.Module, optimizer: MixedPrecisionOptimizer) -> Whole:
    """Return weights, main params, state, counts, options and scale, whole; scales flat: a DTensor's are rows."""
    found = whole_state(optimizer) | gathered_weights(module)
    return {
        key: value.reshape(-1) if "_scale" in key and isinstance(value, Tensor) else value
        for key, value in found.items()
    }


def _save(runs: list[Run], folder: Path) -> list[Whole]:
    """Train each run and save it. Returns what each holds."""
    found = []
    for run in runs:
        module, optimizer = run.build(0)
        for number in range(STEPS):
            run.step(module, optimizer, number)
        Checkpointer(run.path(folder)).save(STEPS, module, optimizer)
        found.append(_everything(module, optimizer))
    return found


def _expected(forms: dict[str, Run]) -> dict[tuple[str, str], tuple[Whole, Whole]]:
    """Return, by form that saves and that loads, what one rank has after ``load_state_dict()``, and a step later."""
    expected = {}
    for (before, source), (after, target) in product(forms.items(), repeat=2):
        module, optimizer = source.build(0)
        for number in range(STEPS):
            source.step(module, optimizer, number)
        other, loaded = target.build(1)
        other.load_state_dict(module.state_dict())
        loaded.load_state_dict(optimizer.state_dict())
        found = _everything(other, loaded)
        target.step(other, loaded, STEPS)
        expected[before, after] = found, _everything(other, loaded)
    return expected


def _load(runs: list[Run], sources: list[Run], folder: Path) -> dict[tuple[str, str], str]:
    """Load each source's checkpoint into each run, and take a step. Returns what differs, by (source, run)."""
    expected, wrong = torch.load(folder / "expected.pt", weights_only=False), {}
    for run, source in product(runs, sources):
        at_once, later = expected[source.form, run.form]
        module, optimizer = run.build(2)
        try:
            Checkpointer(source.path(folder)).load(module, optimizer)
            if source == run:  # a state dict brings all of it, too
                saved = optimizer.state_dict()
                module, optimizer = run.build(3)
                optimizer.load_state_dict(saved)
            found = unlike(at_once, _everything(module, optimizer))
            run.step(module, optimizer, STEPS)
            found += [f"{path} a step later" for path in unlike(later, _everything(module, optimizer))]
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        if found:
            wrong[str(source), str(run)] = ", ".join(found)
    return wrong


def _matrix(runs: list[Run], wrong: dict[tuple[str, str], str]) -> str:
    """Return the table: a row for each run that saved, a column for each that loads."""
    rows = ["".join("x" if (str(row), str(column)) in wrong else "." for column in runs) + f" {row}" for row in runs]
    return "\n".join(["", *rows, *(f"{source} -> {target}: {what}" for (source, target), what in wrong.items())])


LAYOUTS = [
    *(("replicated", size) for size in (1, 2, 4)),
    *((shard, size) for shard in ("elements", "parameters") for size in (1, 2, 3, 4)),
    *(("fsdp2", size) for size in (1, 2, 4)),
    ("hsdp", 4),
]
CUT_ANYWHERE = LAYOUTS[:-4]
"""Without FSDP2, which cuts no group of 32 codes: 8-bit moments have its layouts in a table of other shapes."""
ACROSS_FORMS = [
    *(Run(layout, 2, state) for layout in ("elements", "parameters") for state in ("fp32", "16bit", "8bit", "host")),
    *(Run(layout, 2, "remainders") for layout in ("elements", "parameters", "fsdp2")),
    *(Run("fsdp2", 2, state) for state in ("fp32", "16bit", "host")),
    Run("replicated", 1, "8bit"),
    Run("hsdp", 4),
]
TABLES: dict[str, list[Run]] = {
    "few": [
        Run("replicated", 1, "8bit"),
        Run("elements", 2, "compact-host"),
        Run("parameters", 2, "16bit"),
        Run("fsdp2", 2, "remainders"),
        Run("elements", 4),
        Run("parameters", 4, "remainders"),
    ],
    **{form: [Run(*layout, form) for layout in LAYOUTS] for form in ("fp32", "16bit", "remainders")},
    "8bit": [Run(*layout, "8bit", shapes=(*SHAPES, (), (0, 3))) for layout in CUT_ANYWHERE],
    "forms": ACROSS_FORMS,
    "all": [
        *(Run(*layout, form) for form in ("fp32", "16bit", "remainders") for layout in LAYOUTS),
        *(Run(*layout, "8bit") for layout in CUT_ANYWHERE),
    ],
    "codes": [
        *(Run(*layout, "8bit", shapes=SHAPES_OF_CODES) for layout in LAYOUTS),
        *(Run(layout, 2, "compact-host", shapes=SHAPES_OF_CODES) for layout in ("replicated", "elements", "fsdp2")),
        *(Run(*layout, "compact", shapes=SHAPES_OF_CODES) for layout in (("elements", 4), ("parameters", 2))),
        Run("replicated", 1, shapes=SHAPES_OF_CODES),
    ],
    "tiny": [Run(*layout, shapes=((2, 1),)) for layout in LAYOUTS],
    "muon": [
        *(Run("parameters", size, rule="muon", shapes=MATRICES) for size in (1, 2, 3, 4)),
        *(Run("fsdp2", size, rule="muon", shapes=MATRICES) for size in (2, 4)),
        *(Run(*layout, rule="muon", shapes=MATRICES) for layout in (("replicated", 1), ("hsdp", 4))),
    ],
    **{
        rule: [Run("replicated", 1, rule=rule), *(Run("parameters", size, rule=rule) for size in (1, 2, 3, 4))]
        for rule in WHOLE
        if rule != "muon"
    },
}


@pytest.mark.native  # torch's fused Adam has other last bits where a rank's part of a tensor ends
@pytest.mark.timeout(3600)  # of the largest table; each call waits for less
@pytest.mark.default("few")
@pytest.mark.parametrize(
    "table", [*(name for name in TABLES if name != "all"), pytest.param("all", marks=pytest.mark.release)]
)
def test_every_run_loads_the_checkpoint_of_every_run(table: str, ranks: RankPool, tmp_path: Path) -> None:
    """Invariants 3 and 4: what runs have trained is the same, and so is what they load, and what a step makes of that.
    What another form of state makes of it is what it makes of a state dict in one process.
    """
    runs = TABLES[table]
    sizes = sorted({run.ranks for run in runs})
    of_form = {run.form: Run("replicated", 1, run.form, run.rule, run.shapes) for run in runs}
    [expected] = ranks.run(1, _expected, of_form)
    wrong: dict[tuple[str, str], str] = {}
    for size in sizes:
        here = [run for run in runs if run.ranks == size]
        for rank, held in enumerate(ranks.run(size, _save, here, tmp_path, timeout=300)):
            for run, found in zip(here, held, strict=True):
                differ = unlike(expected[run.form, run.form][0], found)
                wrong |= {(str(run), f"rank {rank} before the save"): ", ".join(differ)} if differ else {}
    torch.save(expected, tmp_path / "expected.pt")
    for size in sizes:
        for seen in ranks.run(size, _load, [run for run in runs if run.ranks == size], runs, tmp_path, timeout=1800):
            wrong |= seen
    assert not wrong, _matrix(runs, wrong)
