"""The precision plugin, for either name of Lightning's package.

:mod:`megascale.integrations.lightning` and :mod:`megascale.integrations.pytorch_lightning` combine it with their
package's base class.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from megascale.base_optimizer import MegascaleOptimizer
from megascale.builder import build_grad_scaler
from megascale.config import OptimizerConfig
from megascale.errors import ArgumentError, ArgumentTypeError, UsageError
from megascale.grad_scaler import MegatronGradScaler
from megascale.integrations.lightning_scaling import PerBatchScaler
from megascale.optimizer import MixedPrecisionOptimizer, StepResult
from megascale.parallel import ParallelGroups
from megascale.step.arguments import check_grad_scaler
from megascale.utils import validate
from megascale.utils.dtensors import to_local
from megascale.utils.transfer import to_device_async

Base: Any = object  # Subclasses also derive from their package's Precision, which super() then finds.


@dataclass(frozen=True)
class Mode:
    """The meaning of one of Lightning's names of precisions.

    Attributes:
        weights: the dtype that the module is cast to; None: not cast.
        autocast: the dtype of ``torch.autocast`` around every step; None: no autocast.
    """

    weights: torch.dtype | None = None
    autocast: torch.dtype | None = None


MODES = {
    "16-true": Mode(weights=torch.float16),
    "bf16-true": Mode(weights=torch.bfloat16),
    "16-mixed": Mode(autocast=torch.float16),
    "bf16-mixed": Mode(autocast=torch.bfloat16),
    "32-true": Mode(),
}


@dataclass
class Clipping:
    """Limits for clipping at an optimizer's next step. None: no clipping by that algorithm."""

    norm: float | None = None
    value: float | None = None


