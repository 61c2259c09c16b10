"""Time data-parallel training steps: megascale and the peers that are installed, interleaved in one run.

    python benchmarks/distributed.py --ranks 2 --numel 50_000_000 --tensors 200 --rounds 20 --out table.md

Starts its own processes: for each contender one for every rank, with gloo on CPU and nccl on GPUs. All contenders get
the same parameters and the same gradients (each rank its own, already multiplied by the loss scale), and do the same
work: reduce over the ranks, unscale, check for overflow, clip to norm 1.0, AdamW in fp32, and every 16-bit parameter
up to date on every rank. Every round times each contender once, in turn, while the others wait; a time is that of the
slowest rank after a barrier.

`reduce` is zero_grad, a backward that only hands over the given gradients, and their reduction; most contenders reduce
from hooks of backward, and `backward alone` is what that backward costs everybody. `step` is the rest, the gather of
the parameters included. `difference` compares parameters after the last round with those of `masters by hand`: it shows
that the work was the same. `--list` shows the contenders and how to install them.
"""

import argparse
import os
import platform
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module, metadata
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from backend import print_backend
from peers.given import Contender, GivenModel, Setup, given_grads
from peers.measure import count_collectives, held_bytes, live_bytes, peak_bytes, reset_peak
from torch import Tensor

PATIENCE = 900.0
"""Seconds to wait for a contender: a peer may compile its kernels first."""
WARM_UP = 3
BASELINE = "megascale fp32"
HALF_BASELINE = "megascale 16-bit"
REFERENCE = "masters by hand"
DEEPSPEED = "DS_ACCELERATOR=cpu pip install --no-deps --no-build-isolation --no-binary deepspeed deepspeed==0.19.8"
MEGATRON = ".ci/install_integrations"


@dataclass(frozen=True)
class Entry:
    """A contender: how it is called, what travels, where it is built, and what must be installed for it."""

    name: str
    travels: str
    module: str
    build: str
    distribution: str = "torch"
    install: str = ""
    options: dict[str, Any] = field(default_factory=dict)


ENTRIES = (
    Entry(BASELINE, "fp32", "ours", "sharded"),
    Entry(HALF_BASELINE, "16 bit", "ours", "sharded", options={"grad_dtype": "model"}),
    Entry("megascale replicated", "fp32", "ours", "replicated"),
    Entry(REFERENCE, "fp32", "by_hand", "masters"),
    Entry("torch ZeroRedundancyOptimizer", "fp32", "by_hand", "zero_redundancy"),
    Entry("torch FSDP2", "fp32", "fsdp2", "build", options={"reduce_dtype": torch.float32}),
    Entry("DeepSpeed ZeRO-1", "16 bit", "deepspeed_zero1", "build", "deepspeed", DEEPSPEED),
    Entry("Megatron-Core", "fp32", "megatron_core", "build", "megatron-core", MEGATRON),
    Entry("Megatron-Core, fused AdamW", "fp32", "megatron_core", "build", "megatron-core", MEGATRON, {"fused": True}),
    Entry("backward alone", "nothing", "by_hand", "backward_alone"),
)


def version(entry: Entry) -> str | None:
    """Return the version of what a contender needs; None: not installed."""
    try:
        return metadata.version(entry.distribution)
    except metadata.PackageNotFoundError:
        return None


# One rank of one contender


