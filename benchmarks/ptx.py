"""Compile every kernel of the triton backend for sm_90, without a GPU, and print what its code says of its speed.

    python -m benchmarks.ptx --out benchmarks/results/ptx_sm90.md
    python -m benchmarks.ptx --capabilities 70,75,80,89,90,100 --out benchmarks/results/ptx_fp16.md

Registers, spills, widths of loads and stores, bytes of an element, occupancy, and the time that follows at a given
bandwidth by the model of benchmarks/machine_code/speed.py. Not measured: launch/gpu_check.sh measures.

Instructions of an element are those that run where every division and root has usual operands: their slow paths, for
0, subnormal or infinite ones, are in the code, but not counted.

``--capabilities`` prints registers and spills of the kernels for fp16 parameters alone, compiled for several GPUs.
"""

import argparse
import math
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent))

from machine_code.assembly import WIDE, Code, Loop, resources
from machine_code.launches import CALLS, Launch, Memory, recorded, whole_step
from machine_code.speed import Device, blocks_per_sm, bytes_in_flight, seconds

from megascale.kernels.compact_moments import GROUP

VECTOR = 8  # elements at most; a row that is no multiple of it may have a remainder
SIZES = {
    "1e9 in 1": [10**9],
    "1e9 in 200": [5 * 10**6] * 200,
    "1e9 in 300, odd": [3_333_333] * 300,
    "50M in 200": [250_000] * 200,
    "50M in 10,000": [5_000] * 10_000,
    "50M in 10,000, odd": [5_001] * 10_000,
    "50M in 100,000": [500] * 100_000,
}


class Compiled:
    """Codes of launches, each read once."""

    def __init__(self) -> None:
        self._codes: dict[str, Code] = {}

    def __getitem__(self, launch: Launch) -> Code:
        key = launch.code.hash
        if key not in self._codes:
            self._codes[key] = Code.of(launch.code)
        return self._codes[key]


def elements_of_turn(code: Code, launch: Launch) -> float:
    """Return how many elements a program takes in one turn of its loop, 0 where it reads none."""
    return launch.constants.get("BLOCK", 0)


def bytes_of_element(code: Code, launch: Launch) -> float:
    """Return the bytes that the streaming loop loads and stores for an element.

    Narrow accesses are of scales: threads of a group access the same one.
    """
    if code.stream is None or not launch.numels:
        return 0
    widths = [width for each in ("LDG", "STG") for width in code.stream.accesses(each)]
    wide, narrow = (sum(width for width in widths if (width >= WIDE) == is_wide) for is_wide in (True, False))
    return wide * 32 * code.warps / elements_of_turn(code, launch) + narrow / GROUP


def widths(loop: Loop, opcode: str) -> str:
    """Return how many accesses of which width a loop has: 4 x 16 + 2 x 8."""
    counts = Counter(loop.accesses(opcode))
    return " + ".join(f"{count} x {width}" for width, count in sorted(counts.items(), reverse=True)) or "-"