class PrecisionRecipe(Base):
    """Trains in 16 bit through megascale's optimizers: ``Trainer(plugins=[MegascalePrecision("16-true")])``.

    The optimizers that ``configure_optimizers`` returns are wrapped in :class:`MixedPrecisionOptimizer`; one that is
    already wrapped is used as it is. Losses are scaled, gradients are clipped in the optimizer's one pass, and all
    ranks skip the same steps. LR schedulers stay on the optimizers that they were built on.

    ``on_before_optimizer_step`` and ``configure_gradient_clipping`` see gradients that are still scaled:
    :meth:`unscaled_grads` yields them unscaled. With several optimizers (manual optimization) there is one scale; it
    changes when the training step ends.

    Args:
        precision: "16-true" or "bf16-true": parameters of 16 bit with fp32 main params. "16-mixed" or "bf16-mixed":
            fp32 parameters under autocast. "32-true": the module as it is, for FSDP2 with a mixed precision policy.
        config: loss scale and kernels, and ``clip_grad``, which applies unless the Trainer has a ``gradient_clip_val``.
            Its ``fp16`` and ``bf16`` need not be set, except with "32-true". None: no clipping by the config.
        grad_scaler: shared by all optimizers. None: a dynamic one from ``config`` for fp16, else none.
        groups: see :class:`MixedPrecisionOptimizer`. None: all ranks.

    Raises:
        ArgumentError, ArgumentTypeError: for an argument that does not fit, naming it.
    """

    def __init__(
        self,
        precision: str = "16-true",
        *,
        config: OptimizerConfig | None = None,
        grad_scaler: MegatronGradScaler | None = None,
        groups: ParallelGroups | ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        self.precision: Any = validate.one_of("precision", precision, MODES)
        self._mode = MODES[precision]
        self.config = _config_for(precision, config)
        check_grad_scaler(grad_scaler)
        self._given_scaler = grad_scaler
        self._groups = groups
        self._device_type = "cpu"
        self._optimizers: list[MegascaleOptimizer] = []
        self._per_batch: PerBatchScaler | None = None
        self._waiting: list[MegascaleOptimizer] = []
        self._clippings: dict[int, Clipping] = {}

    # Set up

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast parameters and buffers, unless the precision is a mixed one."""
        return module if self._mode.weights is None else module.to(dtype=self._mode.weights)

    def connect(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], list[Any]]:
        """Wrap the optimizers, with one shared scaler."""
        self._device_type = next((param.device.type for param in model.parameters()), "cpu")
        scaler = build_grad_scaler(self.config) if self._given_scaler is None else self._given_scaler
        module = model.module if isinstance(model, DistributedDataParallel) else model
        named = list(module.named_parameters())
        connected = [
            optimizer
            # Without param groups it is Lightning's stand-in: configure_optimizers returned None.
            if isinstance(optimizer, MegascaleOptimizer) or not optimizer.param_groups
            else MixedPrecisionOptimizer(optimizer, self.config, scaler, groups=self._groups, named_parameters=named)
            for optimizer in optimizers
        ]
        self._optimizers = [optimizer for optimizer in connected if isinstance(optimizer, MegascaleOptimizer)]
        for optimizer in self._optimizers:
            _move_main_params(optimizer)
            if isinstance(model, DistributedDataParallel) and any(p._reduces_in_backward for p in optimizer._parts()):
                raise UsageError(
                    f"{type(optimizer).__name__} reduces gradients itself, and the ddp strategy does so too; build a "
                    "MixedPrecisionOptimizer without grad_sync, or return the torch optimizer"
                )
        # A loss does not tell which optimizer it is for: one scale, which changes when all steps of a batch are done.
        scalers = [getattr(optimizer.grad_scaler, "scaler", optimizer.grad_scaler) for optimizer in self._optimizers]
        if any(scaler is not scalers[0] for scaler in scalers):
            raise UsageError(
                "the optimizers have different grad scalers, but a loss does not say which optimizer it is for; build "
                "all of them with the same grad scaler object, or return the torch optimizers"
            )
        self._per_batch = PerBatchScaler(scalers[0]) if len(scalers) > 1 and scalers[0] is not None else None
        for optimizer in self._optimizers if self._per_batch is not None else ():
            optimizer.grad_scaler = self._per_batch
        self._waiting = []
        self._clippings.clear()
        return super().connect(model, connected, lr_schedulers)

    def teardown(self) -> None:
        """Move main params with the module, which Lightning moves to the CPU: a Trainer may still save a checkpoint."""
        for optimizer in self._optimizers:
            _move_main_params(optimizer)
        super().teardown()

    @property
    def grad_scaler(self) -> MegatronGradScaler | None:
        """The scaler in use. Before optimizers are connected: the constructor's."""
        return self._optimizers[0].grad_scaler if self._optimizers else self._given_scaler

    # Around forward

    def tensor_init_context(self) -> AbstractContextManager[None]:
        """Return a context in which new modules have 16-bit parameters, unless the precision is a mixed one."""
        return _default_dtype(self._mode.weights)

    def module_init_context(self) -> AbstractContextManager[None]:
        """See :meth:`tensor_init_context`."""
        return self.tensor_init_context()

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Return the context of a step: autocast, or the default dtype of new tensors."""
        with (
            _default_dtype(self._mode.weights),
            torch.autocast(
                self._device_type, self._mode.autocast, enabled=self._mode.autocast is not None, cache_enabled=False
            ),
        ):
            yield

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """After a training step of manual optimization, update the shared scale for all its optimizers."""
        with self.forward_context():
            yield
        if self._per_batch is not None:
            params = (p for optimizer in self._waiting for group in optimizer.param_groups for p in group["params"])
            self._per_batch.end_batch([param.grad for param in params if param.grad is not None])

    def convert_input(self, data: Any) -> Any:
        """Cast floating point tensors of a batch to the parameters' dtype, unless the precision is a mixed one."""
        from lightning_utilities import apply_to_collection

        if self._mode.weights is None:
            return data
        return apply_to_collection(data, Tensor, lambda x: x.to(self._mode.weights) if x.is_floating_point() else x)

    # The step

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Scale the loss."""
        if self._optimizers:
            tensor = self._optimizers[0].scale_loss(tensor)
            self._waiting = list(self._optimizers)
        scaled: Tensor = super().pre_backward(tensor, module)
        return scaled

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure (forward and backward), Lightning's hooks, and the step.

        Returns its StepResult; None if ``training_step`` returned None, which omits the step.
        """
        if not isinstance(optimizer, MegascaleOptimizer):
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        if kwargs:
            raise UsageError(
                f"optimizer.step() was given {', '.join(sorted(kwargs))}; MixedPrecisionOptimizer.step() takes none"
            )
        closure_result = closure()
        self._after_closure(model, optimizer)
        clipping = self._clippings.pop(id(optimizer), Clipping())
        if closure_result is None and model.automatic_optimization:
            return None
        if optimizer in self._waiting:
            self._waiting.remove(optimizer)
        # In manual optimization this is inside the training step's context.
        with _default_dtype(torch.float32), torch.autocast(self._device_type, enabled=False):
            if clipping.norm is not None:
                optimizer.clip_grad_norm_(clipping.norm)
            if clipping.value is not None:
                if clipping.norm is None:
                    optimizer.prepare_grads()
                optimizer.clip_grad_value_(clipping.value)
            return optimizer.step()

    def last_result(self, optimizer: Any) -> StepResult | None:
        """Return the result of the last step of ``optimizer``, as device tensors; None before its first."""
        bare = _bare(optimizer)
        return bare._recipe.last_result if isinstance(bare, MegascaleOptimizer) else None

    # Clipping

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip by the global norm in the next step."""
        clipping = self._clippings.setdefault(id(_bare(optimizer)), Clipping())
        if clipping.value is not None:
            raise UsageError("gradients are to be clipped by value already; clip by norm first, then by value")
        clipping.norm = validate.positive("gradient_clip_val", clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Clip each element of the unscaled gradients in the next step."""
        clipping = self._clippings.setdefault(id(_bare(optimizer)), Clipping())
        clipping.value = validate.positive("gradient_clip_val", clip_val)

    def _clip_gradients(self, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Call ``configure_gradient_clipping``, and check that it did not clip the still scaled gradients."""
        scaled = isinstance(optimizer, MegascaleOptimizer) and optimizer.grad_scaler is not None
        before = _fingerprints(optimizer) if scaled else []
        super()._clip_gradients(model, optimizer, *args, **kwargs)
        if scaled and _fingerprints(optimizer) != before:
            raise UsageError(
                "configure_gradient_clipping() changed the gradients, which are still multiplied by the loss scale; "
                "call self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm) there. A change that "
                "holds at any scale belongs into on_before_optimizer_step()"
            )

    @torch.no_grad()
    def unscaled_grads(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, gradient divided by the loss scale) of every parameter of ``module`` with a gradient.

        fp32 copies in the parameters' shapes, made one by one, without a sync; of a DTensor this rank's part. Use it
        between backward and the step, as in ``on_before_optimizer_step``.
        """
        for name, param in module.named_parameters():
            if param.grad is not None:
                grad = to_local(param.grad).to(torch.promote_types(param.grad.dtype, torch.float32), copy=True)
                if self.grad_scaler is not None:
                    grad.mul_(to_device_async(self.grad_scaler.inv_scale.reshape(()), grad.device))
                yield name, grad


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Return a context in which new tensors have this dtype. None: unchanged."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _config_for(precision: str, config: Any) -> OptimizerConfig:
    """Return ``config``, or the default, with the flags of ``precision``."""
    mode = MODES[precision]
    fp16, bf16 = (dtype in (mode.weights, mode.autocast) for dtype in (torch.float16, torch.bfloat16))
    if config is None:
        return OptimizerConfig(fp16=fp16, bf16=bf16)
    if not isinstance(config, OptimizerConfig):
        raise ArgumentTypeError(f"config must be an OptimizerConfig or None, got {type(config).__name__}")
    if config.use_distributed_optimizer:
        raise ArgumentError(
            "config.use_distributed_optimizer=True needs a module that no strategy has wrapped; leave it False, and "
            "shard with FSDP2 in configure_model()"
        )
    if mode == Mode():
        return config
    if (config.fp16 and not fp16) or (config.bf16 and not bf16):
        raise ArgumentError(
            f"precision={precision!r} contradicts config.fp16={config.fp16}, config.bf16={config.bf16}; "
            "leave both False"
        )
    return replace(config, fp16=fp16, bf16=bf16)


def _bare(optimizer: Any) -> Any:
    """Return the optimizer in a LightningOptimizer; any other object itself."""
    return vars(optimizer).get("_optimizer", optimizer)


def _move_main_params(optimizer: MegascaleOptimizer) -> None:
    """Move main params to the devices of their model params."""
    for part in optimizer._parts():
        for param in part._live_state().main_params:
            if param.is_copy and param.main.device != param.model.device:
                param.move()


@torch.no_grad()
def _fingerprints(optimizer: Any) -> list[tuple[int, int]]:
    """Return, for each gradient, a key that changes when it is written or replaced."""
    grads = [to_local(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return [(grad.data_ptr(), grad._version) for grad in grads]
