"""Estimates of runs whose main params and state live in host memory: bytes, beside real ones, and one iteration."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megascale import DistributedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig, estimate
from megascale.cli import main
from megascale.cli.fit import COMPACT
from megascale.errors import ArgumentError, UsageError
from megascale.estimation import partition
from megascale.estimation.partition import Partition
from megascale.estimation.timeline import (
    BACKWARD,
    BUSES,
    DEVICE,
    DOWN,
    FORWARD,
    HOST,
    REDUCE,
    UP,
    Machine,
    Span,
    Timeline,
    machine_of,
    timeline,
)
from megascale.estimation.traffic import MEASURE, TO_HOST
from megascale.main_params import update_unit

DOCS = Path(__file__).parents[3] / "docs"
OFFLOAD: dict[str, Any] = {"optimizer_cpu_offload": True}
OVERLAP = OFFLOAD | {"overlap_cpu_optimizer_d2h_h2d": True}
VISIT: dict[str, Any] = OFFLOAD | {"optimizer_offload_compute": "device"}
CODES: dict[str, Any] = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}
HELD: dict[str, Any] = {"store_param_remainders": True}


@pytest.mark.parametrize("options", [{}, CODES, CODES | HELD], ids=["fp32", "codes", "remainders"])
@pytest.mark.parametrize("fraction", [1.0, 0.6, 0.3])
def test_bytes_in_host_memory_are_those_of_a_real_run(options: dict[str, Any], fraction: float) -> None:
    """Main params, moments, and both copies: by kind, after a step, for a part that stays, too."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).half()
    fields = OFFLOAD | options | {"optimizer_offload_fraction": fraction}
    optimizer = MixedPrecisionOptimizer(
        torch.optim.AdamW(model.named_parameters()),
        OptimizerConfig(fp16=True, **fields),
        DynamicGradScaler(),
        grads_are_scaled=True,
    )
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    found = estimate(model, **fields)
    twins = [(param, twin) for param in _kept(optimizer) if (twin := param.twin) is not None]
    assert found.host["copies of weights"] == sum(twin.weights.nbytes for _, twin in twins)
    assert found.host["copies of gradients"] == sum(twin.grad.nbytes for _, twin in twins if twin.grad is not None)
    assert found.host["main params"] == sum(param.memory.nbytes for param, _ in twins)
    state = [optimizer.optimizer.state[param.model].values() for param, _ in twins]
    held = sum(value.nbytes for entry in state for value in entry if isinstance(value, torch.Tensor))
    assert found.host["moments"] == held
    assert found.offload["gradients to the host"] == found.offload["weights to the device"]
    assert found.offload["weights to the device"] == found.host["copies of weights"]
    without = estimate(model, **options)
    for kind in ("main params", "moments"):
        assert found.held[kind] + found.host[kind] == without.held[kind]


@pytest.mark.parametrize("sharded", [False, True])
def test_bytes_of_bounded_copies_are_those_of_a_real_run(monkeypatch: pytest.MonkeyPatch, sharded: bool) -> None:
    """Two slots, and memory of their own for the last slices; of shards a slice is a bucket."""
    for module in (partition, update_unit):
        monkeypatch.setattr(module, "SLICE", 1 << 13)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))).half()
    fields = OFFLOAD | {"optimizer_offload_grad_bytes": (4 if sharded else 3) * (1 << 14)}
    inner, config = torch.optim.AdamW(model.named_parameters()), OptimizerConfig(fp16=True, **fields)
    scaler, setup = DynamicGradScaler(), dict[str, Any](sharding="distributed", bucket_numel=1 << 12) if sharded else {}
    optimizer = (
        DistributedOptimizer(inner, config, scaler, modules=model, bucket_numel=1 << 12, grads_are_scaled=True)
        if sharded
        else MixedPrecisionOptimizer(inner, config, scaler, grads_are_scaled=True)
    )
    model(torch.ones(1, 64).half()).sum().backward()
    optimizer.step()
    grads = [twin.grad for param in _kept(optimizer) if (twin := param.twin) is not None and twin.grad is not None]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in grads}
    assert {0, 1, None} == {param.twin.slot for param in _kept(optimizer)}
    assert estimate(model, **fields, **setup).host["copies of gradients"] == sum(storages.values())


