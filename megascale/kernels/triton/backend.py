"""The triton backend: one launch for the statistics and one for the update, whatever the number of tensors. Param
groups that differ in learning rate and weight decay alone share them.

Both reach their tensors through a table of pointers on the device. A unit whose main params are fp64, or share no
dense memory layout with their state, is updated by the reference's arithmetic. Gradients of other strides are copied.
On CPU tensors the kernels run in Triton's interpreter, for tests.
"""

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import accumulate
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megascale.errors import UsageError
from megascale.kernels.blocks import laid_out
from megascale.kernels.compact_moments import GROUP, SCALE_SUFFIX
from megascale.kernels.decision import (
    CLIP_EPSILON,
    NUM_STATISTICS,
    Decision,
    GradWeights,
    ScaleRule,
    StepDecision,
    TensorStats,
)
from megascale.kernels.protocol import Operands
from megascale.kernels.reference import ReferenceBackend
from megascale.kernels.tensors.tensor_list import TensorList
from megascale.kernels.triton import device_table
from megascale.kernels.triton.device_table import DeviceTable, Plan, copied, find_plan, make_plan
from megascale.kernels.triton.launch import launch
from megascale.rules import AdamHyper, Hyper, LionHyper, SgdHyper
from megascale.utils.transfer import hold, is_capturing, to_device_async

BLOCK = 1 << 10  # elements that a program holds at once
MEASURED_BLOCK = 1 << 11  # of a gradient: two loads of a thread under way at once. Sums have as many lanes
MOST_NUMBERS = 64  # columns of rates and weight decays that are kept: of all launches, and some steps of a schedule
FAN = 1 << 8  # chunks that one program adds up at once
OPTIONS: dict[str, Any] = {"num_warps": 4}
# Left to itself the assembler takes up to 150 registers for Adam's moments in codes, and 114 for its fp16 params. With
# these limits an SM of sm_90 holds 5 blocks in place of 4, and 6 to 8 in place of 4 to 7, and nothing spills: see
# benchmarks/results/ptx_sm90.md. Other kernels take fewer registers without a limit than with one.
CODES_OPTIONS, FP16_OPTIONS = ({**OPTIONS, "maxnreg": most} for most in (96, 80))
# Of the one program that adds up all tensors of a rank.
TOTAL_BLOCK = 1 << 12
TOTAL_OPTIONS: dict[str, Any] = {"num_warps": 16}


