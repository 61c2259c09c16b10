"""The native backend: native.c over a table of pointers, one call for all tensors on a CPU.

Bitwise the reference backend on main params and moments (with a learning rate in a tensor: within 1 ulp). Operands in
fp64, with tensors whose memory layouts differ, or on other devices go to the torch backend.
"""

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import increment_version

from megascale.kernels.blocks import flat, laid_out, share_layout
from megascale.kernels.compact_moments import SCALE_SUFFIX
from megascale.kernels.decision import (
    NUM_STATISTICS,
    Decision,
    GradWeights,
    ScaleRule,
    StepDecision,
    TensorStats,
)
from megascale.kernels.native.library import library
from megascale.kernels.protocol import Operands
from megascale.kernels.tensors.forms import Forms
from megascale.kernels.tensors.tensor_list import TensorList
from megascale.kernels.torch_backend import TorchBackend
from megascale.rules import CODE_DTYPES, AdamHyper, LionHyper, SgdHyper

CHUNK = 65536  # elements; native.c's
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
ADAM, SGD, LION, NOTHING = range(4)  # native.c's rules

# The columns of native.c's Row, all 8 bytes wide. In compact.h's the last two stand where a Row has other ones.
MAIN, MODEL, STATE, STEP, MODEL_TYPE, STATE_TYPE, REMAINDER = 0, 1, 2, 5, 6, 7, 10
START, SCALE = STATE + 2, STATE_TYPE
COLUMNS = 11
Array = NDArray[np.int64]

CPU = torch.device("cpu")


class _Lengths(ctypes.Structure):
    """native.c's Lengths. Holds the arrays that it points to."""

    _fields_ = (
        ("numels_at", ctypes.c_void_p),
        ("first_at", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("num_chunks", ctypes.c_int64),
    )

    def __init__(self, numels: Array) -> None:
        chunks = (numels + CHUNK - 1) // CHUNK
        self.numels, self.first = np.ascontiguousarray(numels), np.cumsum(chunks) - chunks
        super().__init__(self.numels.ctypes.data, self.first.ctypes.data, len(numels), int(chunks.sum()))


class _Grads(ctypes.Structure):
    """native.c's Grads: address 0 of a missing one. Holds the arrays that it points to."""

    _fields_ = (("addresses_at", ctypes.c_void_p), ("types_at", ctypes.c_void_p))

    def __init__(self, grads: TensorList) -> None:
        self.addresses, self.types = np.ascontiguousarray(grads.addresses), grads.forms.dtype_codes(TYPES)
        super().__init__(self.addresses.ctypes.data, self.types.ctypes.data)


class _Hyper(ctypes.Structure):
    """native.c's Hyper."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "momentum", "dampening")),
        *((name, ctypes.c_int64) for name in ("decoupled", "amsgrad", "maximize", "nesterov")),
    )


class _ScaleRule(ctypes.Structure):
    """native.c's ScaleRule."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("min_scale", "max_scale", "growth_factor", "backoff_factor")),
        *((name, ctypes.c_int64) for name in ("growth_interval", "hysteresis", "each_clean_step", "fp64_products")),
    )


class _Table(NamedTuple):
    """A table of operands that is reused from step to step. ``forms``: of model params."""

    lengths: _Lengths
    rows: Array
    forms: Forms