def test_an_iteration_with_bounded_copies() -> None:
    """The less memory, the longer it takes: forward begins once the last gradient has travelled to its slot, and all
    but two of the updates of others that share slots are done. A bound that suffices changes nothing; one that is too
    small is an error.
    """
    machine = machine_of("h100", "pcie5", 100e9)
    without = timeline(estimate(8 * 10**9, precision="bf16", **OVERLAP), machine, tokens=32768)
    ends = []
    for nbytes in (1 << 36, 10 * 10**9, 5 * 10**9, 10**9):
        found = estimate(8 * 10**9, precision="bf16", **OVERLAP, optimizer_offload_grad_bytes=nbytes)
        assert found.host["copies of gradients"] <= nbytes
        bounded = timeline(found, machine, tokens=32768)
        moved = [span for span in bounded.spans if span.name == TO_HOST]
        shared = len(Partition(found.sizes, found.setup).grad_layout().shared)
        begin = min(span.begin for span in bounded.spans if span.name == FORWARD)
        updates = [span for span in bounded.spans if span.lane == HOST]
        assert sum(span.begin >= begin for span in moved) == 0
        if shared:
            assert begin >= updates[shared - 3].end
        ends.append(bounded.exposed)
    assert ends[0] == without.exposed
    assert ends == sorted(ends)
    with pytest.raises(UsageError, match="optimizer_offload_grad_bytes=1000 is too little"):
        estimate(8 * 10**9, precision="bf16", **OVERLAP, optimizer_offload_grad_bytes=1000)


def test_bytes_that_visit_the_device() -> None:
    """Main params and moments, 12 bytes per parameter, go there and back; compact ones 4.25, and weights beside them
    come back. On the paper's machine that takes as long as the issue of a bus of 50 GB/s says: 12 bytes 240 ms.
    """
    found = estimate(10**9, precision="bf16", **VISIT)
    assert found.offload["state to the device"] == found.offload["state to the host"] == 12 * 10**9
    assert found.host["copies of gradients"] == 0
    machine = Machine(flops=400e12, memory_bandwidth=3.35e12, bus_bandwidth=50e9, host_bandwidth=180e9)
    visits = timeline(found, machine, tokens=8192)
    assert visits.exposed == pytest.approx(0.24, rel=0.1)
    compact = estimate(10**9, precision="bf16", **VISIT | CODES | HELD)
    assert compact.offload["state to the device"] == pytest.approx(4.25e9, rel=1e-6)
    assert compact.offload["state to the host"] == pytest.approx(6.25e9, rel=1e-6)
    assert timeline(compact, machine, tokens=8192).exposed == pytest.approx(0.125, rel=0.15)


def _kept(optimizer: MixedPrecisionOptimizer) -> list[Any]:
    params = optimizer._member.main_params
    return [param for unit in params.units() for param in unit.params]


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("numel", [10**9, 8 * 10**9, 7 * 10**10])
def test_ranks_share_the_host_bytes(numel: int, ranks: int) -> None:
    """Shards of elements: each rank has its part of 18 bytes on the host, and 6 bytes on the device."""
    found = estimate(numel, ranks=ranks, sharding="distributed", **OFFLOAD)
    assert sum(found.host.values()) == pytest.approx(18 * numel / ranks, rel=1e-3)
    assert found.total == pytest.approx(6 * numel, rel=1e-3)
    assert found.offload["gradients to the host"] == pytest.approx(4 * numel / ranks, rel=1e-3)


