"""The triton backend's own launches on a machine without a GPU: compiled, recorded, and not run.

Signatures, constants, grids and options are those that the backend hands to Triton; nothing of them is written here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from megascale.kernels import AdamHyper, Decision, LionHyper, Operands, SgdHyper
from megascale.kernels.compact_moments import SCALE_SUFFIX
from megascale.kernels.decision import GradWeights, ScaleRule
from megascale.kernels.remainders import REMAINDER_DTYPE
from megascale.kernels.triton import device_table
from megascale.kernels.triton.backend import OPTIONS, TritonBackend
from megascale.rules import CODE_DTYPES, FIRST_DTYPE, SECOND_DTYPE

HALF, BRAIN, SINGLE, CODES = torch.float16, torch.bfloat16, torch.float32, FIRST_DTYPE
ALIGNMENT = 512  # bytes, as torch's allocator on a GPU


@dataclass(frozen=True)
class Launch:
    """One launch.

    Attributes:
        code: what Triton compiled.
        constants: the kernel's, by name.
        numels: elements of each row of the table whose chunks are its programs; empty where it has none.
        summands: how many numbers each of its programs adds up, where it has no chunks.
    """

    kernel: str
    code: Any
    constants: dict[str, Any]
    programs: int
    numels: list[int]
    summands: float


class AbsentDevice:
    """A Triton driver of a GPU that is not there: enough of it to compile."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        """Return what to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """Return the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0


class _Backend(TritonBackend):
    """Takes CPU tensors outside Triton's interpreter: their memory is described to kernels that do not run.

    Every launch goes through Triton, where it is recorded.
    """

    def _check(self, device: torch.device) -> torch.device:
        return device

    def _launch(
        self,
        kernel: Any,
        programs: int,
        arguments: tuple[Any, ...],
        constants: dict[str, Any],
        options: dict[str, Any] = OPTIONS,
        kept: list[Any] | None = None,
    ) -> None:
        kernel[(programs,)](*arguments, **constants, **options, enable_fp_fusion=False)


@contextmanager
def recorded(capability: int = 90) -> Iterator[tuple[TritonBackend, list[Launch]]]:
    """Yield a backend whose launches are compiled for a GPU and appended to the list, instead of run."""
    launches: list[Launch] = []
    run = JITFunction.run

    def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel.device_caches.clear()  # Triton's, by the number of a device, which is 0 whatever its capability is
        code = run(kernel, *args, grid=grid, warmup=True, **options)
        constants = {name: value for name, value in options.items() if name in kernel.arg_names}
        given = dict(zip(kernel.arg_names, args, strict=False))
        numels = given["rows"][:, device_table.NUMEL].tolist() if "chunk_rows" in given else []
        summands = given.get("num_tensors", len(given.get("partials", ())) / grid[0])
        launches.append(Launch(kernel.__name__, code, constants, grid[0], numels, summands))
        return code

    triton.runtime.driver.set_active(AbsentDevice(capability))
    JITFunction.run = compile_only
    try:
        yield _Backend(), launches
    finally:
        JITFunction.run = run


class Memory:
    """Tensors of any number and size that share their memory: nothing reads it, so that a billion elements fit."""

    def __init__(self, numels: Sequence[int]) -> None:
        self._numels = numels
        self._base = torch.empty(max(numels) * 4 + 64 * ALIGNMENT, dtype=torch.uint8)
        first = -self._base.data_ptr() % ALIGNMENT
        self._offsets = cycle(range(first, first + 60 * ALIGNMENT, ALIGNMENT))

    def column(self, dtype: torch.dtype) -> list[Tensor]:
        """Return one tensor of each length, at an address that is not the neighbouring column's."""
        offset = next(self._offsets)
        return [self._base[offset : offset + numel * dtype.itemsize].view(dtype) for numel in self._numels]

    def operands(
        self, model: torch.dtype, grad: torch.dtype, state: torch.dtype, names: Sequence[str], held: bool = False
    ) -> Operands:
        """Return what an update takes. ``held``: main params are remainders."""
        main = self.column(SINGLE)
        operands = Operands(grad=self.column(grad), state={name: self.column(state) for name in names})
        for name in filter(lambda name: state in CODE_DTYPES, names):
            operands.state[name + SCALE_SUFFIX] = self.column(SINGLE)
            if name == "exp_avg_sq":
                operands.state[name] = self.column(SECOND_DTYPE)
        if held:
            operands.remainder.extend(self.column(REMAINDER_DTYPE))
        operands.main.extend(main)
        operands.model.extend(main if model == SINGLE else self.column(model))
        operands.step.extend([torch.zeros(())] * len(main))
        return operands

    def held(self, model: torch.dtype) -> Operands:
        """Return what decodes and encodes main params."""
        models, remainders = self.column(model), self.column(REMAINDER_DTYPE)
        return Operands(model=models, remainder=remainders, main=self.column(SINGLE))


def _decision() -> Decision:
    return Decision(*torch.zeros(4).unbind())


Call = Callable[[TritonBackend, Memory], object]


def measuring(dtype: torch.dtype, count_zeros: bool = False) -> Call:
    """Statistics of gradients."""
    return lambda backend, memory: backend.measure(memory.column(dtype), count_zeros)


