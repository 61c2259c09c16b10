"""Time what the host does in a step of the triton backend, without a GPU: fp16 parameters, AdamW, clipping to norm 1.

    python benchmarks/host_time.py --before ../earlier --tensors 300,2000 --out benchmarks/results/host_time.md

Launches take Triton's own path up to its driver. The driver here launches nothing: it writes the few numbers that the
host reads, and its own time is taken out. Tensors lie in host memory, so that no copy to a device is made. What a GPU's
driver takes for five launches and the copies is therefore missing. Gradients stay in place, or lie elsewhere in every
step, as the default ``zero_grad()`` lets them; or one is missing, the same in each step or another one. Then tensors
are in 50 param groups, each of which has launches of its own. The graph that a StepGraph replays does nothing, and
notes when it is launched: what the host does afterwards, it does while a device works. FSDP2's parameters and a
DistributedOptimizer's are bf16, of 8 ranks of torch's fake group, which sends nothing, and whose copies are taken out.

``--before``: a checkout to compare with; both take turns, each turn in a new process. A cell is the smallest time of a
step and the median of all, over all turns, in ms; the smallest in us per tensor; and the median as a multiple of the
one with all gradients in place. A time is that of the thread on a processor, so that it counts no waiting for one.

Then GradSync's hook is timed, which takes a bf16 gradient of 64 elements: on such a one all of it but the copy into the
main grad is host work. Last, the Python frames of megascale in the simplest step are counted: one process, six fp16
parameters, AdamW, backend ``native``.
"""

import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from backend import print_backend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import _from_local_no_grad
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

ROOT = Path(__file__).parents[1]
NUMELS = [64, 72, 80, 88, 96, 104, 112]  # of one tensor after the other: a missing one changes the table
WARM_UP = 3  # steps: they compile, build tables and fill caches
STEPS = {200: 60, 300: 60, 1_500: 40, 2_000: 30}
OTHERWISE = 16
IN_PLACE, MOVED, THE_SAME, ANOTHER = "in place", "moved", "one is missing, the same", "one is missing, another"
GROUPS, REPLAY, LAUNCH = "in 50 param groups", "a StepGraph's replay", "a StepGraph's replay, until its launch"
FSDP2, SHARDED, RANKS = "FSDP2, ", "a DistributedOptimizer's, of 64 elements", 8
ALONE = (IN_PLACE, MOVED, THE_SAME, ANOTHER, GROUPS, REPLAY, LAUNCH)
OF_RANKS = (*(FSDP2 + kind for kind in ALONE[:4]), SHARDED)

spent = 0.0
"""Seconds in the driver below, and in collectives of the fake group."""
launched = 0.0
"""When the newest graph was launched."""


class Launcher:
    """Takes what Triton launches. Kernels whose results the host reads write those of a clean step."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._kernel: str = source.fn.__name__
        self._names: list[str] = source.fn.arg_names

    def __call__(self, *values: Any) -> None:
        """Take one launch: nine values of Triton's, then the kernel's arguments."""
        global spent
        start = time.thread_time()
        given = dict(zip(self._names, values[9:], strict=False))
        if self._kernel == "total_kernel":
            given["vector"].zero_()[[0, -1]] = 1.0 + 2.0**-16  # a sum of squares; that there are gradients, and scaled
        for name in ("flags", "numbers"):
            if name in given:
                given[name].zero_()
        spent += time.thread_time() - start


class Utils:
    """What Triton asks when it loads a kernel."""

    def get_device_properties(self, index: int) -> dict[str, int]:
        """Return an H100's."""
        return {"max_shared_mem": 232448, "multiprocessor_count": 132}

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        """Return module, function, registers, spills, threads."""
        return 1, 1, 0, 0, 1024

    def unload_module(self, *_: Any) -> None:
        """Nothing was loaded."""


class Driver:
    """A Triton driver of a GPU that is not there."""

    utils = Utils()
    launcher_cls = Launcher

    def get_current_target(self) -> Any:
        """Return what to compile for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """Return the only device."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """Return the default stream."""
        return 0


class Graph:
    """A device's graph that notes when it is launched, and does nothing."""

    def replay(self) -> None:
        """Note it."""
        global launched
        launched = time.thread_time()