@pytest.mark.parametrize(
    "fields",
    [
        {"store_param_remainders": True},
        {"optimizer_offload_fraction": 0.0},
        {"optimizer_offload_fraction": 1.5},
        {"optimizer_offload_fraction": 0.5, "optimizer_cpu_offload": False},
        {"overlap_cpu_optimizer_d2h_h2d": True, "optimizer_cpu_offload": False},
        {"optimizer_offload_fraction": 0.5},
        {"overlap_cpu_optimizer_d2h_h2d": True},
        {"optimizer_offload_grad_bytes": 0},
        {"optimizer_offload_grad_bytes": 4096, "optimizer_cpu_offload": False},
        {"optimizer_offload_grad_bytes": 4096},
    ],
    ids=str,
)
def test_an_estimate_refuses_what_the_optimizer_refuses(fields: dict[str, Any]) -> None:
    """With the same words, and takes what it takes."""
    told = []
    shapes = {"layers.0.weight": [8, 8], "head.bias": [8]}
    for make in (OptimizerConfig, lambda **options: estimate(shapes, **options)):
        try:
            make(**OFFLOAD | fields)
            told.append("taken")
        except ArgumentError as error:
            told.append(str(error))
    assert told[0] == told[1]


def test_what_is_not_estimated_is_refused() -> None:
    """Muon's matrices stay on the device, which an optimizer does and the estimate does not know."""
    OptimizerConfig(**OFFLOAD, optimizer="muon")
    with pytest.raises(ArgumentError, match=r'is not estimated for optimizer="muon"'):
        estimate({"layers.0.weight": [8, 8]}, **OFFLOAD, optimizer="muon")


H100_MS = {"plain": 293.4, "waits": 490.8, "visits": 496.5, "overlaps": 416.6, "codes": 332.3}
"""Milliseconds of an iteration in benchmarks/results/offload_gpu.md."""


def _h100(options: dict[str, Any]) -> Timeline:
    layers = {str(at): (8192, 8192) for at in range(14)}
    # That machine's rates: of forward and backward, of its memory and its bus, each measured alone; and of the host's
    # update, from the second row.
    machine = Machine(flops=672e12, memory_bandwidth=3.02e12, bus_bandwidth=46.7e9, host_bandwidth=125e9)
    return timeline(estimate(layers, precision="bf16", **options), machine, tokens=32768)


@pytest.mark.parametrize(
    ("row", "options"),
    [("plain", {}), ("waits", OFFLOAD), ("visits", VISIT), ("overlaps", OVERLAP), ("codes", OVERLAP | CODES)],
)
def test_an_iteration_takes_as_long_as_on_the_gpu(row: str, options: dict[str, Any]) -> None:
    """The five rows that an H100 has measured, within 6 %; one rate is taken from the second of them."""
    assert _h100(options).total * 1e3 == pytest.approx(H100_MS[row], rel=0.06)
    page = (DOCS.parent / "benchmarks" / "results" / "offload_gpu.md").read_text()
    assert f"| {H100_MS[row]} |" in page


def test_what_a_timeline_says_is_consistent() -> None:
    """Nothing runs before what it needs, lanes do one thing at a time, and hidden time is part of each kind's."""
    for options in ({}, OFFLOAD, OVERLAP, OVERLAP | {"optimizer_offload_fraction": 0.5}, VISIT, VISIT | CODES):
        found = _h100(options)
        for lane in {span.lane for span in found.spans}:
            spans = sorted((span.begin, span.end) for span in found.spans if span.lane == lane)
            assert all(before[1] <= after[0] + 1e-12 for before, after in pairwise(spans))
        updates = [span for span in found.spans if span.lane == HOST]
        arrivals = [span for span in found.spans if span.lane == UP]
        if "optimizer_offload_compute" in options:
            updates = [span for span in found.spans if span.name == "update"]
            assert all(update.begin >= up.end for update, up in zip(updates, arrivals, strict=True))
        else:
            assert all(up.begin >= update.end for update, up in zip(updates, arrivals, strict=True))
        assert all(0 <= hidden <= seconds for seconds, hidden in found.seconds().values())
        last = [span for span in found.spans if span.name == FORWARD][-1]
        assert not arrivals or last.begin >= arrivals[-1].end
        assert found.exposed >= 0