def billion(launch: Launch, code: Code, device: Device) -> str:
    """Return the milliseconds that a launch takes by the model for 1e9 parameters in 200 tensors."""
    numels = SIZES["1e9 in 200"]
    programs = sum(-(-numel // launch.constants["CHUNK"]) for numel in numels)
    _, took = launch_time(replace(launch, numels=numels, programs=programs), code, device)
    return f"{took * 1e3:.2f}"


def code_row(name: str, launch: Launch, code: Code, device: Device) -> str:
    """Return a kernel's line."""
    stream = code.stream if launch.numels else None
    narrow = "-" if stream is None else sum(width < WIDE for op in ("LDG", "STG") for width in stream.accesses(op))
    blocks = blocks_per_sm(code)
    cells = (
        name,
        launch.kernel.removesuffix("_kernel"),
        code.registers,
        code.spilled,
        code.shared,
        "-" if stream is None else widths(stream, "LDG"),
        "-" if stream is None else widths(stream, "STG"),
        narrow,
        f"{bytes_of_element(code, launch):g}" if stream is not None else "-",
        "-" if stream is None else f"{code.turn * 32 * code.warps / elements_of_turn(code, launch):.0f}",
        f"{blocks}, {blocks * code.warps}",
        f"{bytes_in_flight(code) / 1024:.0f}" if stream is not None else "-",
        billion(launch, code, device) if stream is not None else "-",
        f"{code.fused[0]}, {code.fused[1]}",
        code.approximate,
    )
    return f"| {' | '.join(map(str, cells))} |"


def kernels(codes: Compiled, device: Device) -> list[str]:
    """Return the table of kernels."""
    heads = ("call", "kernel", "registers", "spilled bytes", "shared bytes", "loads", "stores", "narrow accesses")
    heads += ("bytes an element", "instructions an element", "blocks, warps of an SM", "KiB in flight of an SM")
    heads += ("1e9 parameters, ms",)
    heads += ("fused fp32, fp64", "approximate")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    seen = set()
    for name, call in CALLS.items():
        with recorded() as (backend, launches):
            call(backend, Memory([100_000] * 3))
        for launch in launches:
            if launch.code.hash not in seen:
                seen.add(launch.code.hash)
                lines.append(code_row(name, launch, codes[launch], device))
    return lines


def capabilities(given: list[int]) -> list[str]:
    """Return the table of fp16 parameters' kernels for some compute capabilities: registers, and bytes spilled."""
    lines = [f"| call | kernel | {' | '.join(f'sm_{each}' for each in given)} |", "|---" * (2 + len(given)) + "|"]
    for name, call in CALLS.items():
        if "fp16" not in name.partition("bf16")[0] and "decision" not in name:
            continue
        launched = []
        for each in given:
            with recorded(each) as (backend, launches):
                call(backend, Memory([100_000] * 3))
            launched.append(launches)
        for launches in zip(*launched, strict=True):
            used = [resources(launch.code) for launch in launches]
            cells = [f"{registers}" + (f", {spilled} B" if spilled else "") for registers, spilled, _ in used]
            lines.append(f"| {' | '.join([name, launches[0].kernel.removesuffix('_kernel'), *cells])} |")
    return list(dict.fromkeys(lines))


def turns(launch: Launch) -> float:
    """Return how often a program goes through its loop, on average."""
    block = launch.constants.get("BLOCK", 0)
    if not block:
        return 0
    items = sum(launch.numels) / launch.programs if launch.numels else launch.summands
    return max(1, math.ceil(items / block))


def launch_time(launch: Launch, code: Code, device: Device) -> tuple[float, float]:
    """Return the bytes that a launch moves and its seconds."""
    moved = sum(launch.numels) * bytes_of_element(code, launch)
    remainders = sum(numel % VECTOR != 0 for numel in launch.numels)
    return moved, seconds(code, launch.programs, moved, turns(launch), remainders, device)


def times(codes: Compiled, device: Device) -> list[str]:
    """Return the table of whole steps, in microseconds."""
    heads = ["parameters", "launches", "bytes", "bound", "step", "of bound"]
    columns: dict[str, dict[str, float]] = {}
    rows: list[tuple[str, float, float, float]] = []
    for name, numels in SIZES.items():
        with recorded() as (backend, launches):
            whole_step(backend, Memory(numels))
        spent: dict[str, float] = {}
        moved = 0.0
        for launch in launches:
            mine, took = launch_time(launch, codes[launch], device)
            moved += mine
            kernel = launch.kernel.removesuffix("_kernel")
            spent[kernel] = spent.get(kernel, 0.0) + took
        columns[name] = spent
        rows.append((name, len(launches), moved, sum(spent.values())))
    names = list(dict.fromkeys(kernel for spent in columns.values() for kernel in spent))
    lines = [f"| {' | '.join(heads + names)} |", "|---" * (len(heads) + len(names)) + "|"]
    for name, count, moved, total in rows:
        bound = moved / device.bandwidth
        each = [f"{columns[name].get(kernel, 0) * 1e6:,.1f}" for kernel in names]
        numbers = [f"{moved:.3g}", f"{bound * 1e6:,.1f}", f"{total * 1e6:,.1f}", f"{total / bound:.2f}"]
        lines.append(f"| {' | '.join([name, str(count), *numbers, *each])} |")
    return lines


def main() -> int:
    """Compile, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", type=float, default=Device.bandwidth, help="B/s, of an H200's memory")
    parser.add_argument("--latency", type=float, default=Device.latency, help="s, of a load from a busy memory")
    parser.add_argument("--launch", type=float, default=Device.launch, help="s, fixed cost of a launch")
    parser.add_argument("--capabilities", type=lambda text: [int(each) for each in text.split(",")])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = Device(given.bandwidth, given.latency, given.launch)
    codes = Compiled()
    versions = f"triton {triton.__version__}, torch {torch.__version__}."
    if given.capabilities:
        lines = [
            "## Registers of a thread, and bytes that it spills, of kernels for fp16 parameters",
            "",
            f"{versions} `python -m benchmarks.ptx --capabilities {','.join(map(str, given.capabilities))}`. "
            "Nothing here was run on a GPU.",
            "",
            *capabilities(given.capabilities),
        ]
    else:
        lines = [
            "## Kernels as compiled for sm_90",
            "",
            f"{versions} `python -m benchmarks.ptx`. Read from PTX and SASS; nothing here was run on a GPU.",
            "",
            *kernels(codes, device),
            "",
            "## Time that follows for a step of AdamW on fp16 parameters, microseconds",
            "",
            f"By a model: {device.bandwidth / 1e12:g} TB/s, {device.latency * 1e6:g} us until a load arrives, "
            f"{device.launch * 1e6:g} us a launch, {device.sms} SMs.",
            "",
            *times(codes, device),
        ]
    text = "\n".join(lines)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
