"""The apex backend: multi-tensor kernels of NVIDIA apex (module ``amp_C``), else TransformerEngine's copies of them.

Used on CUDA tensors in fp16, bf16 and fp32:

* Adam and AdamW: the capturable kernels. They take learning rate, step count and inverse scale from the device, and
  return before any write where their no-op flag is 1, so a skipped step changes no bit. Where gradient and model param
  share a 16-bit dtype one kernel updates the fp32 main param and writes its rounding. They overwrite gradients with
  their unscaled values, so they are given copies, a block at a time: 34 bytes of traffic a parameter instead of 28.
* Sums of squares: the L2 norm kernel. Its norm of an fp16 tensor is finite exactly where every element is, because fp32
  holds any sum of squares of fp16 numbers. That flags roundings that overflow.

Left to TorchBackend, which this one extends:

* Counts. A norm that is not finite means at least one such element in fp16, and perhaps none in bf16 and fp32.
  Non-finite elements and zeros are counted by torch, one tensor at a time.
* ``unscale`` and SGD: ``multi_tensor_scale`` and ``multi_tensor_sgd`` take their factors as host numbers, and ours is
  on the device. Only TransformerEngine has a form of the first that reads it there.
* Lion, amsgrad, fp64, 16-bit moments, tensors with different memory layouts, CPU tensors: there are no kernels.

A call of the Adam kernels has one step count, our parameters have one each, on the device: see :class:`StepGroups`.

Results are not the reference's bits: betas are rounded to fp32 before 1 - beta is taken, and ``amp_C`` is compiled with
fast math, so that roots, quotients and powers are approximate.

Facts from NVIDIA/apex at 6424da3b (csrc/multi_tensor_adam.cu, multi_tensor_l2norm_kernel.cu, multi_tensor_apply.cuh,
update_scale_hysteresis.cu) and NVIDIA/TransformerEngine at d0067d0d (transformer_engine/common/multi_tensor).
"""

import importlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import attrgetter
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megascale.errors import UsageError
from megascale.kernels.blocks import Block, Row, Split, blocks_of, pieces_of
from megascale.kernels.decision import Decision, TensorStats, stats_dtype
from megascale.kernels.protocol import Operands
from megascale.kernels.torch_backend import TorchBackend
from megascale.rules import AdamHyper
from megascale.utils.graph_capture import is_capturing

CHUNK = 1 << 16  # elements of one thread block; apex's own choice
PIECE = 1 << 20  # elements; longer gradients are measured in pieces, since apex indexes a tensor with 32 bits
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
APEX, TRANSFORMER_ENGINE = "amp_C", "transformer_engine.pytorch.optimizers"
REMEDY = "build NVIDIA apex from source with APEX_CPP_EXT=1 APEX_CUDA_EXT=1"

_VERSION = attrgetter("_version")


