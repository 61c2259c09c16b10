"""optimizer_step: all calls that end an iteration in one, in the right order and in fewer passes."""

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from megascale.amp import fused_adam
from megascale.amp.grad_scaler import GradScaler, takes_scaler
from megascale.amp.local_grads import LocalGrads
from megascale.base_optimizer import MegascaleOptimizer
from megascale.errors import ArgumentError, ArgumentTypeError, UsageError, sparse_gradient
from megascale.grad_scaler import MegatronGradScaler
from megascale.kernels import LARGEST_SUM_SQUARES, Decision, clip_coefficient
from megascale.optimizer import StepResult
from megascale.utils import validate
from megascale.utils.calls import outside_of_graphs
from megascale.utils.dtensors import to_local
from megascale.utils.transfer import to_device_async


@outside_of_graphs
def optimizer_step(
    loss: Tensor,
    optimizer: torch.optim.Optimizer,
    grad_scaler: GradScaler | MegatronGradScaler | None,
    max_gradient_norm: float | None = None,
    max_gradient_val: float | None = None,
    *,
    zero_grad: bool = True,
) -> StepResult:
    """End an iteration: zero, scale, backward, unscale, clip, step, update, in this order.

    ``cerebras.pytorch.amp``'s function. It equals torch's loop, with four differences:

    - Gradients are read once, for overflow and norm together. With an optimizer that unscales by itself (torch's with
      ``fused=True``) unscaling and clipping by norm need no pass: they are one number that it divides by. There is no
      host sync; any other optimizer costs one host read. Where gradients are clipped, and the optimizer is a fused Adam
      or AdamW on plain fp32 parameters, without hooks, its update runs on our kernels.
    - Steps with non-finite gradients are skipped also if `grad_scaler` is None or disabled: the loss scale is then 1.
    - A step is skipped if gradients are clipped and their norm overflows; torch steps with zeros.
    - The norm of DTensor gradients is that of the whole tensors. Plain gradients count as replicated, as under
      DistributedDataParallel, so each rank takes the norm of its own: use DTensors to shard parameters.

    Args:
        loss: one element, not scaled, with its graph. Backward runs here.
        optimizer: of any kind. A MixedPrecisionOptimizer, DistributedOptimizer or ChainedOptimizer scales with its own
            scaler, and without ``max_gradient_norm`` clips as its config says.
        grad_scaler: :class:`megascale.amp.GradScaler`. None: no scaling. Of a MixedPrecisionOptimizer: None or its own.
            One call is one iteration: the scale is updated.
        max_gradient_norm: clip the unscaled gradients to this global L2 norm: by ``max / (norm + 1e-6)``, torch's rule.
        max_gradient_val: then clamp each element to [-max, max].
        zero_grad: drop existing gradients. False adds to them: for the last micro-batch of an accumulation.

    Returns:
        Tensors on the device: whether the step landed, the norm before clipping, and the number of zeros: NaN unless a
        wrapped optimizer counts them. Gradients remain, still scaled unless they were unscaled in place.

    Raises:
        ArgumentError, ArgumentTypeError: for an argument that does not fit; nothing has changed.
        UsageError: if the scaler's iteration has begun already (nothing has changed), or if the loss gives none of the
            optimizer's parameters a gradient.
        GradientError: for a sparse gradient with ``max_gradient_val``.
    """
    max_norm = None if max_gradient_norm is None else validate.positive("max_gradient_norm", max_gradient_norm)
    max_value = None if max_gradient_val is None else validate.positive("max_gradient_val", max_gradient_val)
    _check(loss, optimizer, grad_scaler)
    if zero_grad:
        optimizer.zero_grad()
    if isinstance(optimizer, MegascaleOptimizer):
        optimizer.scale_loss(loss).backward()
        if max_norm is not None:
            optimizer.clip_grad_norm_(max_norm)
        if max_value is not None:
            if max_norm is None:
                optimizer.prepare_grads()
            optimizer.clip_grad_value_(max_value)
        return optimizer.step()
    scaler = _scaler_of(grad_scaler, loss.device)
    scaler.scale(loss).backward()
    result = _step(optimizer, scaler, max_norm, max_value)
    scaler.update()
    return result