class Rank:
    """Runs in a process of its own, and answers what the parent asks."""

    def __init__(self, entry: Entry, rank: int, arguments: argparse.Namespace, grads: Tensor) -> None:
        self.device = torch.device(arguments.device)
        if self.device.type != "cpu":
            self.device = torch.device(self.device.type, rank)
            torch.accelerator.set_device_index(rank)
        dtype = getattr(torch, arguments.dtype)
        options = dict(entry.options)
        if options.get("grad_dtype") == "model":
            options["grad_dtype"] = dtype
        setup = Setup(rank, arguments.ranks, self.device, dtype, arguments.bucket_numel, options)
        module = import_module(f"peers.{entry.module}")
        if hasattr(module, "prepare"):
            module.prepare(setup)
        self.grads = grads.to(self.device)
        # Shared pages, and what torch imports late, count as held before, not as the contender's.
        self.grads.sum()
        count_collectives(dist.barrier)
        self.live_before = live_bytes(self.grads)
        self.held_before = held_bytes(self.device)
        self.numel = grads.numel()
        self.contender: Contender = getattr(module, entry.build)(
            GivenModel(arguments.tensors, self.grads, setup), setup
        )

    def round(self) -> tuple[float, float, float]:
        """Return milliseconds: reduce, step, both."""
        self._wait()
        dist.barrier()
        start = time.perf_counter()
        self.contender.reduce()
        self._wait()
        middle = time.perf_counter()
        self.contender.step()
        self._wait()
        stop = time.perf_counter()
        return (middle - start) * 1e3, (stop - middle) * 1e3, (stop - start) * 1e3

    def count(self) -> dict[str, int]:
        """Return the collectives of one round."""
        return dict(count_collectives(lambda: (self.contender.reduce(), self.contender.step())))

    def live(self) -> tuple[float, float]:
        """Return bytes of tensors per parameter, between steps and with reduced gradients; begin to watch the peak."""
        between = live_bytes(self.grads)
        self.contender.reduce()
        reduced = live_bytes(self.grads)
        self.contender.step()
        reset_peak(self.device)
        return (between - self.live_before) / self.numel, (reduced - self.live_before) / self.numel

    def peak(self) -> float | None:
        """Return the most bytes per parameter since :meth:`live`."""
        peak = peak_bytes(self.device)
        return None if peak is None or self.held_before is None else (peak - self.held_before) / self.numel

    def sample(self) -> list[Any]:
        """Return the first and the last parameter."""
        whole = self.contender.parameters()
        return [whole[i].detach().float().cpu().numpy() for i in (0, -1)] if whole else []

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def serve(
    entry: Entry, rank: int, arguments: argparse.Namespace, grads: Tensor, rendezvous: str, parent: Connection
) -> None:
    """Be a rank until the parent says None. What goes wrong is sent as a string."""
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(arguments.ranks)}
    try:
        backend = "gloo" if arguments.device == "cpu" else "nccl"
        dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=arguments.ranks)
        served = Rank(entry, rank, arguments, grads)
        parent.send(None)
        while (command := parent.recv()) is not None:
            parent.send(getattr(served, command)())
    except Exception as error:
        traceback.print_exc()
        parent.send(f"{type(error).__name__}: {error}")
    os._exit(0)  # peers leave threads and groups behind that would wait for one another


# The parent


class ContenderError(Exception):
    """A contender could not go on; the message is what a rank has said."""


