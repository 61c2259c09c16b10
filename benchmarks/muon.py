"""Time Muon's step on many ranks: sharded, replicated, and by hand, interleaved in one run.

    python benchmarks/muon.py --ranks 2 --layers 16 --width 512 --rounds 6 --out benchmarks/results/muon_cpu.md

The parameters are the matrices of a transformer: for each layer four of width x width and two of width x 4 width, in
fp16 or bf16 (``--dtype``), with fp32 main params. Each rank has gradients of its own, already multiplied by the loss
scale. All contenders reduce them, decide together whether the step lands, update by Muon, and end with every 16-bit
parameter up to date on every rank. `step` begins when gradients are reduced. `by hand` is what one writes without a
library: torch's Muon on each rank over a share of the matrices of about equal work, a read of `found_inf` on the host,
and a broadcast from each owner. Megatron-Core's LayerWiseDistributedOptimizer, where it is installed, takes bf16 only;
it gets torch's Muon too, and gradients that are reduced as by hand. `difference` is the largest between a parameter and
that of `by hand` after the last round.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from backend import print_backend
from peers import megatron_core
from peers.given import Setup
from peers.work import UnavailableError
from torch import Tensor, nn

from megascale import ConstantGradScaler, DistributedOptimizer, MixedPrecisionOptimizer, OptimizerConfig
from megascale.grad_sync import GradSync

SCALE = 1024.0
WARM_UP = 1
NS_DTYPE = torch.bfloat16


class Contender:
    """Parameters, and two halves of a step: gradients to reduced ones, and the rest."""

    def __init__(self, shapes: list[tuple[int, int]], grads: list[Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        values = [(torch.randn(shape, generator=generator) * 0.02).to(grads[0].dtype) for shape in shapes]
        self.params = nn.ParameterList(nn.Parameter(value) for value in values)
        self.grads = grads
        self.optimizer: Any = None
        self.sync: Any = None

    def reduce(self) -> None:
        """Hand over the gradients in a backward, which starts their reduction."""
        self.optimizer.zero_grad()
        torch.autograd.backward([param.view_as(param) for param in self.params], self.grads)
        self.sync.finish()

    def step(self) -> None:
        """The rest."""
        self.optimizer.step()


class Sharded(Contender):
    """DistributedOptimizer: matrices whole on one rank each."""

    def __init__(self, shapes: list[tuple[int, int]], grads: list[Tensor]) -> None:
        super().__init__(shapes, grads)
        config = _config(grads[0].dtype)
        self.optimizer = DistributedOptimizer(
            torch.optim.Muon(self.params), config, ConstantGradScaler(SCALE), modules=self.params, grads_are_scaled=True
        )
        self.sync = self.optimizer.grad_sync


class Replicated(Contender):
    """MixedPrecisionOptimizer with GradSync: every rank updates all."""

    def __init__(self, shapes: list[tuple[int, int]], grads: list[Tensor]) -> None:
        super().__init__(shapes, grads)
        config = _config(grads[0].dtype)
        self.sync = GradSync(self.params.named_parameters())
        self.optimizer = MixedPrecisionOptimizer(
            torch.optim.Muon(self.params),
            config,
            ConstantGradScaler(SCALE),
            grad_sync=self.sync,
            grads_are_scaled=True,
        )


class ByHand(Contender):
    """torch's Muon on each rank over its share, and a broadcast from each owner."""

    def __init__(self, shapes: list[tuple[int, int]], grads: list[Tensor]) -> None:
        super().__init__(shapes, grads)
        work = [0.0] * dist.get_world_size()
        self.owners: dict[int, int] = {}
        for index in sorted(range(len(shapes)), key=lambda i: -max(shapes[i]) * min(shapes[i]) ** 2):
            owner = work.index(min(work))
            self.owners[index] = owner
            work[owner] += max(shapes[index]) * min(shapes[index]) ** 2
        self.mains = {i: nn.Parameter(self.params[i].detach().float()) for i, o in self.owners.items() if o == _rank()}
        self.muon = torch.optim.Muon(self.mains.values())

    def reduce(self) -> None:
        """All gradients, in fp32, by one all-reduce each."""
        self.reduced = [grad.float() for grad in self.grads]
        works = [dist.all_reduce(grad, async_op=True) for grad in self.reduced]
        for work in works:
            work.wait()

    def step(self) -> None:
        """Unscale, look for overflows, update the share, broadcast."""
        found = torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_(
            self.reduced, found, torch.tensor(1 / (SCALE * dist.get_world_size()))
        )
        dist.all_reduce(found)
        if found.item():
            return
        for index, main in self.mains.items():
            main.grad = self.reduced[index]
        self.muon.step()
        works = []
        for index, param in enumerate(self.params):
            if index in self.mains:
                param.data.copy_(self.mains[index].detach())
            works.append(dist.broadcast(param.data, self.owners[index], async_op=True))
        for work in works:
            work.wait()