class TritonBackend(ReferenceBackend):
    """See :class:`megascale.kernels.Backend`.

    Operations are the reference backend's, in its order, each correctly rounded, and so are the bits. Only powers in
    Adam's bias corrections may differ, in the last bits of fp64. Sums of squares are fp32 within a chunk, fp64 across
    chunks. Of a chunk, the i-th element is added to lane i % 2048, and then neighbouring lanes are added in pairs, and
    those sums in pairs. Of a gradient, 256 chunks one after the other are added in pairs likewise, and of those sums
    the i-th is added to lane i % 256; of all gradients, the i-th to lane i % 4096. The order is the same wherever a
    gradient lies in memory, and in the interpreter.

    Methods raise UsageError for CPU tensors outside Triton's interpreter, for other tensors inside it, and where a
    graph captures a step whose tensors have moved. The constructor raises UsageError where triton is not installed.
    """

    name = "triton"

    def __init__(self) -> None:
        _import_kernels()  # fails here, where the backend is asked for, if triton is not there
        self._measured: dict[Hashable, Plan] = {}  # by the forms of gradients
        self._numbers: dict[Hashable, Tensor] = {}

    @property
    def _kernels(self) -> ModuleType:
        return _import_kernels()  # not kept here, so that an optimizer can be copied: a module cannot

    def measure(self, grads: Sequence[Tensor | None], count_zeros: bool) -> TensorStats:
        """See :class:`megascale.kernels.Backend`."""
        measured = TensorList.of(grads)
        device = self._check(measured.filled[0].device)
        plan = find_plan(self._measured, measured.forms.key, device, lambda: make_plan([], {}, grads=measured))
        if not plan.tables:
            return super().measure(grads, count_zeros)
        addresses = plan.addresses_of(measured)
        stats = torch.empty(len(grads), 3, dtype=torch.float64, device=device)
        for table in plan.tables:
            partials = torch.empty(len(table.chunk_rows), 4, dtype=stats.dtype, device=device)
            sizes = {**self._sizes(table, MEASURED_BLOCK, MEASURED_BLOCK), "FAN": FAN}
            self._launch(
                self._kernels.measure_kernel,
                len(table.chunk_rows),
                (table.rows, table.chunk_rows, table.counters, addresses, table.arrivals, partials, stats),
                {"GRAD_DTYPE": self._kernels.LANGUAGE_DTYPES[table.grad_dtype], "COUNT_ZEROS": count_zeros, **sizes},
            )
        sum_squares, non_finite, zeros = stats.unbind(1)
        return TensorStats(sum_squares, non_finite, zeros if count_zeros else None)

    def total(self, stats: TensorStats, weights: GradWeights, errors: Tensor, scaled: float) -> Tensor:
        """See :class:`megascale.kernels.Backend`. One launch."""
        shares, contrasts = weights
        self._check(shares.device)
        columns = (stats.sum_squares, stats.non_finite, stats.sum_squares if stats.zeros is None else stats.zeros)
        strides = {column.stride(0) for column in columns}
        if len(strides) > 1:
            return super().total(stats, weights, errors, scaled)
        vector = torch.empty(NUM_STATISTICS, dtype=torch.float64, device=shares.device)
        compared = shares if contrasts is None else contrasts
        self._launch(
            self._kernels.total_kernel,
            1,
            (*columns, shares, compared, errors, vector, strides.pop(), len(shares), scaled),
            {"COUNT_ZEROS": stats.zeros is not None, "COMPARES": contrasts is not None, "BLOCK": TOTAL_BLOCK},
            TOTAL_OPTIONS,
        )
        return vector

    def decide(
        self, vector: Tensor, scale: Tensor | None, clip_grad: float, most_norm: float = math.inf
    ) -> StepDecision:
        """See :class:`megascale.kernels.Backend`. One launch."""
        device = self._check(vector.device)
        numbers = torch.empty(4, dtype=torch.float32, device=device)
        num_zeros = torch.empty((), dtype=torch.float64, device=device)
        success = torch.empty((), dtype=torch.bool, device=device)
        tensors = (vector, vector if scale is None else scale, numbers, num_zeros, success)
        self._launch(
            self._kernels.decide_kernel,
            1,
            (*tensors, float(clip_grad), CLIP_EPSILON, float(most_norm)),
            {"SCALED": scale is not None, "CLIPS": clip_grad > 0},
        )
        found_inf, coefficient, grad_norm, overflow = numbers.unbind()
        return StepDecision(found_inf, coefficient, grad_norm, num_zeros, overflow, success)

    def rescale_(
        self, found_inf: Tensor, scale: Tensor, growth_tracker: Tensor, hysteresis_tracker: Tensor, rule: ScaleRule
    ) -> None:
        """See :class:`megascale.kernels.Backend`. One launch."""
        self._check(scale.device)
        tensors = (found_inf, scale, growth_tracker, hysteresis_tracker)
        factors = map(float, (rule.min_scale, rule.max_scale, rule.growth_factor, rule.backoff_factor))
        self._launch(
            self._kernels.rescale_kernel,
            1,
            (*tensors, *factors, rule.growth_interval, rule.hysteresis),
            {"EACH_CLEAN_STEP": rule.each_clean_step, "FP64_PRODUCTS": rule.fp64_products},
        )
        torch.autograd.graph.increment_version(tensors[1:])

    def kind_of(self, hyper: Hyper) -> object:
        """See :class:`megascale.kernels.Backend`: one launch updates param groups of other rates and weight decays."""
        if not isinstance(hyper, (AdamHyper, SgdHyper, LionHyper)):
            return object()
        lr = hyper.lr.dtype if isinstance(hyper.lr, Tensor) else None
        return {**vars(hyper), "lr": lr, "weight_decay": hyper.decoupled or hyper.weight_decay != 0}

    def adam_(self, operands: Operands, hyper: AdamHyper, decision: Decision, *others: AdamHyper) -> Tensor:
        """See :class:`megascale.kernels.Backend`."""
        names = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if hyper.amsgrad else [])

        def factors() -> tuple[float, ...]:
            betas = (hyper.beta1, 1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2)
            logs = (math.log(beta) if beta > 0 else -math.inf for beta in (hyper.beta1, hyper.beta2))
            return (*betas, *logs, hyper.eps)

        return self._apply(
            "adam", super().adam_, operands, (hyper, *others), decision, names, factors, counts_steps=True
        )

    def sgd_(self, operands: Operands, hyper: SgdHyper, decision: Decision, *others: SgdHyper) -> Tensor:
        """See :class:`megascale.kernels.Backend`."""
        names = ["momentum_buffer"] if hyper.momentum != 0 else []
        counts = hyper.momentum != 0 and hyper.dampening != 0
        return self._apply(
            "sgd",
            super().sgd_,
            operands,
            (hyper, *others),
            decision,
            names,
            lambda: (hyper.momentum, 1 - hyper.dampening, 0, 0, 0, 0, 0),
            counts_steps=counts,
        )

    def lion_(self, operands: Operands, hyper: LionHyper, decision: Decision, *others: LionHyper) -> Tensor:
        """See :class:`megascale.kernels.Backend`."""
        return self._apply(
            "lion",
            super().lion_,
            operands,
            (hyper, *others),
            decision,
            ["exp_avg"],
            lambda: (hyper.beta1, 1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2, 0, 0, 0),
            counts_steps=False,
        )

    def _apply(
        self,
        rule: str,
        reference: Callable[..., Tensor],
        operands: Operands,
        hypers: Sequence[AdamHyper | SgdHyper | LionHyper],
        decision: Decision,
        names: list[str],
        factors: Callable[[], Iterable[float]],
        *,
        counts_steps: bool,
    ) -> Tensor:
        """Update by the kernel, or by the reference what the kernel cannot read. Returns the overflow flags.

        Args:
            rule: the kernel's name of it.
            hypers: of each param group; of one kind.
            names: of the states that the rule updates.
            factors: returns the kernel's, from ``beta1`` to ``eps``.
            counts_steps: whether the kernel reads step counts and adds to them.
        """
        device = self._check(operands.main[0].device)
        grads = TensorList.of(operands.grad, operands.model)

        def plan_for(grads: TensorList) -> Plan:
            key = (*names, counts_steps, grads.forms.key)
            return find_plan(operands.tables, key, device, lambda: _plan_of(operands, names, counts_steps, grads))

        plan = plan_for(grads)
        if not plan.tables and not is_capturing(device):  # whose replays would read the copy of the capture
            # A GradSync's main grads, for one, lie in row-major order, whatever the order of their weights is.
            grads = laid_out(grads, operands.model)
            plan = plan_for(grads)
        if not plan.tables:
            sizes = operands.groups or [len(operands.main)]
            parts = [
                operands.pick(range(stop - size, stop)) for size, stop in zip(sizes, accumulate(sizes), strict=True)
            ]
            return torch.cat([reference(part, one, decision) for part, one in zip(parts, hypers, strict=True)])
        addresses = plan.addresses_of(grads)
        flags = torch.empty(len(operands.main), dtype=torch.uint8, device=device)
        # Numbers of a schedule are others in each step. They are written to the device, and no part of a launch.
        hyper = hypers[0]
        rates = self._column([one.lr for one in hypers], device)
        decays = self._column([one.weight_decay for one in hypers], device)
        kind = self.kind_of(hyper)
        if plan.kind != kind:
            constants = {
                "RULE": rule,
                "HELD": len(operands.remainder) > 0,
                "CODES": operands.has_codes,
                "COUNTS": counts_steps,
                "DECOUPLED": hyper.decoupled,
                "NESTEROV": isinstance(hyper, SgdHyper) and hyper.nesterov,
                "L2": hyper.weight_decay != 0 and not hyper.decoupled,
                "MAXIMIZE": hyper.maximize,
            }
            numbers = tuple(map(float, factors()))
            plan.kind, plan.launches = kind, []
            for table in plan.tables:
                _, model, *moments = [*self._dtypes(table), None, None, None]
                dtypes = {
                    **dict(zip(("AVG_DTYPE", "SQ_DTYPE", "MAX_DTYPE"), moments, strict=False)),
                    "MODEL_DTYPE": model,
                    "GRAD_DTYPE": self._kernels.LANGUAGE_DTYPES[table.grad_dtype],
                }
                limited = FP16_OPTIONS if table.dtypes[1] == torch.float16 else OPTIONS
                of_adam = CODES_OPTIONS if operands.has_codes else limited
                of_triton = of_adam if rule == "adam" else OPTIONS
                plan.launches.append((numbers, constants | dtypes | self._sizes(table), of_triton, []))
        for table, (numbers, constants, of_triton, code) in zip(plan.tables, plan.launches, strict=True):
            tensors = (table.rows, table.chunk_rows, table.counters, addresses, flags)
            arguments = (*tensors, decision.found_inf, decision.coefficient, rates, decays, *numbers)
            self._launch(self._kernels.update_kernel, len(table.chunk_rows), arguments, constants, of_triton, code)
        torch.autograd.graph.increment_version(grads.beside(operands.model))  # autograd must see the written weights
        return flags.view(torch.bool)

    def decode_(self, operands: Operands) -> None:
        """See :class:`megascale.kernels.Backend`. One launch per dtype of model params."""
        if self._hold(operands, None) is None:
            super().decode_(operands)
        torch.autograd.graph.increment_version(operands.main)

    def encode_(self, operands: Operands, found_inf: Tensor) -> Tensor:
        """See :class:`megascale.kernels.Backend`. One launch per dtype of model params."""
        flags = self._hold(operands, found_inf)
        if flags is None:
            return super().encode_(operands, found_inf)
        torch.autograd.graph.increment_version([*operands.model, *operands.remainder])
        return flags.view(torch.bool)

    def _hold(self, operands: Operands, found_inf: Tensor | None) -> Tensor | None:
        """Encode main params, or decode them without ``found_inf``. Returns flags; None: the kernel cannot read all."""
        device = self._check(operands.main[0].device)
        if is_capturing(device) and "hold" not in operands.tables:  # some that the reference has picked: no table yet
            return None
        columns = [operands.remainder, operands.model, operands.main]
        plan = find_plan(operands.tables, "hold", device, lambda: make_plan(list(map(TensorList.of, columns)), {}))
        if not plan.tables:
            return None
        flags = torch.empty(len(operands.model), dtype=torch.uint8, device=device)
        for table in plan.tables:
            constants = {"MODEL_DTYPE": self._dtypes(table)[1], "ENCODE": found_inf is not None}
            skips = flags if found_inf is None else found_inf  # decoding reads neither
            tensors = (table.rows, table.chunk_rows, table.counters, flags, skips)
            self._launch(self._kernels.hold_kernel, len(table.chunk_rows), tensors, constants | self._sizes(table))
        return flags

    def _check(self, device: torch.device) -> torch.device:
        """Raise UsageError unless the kernels, compiled or interpreted, can reach memory of ``device``."""
        if device.type == "cpu" and not self._kernels.INTERPRETED:
            raise UsageError(
                "backend 'triton' runs on CPU tensors in Triton's interpreter only: set TRITON_INTERPRET=1 before "
                "Python starts, or choose backend 'torch'"
            )
        if device.type != "cpu" and self._kernels.INTERPRETED:
            raise UsageError(f"Triton's interpreter cannot reach tensors on {device}: unset TRITON_INTERPRET")
        return device

    def _column(self, numbers: Sequence[Any], device: torch.device) -> Tensor:
        """Return a number per param group on the device: all are 0-d tensors of one dtype, or all are Python's.

        Those are fp64 there, and are written once.
        """
        if tensors := [to_device_async(number, device) for number in numbers if isinstance(number, Tensor)]:
            return torch.stack(tensors) if len(tensors) > 1 else tensors[0]
        key = device, tuple(numbers)
        if key not in self._numbers:
            if is_capturing(device):  # a graph's own memory holds no value before its first replay
                return torch.cat([torch.full((1,), one, dtype=torch.float64, device=device) for one in numbers])
            written = copied(np.array(numbers, dtype=np.float64).view(np.int64), device).view(torch.float64)
            self._numbers = {**(self._numbers if len(self._numbers) < MOST_NUMBERS else {}), key: written}
        if is_capturing(device):
            hold(self._numbers[key])
        return self._numbers[key]

    def _dtypes(self, table: DeviceTable) -> list[Any]:
        return [self._kernels.LANGUAGE_DTYPES[dtype] for dtype in table.dtypes]

    def _sizes(self, table: DeviceTable, block: int = BLOCK, most: int = device_table.CHUNK) -> dict[str, int]:
        """Return the row's, the chunk's and the block's length.

        On a device the block is always the same, so that one compiled kernel serves. The interpreter takes about as
        long for a few elements as for many, so there a chunk is one block, of no more than ``most`` elements, and no
        longer than the longest row.
        """
        chunk = device_table.CHUNK
        if self._kernels.INTERPRETED:
            block = min(max(1 << (table.longest - 1).bit_length(), GROUP), most)
        return {"COLUMNS": table.rows.shape[1], "CHUNK": chunk, "BLOCK": min(block, chunk)}

    def _launch(
        self,
        kernel: Any,
        programs: int,
        arguments: tuple[Any, ...],
        constants: dict[str, Any],
        options: dict[str, Any] = OPTIONS,
        kept: list[Any] | None = None,
    ) -> None:
        launch(kernel, programs, arguments, constants, options, kept)