class Team:
    """All ranks of one contender."""

    def __init__(self, entry: Entry, arguments: argparse.Namespace, grads: list[Tensor], folder: str) -> None:
        self.entry = entry
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        context = mp.get_context("spawn")
        rendezvous = str(Path(folder) / entry.name.replace(" ", "_").replace(",", ""))
        for rank in range(arguments.ranks):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(entry, rank, arguments, grads[rank], rendezvous, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def answers(self) -> list[Any]:
        """Return what each rank says next.

        Raises:
            ContenderError: if one says that it failed, or says nothing.
        """
        said: dict[Connection, Any] = {}
        until = time.monotonic() + PATIENCE
        while len(said) < len(self.pipes):
            ready = wait([pipe for pipe in self.pipes if pipe not in said], until - time.monotonic())
            if not ready:
                raise ContenderError(f"no answer within {PATIENCE:.0f} s")
            for pipe in ready:
                try:
                    said[pipe] = pipe.recv()  # type: ignore[union-attr, index]
                except EOFError:
                    raise ContenderError("a rank ended without a word") from None
        errors = [answer for answer in said.values() if isinstance(answer, str)]
        if errors:
            raise ContenderError(errors[0])
        return [said[pipe] for pipe in self.pipes]

    def ask(self, command: str) -> list[Any]:
        """Return each rank's answer to ``command``."""
        for pipe in self.pipes:
            pipe.send(command)
        return self.answers()

    def stop(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()


@dataclass
class Result:
    """What was measured of one contender; ``failure`` says why it was not."""

    entry: Entry
    failure: str = ""
    times: list[tuple[float, float, float]] = field(default_factory=list)
    live: tuple[float, float] = (0.0, 0.0)
    peak: float | None = None
    collectives: dict[str, int] = field(default_factory=dict)
    sample: list[Any] = field(default_factory=list)


def start(entries: list[Entry], arguments: argparse.Namespace, folder: str) -> Iterator[tuple[Result, Team | None]]:
    """Yield each contender when it is ready, one after the other."""
    dtype = getattr(torch, arguments.dtype)
    grads = [given_grads(arguments.numel, rank, dtype).share_memory_() for rank in range(arguments.ranks)]
    for entry in entries:
        if version(entry) is None:
            yield Result(entry, f"not installed: `{entry.install}`"), None
            continue
        team = Team(entry, arguments, grads, folder)
        result = Result(entry)
        try:
            team.answers()
            for _ in range(WARM_UP):
                team.ask("round")
            result.collectives = max(team.ask("count"), key=lambda counts: sum(counts.values()))
            result.live = max(team.ask("live"))
        except ContenderError as error:
            team.stop()
            yield Result(entry, str(error)), None
            continue
        yield result, team


def measure(entries: list[Entry], arguments: argparse.Namespace) -> list[Result]:
    """Run the rounds."""
    results: list[Result] = []
    teams: list[tuple[Result, Team]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for result, team in start(entries, arguments, folder):
                results.append(result)
                if team is not None:
                    teams.append((result, team))
            for _ in range(arguments.rounds):
                for result, team in teams:
                    by_rank = team.ask("round")
                    result.times.append(tuple(max(times) for times in zip(*by_rank, strict=True)))  # type: ignore[arg-type]
            for result, team in teams:
                result.peak = max((p for p in team.ask("peak") if p is not None), default=None)
                result.sample = team.ask("sample")[0]
        finally:
            for _, team in teams:
                team.stop()
    return results


# The table


def spread(values: list[float]) -> str:
    """Return median (min to max)."""
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def ratio(baseline: Result | None, result: Result) -> str:
    """Return the baseline's total over the contender's: of medians, of minima."""
    if baseline is None or not baseline.times:
        return "-"
    ours, theirs = ([times[2] for times in it.times] for it in (baseline, result))
    return f"{statistics.median(ours) / statistics.median(theirs):.2f}, {min(ours) / min(theirs):.2f}"


def difference(reference: Result | None, result: Result) -> str:
    """Return the largest difference of a parameter from the reference's."""
    if reference is None or not reference.sample or not result.sample:
        return "-"
    pairs = zip(reference.sample, result.sample, strict=True)
    return f"{max(abs(a.reshape(-1) - b.reshape(-1)).max() for a, b in pairs):.1e}"


def row(result: Result, by_name: dict[str, Result]) -> str:
    """Return one line of the table."""
    if result.failure:
        return f"| {result.entry.name} | {result.entry.travels} | {result.failure.splitlines()[0]} |" + " |" * 8
    reduce, step, total = (list(column) for column in zip(*result.times, strict=True))
    counts = ", ".join(f"{name} {count}" for name, count in sorted(result.collectives.items())) or "none"
    peak = "-" if result.peak is None else f"{result.peak:.1f}"
    cells = [
        result.entry.name,
        result.entry.travels,
        spread(total),
        spread(reduce),
        spread(step),
        ratio(by_name.get(BASELINE), result),
        ratio(by_name.get(HALF_BASELINE), result),
        f"{result.live[0]:.1f}, {result.live[1]:.1f}",
        peak,
        counts,
        difference(by_name.get(REFERENCE), result),
    ]
    return "| " + " | ".join(cells) + " |"


def report(results: list[Result], arguments: argparse.Namespace, command: str) -> str:
    """Return the Markdown text."""
    where = "CPU" if arguments.device == "cpu" else torch.cuda.get_device_name()
    found = {entry.distribution: version(entry) for entry in (result.entry for result in results)}
    versions = ", ".join(f"{name} {number}" for name, number in found.items() if number is not None)
    by_name = {result.entry.name: result for result in results}
    heads = [
        "contender",
        "travels",
        "total ms: median (min to max)",
        "reduce ms",
        "step ms",
        f"{BASELINE} / it (median, min)",
        f"{HALF_BASELINE} / it (median, min)",
        "state, bytes a parameter: between steps, with gradients",
        "peak, bytes a parameter",
        "collectives",
        "difference",
    ]
    lines = [
        f"## One data-parallel step on {where}: {arguments.ranks} ranks",
        "",
        f"{arguments.dtype}, {arguments.numel:,} parameters in {arguments.tensors} tensors; {arguments.rounds} "
        f"interleaved rounds. {versions}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.machine()}, {os.cpu_count()} cores, {arguments.threads} threads a rank.",
        "",
        f"`{command}`",
        "",
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
        *(row(result, by_name) for result in results),
        "",
        "Times: the slowest rank's. `reduce`: zero_grad, the given backward, the reduction. `step`: unscale, overflow "
        "check, clip, AdamW, gather. A ratio below 1 means that megascale is faster. `state`: storages of all live "
        "tensors on a rank, between two steps, and between reduce and step; the given gradients do not count. `peak`: "
        "the most that a rank held during the rounds, above what it held before the contender was built. "
        "`collectives`: on gloo megascale sends shards from rank to rank: a bucket is one recv and one send for every "
        "other rank, to reduce and to gather alike. "
        f"`difference`: the largest between a parameter and that of `{REFERENCE}`, after the last round.",
    ]
    return "\n".join(lines) + "\n"


def rows_of_rounds(results: list[Result]) -> str:
    """Return every round as CSV."""
    lines = ["contender,travels,round,reduce_ms,step_ms,total_ms"]
    for result in results:
        for index, times in enumerate(result.times):
            cells = (f'"{result.entry.name}"', result.entry.travels, index, *(f"{time:.2f}" for time in times))
            lines.append(",".join(map(str, cells)))
    return "\n".join(lines) + "\n"


def arguments_of_command() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--numel", type=int, default=50_000_000)
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, help="a rank's; cores / ranks unless told")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--bucket-numel", type=int, help="unless told, each contender's default")
    parser.add_argument("--device", default=str(torch.accelerator.current_accelerator(check_available=True) or "cpu"))
    parser.add_argument("--only", help="contenders, by parts of their names, separated by commas")
    parser.add_argument("--list", action="store_true", help="show the contenders, and how to install them")
    parser.add_argument("--out", type=Path, help="also write the table to this file, and every round beside it as .csv")
    arguments = parser.parse_args()
    print_backend()
    if arguments.numel % arguments.tensors:
        parser.error(f"--numel {arguments.numel} must be a multiple of --tensors {arguments.tensors}")
    arguments.threads = arguments.threads or max(1, (os.cpu_count() or 1) // arguments.ranks)
    return arguments


def main() -> None:
    """Measure, print, and write the table where asked."""
    arguments = arguments_of_command()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    if arguments.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    parts = [part.strip().lower() for part in (arguments.only or "").split(",")]
    entries = [entry for entry in ENTRIES if any(part in entry.name.lower() for part in parts)]
    if arguments.list:
        for entry in entries:
            print(f"{entry.name}: {entry.distribution} {version(entry) or 'not installed: ' + entry.install}")
        return
    command = (
        f"python benchmarks/distributed.py --ranks {arguments.ranks} --numel {arguments.numel} "
        f"--tensors {arguments.tensors} --rounds {arguments.rounds} --threads {arguments.threads} "
        f"--dtype {arguments.dtype} --device {arguments.device}"
        + (f" --bucket-numel {arguments.bucket_numel}" if arguments.bucket_numel else "")
        + (f' --only "{arguments.only}"' if arguments.only else "")
    )
    results = measure(entries, arguments)
    text = report(results, arguments, command)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text)
        arguments.out.with_suffix(".csv").write_text(rows_of_rounds(results))


if __name__ == "__main__":
    main()
