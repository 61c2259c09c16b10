"""The compiled backend: plain tensor code, compiled by torch.compile for rows of any length.

C++ on a CPU, Triton on a GPU. One compilation for each combination of dtypes and optimizer options, when it is first
needed; Inductor keeps what it has built on disk for later processes. Main params and moments are the reference
backend's, bit for bit, on a CPU.

Rows that lie side by side in memory are updated in one call. What rows of one call share is the bias correction, so
their step counts have to be equal. On a CPU those lie in the host's own memory and are compared. On other devices they
are not read: there, rows that count steps are updated one by one.
"""

import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megascale.kernels import formulas
from megascale.kernels.blocks import Row, flat
from megascale.kernels.decision import Decision, TensorStats, TorchDecisions
from megascale.kernels.operands import AdamHyper, Backend, LionHyper, Operands, SgdHyper
from megascale.kernels.prepared_rows import DTYPES, PreparedRows
from megascale.kernels.reference import ReferenceBackend, stats_dtype
from megascale.kernels.row_compiler import Call, CompilerMissingError, RowCompiler
from megascale.kernels.runs import Run
from megascale.kernels.torch_backend import TorchBackend

LONGEST_CALL = 1 << 30  # elements; a GPU's code counts them in 32 bits

_compiler = RowCompiler()
_warned = False


class CompiledBackend(TorchDecisions):
    """See :class:`megascale.kernels.Backend`.

    Where nothing can be compiled the torch backend takes over, with one RuntimeWarning in a process. Rows that share no
    dense memory layout, and fp64 main params, take the reference's arithmetic.
    """

    name = "compiled"

    def __init__(self) -> None:
        self._reference = ReferenceBackend()
        self._torch = TorchBackend()
        self._kept: WeakKeyDictionary[Operands, PreparedRows] = WeakKeyDictionary()

    @property
    def compile_seconds(self) -> float:
        """Time that this process has spent on compiling, or on finding on disk what had been compiled, so far."""
        return _compiler.seconds

    def measure(self, grads: Sequence[Tensor], count_zeros: bool) -> TensorStats:
        """See :class:`megascale.kernels.Backend`. Sums of squares are fp32 within 4,096 elements, wider across them."""
        nothing = torch.zeros(2 + count_zeros, dtype=stats_dtype(grads[0].device), device=grads[0].device)
        parts: list[Tensor] = []
        calls: dict[torch.dtype, Call] = {}
        try:
            for grad in grads:
                row = flat([grad]) if grad.dtype in DTYPES else None
                if row is None:
                    stats = self._reference.measure([grad], count_zeros)
                    parts += torch.cat([part for part in stats if part is not None]), nothing
                    continue
                if grad.dtype not in calls:
                    example = row[0].view(1, -1)
                    calls[grad.dtype] = _compiler.compiled(formulas.statistics, [example], count_zeros=count_zeros)
                parts += _statistics(calls[grad.dtype], row[0], nothing)
        except CompilerMissingError as error:
            _warn(error)
            return self._torch.measure(grads, count_zeros)
        table = torch.stack(parts).view(len(grads), 2, -1).sum(1)
        return TensorStats(table[:, 0], table[:, 1], table[:, 2] if count_zeros else None)

    def unscale(self, grads: list[Tensor], mains: list[Tensor], coefficient: Tensor) -> list[Tensor]:
        """See :class:`megascale.kernels.Backend`."""
        return self._torch.unscale(grads, mains, coefficient)

    def adam_(self, operands: Operands, hyper: AdamHyper, decision: Decision) -> Tensor:
        """See :class:`megascale.kernels.Backend`."""
        return self._update(
            operands,
            ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if hyper.amsgrad else ())),
            decision,
            formulas.adam,
            {"l2": not hyper.decoupled and hyper.weight_decay != 0},
            True,
            lambda steps: formulas.adam_scalars(hyper, decision, steps),
            lambda backend, rest: backend.adam_(rest, hyper, decision),
        )

    def sgd_(self, operands: Operands, hyper: SgdHyper, decision: Decision) -> Tensor:
        """See :class:`megascale.kernels.Backend`."""
        return self._update(
            operands,
            ("momentum_buffer",) if hyper.momentum != 0 else (),
            decision,
            formulas.sgd,
            {"l2": hyper.weight_decay != 0, "nesterov": hyper.nesterov},
            hyper.momentum != 0 and hyper.dampening != 0,
            lambda steps: formulas.sgd_scalars(hyper, decision, steps),
            lambda backend, rest: backend.sgd_(rest, hyper, decision),
        )

    def lion_(self, operands: Operands, hyper: LionHyper, decision: Decision) -> Tensor:
        """See :class:`megascale.kernels.Backend`."""
        return self._update(
            operands,
            ("exp_avg",),
            decision,
            formulas.lion,
            {},
            False,
            lambda steps: formulas.lion_scalars(hyper, decision, steps),
            lambda backend, rest: backend.lion_(rest, hyper, decision),
        )

    def write_back_(self, mains: list[Tensor], models: list[Tensor]) -> Tensor:
        """See :class:`megascale.kernels.Backend`."""
        return self._torch.write_back_(mains, models)

    def _update(
        self,
        operands: Operands,
        names: tuple[str, ...],
        decision: Decision,
        formula: Callable[..., Any],
        options: dict[str, bool],
        counts_steps: bool,
        scalars_of: Callable[[Tensor], Tensor],
        slow: Callable[[Backend, Operands], Tensor],
    ) -> Tensor:
        prepared = self._kept.get(operands)
        if prepared is None or prepared.names != names:
            prepared = self._kept[operands] = PreparedRows(operands, names)
        grads = prepared.flat_grads(operands.grad)
        keys = _step_counts(operands.step) if counts_steps else [None] * len(grads)
        runs = prepared.runs(grads, keys)
        scalars: Sequence[Tensor] = ()
        if runs:
            heads = [operands.step[run.members[0]] for run in runs] if counts_steps else []
            steps = torch.stack(heads) if heads else torch.zeros(len(runs), device=decision.found_inf.device)
            scalars = scalars_of(steps).unbind()
        try:
            # All of it is compiled before any of it runs.
            calls = _calls(formula, options, scalars, runs)
        except CompilerMissingError as error:
            _warn(error)
            return slow(self._torch, operands)
        flags = [_run(call, scalar, run.row) for call, scalar, run in zip(calls, scalars, runs, strict=True)]
        taken = [index for index, grad in enumerate(grads) if grad is not None]
        if counts_steps and taken:
            torch._foreach_add_([operands.step[index] for index in taken], [1 - decision.found_inf] * len(taken))
        found = _flags(operands, runs, flags)
        rest = [index for index, grad in enumerate(grads) if grad is None]
        if not rest:
            return found
        of_rest = dict(zip(rest, slow(self._reference, operands.pick(rest)).unbind(), strict=True))
        return torch.stack([of_rest.get(index, flag) for index, flag in enumerate(found.unbind())])


