"""The apex backend: multi-tensor kernels of NVIDIA apex (module ``amp_C``).

Used on CUDA tensors in fp16, bf16 and fp32:

* Adam and AdamW: the capturable kernels. They take learning rate, step count and inverse scale from the device, and
  return before any write where their no-op flag is 1, so a skipped step changes no bit. Where gradient and model param
  share a 16-bit dtype one kernel updates the fp32 main param and writes its rounding. They overwrite gradients with
  their unscaled values, so they are given copies, a block at a time: 34 bytes of traffic a parameter instead of 28.

Left to TorchBackend, which this one extends:

* Statistics. apex has an L2 norm, but counts neither non-finite elements nor zeros: a norm that is not finite means at
  least one such element in fp16, and perhaps none in bf16 and fp32.
* ``unscale`` and SGD: ``multi_tensor_scale`` and ``multi_tensor_sgd`` take their factors as host numbers, and ours is
  on the device.
* Lion, amsgrad, fp64, 16-bit moments, tensors with different memory layouts, CPU tensors: there are no kernels.

A call of the Adam kernels has one step count, our parameters have one each, on the device, so that each parameter has a
launch of its own: which counts are equal the host does not know.

Results are not the reference's bits: betas are rounded to fp32 before 1 - beta is taken, and ``amp_C`` is compiled with
fast math, so that roots, quotients and powers are approximate.

Facts from NVIDIA/apex at 6424da3b (csrc/multi_tensor_adam.cu, multi_tensor_apply.cuh, update_scale_hysteresis.cu).
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megascale.errors import UsageError
from megascale.kernels.blocks import RoundingWatch, Row, blocks_of, rows_of
from megascale.kernels.decision import Decision
from megascale.kernels.protocol import Operands
from megascale.kernels.rounding import of_trained
from megascale.kernels.torch_backend import TorchBackend
from megascale.rules import AdamHyper

CHUNK = 1 << 16  # elements of one thread block; apex's own choice
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
APEX = "amp_C"


class ApexBackend(TorchBackend):
    """See :class:`megascale.kernels.Backend`.

    Raises:
        UsageError: apex's CUDA extension is not installed; names the remedy.
    """

    name = "apex"

    def __init__(self) -> None:
        # Each takes chunk size, no-op flag and lists of tensors first.
        self._adam, self._adam_with_main = _load_kernels()

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
        watch = RoundingWatch(len(rows))
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            _, grad, model, *_ = row
            for block in blocks_of([row]):
                mains, grads, models, exp_avgs, exp_avg_sqs = (block.column(at) for at in range(5))
                # Of a 16-bit dtype that gradient and model param share, one kernel writes both params.
                fuses = grad.dtype == model.dtype != torch.float32
                copies = [grad.to(model.dtype if fuses else torch.float32, copy=True) for grad in grads]
                moments = [exp_avgs, exp_avg_sqs]
                lists = [copies, models, *moments, mains] if fuses else [copies, mains, *moments]
                numbers = (lr, hyper.beta1, hyper.beta2, hyper.eps, count.reshape(1), int(hyper.decoupled))
                # Mode 0 adds weight decay to the gradient; the 1 asks for the bias correction.
                kernel = self._adam_with_main if fuses else self._adam
                kernel(CHUNK, noop, lists, *numbers, 1, hyper.weight_decay, inv_scale)
                if not fuses and model.dtype != torch.float32:
                    torch._foreach_copy_(models, mains)
                watch.observe([index] * len(mains), mains, models)
        torch.autograd.graph.increment_version([tensor for main, _, *rest in rows for tensor in (main, *rest)])
        return watch.flags(device)


def _load_kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the kernels. Raises UsageError where apex is not installed; any other failure to import is raised."""
    try:
        library = importlib.import_module(APEX)
    except ModuleNotFoundError as error:
        if error.name != APEX:
            raise
        raise UsageError(
            f"backend 'apex' needs module {APEX}, which is not installed: build NVIDIA apex from source with "
            "APEX_CPP_EXT=1 APEX_CUDA_EXT=1, or choose backend 'torch'"
        ) from error
    return library.multi_tensor_adam_capturable, library.multi_tensor_adam_capturable_master


def _takes(row: Row) -> bool:
    """Whether the kernels support these tensors: main, grad, model, moments. Main params and moments must be fp32."""
    main, _, _, *moments = row
    on_cuda = all(tensor.device.type == "cuda" and tensor.dtype in DTYPES for tensor in row)
    return on_cuda and all(tensor.dtype == torch.float32 for tensor in (main, *moments))
