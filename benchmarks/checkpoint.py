"""Time and memory of saving a checkpoint: ours, an earlier commit's, torch.save's and torch.distributed.checkpoint's.

    python benchmarks/checkpoint.py --before ../earlier --tensors 200,1500,20000 \
        --out benchmarks/results/checkpoint_cpu.md

fp16 parameters with fp32 main params and AdamW's moments: 14 bytes a parameter. Each contender is a process of its own,
which holds the same state and lives through all rounds. In every round all of them save, one after the other, another
one first each time, each into an empty folder after all earlier writes have reached the disk, and each waits until its
own bytes have. Ours adds checksums. An asynchronous save is timed until it returns: training goes on then. A ratio is
taken within each round: what slows the disk slows both. Peak memory is what the process holds at most in any round,
until its bytes are on disk, above what it held before its first save. Linux alone tells it.
"""

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from backend import print_backend
from peers.report import place
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
OURS, RIVAL = "megascale", "torch.save, fsync"
LATER = ", asynchronous: until it returns"
RIVALS = (RIVAL, "torch.distributed.checkpoint.save", "bytes alone, fsync")
GIVEN_TO = (OURS, OURS + LATER)
BEFORE = "megascale, the earlier commit"


class Save(NamedTuple):
    """What one save took: seconds of the clock and on a processor in its process, and the peak of memory, in bytes."""

    clock: float
    processor: float
    peak: int


class Saved:
    """A model and its optimizer, after one step."""

    def __init__(self, numel: int, tensors: int) -> None:
        from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig

        torch.manual_seed(0)
        self.model = nn.Module()
        for index in range(tensors):
            start, stop = numel * index // tensors, numel * (index + 1) // tensors
            self.model.register_parameter(f"weight{index}", nn.Parameter(torch.randn(stop - start).half()))
        inner = torch.optim.AdamW(self.model.named_parameters(), lr=1e-3)
        self.optimizer = MixedPrecisionOptimizer(inner, OptimizerConfig(fp16=True), DynamicGradScaler())
        for param in self.model.parameters():
            param.grad = torch.zeros_like(param)
        self.optimizer.get_loss_scale()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """Return the live state of both."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(copy=False)}


def tensors_of(nest: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested containers."""
    if isinstance(nest, Tensor):
        yield nest.detach()
    elif isinstance(nest, (dict, list, tuple)):
        for value in nest.values() if isinstance(nest, dict) else nest:
            yield from tensors_of(value)