@torch.no_grad()
def _step(
    optimizer: torch.optim.Optimizer, scaler: GradScaler, max_norm: float | None, max_value: float | None
) -> StepResult:
    for index, param in enumerate(_with_grads(optimizer) if max_value is not None else ()):
        if param.grad is not None and param.grad.layout != torch.strided:
            raise sparse_gradient(f"parameter {index}", param.grad.layout)
    grads = LocalGrads(optimizer, coalesced=True)
    sum_squares = scaler._measure(optimizer, grads)
    if not scaler._found_inf_per_device(optimizer):
        raise UsageError("the loss gave no parameter of the optimizer a gradient; does it depend on them?")
    left_to_do = inv_scale = scaler._inv_scale()
    norm = sum_squares.sqrt() * inv_scale
    clip = None
    if max_norm is not None:
        clip = clip_coefficient(norm, max_norm)
        left_to_do = inv_scale * clip
        for found_inf in scaler._found_inf_per_device(optimizer).values():
            found_inf.masked_fill_(sum_squares > LARGEST_SUM_SQUARES, 1.0)
    # By the attribute grad_scale, as torch's fused optimizers do.
    divides = getattr(optimizer, "_step_supports_amp_scaling", False) and not takes_scaler(optimizer)
    if not divides:
        scaler._unscale(optimizer, None if clip is None else clip.float(), grads)
        left_to_do = torch.ones_like(inv_scale)
    if max_value is not None:
        bound = max_value / left_to_do
        for param in _with_grads(optimizer):
            grad = to_local(param.grad)  # type: ignore[arg-type]
            limit = to_device_async(bound, grad.device)
            torch.clamp(grad, -limit, limit, out=grad)
    flags = [to_device_async(flag, norm.device) for flag in scaler._found_inf_per_device(optimizer).values()]
    zeros = torch.full((), torch.nan, dtype=torch.float64, device=norm.device)
    result = StepResult(torch.stack(flags).sum() == 0, norm.float(), zeros)
    backend = scaler._backend(inv_scale.device)
    if (max_norm, max_value) != (None, None) and fused_adam.fits(optimizer, backend):
        updates = fused_adam.updates_of(optimizer, grads, inv_scale.device)
        if updates is not None:
            found_inf = result.success.logical_not().float()
            decision = Decision(found_inf, left_to_do.float(), result.grad_norm, result.num_zeros_in_grad)
            fused_adam.step_(optimizer, updates, backend, decision)
            return result
    if divides and clip is not None:
        # Multiplied by the scale in the scaler's step().
        optimizer.grad_scale = clip.reciprocal().float()  # type: ignore[attr-defined]
    scaler.step(optimizer)
    return result


def _with_grads(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]


def _check(loss: Any, optimizer: Any, grad_scaler: Any) -> None:
    """Raise for bad arguments, before anything has changed."""
    if not isinstance(loss, Tensor):
        raise ArgumentTypeError(f"loss must be a tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ArgumentError(f"loss must have one element, got shape {tuple(loss.shape)}; take its mean or sum")
    if not loss.requires_grad:
        raise ArgumentError("loss has no graph; compute it outside torch.no_grad(), and do not detach it")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentTypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, MegascaleOptimizer):
        if grad_scaler is not None and grad_scaler is not optimizer.grad_scaler:
            raise ArgumentError(
                f"grad_scaler is not that of the {type(optimizer).__name__}, which scales with its own; pass None, or "
                "optimizer.grad_scaler"
            )
        return
    if not isinstance(grad_scaler, GradScaler | None):
        raise ArgumentTypeError(
            f"grad_scaler must be a megascale.amp.GradScaler or None, got {grad_scaler!r}; change the import of "
            "torch.amp's to megascale.amp's, and put a DynamicGradScaler into a MixedPrecisionOptimizer"
        )
    if grad_scaler is not None and grad_scaler.is_enabled():
        stages = [state["stage"] for state in grad_scaler._per_optimizer_states.values()]
        if any(stage is not OptState.READY for stage in stages):
            raise UsageError(
                "an optimizer was unscaled or stepped since the last update(): optimizer_step() is a whole iteration; "
                "call grad_scaler.update() first, or write out the loop"
            )


def _scaler_of(grad_scaler: object, device: torch.device) -> GradScaler:
    """Return the scaler; for None or a disabled one a scaler with a constant scale of 1."""
    if isinstance(grad_scaler, GradScaler) and grad_scaler.is_enabled():
        return grad_scaler
    group = getattr(grad_scaler, "process_group", None)
    return GradScaler(device.type, loss_scale=1.0, process_group=group)