def adam(
    model: torch.dtype, grad: torch.dtype, state: torch.dtype = SINGLE, amsgrad: bool = False, held: bool = False
) -> Call:
    """AdamW."""
    hyper = AdamHyper(1e-2, 0.9, 0.999, 1e-8, 0.1, True, amsgrad, False)
    names = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if amsgrad else [])
    return lambda backend, memory: backend.adam_(memory.operands(model, grad, state, names, held), hyper, _decision())


def sgd(model: torch.dtype, grad: torch.dtype, momentum: float, nesterov: bool = False, held: bool = False) -> Call:
    """SGD."""
    hyper = SgdHyper(1e-2, momentum, 0.0, 0.1, nesterov, False)
    names = ["momentum_buffer"] if momentum else []
    return lambda backend, memory: backend.sgd_(memory.operands(model, grad, SINGLE, names, held), hyper, _decision())


def lion(model: torch.dtype, grad: torch.dtype, held: bool = False) -> Call:
    """Lion."""
    hyper = LionHyper(1e-3, 0.9, 0.99, 0.1, False)
    return lambda backend, memory: backend.lion_(
        memory.operands(model, grad, SINGLE, ["exp_avg"], held), hyper, _decision()
    )


def decoding(model: torch.dtype) -> Call:
    """Decoding main params that are held as remainders."""
    return lambda backend, memory: backend.decode_(memory.held(model))


def encoding(model: torch.dtype) -> Call:
    """Encoding main params as remainders."""
    return lambda backend, memory: backend.encode_(memory.held(model), _decision().found_inf)


def deciding(backend: TritonBackend, memory: Memory) -> None:
    """Totals, decision and scale: a launch each."""
    grads = memory.column(HALF)
    columns = torch.zeros(len(grads), 3, dtype=torch.float64)
    weights = GradWeights(torch.ones(len(grads), dtype=torch.float64), None)
    stats = backend.measure(grads, False)._replace(sum_squares=columns[:, 0], non_finite=columns[:, 1])
    vector = backend.total(stats, weights, torch.zeros((), dtype=torch.float64), 1.0)
    scale = torch.ones(1)
    decision = backend.decide(vector, scale, 1.0)
    trackers = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    backend.rescale_(decision.found_inf, scale, *trackers, ScaleRule(1.0, 2.0**24, 2.0, 0.5, 1000, 2, False))


def whole_step(backend: TritonBackend, memory: Memory) -> None:
    """Everything that a step of AdamW on fp16 parameters launches."""
    deciding(backend, memory)
    adam(HALF, HALF)(backend, memory)


CALLS: dict[str, Call] = {
    "measure fp16": measuring(HALF),
    "measure bf16": measuring(BRAIN),
    "measure fp32": measuring(SINGLE),
    "measure fp16, zeros": measuring(HALF, True),
    "totals, decision, scale": deciding,
    "AdamW fp16": adam(HALF, HALF),
    "AdamW bf16": adam(BRAIN, BRAIN),
    "AdamW bf16, bf16 moments": adam(BRAIN, BRAIN, BRAIN),
    "AdamW fp16, fp32 main grads": adam(HALF, SINGLE),
    "AdamW fp32": adam(SINGLE, SINGLE),
    "AdamW fp16, amsgrad": adam(HALF, HALF, amsgrad=True),
    "AdamW fp16, remainders": adam(HALF, HALF, held=True),
    "AdamW bf16, remainders": adam(BRAIN, BRAIN, held=True),
    "AdamW bf16, bf16 moments, remainders": adam(BRAIN, BRAIN, BRAIN, held=True),
    "AdamW fp16, 8-bit moments": adam(HALF, HALF, CODES),
    "AdamW bf16, 8-bit moments": adam(BRAIN, BRAIN, CODES),
    "AdamW fp16, 8-bit moments, remainders": adam(HALF, HALF, CODES, held=True),
    "AdamW bf16, 8-bit moments, remainders": adam(BRAIN, BRAIN, CODES, held=True),
    "SGD fp16": sgd(HALF, HALF, 0.0),
    "SGD fp16, momentum": sgd(HALF, HALF, 0.9),
    "SGD fp32, momentum": sgd(SINGLE, SINGLE, 0.9),
    "SGD bf16, nesterov": sgd(BRAIN, BRAIN, 0.9, nesterov=True),
    "SGD fp16, momentum, remainders": sgd(HALF, HALF, 0.9, held=True),
    "SGD bf16, momentum, remainders": sgd(BRAIN, BRAIN, 0.9, held=True),
    "Lion bf16": lion(BRAIN, BRAIN),
    "Lion fp32": lion(SINGLE, SINGLE),
    "Lion fp16, remainders": lion(HALF, HALF, held=True),
    "Lion bf16, remainders": lion(BRAIN, BRAIN, held=True),
    "decode fp16": decoding(HALF),
    "decode bf16": decoding(BRAIN),
    "encode fp16": encoding(HALF),
    "encode bf16": encoding(BRAIN),
}
"""What is compiled. fp32 is also what torch.amp's loop is given: parameters that are their own main params."""