class NativeBackend(TorchBackend):
    """See :class:`megascale.kernels.Backend`. Raises UsageError where native.c has no library.

    Args:
        num_threads: how many threads share a pass; None: torch's number of the calling thread. No bit depends on it.
    """

    name = "native"

    def __init__(self, num_threads: int | None = None) -> None:
        self._library = library()
        self._num_threads = num_threads
        self._measured = _Lengths(np.empty(0, dtype=np.int64))

    def measure(self, grads: Sequence[Tensor | None], count_zeros: bool) -> TensorStats:
        """See :class:`megascale.kernels.Backend`. Sums of squares are fp32 within 1,024 elements, fp64 across them."""
        looked = TensorList.of(grads)
        if not _are_readable(looked):
            return super().measure(grads, count_zeros)
        if not looked.forms.contiguous:
            looked = TensorList(None if one is None else one if flat([one]) else one.contiguous() for one in grads)
        numels = looked.forms.numels
        if not np.array_equal(self._measured.numels, numels):
            self._measured = _Lengths(numels)
        lengths = self._measured
        partial = torch.empty(lengths.num_chunks, 3, dtype=torch.float64, device="cpu")
        out = torch.empty(3, len(numels), dtype=torch.float64, device="cpu")
        self._library.measure(
            ctypes.byref(lengths),
            ctypes.byref(_Grads(looked)),
            count_zeros,
            partial.data_ptr(),
            out.data_ptr(),
            self._num_threads or torch.get_num_threads(),
        )
        return TensorStats(out[0], out[1], out[2] if count_zeros else None)

    def total(self, stats: TensorStats, weights: GradWeights, errors: Tensor, scaled: float) -> Tensor:
        """See :class:`megascale.kernels.Backend`."""
        columns = (stats.sum_squares, stats.non_finite, stats.zeros, *weights)
        addresses: list[int | None] = []
        for column in (*columns, errors):
            is_plain = column is None or (column.dtype == torch.float64 and column.is_cpu and column.is_contiguous())
            if not is_plain:
                return super().total(stats, weights, errors, scaled)
            addresses.append(None if column is None else column.data_ptr())
        vector = torch.empty(NUM_STATISTICS, dtype=torch.float64, device="cpu")
        at_errors = addresses.pop()
        self._library.total(*addresses, len(weights.shares), at_errors, scaled, vector.data_ptr())
        return vector

    def decide(
        self, vector: Tensor, scale: Tensor | None, clip_grad: float, most_norm: float = math.inf
    ) -> StepDecision:
        """See :class:`megascale.kernels.Backend`."""
        if not vector.is_cpu:
            return super().decide(vector, scale, clip_grad, most_norm)
        numbers = torch.empty(4, dtype=torch.float32, device="cpu")
        num_zeros = torch.empty((), dtype=torch.float64, device="cpu")
        success = torch.empty((), dtype=torch.bool, device="cpu")
        at_scale = None if scale is None else scale.data_ptr()
        self._library.decide(
            vector.data_ptr(), at_scale, clip_grad, most_norm, *map(Tensor.data_ptr, (numbers, num_zeros, success))
        )
        found_inf, coefficient, grad_norm, overflow = numbers.unbind()
        return StepDecision(found_inf, coefficient, grad_norm, num_zeros, overflow, success)

    def rescale_(
        self, found_inf: Tensor, scale: Tensor, growth_tracker: Tensor, hysteresis_tracker: Tensor, rule: ScaleRule
    ) -> None:
        """See :class:`megascale.kernels.Backend`."""
        state = (scale, growth_tracker, hysteresis_tracker)
        if not (found_inf.is_cpu and scale.is_cpu):
            super().rescale_(found_inf, *state, rule)
            return
        constants = _ScaleRule(*rule)
        self._library.rescale(found_inf.data_ptr(), *map(Tensor.data_ptr, state), ctypes.byref(constants))
        increment_version(state)

    def adam_(self, operands: Operands, hyper: AdamHyper, decision: Decision) -> Tensor:
        """See :class:`megascale.kernels.Backend`."""
        names = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if hyper.amsgrad else [])
        return self._update(operands, names, ADAM, hyper, decision, super().adam_)

    def sgd_(self, operands: Operands, hyper: SgdHyper, decision: Decision) -> Tensor:
        """See :class:`megascale.kernels.Backend`."""
        names = ["momentum_buffer"] if hyper.momentum != 0 else []
        return self._update(operands, names, SGD, hyper, decision, super().sgd_)

    def lion_(self, operands: Operands, hyper: LionHyper, decision: Decision) -> Tensor:
        """See :class:`megascale.kernels.Backend`."""
        return self._update(operands, ["exp_avg"], LION, hyper, decision, super().lion_)

    def write_back_(self, operands: Operands) -> Tensor:
        """See :class:`megascale.kernels.Backend`."""
        every = Operands(model=operands.model, main=operands.main, grad=operands.main)
        return self._update(every, [], NOTHING, None, None, lambda slow, *_: TorchBackend.write_back_(self, slow))

    def _update(
        self,
        operands: Operands,
        names: list[str],
        rule: int,
        hyper: Any,
        decision: Decision | None,
        slow: Callable[..., Tensor],
    ) -> Tensor:
        """Run one of native.c's rules where it supports all operands, else ``slow``. Returns the overflow flags.

        Args:
            names: of the state that the rule updates.
            rule: native.c's number of it.
            hyper, decision: None for a write-back, which has none.
            slow: takes operands, hyperparameters and decision.
        """
        kept = operands.tables.get(NativeBackend)
        if kept is None or kept[0] != names:
            kept = operands.tables[NativeBackend] = (names, _table(operands, names))
        table: _Table | None = kept[1]
        grads = TensorList.of(operands.grad, operands.model)
        if table is None or not _are_readable(grads):
            return slow(operands, hyper, decision)
        are_alike = grads.forms.contiguous if table.forms.contiguous else grads.forms.strides == table.forms.strides
        if not are_alike:
            grads = laid_out(grads, operands.model)
        increment_version(grads.beside(operands.model))  # autograd must see that saved weights have changed
        numbers = {} if hyper is None else dict(vars(hyper))
        if isinstance(numbers.get("lr"), Tensor):  # on the CPU, where it is read at once
            numbers["lr"] = float(numbers["lr"].detach().numpy())
        update, rules = self._library.update, [rule]
        if operands.has_codes:  # compact.h's, whose rule is Adam's
            update, rules = self._library.update_compact, []
        overflowed = torch.empty(len(table.rows), dtype=torch.bool, device="cpu")
        update(
            ctypes.byref(table.lengths),
            ctypes.byref(_Grads(grads)),
            table.rows.ctypes.data,
            *rules,
            ctypes.byref(_Hyper(**numbers)),
            None if decision is None else decision.found_inf.data_ptr(),
            None if decision is None else decision.coefficient.data_ptr(),
            overflowed.data_ptr(),
            self._num_threads or torch.get_num_threads(),
        )
        return overflowed