@contextmanager
def synced(path: Path) -> Iterator[Any]:
    """Open a file for writing; wait until it is on disk."""
    with open(path, "wb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())


def way_of(contender: str, saved: Saved, folder: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return what saves into ``folder`` and is timed, and what follows untimed."""
    if contender.startswith(OURS):
        from megascale.checkpoint import Checkpointer

        checkpointer = Checkpointer(folder, async_save=contender.endswith(LATER))
        return (lambda: checkpointer.save(1, saved.model, saved.optimizer)), checkpointer.wait

    def by_torch() -> None:
        with synced(folder / "checkpoint.pt") as stream:
            torch.save(saved.state(), stream)

    def by_dcp() -> None:
        dcp.save(saved.state(), checkpoint_id=folder / "dcp", no_dist=True)

    def bytes_alone() -> None:
        with synced(folder / "bytes") as stream:
            for tensor in tensors_of(saved.state()):
                stream.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    return dict(zip(RIVALS, (by_torch, by_dcp, bytes_alone), strict=True))[contender], lambda: None


def serve(contender: str, numel: int, tensors: int, folder: Path) -> None:
    """Be a contender: save once per line of stdin, and print what it took. First print the bytes of the state."""
    warnings.simplefilter("ignore")
    saved = Saved(numel, tensors)
    save, afterwards = way_of(contender, saved, folder)
    print(sum(tensor.nbytes for tensor in tensors_of(saved.state())), flush=True)
    held = forget_peak()
    for _ in sys.stdin:
        start, busy = time.perf_counter(), time.process_time()
        save()
        took = time.perf_counter() - start, time.process_time() - busy
        afterwards()
        print(json.dumps([*took, memory("VmHWM") - held]), flush=True)


def forget_peak() -> int:
    """Let the peak of this process's memory begin anew; return what it holds, in bytes."""
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(name: str) -> int:
    """Return a number of this process's memory, in bytes; 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def measure(contenders: dict[str, Path], given: argparse.Namespace, tensors: int) -> tuple[int, dict[str, list[Save]]]:
    """Return the bytes of the state, and what each save of each contender took, by the root of its checkout."""
    took: dict[str, list[Save]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        target = Path(folder) / "save"
        target.mkdir()
        servers = {name: start(name, root, given, tensors, target) for name, root in contenders.items()}
        [nbytes, *_] = {name: int(answer(server)) for name, server in servers.items()}.values()
        for number in range(given.rounds + 1):  # the first round is not counted
            for turn in range(len(servers)):
                name, server = list(servers.items())[(number + turn) % len(servers)]
                for left in target.iterdir():
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
                os.sync()
                server.stdin.write("save\n")
                server.stdin.flush()
                one = Save(*json.loads(answer(server)))
                if number:
                    took[name].append(one)
        for server in servers.values():
            server.stdin.close()
            server.wait()
    return nbytes, took


def start(contender: str, root: Path, given: argparse.Namespace, tensors: int, folder: Path) -> Any:
    """Start a contender's process with the megascale of a checkout."""
    call = f"serve({contender!r}, {given.numel}, {tensors}, Path({str(folder)!r}))"
    paths = f"import sys; sys.path[:0] = [{str(root)!r}, {str(ROOT / 'benchmarks')!r}]; "
    code = f"{paths}from pathlib import Path; from checkpoint import serve; import torch; "
    code += f"torch.set_num_threads({given.threads}); {call}"
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def answer(server: Any) -> str:
    """Return the next line that a contender prints."""
    line: str = server.stdout.readline()
    if not line:
        raise SystemExit(f"a contender ended with {server.wait()}: see above")
    return line


def table(took: dict[str, list[Save]]) -> Iterator[str]:
    """Yield the rows: seconds, memory, and the ratios within rounds."""
    others = [name for name in (RIVAL, BEFORE) if name in took]
    heads = [f"of {'torch.save' if name == RIVAL else 'the earlier commit'}'s" for name in others]
    yield f"| save | s, median (min to max) | on a processor | peak, MB | {' | '.join(heads)} |"
    yield f"|{'---|' * (4 + len(heads))}"
    for name, own in took.items():
        ratios = []
        for other in others:
            rival = BEFORE + LATER if other == BEFORE and name.endswith(LATER) else other
            ratios.append(spread([one.clock / two.clock for one, two in zip(own, took[rival], strict=True)]))
        busy = statistics.median(one.processor for one in own)
        peak = max(one.peak for one in own) / 1e6
        row = [name, spread([one.clock for one in own]), f"{busy:.2f}", f"{peak:,.0f}", *ratios]
        yield f"| {' | '.join(row)} |"


def spread(values: Sequence[float]) -> str:
    """Return the median, the least and the most."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def arguments_of_command() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of an earlier commit, to compare with")
    parser.add_argument("--numel", type=int, default=50_000_000)
    parser.add_argument("--tensors", default="200", help="numbers of tensors, separated by commas")
    parser.add_argument("--skip", action="append", default=[], help="a contender's name, to leave it out; repeatable")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument("--out", type=Path, help="write the tables to this file too")
    given = parser.parse_args()
    print_backend()
    if given.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {given.rounds}")
    return given


def main() -> None:
    """Measure, print, and write the tables where asked."""
    given = arguments_of_command()
    contenders = dict.fromkeys((*GIVEN_TO, *RIVALS), ROOT)
    if given.before is not None:
        contenders |= dict.fromkeys((BEFORE, BEFORE + LATER), given.before.resolve())
    contenders = {name: root for name, root in contenders.items() if name == RIVAL or name not in given.skip}
    busy = [os.getloadavg()[0]]
    tables: list[str] = []
    for tensors in map(int, given.tensors.split(",")):
        nbytes, took = measure(contenders, given, tensors)
        tables += [f"### {nbytes / 1e6:,.0f} MB, {tensors:,} parameters' tensors", "", *table(took), ""]
        busy.append(os.getloadavg()[0])
    others = f"Load average of the machine, which others share: {', '.join(f'{load:.1f}' for load in busy)}."
    lines = ["## Saving a checkpoint", ""]
    lines += [f"{place(torch.device('cpu'), given.threads)}; {given.rounds} rounds. {others}", ""]
    lines += [f"`python benchmarks/checkpoint.py {shlex.join(sys.argv[1:])}`", "", *tables]
    text = "\n".join(lines)
    print(text)
    if given.out is not None:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