def times_of_steps(count: int, kind: str) -> Iterator[float]:
    """Yield the host's ms of each step with ``count`` tensors, whose gradients are of a kind, in 50 groups for one."""
    from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig, StepGraph

    fsdp2 = kind.startswith(FSDP2)
    dtype = torch.bfloat16 if fsdp2 else torch.float16
    mesh = init_device_mesh("cpu", (RANKS,)) if fsdp2 else None

    def zeros(index: int) -> torch.Tensor:
        part = torch.zeros(NUMELS[index % len(NUMELS)], dtype=dtype)
        return part if mesh is None else DTensor.from_local(part, mesh, [Shard(0)], run_check=False)

    params: list[Any] = [torch.nn.Parameter(zeros(index)) for index in range(count)]
    size = count // 50 if kind == GROUPS else count
    inner = torch.optim.AdamW([{"params": params[at : at + size]} for at in range(0, count, size)], lr=1e-3)
    scaler = None if fsdp2 else DynamicGradScaler(2.0**10, 1.0, 2.0, 0.5, 1000, 2)
    config = OptimizerConfig(fp16=not fsdp2, bf16=fsdp2, clip_grad=1.0)
    optimizer = MixedPrecisionOptimizer(inner, config, scaler, **({} if mesh is None else {"groups": mesh}))

    def gradient(index: int) -> torch.Tensor:
        if mesh is None:
            return zeros(index)
        # FSDP2's gradients and parameters have one spec, the same object.
        return _from_local_no_grad(torch.zeros_like(params[index].to_local()), params[index]._spec)

    held: list[Any] = []
    step = optimizer.step
    for index_of_step in range(WARM_UP + STEPS.get(count, OTHERWISE)):
        if kind.endswith(MOVED) or not held:
            # The last gradients live until these are made, so that these lie elsewhere.
            held = [gradient(index) for index in range(count)]
        missing = 5 if kind.endswith(THE_SAME) else 31 * index_of_step % count if kind.endswith(ANOTHER) else None
        for index, (param, grad) in enumerate(zip(params, held, strict=True)):
            param.grad = None if index == missing else grad
        if scaler is not None:
            optimizer.get_loss_scale(), scaler.scale
        if kind in (REPLAY, LAUNCH) and index_of_step == 1:  # the first step has put all in its place
            step = StepGraph(optimizer, warmup=1).replay
        yield time_of(step, until_launch=kind == LAUNCH and index_of_step > 0)


def time_of(step: Callable[[], Any], *, until_launch: bool = False) -> float:
    """Return the host's ms of one step, without what a driver or a group that is not there took for it."""
    start, before = time.thread_time(), spent
    step()
    return ((launched if until_launch else time.thread_time()) - start - (spent - before)) * 1e3


def times_of_sharded_steps(count: int) -> Iterator[float]:
    """Yield the host's ms of each step of a DistributedOptimizer with ``count`` bf16 tensors of 64 elements."""
    from megascale import DistributedOptimizer, OptimizerConfig

    model = torch.nn.ParameterList(torch.zeros(64, dtype=torch.bfloat16) for _ in range(count))
    config = OptimizerConfig(bf16=True, clip_grad=1.0, use_distributed_optimizer=True)
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), config, modules=model)
    for _ in range(WARM_UP + STEPS.get(count, OTHERWISE)):
        optimizer.zero_grad()
        torch.stack([param.sum() for param in model]).sum().backward()
        yield time_of(optimizer.step)


def measure(count: int, kinds: Sequence[str]) -> None:
    """Print the ms of the steps of each kind with the megascale that Python finds: one line of JSON."""
    for name in ("all_reduce", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "broadcast"):
        if (call := getattr(dist, name, None)) is not None:
            setattr(dist, name, untimed(call))  # the fake group copies what its ranks would receive
    if not set(kinds).isdisjoint(OF_RANKS):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    cpu: Any = torch.cpu
    cpu.CUDAGraph, cpu.graph = Graph, lambda *_, **__: contextlib.nullcontext()

    from triton.runtime import driver

    import megascale.optimizer

    try:
        from megascale.kernels.triton.backend import TritonBackend
    except ModuleNotFoundError:  # in checkouts of commits up to b69c0ed
        from megascale.kernels.triton_backend import TritonBackend

    class OnHost(TritonBackend):
        """Hands host memory to kernels that do not run."""

        def _check(self, device: torch.device) -> torch.device:
            return device

    warnings.simplefilter("ignore")
    driver.set_active(Driver())
    megascale.optimizer.select_backend = lambda *_: OnHost()
    times = [times_of_sharded_steps(count) if kind == SHARDED else times_of_steps(count, kind) for kind in kinds]
    print(json.dumps([list(each)[WARM_UP:] for each in times]))