def test_no_more_is_hidden_than_there_is() -> None:
    """Behind two spans, whose shares are rounded: (0.3 - 0.02) + (0.9 - 0.3) is more than 0.9 - 0.02."""
    spans = [Span(DEVICE, BACKWARD, 0.0, 0.3), Span(DEVICE, FORWARD, 0.3, 1.0), Span(DOWN, TO_HOST, 0.02, 0.9)]
    assert Timeline(spans, 1.0).seconds()[TO_HOST] == (0.9 - 0.02, 0.9 - 0.02)


def test_gradients_travel_in_backward() -> None:
    """Those of the last layers first, each behind its own backward; updates follow the statistics and all copies."""
    found, late = _h100(OVERLAP), _h100(OVERLAP | {"ranks": 2, "sharding": "replicated"})
    backward = next(span for span in found.spans if span.name == BACKWARD)
    measured = next(span for span in found.spans if span.name == MEASURE)
    copies = [span for span in found.spans if span.name == TO_HOST]
    update = next(span for span in found.spans if span.lane == HOST)
    assert len(copies) == 14
    assert copies[0].begin == pytest.approx((backward.end - backward.begin) / 14)
    assert all(copy.begin >= backward.end * (at + 1) / 14 - 1e-12 for at, copy in enumerate(copies))
    assert update.begin == pytest.approx(max(measured.end, copies[-1].end))
    assert found.seconds()[TO_HOST][0] == pytest.approx(late.seconds()[TO_HOST][0])
    assert found.seconds()[TO_HOST][1] > 0.9 * found.seconds()[TO_HOST][0]
    assert late.seconds()[TO_HOST][1] == 0
    assert found.total < late.total


def test_reduced_gradients_travel_behind_their_messages() -> None:
    """Over ranks, where a link is given: messages follow backward, and each slice is copied behind its own."""
    machine = Machine(flops=4e14, memory_bandwidth=3e12, bus_bandwidth=5e10, host_bandwidth=1e11, link_bandwidth=1e10)
    layers = {str(at): (4096, 4096) for at in range(8)}
    options: dict[str, Any] = {"ranks": 2, "sharding": "grad_sync"}
    made = [
        timeline(estimate(layers, precision="bf16", **OVERLAP, **options, communication=one), machine, tokens=8192)
        for one in ("nccl", "gloo")
    ]
    for found, is_early in zip(made, (True, False), strict=True):
        reduced = next(span for span in found.spans if span.name == REDUCE)
        first = next(span for span in found.spans if span.name == TO_HOST)
        share = reduced.begin + (reduced.end - reduced.begin) / 8
        assert first.begin == pytest.approx(share) if is_early else first.begin >= reduced.end
    assert made[0].total < made[1].total


def test_overlap_a_fraction_and_a_fast_bus_hide_more() -> None:
    """What is exposed falls with overlap, with a part that stays on the device, and from bus to bus."""
    waits, overlaps = _h100(OFFLOAD), _h100(OVERLAP)
    assert overlaps.exposed < waits.exposed
    assert _h100(OVERLAP | {"optimizer_offload_fraction": 0.5}).exposed < overlaps.exposed
    found = estimate(8 * 10**9, precision="bf16", **OVERLAP)
    exposed = [timeline(found, machine_of("h100", bus, 200e9), tokens=32768).exposed for bus in BUSES]
    assert exposed == sorted(exposed, reverse=True)
    assert len(set(exposed)) == len(BUSES)


