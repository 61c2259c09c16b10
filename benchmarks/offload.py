"""Main params and state in host memory: what a step takes beside one on the device, and how fast all of it moves.

    python benchmarks/offload.py --numel 1_000_000_000 --width 8192 --tokens 32768 --out results/offload_gpu.md

First table: a stack of square bf16 layers is trained by AdamW, with clipping. *iteration*: forward, backward and step,
as they follow each other. *exposed*: of it, what is beside forward and backward. *step() returns*: until the host may
go on. *held*, *with gradients*, *at most*: bytes of the device per parameter, as torch's allocator counts them, between
iterations, between backward and step, and in between, with activations. The last column says whether the weights have
the bits of the first row's. The last row's fraction is what the overlap has hidden of the update.

Second table: the parts of such a step, each measured alone.

``--variants`` measures that update alone once more in other ways, which tell why it may be slower in a run: of pinned
or pageable weights and gradients, of three layers or all, with fewer threads than cores.

Third table: ``offload()`` and ``reload()`` of the first row's optimizer, until the copies have ended, and plain
copies of pinned memory. Every row that fails has its reason; rows that come after ``--seconds`` are left out.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from backend import print_backend
from torch import Tensor, nn

from megascale import MixedPrecisionOptimizer, OptimizerConfig
from megascale.kernels import NativeBackend, host_backend

WAYS: dict[str, dict[str, Any]] = {
    "on the device": {},
    "in host memory": {"optimizer_cpu_offload": True},
    "in host memory, overlap": {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True},
    "in host memory, overlap, 8-bit moments": {
        "optimizer_cpu_offload": True,
        "overlap_cpu_optimizer_d2h_h2d": True,
        "exp_avg_dtype": torch.int8,
        "exp_avg_sq_dtype": torch.uint8,
    },
}
WAITS, OVERLAPS = "in host memory", "in host memory, overlap"
"""The rows of which the fraction of the last row is chosen."""
WARM_UP = 3
"""Iterations before the first that is timed."""
HEAD = (
    "| main params and state | iteration ms | exposed ms | step() returns, ms "
    "| held | with gradients | at most | bits |"
)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def timed(device: torch.device, work: Callable[[], object]) -> float:
    """Return milliseconds of ``work``, from an idle device until it is idle again."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def allocated(device: torch.device, most: bool = False) -> int:
    """Return bytes that torch has allocated on the device, or had at most; 0 on a CPU."""
    if device.type == "cpu":
        return 0
    taken: int = torch.accelerator.max_memory_allocated() if most else torch.accelerator.memory_allocated()
    return taken


