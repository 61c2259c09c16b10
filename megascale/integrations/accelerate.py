"""Accelerate: megascale's optimizers through ``accelerator.prepare``, and its GradScaler for autocast.

:class:`Accelerator` replaces ``accelerate.Accelerator``; :func:`adopt` converts one that a library has created, such as
``transformers.Trainer``. Nothing else in a training loop changes.
"""

from collections.abc import Iterable
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from megascale.amp import GradScaler
from megascale.base_optimizer import MegascaleOptimizer
from megascale.errors import ArgumentError, ArgumentTypeError, UsageError
from megascale.integrations.accelerate_checks import (
    check_autocast,
    check_engine,
    check_fits,
    check_precision,
    two_with_one_scale,
    unscaled_beside_scaled,
)
from megascale.integrations.accelerate_prepared import PreparedOptimizer, UnshardedOptimizer
from megascale.integrations.accelerate_scaling import ScaledOptimizer, SkipOnDevice, reduce_in_fp32
from megascale.utils import validate


class Accelerator(accelerate.Accelerator):
    """accelerate.Accelerator with support for MixedPrecisionOptimizer's loss scaling, clipping and skipping.

    - ``prepare`` takes MixedPrecisionOptimizer and ChainedOptimizer, beside all that it accepts.
    - ``backward`` scales the loss by the optimizer's grad scaler.
    - ``clip_grad_norm_`` and ``clip_grad_value_`` clip unscaled gradients, with no host sync, over all ranks and
      shards. They begin the step, so call them under ``if accelerator.sync_gradients``.
    - ``optimizer_step_was_skipped``, and a prepared LR scheduler, read the decision on the host: one sync a step.

    Use it with ``mixed_precision="no"`` and a model in fp16 (``model.half()``), or "bf16" and a model in bf16 or fp32.

    Args:
        args, kwargs: for ``accelerate.Accelerator``.
        grad_scaler: a :class:`megascale.amp.GradScaler` in place of torch's, for a torch optimizer with
            ``mixed_precision="fp16"``: fp32 parameters, autocast. It also works on a CPU, where Accelerate alone trains
            in fp32.

    Raises:
        ArgumentError, ArgumentTypeError: for a ``grad_scaler`` of another type, or without ``mixed_precision="fp16"``.
    """

    def __init__(self, *args: Any, grad_scaler: GradScaler | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._use_scaler(grad_scaler)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects for training; see ``accelerate.Accelerator.prepare``.

        Raises:
            UsageError: for an optimizer that cannot be used with this accelerator, with the remedy.
        """
        if self.is_fsdp2 and any(isinstance(arg, MegascaleOptimizer | UnshardedOptimizer) for arg in args):
            reduce_in_fp32(self.state.fsdp_plugin)
        result = super().prepare(*args, device_placement=device_placement)
        if self.is_fsdp2:
            # FSDP2's plugin has replaced the parameters: create main params of the shards before the first forward.
            for prepared in self._ours():
                unsharded = prepared.optimizer
                if isinstance(unsharded, UnshardedOptimizer):
                    self._optimizers.remove(prepared)  # what it is compared with are the others
                    prepared.optimizer = unsharded.wrap(unsharded.optimizer)
                    check_fits(self, prepared.optimizer)
                    self._optimizers.append(prepared)
            for part in (part for prepared in self._ours() for part in prepared.optimizer._parts()):
                part.main_params()
        return result

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare one model; see ``accelerate.Accelerator.prepare_model``.

        Raises:
            UsageError: for parameters of 16 bits that ``mixed_precision`` would compute with in the other format.
        """
        if not evaluation_mode:
            check_precision(self, type(model).__name__, model.parameters())
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare one optimizer; see :meth:`prepare`."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        if isinstance(optimizer, MegascaleOptimizer):
            check_fits(self, optimizer)
            prepared: SkipOnDevice = PreparedOptimizer(optimizer)
        elif isinstance(optimizer, UnshardedOptimizer):
            check_engine(self, "MixedPrecisionOptimizer")
            prepared = PreparedOptimizer(optimizer)
        elif isinstance(self.scaler, GradScaler):
            if any(isinstance(other, ScaledOptimizer) for other in self._optimizers):
                raise two_with_one_scale(optimizer)
            check_autocast(param for group in optimizer.param_groups for param in group["params"])
            placement = self.device_placement if device_placement is None else device_placement
            prepared = ScaledOptimizer(optimizer, self.scaler, device_placement=placement)
        else:
            if any(prepared.optimizer.grad_scaler is not None for prepared in self._ours()):
                raise unscaled_beside_scaled(optimizer)
            return super().prepare_optimizer(optimizer, device_placement)
        self._optimizers.append(prepared)
        return prepared

    def backward(self, loss: Tensor, *, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any) -> None:
        """Scale the loss, by the grad scaler and the number of accumulation steps, and run backward.

        Args:
            loss: the unscaled loss.
            optimizer: selects the grad scaler; needed if several prepared optimizers have their own scalers.
            kwargs: for ``loss.backward``.
        """
        scaling = [prepared for prepared in self._ours() if prepared.optimizer.grad_scaler is not None]
        if optimizer is not None:
            scaling = [prepared for prepared in scaling if optimizer in (prepared, prepared.optimizer)]
        if len(scaling) > 1:
            raise UsageError(
                f"{len(scaling)} prepared optimizers have grad scalers of their own: say whose loss it is, "
                "backward(loss, optimizer=...), or chain them with megascale.ChainedOptimizer"
            )
        super().backward(scaling[0].optimizer.scale_loss(loss) if scaling else loss, **kwargs)

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Clip the global L2 norm of the unscaled gradients of all of an optimizer's parameters.

        Args:
            parameters: all parameters of one prepared optimizer. Parameters that it does not train are ignored.
            max_norm: above 0; inf only measures. A smaller ``clip_grad`` of the optimizer takes precedence.
            norm_type: 2.

        Returns:
            The norm before clipping: fp32, 0-d, on the device; non-finite if the step will be skipped. No host sync.

        Raises:
            UsageError: before the last micro-batch of an accumulation, for a part of an optimizer's parameters, or if
                this step's gradients were clipped already.
            ArgumentError: for another norm, or a ``max_norm`` that is not above 0.
        """
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        prepared = self._optimizer_of(params)
        if prepared is None:
            norm: Tensor | None = super().clip_grad_norm_(params, max_norm, norm_type=norm_type)
            return norm
        if norm_type != 2:
            raise ArgumentError(f"norm_type must be 2 with a {type(prepared.optimizer).__name__}, got {norm_type!r}")
        if max_norm != torch.inf:
            validate.positive("max_norm", max_norm)
        return prepared.prepare_grads(max_norm)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clamp every element of the unscaled gradients of all of an optimizer's parameters; after clipping by norm.

        Raises:
            UsageError, ArgumentError: as :meth:`clip_grad_norm_`.
        """
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        prepared = self._optimizer_of(params)
        if prepared is None:
            super().clip_grad_value_(params, clip_value)
        else:
            prepared.clip_grad_value_(clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale gradients of torch optimizers under fp16 autocast.

        With a :class:`megascale.amp.GradScaler`, if they are scaled still: clipping by norm, then by value, divides no
        gradient twice.

        Raises:
            UsageError: if gradients belong to an optimizer with its own scaler: they stay scaled, as fp16 would lose
                the small ones.
        """
        if optimizer is None:
            chosen = self._optimizers
        else:
            chosen = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        for prepared in self._ours():
            named = any(one in (prepared, prepared.optimizer) for one in chosen)
            if named and prepared.optimizer.grad_scaler is not None:
                raise UsageError(
                    f"the gradients of a {type(prepared.optimizer).__name__} stay scaled; clip them with "
                    "accelerator.clip_grad_norm_() or clip_grad_value_(), which know the scale"
                )
        if optimizer is None:
            optimizer = [one for one in chosen if not (isinstance(one, ScaledOptimizer) and one.is_unscaled)]
        super().unscale_gradients(optimizer)

    def _use_scaler(self, grad_scaler: GradScaler | None) -> None:
        """Use ``grad_scaler`` instead of torch's, and autocast to fp16 on any device."""
        if grad_scaler is None:
            return
        if not isinstance(grad_scaler, GradScaler):
            raise ArgumentTypeError(f"grad_scaler must be a megascale.amp.GradScaler, got {type(grad_scaler).__name__}")
        if self.mixed_precision != "fp16":
            raise ArgumentError(
                f"grad_scaler is for mixed_precision='fp16', got {self.mixed_precision!r}; a model in fp16 takes a "
                "MixedPrecisionOptimizer, which brings its own"
            )
        self.scaler = grad_scaler
        self.native_amp = True

    def _ours(self) -> list[PreparedOptimizer]:
        return [prepared for prepared in self._optimizers if isinstance(prepared, PreparedOptimizer)]

    def _optimizer_of(self, params: list[Tensor]) -> PreparedOptimizer | None:
        """Return our optimizer that is to clip ``params``; None if they are not ours."""
        given = {id(param) for param in params}
        found = [(prepared, prepared.trains()) for prepared in self._ours()]
        found = [(prepared, own) for prepared, own in found if own & given]
        if not found:
            return None
        if len(found) > 1:
            raise UsageError(
                f"parameters belong to {len(found)} optimizers, of which each clips its own: call it for each, or "
                "chain them with megascale.ChainedOptimizer for one norm"
            )
        prepared, own = found[0]
        if own - given:
            raise UsageError(
                f"parameters leave out {len(own - given)} of the optimizer's {len(own)}; it clips all together: pass "
                "all, such as model.parameters()"
            )
        if not self.sync_gradients:
            raise UsageError(
                "clipping begins the step, and gradients are still accumulated: call it under "
                "'if accelerator.sync_gradients:'"
            )
        return prepared


def adopt(accelerator: accelerate.Accelerator, *, grad_scaler: GradScaler | None = None) -> Accelerator:
    """Convert an existing ``accelerate.Accelerator``, such as a Trainer's, into :class:`Accelerator`.

    Returns the same object, so that its owner gets the new behaviour.

    Args:
        accelerator: before anything was prepared with it.
        grad_scaler: see :class:`Accelerator`.

    Raises:
        ArgumentTypeError: for a subclass, whose behaviour would be lost.
        UsageError: if an optimizer is prepared already.
    """
    if type(accelerator) not in (accelerate.Accelerator, Accelerator):
        raise ArgumentTypeError(
            f"accelerator must be an accelerate.Accelerator, got {type(accelerator).__name__}; let its class inherit "
            "from megascale.integrations.accelerate.Accelerator"
        )
    if accelerator._optimizers:
        raise UsageError("accelerator has prepared an optimizer already; adopt it before prepare()")
    accelerator.__class__ = Accelerator
    accelerator._use_scaler(grad_scaler)
    return accelerator
