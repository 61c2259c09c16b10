"""Compiles a formula for rows of given dtypes, once in a process, into a function that serves every length.

torch.compile traces the formula on tensors made for that purpose. Later calls go straight to what Inductor has built:
Dynamo's guards take twice the time of the call itself, and could find nothing, since a compiled formula is found by
everything that it depends on. Lengths are dynamic; all other numbers come in tensors.
"""

import subprocess
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from megascale.errors import MegascaleError, UsageError

OPTIONS: dict[str, Any] = {
    # Main params are the reference's bits: a product and a sum are rounded twice, and quotients on a GPU are exact.
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "triton.cudagraphs": False,
}

EXAMPLE_SHAPES = {1: (1 << 20,), 2: (1 << 8, 1 << 12)}
"""By dimensions. Long, because Inductor shares short loops out among no threads; unlike, to tell sizes apart."""

Formula = Callable[..., Any]
Call = Callable[..., Any]
Source = tuple[int, int | None]
"""What an argument of a graph is: the tensor of this number, or its size in this dimension."""


class CompilerMissingError(MegascaleError):
    """No working compiler for a device was found."""


class RowCompiler:
    """Compiled formulas.

    Attributes:
        seconds: time spent on compiling so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._calls: dict[Any, Call] = {}
        self._missing: dict[str, str] = {}

    def compiled(self, formula: Formula, tensors: Sequence[Tensor | None], fixed: int = 0, **options: Any) -> Call:
        """Return ``formula`` for tensors like these, as a function of as many tensors and with the same results.

        Args:
            formula: of tensors and keyword options.
            tensors: contiguous, on one device. The formula gets None for None.
            fixed: the first so many tensors always have the shape that they have here. Of the others only the dtype and
                the number of dimensions, 1 or 2, count; 1-D ones are equally long.
            options: the formula's options.

        Raises:
            CompilerMissingError: there is no working compiler; raised at once when asked again.
        """
        device = next(tensor.device for tensor in tensors if tensor is not None)
        # The number of threads is a constant in code for a CPU.
        threads = torch.get_num_threads() if device.type == "cpu" else None
        dtypes = tuple([None if tensor is None else tensor.dtype for tensor in tensors])
        key = (formula, dtypes, device, threads, *options.values())
        call = self._calls.get(key)
        if call is None:
            if device.type in self._missing:
                raise CompilerMissingError(self._missing[device.type])
            started = time.perf_counter()
            try:
                call = self._calls[key] = _compile(formula, tensors, fixed, options)
            except Exception as error:
                if not any(map(_says_that_compiler_is_missing, _causes(error))):
                    raise
                self._missing[device.type] = f"no working compiler for {device.type}: {error}"
                raise CompilerMissingError(self._missing[device.type]) from error
            finally:
                self.seconds += time.perf_counter() - started
        return call


def _compile(formula: Formula, tensors: Sequence[Tensor | None], fixed: int, options: dict[str, Any]) -> Call:
    """Compile on examples. Nothing is read or written but those."""
    examples = [None if tensor is None else _example(tensor, index < fixed) for index, tensor in enumerate(tensors)]
    built: list[tuple[Call, list[Source]]] = []

    def build(graph: GraphModule, inputs: list[Any]) -> Call:
        from torch._inductor.compile_fx import compile_fx

        compiled: Any = compile_fx(graph, inputs, config_patches=OPTIONS)

        def first_call(*arguments: Tensor | int) -> Any:
            built.append((compiled, [_source(argument, examples) for argument in arguments]))
            return compiled(*arguments)

        return first_call

    def row_formula(*row: Tensor | None) -> Any:
        return formula(*row, **options)

    # Dynamo counts compilations by code object and refuses beyond a limit: each formula gets one of its own.
    code = row_formula.__code__.replace(co_name=f"{formula.__name__}_row")
    traced = types.FunctionType(code, globals(), code.co_name, None, row_formula.__closure__)
    compiling = torch.compile(traced, fullgraph=True, dynamic=True, backend=build)
    constants = torch._dynamo.config.patch(specialize_float=True)
    with _disable_current_modes(), torch.no_grad(), torch.compiler.set_stance("default"), constants:
        single = isinstance(compiling(*examples), Tensor)
    if len(built) != 1:
        raise CompilerMissingError("torch.compile is disabled")
    compiled, sources = built[0]

    def call(*row: Tensor | None) -> Any:
        outputs = compiled(*[row[i] if dim is None else row[i].shape[dim] for i, dim in sources])  # type: ignore[union-attr]
        return outputs[0] if single else None

    return call


def _example(tensor: Tensor, fixed: bool) -> Tensor:
    shape = tensor.shape if fixed else EXAMPLE_SHAPES[tensor.dim()]
    example = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    if fixed:
        torch._dynamo.mark_static(example)
    return example


def _source(argument: Tensor | int, examples: Sequence[Tensor | None]) -> Source:
    for index, example in enumerate(examples):
        if argument is example:
            return index, None
        if example is not None and not isinstance(argument, Tensor):
            for dim, size in enumerate(example.shape):
                if argument == size:
                    return index, dim
    raise UsageError(f"torch.compile made a graph with an argument of its own, {argument!r}; choose another backend")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__


def _says_that_compiler_is_missing(error: BaseException) -> bool:
    from torch._inductor import exc

    failures = (exc.InvalidCxxCompiler, exc.CppCompileError, exc.TritonMissing, subprocess.CalledProcessError)
    return isinstance(error, (CompilerMissingError, *failures))