class Run:
    """One way to train. Every one starts from the same weights."""

    def __init__(self, device: torch.device, numel: int, width: int, tokens: int, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.device = device
        self.batch = torch.randn(tokens, width, device=device).bfloat16()
        self.before = allocated(device)
        layers = [
            nn.Linear(width, width, bias=False, device=device, dtype=torch.bfloat16)
            for _ in range(max(1, numel // width**2))
        ]
        for layer in layers:
            nn.init.kaiming_normal_(layer.weight)
        self.model = nn.Sequential(*(layer for one in layers for layer in (one, nn.GELU())))
        config = OptimizerConfig(bf16=True, clip_grad=1.0, **options)
        inner = torch.optim.AdamW(self.model.named_parameters(), lr=1e-4)
        self.optimizer = MixedPrecisionOptimizer(inner, config)
        self.shapes = [param.shape for param in self.model.parameters()]
        self.numel = sum(param.numel() for param in self.model.parameters())
        self.returns: list[float] = []

    def backward(self) -> None:
        """Run forward and backward."""
        self.optimizer.zero_grad()
        (self.model(self.batch).float() - 1).square().mean().backward()

    def iterate(self, count: int) -> None:
        """Train."""
        for _ in range(count):
            self.backward()
            start = time.perf_counter()
            self.optimizer.step()
            self.returns.append((time.perf_counter() - start) * 1e3)

    def weights(self) -> list[Tensor]:
        """Return a copy of the weights, on the host."""
        return [value.cpu() for value in self.model.state_dict().values()]


class Row(NamedTuple):
    """A row of the first table, and what the second needs of it, in ms."""

    text: str
    iteration: float
    alone: float


def row_of(name: str, run: Run, rounds: int, first: list[Tensor]) -> Row:
    """Return a row of the first table. ``first``: weights of the first row, set here if empty."""
    run.iterate(WARM_UP)
    synchronize(run.device)
    if run.device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
    run.returns.clear()
    whole = timed(run.device, lambda: run.iterate(rounds)) / rounds
    most = (allocated(run.device, most=True) - run.before) / run.numel
    alone = statistics.median(timed(run.device, run.backward) for _ in range(rounds))
    with_grads = (allocated(run.device) - run.before) / run.numel
    run.optimizer.zero_grad()
    held = (allocated(run.device) - run.before) / run.numel
    mine = run.weights()
    if not first:
        first += mine
    same = "the same" if all(map(torch.equal, mine, first)) else "other bits"
    text = (
        f"| {name} | {whole:.1f} | {whole - alone:.1f} | {statistics.median(run.returns):.2f} | {held:.2f} "
        f"| {with_grads:.2f} | {most:.2f} | {same} |"
    )
    return Row(text, whole, alone)


def hidden_fraction(waits: Row, overlaps: Row) -> float:
    """Return the share of the update that the overlap hides, as docs/memory.md says."""
    hidden = (waits.iteration - overlaps.iteration) / max(1e-3, waits.iteration - waits.alone)
    return round(min(1.0, max(0.01, hidden)), 2)


def rows_of_parts(device: torch.device, shapes: list[torch.Size], tokens: int, alone: float) -> list[str]:
    """Return the second table. ``shapes``: of the parameters; ``alone``: seconds of forward and backward."""
    numel = sum(shape.numel() for shape in shapes)
    count = max(1, len(shapes) // 4)
    host = MixedPrecisionOptimizer(
        torch.optim.AdamW(host_params(shapes[:count]), lr=1e-4), OptimizerConfig(bf16=True, clip_grad=1.0)
    )
    update = update_seconds(host, threads := host_threads(), 3.0)
    moved = 28 * sum(shape.numel() for shape in shapes[:count])
    copies = seconds_of_copies(device, 2 * numel)
    return [
        "| part of a step, measured alone | GB | ms | per second |",
        "|---|---|---|---|",
        f"| forward and backward | - | {alone * 1e3:.1f} | {6 * numel * tokens / alone / 1e12:.0f} TFLOP |",
        f"| gradients to the host, and weights back at the same time | {2 * numel / 1e9:.2f} each way "
        f"| {copies * 1e3:.1f} | {2 * numel / copies / 1e9:.1f} GB each way |",
        f"| the update in host memory, {threads} threads, of {count} of {len(shapes)} layers | {moved / 1e9:.2f} "
        f"| {update * 1e3:.1f} | {moved / update / 1e9:.1f} GB |",
    ]


def seconds_of_copies(device: torch.device, nbytes: int) -> float:
    """Return the seconds in which ``nbytes`` travel to the host and as many to the device, at the same time."""
    pin = device.type != "cpu"
    there = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    here = [torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pin) for _ in range(2)]
    side = torch.Stream(device) if pin else nullcontext()

    def both() -> None:
        here[0].copy_(there[0], non_blocking=True)
        with side:
            there[1].copy_(here[1], non_blocking=True)

    timed(device, both)
    return statistics.median(timed(device, both) for _ in range(5)) / 1e3


def host_threads() -> int:
    """Return how many threads an offloaded update has."""
    backend = host_backend()
    return (isinstance(backend, NativeBackend) and backend._num_threads) or torch.get_num_threads()


def update_seconds(host: MixedPrecisionOptimizer, threads: int, seconds: float) -> float:
    """Return the median of an update whose statistics are known."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    end, found = time.perf_counter() + seconds, list[float]()
    while len(found) < 2 or time.perf_counter() < end:
        host.prepare_grads()
        start = time.perf_counter()
        host.step_with_ready_grads()
        found.append(time.perf_counter() - start)
    torch.set_num_threads(before)
    return statistics.median(found[1:])


def host_params(shapes: Sequence[torch.Size], *, pin: bool = False) -> list[nn.Parameter]:
    """Return bf16 parameters in host memory, with gradients."""
    params = []
    for shape in shapes:
        value, grad = (torch.randn(shape, device="cpu").bfloat16() for _ in range(2))
        params.append(nn.Parameter(value.pin_memory() if pin else value))
        params[-1].grad = (grad.pin_memory() if pin else grad).mul_(1e-3)
    return params


def rows_of_variants(device: torch.device, shapes: list[torch.Size]) -> list[str]:
    """Return the table of ``--variants``. ``shapes``: of the layers."""
    most = host_threads()
    lines = ["| weights and gradients | layers | threads | ms | GB/s |", "|---|---|---|---|---|"]
    for pin, count in product((False, True) if device.type != "cpu" else (False,), {min(3, len(shapes)), len(shapes)}):
        params = host_params(shapes[:count], pin=pin)
        host = MixedPrecisionOptimizer(torch.optim.AdamW(params, lr=1e-4), OptimizerConfig(bf16=True, clip_grad=1.0))
        moved = 28 * sum(param.numel() for param in params)
        for threads in sorted({max(1, most * share // 8) for share in (6, 7, 8)}):
            taken = update_seconds(host, threads, 1.0)
            memory = "pinned" if pin else "pageable"
            lines.append(f"| {memory} | {count} | {threads} | {taken * 1e3:.1f} | {moved / taken / 1e9:.1f} |")
    return [*lines, "", f"NUMA nodes here: {len(list(Path('/sys/devices/system/node').glob('node[0-9]*')))}."]


def rows_of_moves(run: Run) -> list[str]:
    """Return the rows of the second table."""
    state = [
        value for entry in run.optimizer._inner.state.values() for value in entry.values() if isinstance(value, Tensor)
    ]
    size = sum(one.nbytes for one in (*state, *(main for _, main in run.optimizer.main_params())))
    rows = []
    for which in ("first", "second", "third"):
        for name, move in (("offload()", run.optimizer.offload), ("reload()", run.optimizer.reload)):
            taken = timed(run.device, move)
            rows.append(f"| {name}, the {which} | {size / 1e9:.2f} | {taken:.1f} | {size / taken / 1e6:.1f} |")
    there = torch.empty(1 << 28, dtype=torch.uint8, device=run.device)
    here = torch.empty(1 << 28, dtype=torch.uint8, device="cpu", pin_memory=run.device.type != "cpu")
    for name, target, source in (("a copy to the host", here, there), ("a copy to the device", there, here)):
        taken = statistics.median(
            timed(run.device, lambda t=target, s=source: t.copy_(s, non_blocking=True)) for _ in range(5)
        )  # type: ignore[misc]
        rows.append(f"| {name} | {source.nbytes / 1e9:.2f} | {taken:.1f} | {source.nbytes / taken / 1e6:.1f} |")
    return rows


def measure(given: argparse.Namespace, device: torch.device) -> tuple[list[str], list[str], list[str]]:
    """Return the rows of the three tables."""
    begin = time.perf_counter()
    first: list[Tensor] = []
    measured: dict[str, Row] = {}
    rows, parts, moves = [], [], []
    shapes: list[torch.Size] = []
    names = [*WAYS, "in host memory, overlap, the fraction that is hidden"]
    for name in names:
        options = WAYS.get(name, WAYS[OVERLAPS])
        if name not in WAYS:
            if not {WAITS, OVERLAPS} <= measured.keys():
                continue
            fraction = hidden_fraction(measured[WAITS], measured[OVERLAPS])
            name, options = (
                f"in host memory, overlap, fraction {fraction}",
                options | {"optimizer_offload_fraction": fraction},
            )
        if time.perf_counter() - begin > given.seconds:
            rows.append(f"| {name} | left out: {given.seconds:.0f} s are over | | | | | | |")
            continue
        try:
            run = Run(device, given.numel, given.width, given.tokens, options)
            measured[name] = row_of(name, run, given.rounds, first)
            rows.append(measured[name].text)
            shapes = run.shapes
            if not options:
                moves = rows_of_moves(run)
        except Exception as error:  # a row says it, and the others are measured
            rows.append(f"| {name} | {type(error).__name__}: {str(error).splitlines()[0][:150]} | | | | | | |")
        run = None  # type: ignore[assignment]
        if device.type != "cpu":
            torch.accelerator.empty_cache()
        print(rows[-1], f"{time.perf_counter() - begin:.0f} s", flush=True)
    if next(iter(WAYS)) in measured:
        parts = rows_of_parts(device, shapes, given.tokens, measured[next(iter(WAYS))].alone / 1e3)
        if given.variants:
            parts += ["", *rows_of_variants(device, shapes)]
    return rows, parts, moves


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=300_000_000)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--variants", action="store_true", help="measure the update alone in other ways, too")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    print_backend()
    device = torch.device(given.device)
    torch.mm(*(torch.zeros(8, 8, dtype=torch.bfloat16, device=device) for _ in range(2)))  # the library's workspace
    rows, parts, moves = measure(given, device)
    where = (
        torch.cuda.get_device_name() if device.type == "cuda" else "a CPU, whose host memory stands for the device's"
    )
    lines = [
        f"## Main params and state in host memory, on {where}",
        "",
        f"torch {torch.__version__}, {torch.get_num_threads()} threads; `python benchmarks/offload.py "
        f"--numel {given.numel} --width {given.width} --tokens {given.tokens} --rounds {given.rounds}`",
        "",
        HEAD,
        "|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        *parts,
        "",
        "| move | GB | ms | GB/s |",
        "|---|---|---|---|",
        *moves,
    ]
    text = "\n".join(lines)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
