"""What the compiled kernels of the triton backend promise, read from PTX and SASS: no GPU is needed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


ROOT = Path(__file__).parents[3]
KEPT = ROOT / "benchmarks" / "results" / "ptx_sm90.md"


def table(text: str) -> list[dict[str, str]]:
    """Return the rows of all Markdown tables, by the names of their columns."""
    rows: list[dict[str, str]] = []
    heads: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            heads = []
        elif not heads:
            heads = cells
        elif not line.startswith("|---"):
            rows.append(dict(zip(heads, cells, strict=True)))
    return rows


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the program prints with its defaults, from an empty cache."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    command = [sys.executable, "-m", "benchmarks.ptx"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.release
def test_no_kernel_spills_or_contracts_or_reads_vectors_piece_by_piece(printed: str) -> None:
    """Every kernel that passes over tensors does so in accesses of 8 or 16 bytes and moves its columns once; nothing
    spills. No fp32 product is fused with a sum, nor an fp64 one but inside Adam's powers; no division is approximate.
    """
    kernels = [row for row in table(printed) if "kernel" in row]
    for row in kernels:
        assert row["spilled bytes"] == "0", row
        assert row["approximate"] == "0", row
        fused_single, fused_double = map(int, row["fused fp32, fp64"].split(","))
        assert fused_single == 0, row
        assert (fused_double > 0) == row["call"].startswith("AdamW"), row
    streams = {row["call"]: row for row in kernels if row["bytes an element"] != "-"}
    for call, row in streams.items():  # of codes, the scales: Adam has two kinds, each is read and written
        scales = 0 if "8-bit" not in call else 4 if row["kernel"] == "update" else 2
        assert row["narrow accesses"] == str(scales), row
    moved = {call: float(row["bytes an element"]) for call, row in streams.items()}
    assert moved == {
        "measure fp16": 2,
        "measure bf16": 2,
        "measure fp32": 4,
        "measure fp16, zeros": 2,
        "AdamW fp16": 28,
        "AdamW bf16": 28,
        "AdamW bf16, bf16 moments": 20,
        "AdamW fp16, fp32 main grads": 30,
        "AdamW fp32": 28,
        "AdamW fp16, amsgrad": 36,
        "AdamW fp16, remainders": 26,
        "AdamW bf16, remainders": 26,
        "AdamW bf16, bf16 moments, remainders": 18,
        "AdamW fp16, 8-bit moments": 16.5,
        "AdamW bf16, 8-bit moments": 16.5,
        "AdamW fp16, 8-bit moments, remainders": 14.5,
        "AdamW bf16, 8-bit moments, remainders": 14.5,
        "SGD fp16": 12,
        "SGD fp16, momentum": 20,
        "SGD fp32, momentum": 20,
        "SGD bf16, nesterov": 20,
        "SGD fp16, momentum, remainders": 18,
        "SGD bf16, momentum, remainders": 18,
        "Lion bf16": 20,
        "Lion fp32": 20,
        "Lion fp16, remainders": 18,
        "Lion bf16, remainders": 18,
        "decode fp16": 8,
        "decode bf16": 8,
        "encode fp16": 12,
        "encode bf16": 8,
    }


@pytest.mark.release
def test_launches_do_not_grow_and_time_stays_near_the_bound(printed: str) -> None:
    """Of a whole step: as many launches for one tensor as for 100,000; the model's time for 1e9 parameters is within
    3 % of what the bytes take.
    """
    steps = {row["parameters"]: row for row in table(printed) if "parameters" in row}
    assert len({row["launches"] for row in steps.values()}) == 1
    assert max(float(row["of bound"]) for name, row in steps.items() if name.startswith("1e9")) <= 1.03


@pytest.mark.release
def test_kept_table_is_what_the_program_prints(printed: str) -> None:
    """benchmarks/results/ptx_sm90.md is of these kernels, for the version of triton that it names."""
    kept = KEPT.read_text()
    versions = [re.search(r"^triton .*?, torch \S+ ", text, re.MULTILINE) for text in (kept, printed)]
    assert None not in versions
    if versions[0] is not None and versions[1] is not None and versions[0][0] != versions[1][0]:
        pytest.skip(f"the table was written with {versions[0][0]}, here is {versions[1][0]}")
    assert kept.strip() == printed.strip(), "run: python -m benchmarks.ptx --out benchmarks/results/ptx_sm90.md"