class ApexBackend(TorchBackend):
    """See :class:`megascale.kernels.Backend`.

    Raises:
        UsageError: neither apex's CUDA extension nor TransformerEngine is installed, or a kernel is missing; names the
            remedy.
    """

    name = "apex"

    def __init__(self) -> None:
        super().__init__()
        self._kernels = _load_kernels()
        self._steps = StepGroups()

    def measure(self, grads: Sequence[Tensor], count_zeros: bool) -> TensorStats:
        """See :class:`megascale.kernels.Backend`. Sums of squares are fp32 within PIECE elements, fp64 across them."""
        if not all(_reaches(grad) for grad in grads) or not any(grad.numel() for grad in grads):
            return super().measure(grads, count_zeros)
        # Empty tensors have no piece: apex launches nothing for the tensors before a last one that is empty.
        pieces, num_pieces = pieces_of(grads, PIECE)
        # x - x is 0 where x is finite and NaN, which is not 0, where it is not.
        non_finite = [torch.sub(piece, piece).count_nonzero() for piece in pieces]
        columns = [self._norms(pieces).square(), _stacked(non_finite)]
        if count_zeros:
            columns.append(_stacked([piece.numel() - piece.count_nonzero() for piece in pieces]))
        return TensorStats.of_pieces(torch.stack(columns, dim=1), num_pieces)

    def adam_(self, operands: Operands, hyper: AdamHyper, decision: Decision) -> Tensor:
        """See :class:`megascale.kernels.Backend`."""
        slow = super().adam_
        if hyper.amsgrad:
            return slow(operands, hyper, decision)
        split = Split(operands, ["exp_avg", "exp_avg_sq"], _takes)
        return split.joined(
            lambda: self._adam_rows_(split, operands, hyper, decision),
            lambda rest: slow(rest, hyper, decision),
        )

    def _adam_rows_(self, split: Split, operands: Operands, hyper: AdamHyper, decision: Decision) -> Tensor:
        """Update the rows of ``split``; returns a flag per row."""
        steps = [operands.step[index] for index in split.taken]
        counts = (torch.stack(steps) + 1).to(torch.int32)
        call = _AdamCall(self._kernels, hyper, decision)
        overflows: list[list[Tensor]] = [[] for _ in split.rows]
        for positions in self._steps.advance_(operands, steps, decision.found_inf):
            families: defaultdict[torch.dtype, list[int]] = defaultdict(list)
            for position in positions:
                families[_kernel_dtype(split.rows[position])].append(position)
            for dtype, members in families.items():
                for block in blocks_of([split.rows[position] for position in members]):
                    call.run_(block, dtype, counts[positions[0]])
                    for owner, flag in self._overflows(block):
                        overflows[members[owner]].append(flag)
        torch.autograd.graph.increment_version([tensor for main, _, *rest in split.rows for tensor in (main, *rest)])
        return _any_of_each(overflows, decision.found_inf.device)

    def _overflows(self, block: Block) -> list[tuple[int, Tensor]]:
        """Return, for each piece of an fp16 model param, its owner and whether an element of it is not finite."""
        watched = [
            (owner, piece[2])
            for owner, piece in zip(block.owners, block.pieces, strict=True)
            if piece[2].dtype == torch.float16
        ]
        if not watched:
            return []
        flags = self._norms([model for _, model in watched]).isfinite().logical_not()
        return list(zip([owner for owner, _ in watched], flags.unbind(), strict=True))

    def _norms(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the L2 norm of each 1-D tensor, none of them empty, in the statistics dtype, shape [len(tensors)]."""
        by_dtype: defaultdict[torch.dtype, list[int]] = defaultdict(list)
        for index, tensor in enumerate(tensors):
            by_dtype[tensor.dtype].append(index)
        device = tensors[0].device
        # The kernel sets this to 1 where a sum is not finite. It is not used.
        flag = torch.zeros(1, dtype=torch.int32, device=device)
        norms: dict[int, Tensor] = {}
        with _on(device):
            for indices in by_dtype.values():
                _, found = self._kernels.l2norm(CHUNK, flag, [[tensors[index] for index in indices]], True)
                norms |= dict(zip(indices, found.unbind(), strict=True))
        return _stacked([norms[index] for index in range(len(tensors))])


class StepGroups:
    """Groups parameters by their step counts, which are on the device, without a host sync.

    Step counts of one call advance together or not at all, so counts that are equal once stay equal unless others write
    them. For new parameters, a copy of the counts is sent to the host. Until it arrives every parameter is its own
    group, which is always right; then those with equal counts form one group. Only the number of launches depends on
    when it arrives: results have the same bits.

    A count that others have written, as its tensor's version shows, is read again. Replays of a graph write without
    leaving a version, so from the first capture on every parameter is a group of its own.
    """

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[Operands, _CountsCopy] = WeakKeyDictionary()
        self._captured = False

    def advance_(self, operands: Operands, steps: list[Tensor], found_inf: Tensor) -> list[list[int]]:
        """Add one to each of ``steps`` where the step lands.

        Args:
            operands: identifies the parameters: the same object in each call for the same ones.
            steps: 0-d fp32 tensors on one device, at least one.
            found_inf: 0-d fp32.

        Returns:
            Positions in ``steps``, in groups whose counts are equal.
        """
        self._captured = self._captured or is_capturing(found_inf.device)
        counts = None if self._captured else self._counts.get(operands)
        if counts is None or not counts.is_of(steps):
            counts = None if self._captured else _CountsCopy(steps)
        # A list, because the overload for a single tensor reads it on the host.
        torch._foreach_add_(steps, [1 - found_inf] * len(steps))
        if counts is None:
            return [[position] for position in range(len(steps))]
        counts.versions = list(map(_VERSION, steps))
        self._counts[operands] = counts
        return counts.groups()


class _CountsCopy:
    """An asynchronous copy of step counts to the host."""

    def __init__(self, steps: list[Tensor]) -> None:
        self._steps = list(steps)  # held, so that ids stay unique
        self.versions: list[int] = []
        self._groups: list[list[int]] | None = None
        self._event: torch.Event | None = None
        self._values = torch.stack(steps)
        device = self._values.device
        if device.type != "cpu":
            pinned = torch.empty(self._values.shape, dtype=self._values.dtype, device="cpu", pin_memory=True)
            self._values = pinned.copy_(self._values, non_blocking=True)
            self._event = torch.Event(device)
            self._event.record(torch.accelerator.current_stream(device))

    def is_of(self, steps: list[Tensor]) -> bool:
        """Whether these are the tensors that were copied, not written by others since."""
        return list(map(id, self._steps)) == list(map(id, steps)) and self.versions == list(map(_VERSION, steps))

    def groups(self) -> list[list[int]]:
        """Return groups of equal counts as far as they are known."""
        if self._groups is None:
            if self._event is not None and not self._event.query():
                return [[position] for position in range(len(self._steps))]
            by_count: defaultdict[float, list[int]] = defaultdict(list)
            for position, count in enumerate(self._values.tolist()):
                by_count[count].append(position)
            self._groups = list(by_count.values())
        return self._groups


@dataclass(frozen=True)
class _Kernels:
    """The library's functions. Each takes chunk size, no-op flag and lists of tensors first."""

    l2norm: Callable[..., Any]
    adam: Callable[..., Any]
    adam_with_main: Callable[..., Any]


class _AdamCall:
    """Arguments on the device that all launches of one update share."""

    def __init__(self, kernels: _Kernels, hyper: AdamHyper, decision: Decision) -> None:
        device = decision.found_inf.device
        self._kernels = kernels
        self._hyper = hyper
        self._noop = (decision.found_inf != 0).to(torch.int32).reshape(1)
        if isinstance(hyper.lr, Tensor):
            self._lr = hyper.lr.detach().to(device, torch.float32, non_blocking=True).reshape(1)
        else:
            self._lr = torch.full((1,), hyper.lr, dtype=torch.float32, device=device)
        coefficient = -decision.coefficient if hyper.maximize else decision.coefficient
        self._inv_scale = coefficient.to(torch.float32).reshape(1)

    def run_(self, block: Block, dtype: torch.dtype, count: Tensor) -> None:
        """Update a block. ``dtype``: see :func:`_kernel_dtype`. ``count``: landed steps with this one, 0-d int32."""
        mains, grads, models, exp_avgs, exp_avg_sqs = (block.column(index) for index in range(5))
        buffer = torch.empty(block.numel, dtype=dtype, device=mains[0].device)
        copies = list(buffer.split([grad.numel() for grad in grads]))
        torch._foreach_copy_(copies, grads)
        if dtype == torch.float32:
            kernel, lists = self._kernels.adam, [copies, mains, exp_avgs, exp_avg_sqs]
        else:
            kernel, lists = self._kernels.adam_with_main, [copies, models, exp_avgs, exp_avg_sqs, mains]
        hyper = self._hyper
        with _on(buffer.device):
            kernel(
                CHUNK,
                self._noop,
                lists,
                self._lr,
                hyper.beta1,
                hyper.beta2,
                hyper.eps,
                count.reshape(1),
                int(hyper.decoupled),  # the kernel's mode: 0 adds weight decay to the gradient
                1,  # with bias correction
                hyper.weight_decay,
                self._inv_scale,
            )
        if dtype == torch.float32:
            rounded = [(model, main) for model, main in zip(models, mains, strict=True) if model.dtype != main.dtype]
            if rounded:
                torch._foreach_copy_([model for model, _ in rounded], [main for _, main in rounded])


def _load_kernels() -> _Kernels:
    """Return apex's kernels where it is installed, else TransformerEngine's. Raises UsageError."""
    library = _load(APEX) or _load(TRANSFORMER_ENGINE)
    if library is None:
        raise UsageError(
            f"backend 'apex' needs module {APEX} or {TRANSFORMER_ENGINE}, neither of which is installed: {REMEDY}, or "
            "install transformer_engine[pytorch], or choose backend 'torch'"
        )
    names = ("multi_tensor_l2norm", "multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master")
    missing = [name for name in names if not hasattr(library, name)]
    if missing:
        raise UsageError(
            f"backend 'apex' found {library.__name__} without {', '.join(missing)}: install a newer version, or choose "
            "backend 'torch'"
        )
    return _Kernels(*(getattr(library, name) for name in names))


def _load(module: str) -> ModuleType | None:
    """Import ``module``. None: its package is not installed. Any other failure to import is raised."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        return None


def _reaches(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and tensor.dtype in DTYPES


def _takes(row: Row) -> bool:
    """Whether the kernels support these tensors: main, grad, model, moments. Main params and moments must be fp32."""
    main, _, _, *moments = row
    return all(map(_reaches, row)) and all(tensor.dtype == torch.float32 for tensor in (main, *moments))


def _kernel_dtype(row: Row) -> torch.dtype:
    """Return a 16-bit dtype that gradient and model param share: the kernel that writes both params. Else fp32."""
    _, grad, model, *_ = row
    return model.dtype if grad.dtype == model.dtype else torch.float32


def _any_of_each(flags: list[list[Tensor]], device: torch.device) -> Tensor:
    """Return, shape [len(flags)], whether any of the 0-d bool tensors in each list is true."""
    none = torch.zeros((), dtype=torch.bool, device=device)
    return torch.stack([torch.stack(found).any() if len(found) > 1 else (found or [none])[0] for found in flags])


def _stacked(scalars: list[Tensor]) -> Tensor:
    """Return 0-d tensors as one of shape [len(scalars)] in the statistics dtype."""
    return torch.stack(scalars).to(stats_dtype(scalars[0].device))


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make ``device`` the current one: TransformerEngine launches on its stream, wherever the tensors are."""
    return torch.accelerator.device_index(device.index)