def _are_readable(tensors: TensorList, dtypes: Iterable[torch.dtype] = TYPES) -> bool:
    """Whether all tensors are on the CPU and of these dtypes."""
    return tensors.forms.devices <= {CPU} and tensors.forms.kinds.issubset(dtypes)


def _table(operands: Operands, names: list[str]) -> _Table | None:
    """Return a table without gradients, of one row per parameter; None unless native.c supports all of them."""
    models, states = TensorList.of(operands.model), [TensorList.of(operands.state[name]) for name in names]
    mains = models if operands.main is operands.model else TensorList.of(operands.remainder or operands.main)
    fits = _are_readable(models) and share_layout([mains, models, *states], in_order=operands.has_codes)
    fits = fits and (len(operands.remainder) > 0 or _are_readable(mains, {torch.float32}))
    if operands.has_codes:  # compact.h knows no amsgrad, and one dtype of a moment
        fits = fits and len(states) == 2 and all(len(state.forms.kinds) == 1 for state in states)
    state_dtypes = {torch.float32, *CODE_DTYPES} if operands.has_codes else TYPES
    if not (fits and all(_are_readable(state, state_dtypes) for state in states)):
        return None
    rows: Array = np.zeros((len(mains), COLUMNS), dtype=np.int64)
    rows[:, REMAINDER if operands.remainder else MAIN] = mains.pointers
    # An fp32 model param is its own main param.
    rows[:, MODEL] = np.where(models.pointers == mains.pointers, 0, models.pointers)
    rows[:, MODEL_TYPE] = models.forms.dtype_codes(TYPES)
    for index, (name, state) in enumerate(zip(names, states, strict=True)):
        rows[:, STATE + index] = state.pointers
        if not operands.has_codes:
            rows[:, STATE_TYPE + index] = state.forms.dtype_codes(TYPES)
        elif not state.forms.kinds.isdisjoint(CODE_DTYPES):
            rows[:, SCALE + index] = TensorList.of(operands.state[name + SCALE_SUFFIX]).pointers
    if operands.step:
        rows[:, STEP] = TensorList.of(operands.step).pointers
    if operands.has_codes:
        rows[:, START] = operands.start or 0
    return _Table(_Lengths(mains.forms.numels), rows, models.forms)
