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

A call of the Adam kernels has one step count, our parameters have one each, on the device, so that each parameter has a
launch of its own: which counts are equal the host does not know.

Results are not the reference's bits: betas are rounded to fp32 before 1 - beta is taken, and ``amp_C`` is compiled with
fast math, so that roots, quotients and powers are approximate.

Facts from NVIDIA/apex at 6424da3b (csrc/multi_tensor_adam.cu, multi_tensor_l2norm_kernel.cu, multi_tensor_apply.cuh,
update_scale_hysteresis.cu) and NVIDIA/TransformerEngine at d0067d0d (transformer_engine/common/multi_tensor).
"""

import importlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megascale.errors import UsageError
from megascale.kernels.blocks import Row, blocks_of, pieces_of, rows_of
from megascale.kernels.decision import Decision, TensorStats, stats_dtype
from megascale.kernels.protocol import Operands
from megascale.kernels.remainders import of_trained
from megascale.kernels.torch_backend import TorchBackend
from megascale.rules import AdamHyper

CHUNK = 1 << 16  # elements of one thread block; apex's own choice
PIECE = 1 << 20  # elements; longer gradients are measured in pieces, since apex indexes a tensor with 32 bits
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
APEX, TRANSFORMER_ENGINE = "amp_C", "transformer_engine.pytorch.optimizers"
REMEDY = "build NVIDIA apex from source with APEX_CPP_EXT=1 APEX_CUDA_EXT=1"


class ApexBackend(TorchBackend):
    """See :class:`megascale.kernels.Backend`.

    Raises:
        UsageError: neither apex's CUDA extension nor TransformerEngine is installed, or a kernel is missing; names the
            remedy.
    """

    name = "apex"

    def __init__(self) -> None:
        super().__init__()
        # Each takes chunk size, no-op flag and lists of tensors first.
        self._l2norm, self._adam, self._adam_with_main = _load_kernels()

    def measure(self, grads: Sequence[Tensor | None], count_zeros: bool) -> TensorStats:
        """See :class:`megascale.kernels.Backend`. Sums of squares are fp32 within PIECE elements, fp64 across them."""
        there = [grad for grad in grads if grad is not None]
        if not all(map(_reaches, there)) or not any(map(Tensor.numel, there)):
            return super().measure(grads, count_zeros)
        # Empty tensors have no piece: apex launches nothing for the tensors before a last one that is empty.
        pieces, num_pieces = pieces_of(grads, PIECE)
        # x - x is 0 where x is finite and NaN, which is not 0, where it is not.
        non_finite = [torch.sub(piece, piece).count_nonzero() for piece in pieces]
        columns = [self._norms(pieces).square(), _stacked(non_finite)]
        if count_zeros:
            columns.append(_stacked([piece.numel() - piece.count_nonzero() for piece in pieces]))
        return TensorStats.of_pieces(torch.stack(columns, dim=1), num_pieces)

    @of_trained
    def adam_(self, operands: Operands, hyper: AdamHyper, decision: Decision) -> Tensor:
        """See :class:`megascale.kernels.Backend`."""
        rows = rows_of(operands, ["exp_avg", "exp_avg_sq"])
        if hyper.amsgrad or rows is None or not all(map(_takes, rows)):
            return super().adam_(operands, hyper, decision)
        steps, device = list(operands.step), decision.found_inf.device
        noop, counts = (decision.found_inf != 0).to(torch.int32).reshape(1), (torch.stack(steps) + 1).to(torch.int32)
        # A list, because the overload for a single tensor reads it on the host.
        torch._foreach_add_(steps, [1 - decision.found_inf] * len(steps))
        if isinstance(hyper.lr, Tensor):
            lr = hyper.lr.detach().to(device, torch.float32, non_blocking=True).reshape(1)
        else:
            lr = torch.full((1,), hyper.lr, dtype=torch.float32, device=device)
        coefficient = -decision.coefficient if hyper.maximize else decision.coefficient
        inv_scale = coefficient.to(torch.float32).reshape(1)
        flags = []
        for row, count in zip(rows, counts, strict=True):
            _, grad, model, *_ = row
            watched: list[Tensor] = []
            for block in blocks_of([row]):
                mains, grads, models, exp_avgs, exp_avg_sqs = (block.column(index) for index in range(5))
                # Of a 16-bit dtype that gradient and model param share, one kernel writes both params.
                fuses = grad.dtype == model.dtype != torch.float32
                copies = [grad.to(model.dtype if fuses else torch.float32, copy=True) for grad in grads]
                moments = [exp_avgs, exp_avg_sqs]
                lists = [copies, models, *moments, mains] if fuses else [copies, mains, *moments]
                numbers = (lr, hyper.beta1, hyper.beta2, hyper.eps, count.reshape(1), int(hyper.decoupled))
                with _on(device):  # mode 0 adds weight decay to the gradient; the 1 asks for the bias correction
                    kernel = self._adam_with_main if fuses else self._adam
                    kernel(CHUNK, noop, lists, *numbers, 1, hyper.weight_decay, inv_scale)
                if not fuses and model.dtype != torch.float32:
                    torch._foreach_copy_(models, mains)
                watched += models if model.dtype == torch.float16 else []
            none = torch.zeros((), dtype=torch.bool, device=device)
            flags.append(self._norms(watched).isfinite().logical_not().any() if watched else none)
        torch.autograd.graph.increment_version([tensor for main, _, *rest in rows for tensor in (main, *rest)])
        return torch.stack(flags)

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
                _, found = self._l2norm(CHUNK, flag, [[tensors[index] for index in indices]], True)
                norms |= dict(zip(indices, found.unbind(), strict=True))
        return _stacked([norms[index] for index in range(len(tensors))])


def _load_kernels() -> list[Callable[..., Any]]:
    """Return the kernels of apex where it is installed, else TransformerEngine's. Raises UsageError."""
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
    return [getattr(library, name) for name in names]


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


def _stacked(scalars: list[Tensor]) -> Tensor:
    """Return 0-d tensors as one of shape [len(scalars)] in the statistics dtype."""
    return torch.stack(scalars).to(stats_dtype(scalars[0].device))


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make ``device`` the current one: TransformerEngine launches on its stream, wherever the tensors are."""
    return torch.accelerator.device_index(device.index)