def test_the_command_tells_of_host_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes on the host and over the bus, what is hidden, and a picture as SVG, which is the same each time."""
    typed = ["estimate", "1B", "--gpu", "h100", "--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d"]
    drawn = []
    for name in ("a.svg", "b.svg"):
        assert main([*typed, "--tokens", "8192", "--timeline", str(tmp_path / name)]) == 0
        drawn.append((tmp_path / name).read_bytes())
    said = capsys.readouterr().out
    assert "Bytes a rank in host memory\n  main params " in said
    assert "gradients to the host" in said
    assert "One iteration: " in said
    assert "not hidden" in said
    assert b"<svg" in drawn[0]
    assert drawn[0] == drawn[1]


BILLION = 10**9
NEEDS = [(7, 24, 1), (7, 24, 2), (7, 24, 4), (8, 80, 1), (8, 80, 2), (32, 80, 1), (32, 80, 4), (70, 80, 8)]
"""Billions of parameters, GB of a card, and cards."""


def needs_rows() -> list[str]:
    """Return the rows of the table in docs/larger_models.md: GB per GPU, bold where the card holds them."""
    rows = []
    for billions, memory, ranks in NEEDS:
        for held in ("one",) if ranks == 1 else ("`DistributedOptimizer`", "FSDP2"):
            sharding = "distributed" if held.startswith("`") else "replicated"
            # FSDP2 gives each rank its part of every parameter, which the optimizer takes as a model of its own.
            numel = billions * BILLION // (ranks if held == "FSDP2" else 1)
            count = ranks if sharding == "distributed" else 1
            made = [
                estimate(numel, precision="bf16", sharding=sharding, ranks=count, **options)
                for options in ({}, COMPACT, OFFLOAD, OFFLOAD | CODES)
            ]
            device = [round(one.total / 1e9, 1) for one in made[:3]]
            host = [sum(one.host.values()) / 1e9 for one in made[2:]]
            cells = [f"✓ {size:.1f}" if size <= memory else f"{size:.1f}" for size in device]
            where = "" if ranks == 1 else f", {held}"
            cards = f"{ranks} x {memory} GB{where}"
            rows.append(f"| {billions}B | {cards} | {' | '.join(cells)} | {host[0]:.0f} | {host[1]:.0f} |")
    return rows


def test_the_pages_table_of_needs() -> None:
    """*Train larger models* says what estimate says, row by row."""
    page = (DOCS / "larger_models.md").read_text()
    assert "\n".join(needs_rows()) in page


def timeline_rows() -> list[str]:
    """Return the rows of the table in docs/larger_models.md: one iteration, by model, ranks and bus."""
    rows = []
    for billions in (1, 8, 70):
        for ranks in (1, 2, 8):
            # FSDP2's root waits for all weights, as if there were no overlap.
            found = estimate(billions * BILLION // ranks, precision="bf16", **(OVERLAP if ranks == 1 else OFFLOAD))
            cells = []
            for bus in BUSES:
                made = timeline(found, machine_of("h100", bus, 100e9), tokens=32768 * ranks)
                cells.append(f"{made.compute * 1e3:,.0f} + {made.exposed * 1e3:,.0f}")
            host, moved = sum(found.host.values()) / 1e9, found.offload["gradients to the host"] / 1e9
            rows.append(
                f"| {billions}B | {ranks} | {found.total / 1e9:.1f} | {host:.0f} | {moved:.1f} | {' | '.join(cells)} |"
            )
    return rows


def test_the_pages_table_of_iterations() -> None:
    """*Train larger models* says what the timeline says, row by row."""
    page = (DOCS / "larger_models.md").read_text()
    assert "\n".join(timeline_rows()) in page


def test_the_pages_rows_of_bounds() -> None:
    """docs/larger_models.md has what the estimate says of each bound."""
    page = (DOCS / "larger_models.md").read_text()
    machine = machine_of("h100", "pcie5", 100e9)
    for name, limit in {"None": None, "10 GB": 10 * 10**9, "4 GB": 4 * 10**9, "1 GB": 10**9}.items():
        found = estimate(8 * 10**9, precision="bf16", **OVERLAP, optimizer_offload_grad_bytes=limit)
        took = timeline(found, machine, tokens=32768)
        copies = found.host["copies of gradients"] / 1e9
        assert f"| {name} | {copies:.1f} | {took.compute * 1e3:,.0f} + {took.exposed * 1e3:,.0f} |\n" in page