def _step_counts(steps: list[Tensor]) -> Sequence[Hashable]:
    """Return keys that are equal only where step counts are known to be."""
    if steps[0].device.type == "cpu":
        counts: list[float] = torch.stack(steps).tolist()
        return counts
    return range(len(steps))


def _calls(
    formula: Callable[..., Any], options: dict[str, bool], scalars: Sequence[Tensor], runs: list[Run]
) -> list[Call]:
    """Return the compiled formula for each run, which may differ in dtypes."""
    by_kind: dict[Hashable, Call] = {}
    calls = []
    for scalar, run in zip(scalars, runs, strict=True):
        main, grad, model, *state = run.row
        own = model.data_ptr() == main.data_ptr()
        kind = (own, *[tensor.dtype for tensor in run.row])
        if kind not in by_kind:
            row = [scalar, main, grad, None if own else model, *state]
            by_kind[kind] = _compiler.compiled(formula, row, 1, **options)
        calls.append(by_kind[kind])
    return calls


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    return tensor.split(LONGEST_CALL) if tensor.numel() > LONGEST_CALL else (tensor,)


def _statistics(call: Call, row: Tensor, nothing: Tensor) -> tuple[Tensor, Tensor]:
    """Return the statistics of the elements that fill whole widths, and of the rest of them."""
    numel, width = row.numel(), formulas.STATS_WIDTH
    whole, tail = numel - numel % width, nothing
    if whole < numel:
        tail = call(row[whole:].view(1, -1))
    if whole == 0:
        return tail, nothing
    parts = [call(piece.view(-1, width)) for piece in _pieces(row[:whole])]
    return (parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)), tail


def _run(call: Call, scalars: Tensor, row: Row) -> Tensor | None:
    """Update a row; returns the formula's flag."""
    if row[0].numel() <= LONGEST_CALL:
        flag: Tensor | None = call(scalars, *row)
        return flag
    pieces = zip(*map(_pieces, row), strict=True)
    flags = [flag for piece in pieces if (flag := call(scalars, *piece)) is not None]
    return torch.stack(flags).any() if flags else None


def _flags(operands: Operands, runs: list[Run], found: list[Tensor | None]) -> Tensor:
    """Return, a bool per parameter, what each run has found as a whole."""
    flags = [torch.zeros((), dtype=torch.bool, device=operands.main[0].device)] * len(operands.main)
    for run, flag in zip(runs, found, strict=True):
        if flag is None:
            continue
        if len(run.members) == 1:
            flags[run.members[0]] = flag
        elif not flag.is_cpu or flag.numpy():
            # Which one was it? On a CPU the answer is in the host's own memory, and the question is not asked in vain.
            norms = torch.stack(torch._foreach_norm([operands.model[index] for index in run.members], math.inf))
            for index, bad in zip(run.members, norms.isfinite().logical_not().unbind(), strict=True):
                flags[index] = bad
    return torch.stack(flags)


def _warn(error: CompilerMissingError) -> None:
    global _warned
    if not _warned:
        _warned = True
        reason = str(error).splitlines()[0]
        message = f"backend 'compiled' falls back to 'torch': {reason}; install a compiler, or set CXX to one"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