def untimed(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of which :func:`time_of` takes out the time."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        global spent
        start = time.thread_time()
        try:
            return call(*args, **kwargs)
        finally:
            spent += time.thread_time() - start

    return timed


def time_hook() -> None:
    """Print the smallest and the median us per gradient of GradSync's hook, over 9 micro-batches of 1,000: JSON."""
    from megascale.grad_sync import GradSync

    params = [torch.nn.Parameter(torch.zeros(64, dtype=torch.bfloat16)) for _ in range(1_000)]
    sync = GradSync([(str(index), param) for index, param in enumerate(params)], overlap=False)
    hooks = [next(iter(param._post_accumulate_grad_hooks.values())) for param in params]  # type: ignore[attr-defined]
    times = []
    for _ in range(WARM_UP + 9):
        sync.finish()
        sync.zero_()
        for param in params:
            param.grad = torch.zeros_like(param)
        with torch.no_grad():  # as in backward
            start = time.thread_time()
            for hook, param in zip(hooks, params, strict=True):
                hook(param)
            times.append((time.thread_time() - start) * 1e6 / len(params))
    print(json.dumps([min(times[WARM_UP:]), statistics.median(times[WARM_UP:])]))


def count_frames() -> None:
    """Print how many Python frames the sixth step of six parameters has, of how many functions and files: JSON."""
    from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig

    layers = [torch.nn.Linear(*sizes) for sizes in ((4, 4), (4, 4), (4, 2))]
    params = [param for layer in layers for param in layer.half().parameters()]
    config = OptimizerConfig(fp16=True, clip_grad=1.0, backend="native")
    scaler = DynamicGradScaler(2.0**10, 1.0, 2.0, 0.5, 1000, 2)
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(params, lr=1e-3), config, scaler)
    seen: list[tuple[str, str]] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and f"{os.sep}megascale{os.sep}" in frame.f_code.co_filename:
            seen.append((frame.f_code.co_filename, frame.f_code.co_qualname))

    gc.disable()  # a collection in the step would call what waits for a weak reference's end
    for step in range(6):
        optimizer.zero_grad()
        optimizer.scale_loss(torch.stack([param.float().square().sum() for param in params]).sum()).backward()
        sys.setprofile(note if step == 5 else None)
        optimizer.step()
        sys.setprofile(None)
    print(json.dumps([len(seen), len(set(seen)), len({file for file, _ in seen})]))


def turn(root: Path, call: str, threads: int) -> Any:
    """Return what a function of this module prints with the megascale of a checkout, in a new process."""
    code = f"import torch, host_time; torch.set_num_threads({threads}); host_time.{call}"
    paths = f"import sys; sys.path[:0] = [{str(root)!r}, {str(ROOT / 'benchmarks')!r}]; "
    done = subprocess.run([sys.executable, "-c", paths + code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{root}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def report(roots: dict[str, Path], counts: Sequence[int], rounds: int, threads: int) -> Iterator[str]:
    """Yield the lines of the table."""
    from peers.report import place

    cases = [(count, kind) for kinds in (ALONE, OF_RANKS) for count in counts for kind in kinds]
    times: dict[str, dict[tuple[int, str], list[float]]] = {name: {case: [] for case in cases} for name in roots}
    for _ in range(rounds):
        for count, kinds in itertools.product(counts, (ALONE, OF_RANKS)):
            for name, root in roots.items():
                measured = turn(root, f"measure({count}, {list(kinds)})", threads)
                for kind, more in zip(kinds, measured, strict=True):
                    times[name][count, kind] += more
    yield "## What the host does in a step on an accelerator\n"
    yield f"{place(torch.device('cpu'), threads)}; {rounds} interleaved turns.\n"
    yield f"`python benchmarks/host_time.py {' '.join(sys.argv[1:])}`\n"
    titles = (f"{name}: smallest ms (median) | us per tensor | of all there" for name in roots)
    yield "| tensors | what | " + " | ".join(titles) + " |"
    yield "|---" * (2 + 3 * len(roots)) + "|"
    for count, kind in cases:
        cells = []
        for found in times.values():
            least, middle = min(found[count, kind]), statistics.median(found[count, kind])
            all_there = statistics.median(found[count, FSDP2 * kind.startswith(FSDP2) + IN_PLACE])
            ratio = "" if kind == SHARDED else f"{middle / all_there:.2f}"
            cells.append(f"{least:.2f} ({middle:.2f}) | {least * 1e3 / count:.2f} | {ratio}")
        yield f"| {count:,} | {kind} | {' | '.join(cells)} |"
    for name, root in roots.items():
        least, middle = turn(root, "time_hook()", 1)
        yield f"\n{name}: GradSync's hook takes {least:.1f} us per gradient ({middle:.1f})."
    for name, root in roots.items():
        frames, functions, files = turn(root, "count_frames()", 1)
        yield f"\n{name}: the simplest step has {frames} Python frames, of {functions} functions in {files} files."


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", default="200,1500,10000")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--before", type=Path, help="a checkout of megascale to compare with")
    parser.add_argument("--out", type=Path, help="write the table to this file, too")
    options = parser.parse_args()
    print_backend()
    roots = {"before": options.before.resolve()} if options.before else {}
    roots["here"] = ROOT
    text = "\n".join(report(roots, [int(one) for one in options.tensors.split(",")], options.rounds, options.threads))
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