def _plan_of(operands: Operands, names: list[str], counts_steps: bool, grads: TensorList) -> Plan:
    """Return the plan of an update. ``names``: of the state that is updated."""
    columns = [operands.remainder or operands.main, operands.model, *(operands.state[name] for name in names)]
    beside = {device_table.STEP: operands.step} if counts_steps else {}
    for column, name in zip(device_table.SCALES, names, strict=False):
        if name + SCALE_SUFFIX in operands.state:
            beside[column] = operands.state[name + SCALE_SUFFIX]
    beside_lists = {column: TensorList.of(tensors) for column, tensors in beside.items()}
    groups = np.repeat(np.arange(len(operands.groups)), operands.groups).tolist()
    numbers = {device_table.START: operands.start, device_table.GROUP: groups}
    return make_plan(list(map(TensorList.of, columns)), beside_lists, numbers, grads)


@functools.cache
def require_launch(device: torch.device) -> None:
    """Launch a kernel on ``device`` once per process, as Triton looks for a C compiler and the like only then.

    Raises UsageError, with the remedy, if it fails.
    """
    backend, vector = TritonBackend(), torch.zeros(NUM_STATISTICS, dtype=torch.float64, device=device)
    try:
        backend.decide(vector, None, 0.0)
    except UsageError:
        raise
    except Exception as error:  # whatever Triton, its assembler, the C compiler or the driver ended with
        raise UsageError(
            f"backend 'triton' cannot launch a kernel on {device}: {type(error).__name__}: {error}\n"
            "Triton builds its launcher in C: install gcc or clang, and Python's headers, or set CC. It keeps compiled "
            "kernels in a folder: if that cannot be written, set TRITON_CACHE_DIR. Or choose backend 'torch'"
        ) from error


@functools.cache
def _import_kernels() -> ModuleType:
    try:
        from megascale.kernels.triton import kernels as triton_kernels
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise UsageError("backend 'triton' needs triton: pip install triton, or choose backend 'torch'") from error
    return triton_kernels