class MegatronLayerWise(ByHand):
    """Megatron-Core's LayerWiseDistributedOptimizer around torch's Muon."""

    def __init__(self, shapes: list[tuple[int, int]], grads: list[Tensor]) -> None:
        Contender.__init__(self, shapes, grads)
        if grads[0].dtype != torch.bfloat16:
            raise UnavailableError("its layer-wise optimizer takes bf16 only")
        megatron_core.prepare(Setup(_rank(), dist.get_world_size(), torch.device("cpu"), torch.bfloat16, None, {}))
        parallel_state = import_module("megatron.core.parallel_state")
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        optimizers = import_module("megatron.core.optimizer")
        layer_wise = import_module("megatron.core.optimizer.layer_wise_optimizer")
        collection = import_module("megatron.core.process_groups_config").ProcessGroupCollection
        groups = collection.use_mpu_process_groups(["dp_cp", "expt_dp", "mp", "tp"])
        config = optimizers.OptimizerConfig(
            bf16=True, lr=1e-3, params_dtype=torch.bfloat16, loss_scale=SCALE, clip_grad=0.0
        )
        muon = torch.optim.Muon(list(self.params))
        self.optimizer = layer_wise.LayerWiseDistributedOptimizer([muon], config, groups)

    def reduce(self) -> None:
        """As by hand; its mean is taken here, as Megatron's DDP does."""
        super().reduce()
        for param, grad in zip(self.params, self.reduced, strict=True):
            param.main_grad = grad.div_(dist.get_world_size())

    def step(self) -> None:
        """Its own step, which gathers the parameters."""
        self.optimizer.step()


CONTENDERS: dict[str, Callable[[list[tuple[int, int]], list[Tensor]], Contender]] = {
    "megascale sharded": Sharded,
    "megascale replicated": Replicated,
    "by hand": ByHand,
    "Megatron-Core layer-wise": MegatronLayerWise,
}


def _config(dtype: torch.dtype) -> OptimizerConfig:
    half = dtype == torch.float16
    return OptimizerConfig(fp16=half, bf16=not half, muon_ns_dtype=NS_DTYPE)


def _rank() -> int:
    return dist.get_rank()


def shapes_of(layers: int, width: int) -> list[tuple[int, int]]:
    """Return the shapes of a transformer's matrices."""
    return [shape for _ in range(layers) for shape in [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]]


def serve(rank: int, given: argparse.Namespace, folder: str) -> None:
    """Be one rank: time all contenders in turns; rank 0 writes the table."""
    torch.set_num_threads(given.threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=given.ranks)
    shapes = shapes_of(given.layers, given.width)
    generator = torch.Generator().manual_seed(1 + rank)
    dtype = getattr(torch, given.dtype)
    grads = [(torch.randn(shape, generator=generator) * SCALE * 1e-3).to(dtype) for shape in shapes]
    contenders: dict[str, Contender] = {}
    for name, build in CONTENDERS.items():
        try:
            contenders[name] = build(shapes, grads)
        except (UnavailableError, ImportError) as reason:
            print(f"rank {rank}: no {name}: {reason}", file=sys.stderr)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for turn in range(WARM_UP + given.rounds):
        for name, contender in contenders.items():
            dist.barrier()
            start = time.perf_counter()
            contender.reduce()
            dist.barrier()
            middle = time.perf_counter()
            contender.step()
            dist.barrier()
            if turn >= WARM_UP:
                times[name].append((middle - start, time.perf_counter() - middle))
    if rank == 0:
        _write(given, shapes, contenders, times)
    dist.barrier()
    os._exit(0)


def _write(
    given: argparse.Namespace,
    shapes: list[tuple[int, int]],
    contenders: dict[str, Contender],
    times: dict[str, list[tuple[float, float]]],
) -> None:
    model = f"--ranks {given.ranks} --layers {given.layers} --width {given.width} --dtype {given.dtype}"
    numel = sum(rows * columns for rows, columns in shapes)
    lines = [
        f"`python benchmarks/muon.py {model} --rounds {given.rounds} --threads {given.threads}`",
        "",
        f"{numel:,} parameters in {len(shapes)} matrices, {given.dtype}; {given.ranks} gloo ranks of {given.threads} "
        f"thread(s); torch {torch.__version__}, {platform.machine()}. Median (min to max) of {given.rounds} "
        "interleaved rounds.",
        "",
        "| contender | reduce, s | step, s | step / replicated | difference |",
        "|---|---|---|---|---|",
    ]
    for name, contender in contenders.items():
        reduce, step = ([time[half] for time in times[name]] for half in (0, 1))
        ratios = [mine[1] / theirs[1] for mine, theirs in zip(times[name], times["megascale replicated"], strict=True)]
        apart = max(
            float((one.detach().float() - other.detach().float()).abs().max())
            for one, other in zip(contender.params, contenders["by hand"].params, strict=True)
        )
        lines.append(f"| {name} | {_told(reduce)} | {_told(step)} | {_told(ratios)} | {apart:.1g} |")
    table = "\n".join(lines) + "\n"
    print(table)
    if given.out is not None:
        given.out.write_text(table)


def _told(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="gloo ranks on this machine (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=16, help="layers of the transformer (default: %(default)s)")
    parser.add_argument("--width", type=int, default=512, help="its width (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=6, help="rounds that are timed (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each rank (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write the table there")
    given = parser.parse_args()
    print_backend()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(serve, args=(given, folder), nprocs=given.ranks)


if __name__ == "__main__":
    main()
