"""``transformers.Trainer`` and TRL's trainers in 16 bits.

``class MyTrainer(MegascaleTrainer, SFTTrainer)``, or ``adopt(trainer)`` for one that exists.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import Trainer

from megascale.base_optimizer import MegascaleOptimizer
from megascale.builder import build_grad_scaler
from megascale.casting import cast_model
from megascale.errors import ArgumentError, ArgumentTypeError, UsageError
from megascale.integrations.accelerate import adopt as adopt_accelerator
from megascale.integrations.accelerate_prepared import UnshardedOptimizer
from megascale.integrations.named_options import NamedOptions
from megascale.lion import Lion
from megascale.optimizer import MixedPrecisionOptimizer
from megascale.rules import FIRST, FIRST_DTYPE, SECOND, SECOND_DTYPE

T = TypeVar("T", bound=Trainer)

FROM_ARGUMENTS = {
    "lr": "learning_rate",
    "weight_decay": "weight_decay",
    "clip_grad": "max_grad_norm",
    "adam_beta1": "adam_beta1",
    "adam_beta2": "adam_beta2",
    "adam_eps": "adam_epsilon",
    "lion_beta1": "adam_beta1",
    "lion_beta2": "adam_beta2",
    "sgd_momentum": "optim_args",
    "optimizer": "optim",
    "decoupled_weight_decay": "optim",
}
"""Fields of OptimizerConfig that TrainingArguments decide, and by which argument."""

AS_THEY_ARE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor")
"""Values of ``TrainingArguments.optim`` whose optimizer the Trainer makes, and which is then wrapped."""
_ADAM_CODES = {FIRST: FIRST_DTYPE, SECOND: SECOND_DTYPE}
OURS: Mapping[str, tuple[type[torch.optim.Optimizer], Mapping[str, torch.dtype]]] = {
    "adamw_8bit": (torch.optim.AdamW, _ADAM_CODES),
    "adamw_bnb_8bit": (torch.optim.AdamW, _ADAM_CODES),
    "adamw_torch_8bit": (torch.optim.AdamW, _ADAM_CODES),
    "lion_32bit": (Lion, {}),
}
"""Other values: the optimizer, and the dtypes of its moments. They need no other library."""

_IN_16_BITS = "set fp16=False and bf16=False in TrainingArguments, and dtype='fp16'"


Base: Any = object  # Subclasses also derive from a trainer, which super() then finds.


class MegascaleTrainer(Base):
    """A mixin for ``transformers.Trainer`` and every trainer of TRL: ``class MyTrainer(MegascaleTrainer, SFTTrainer)``.

    The optimizer follows the TrainingArguments: ``optim``, ``learning_rate``, the groups without ``weight_decay``,
    betas, ``max_grad_norm``, and any schedule, which advances with landed steps only. Weights in fp16 or bf16 get fp32
    main params, and fp16 a dynamic loss scale. Logs have ``loss_scale`` and ``skipped_steps`` beside the unscaled
    ``grad_norm``. Checkpoints hold main params, scale and trackers. A plain Trainer's checkpoint resumes, and so does
    one of weights in another precision: moments are kept, and a warning tells what it lacks.

    | weights | TrainingArguments | |
    |---|---|---|
    | fp16 | ``fp16=False, bf16=False`` | MixedPrecisionOptimizer with a scaler |
    | bf16 | ``bf16=True`` or False | MixedPrecisionOptimizer |
    | fp32, or LoRA's adapters over a frozen base | ``bf16=True`` or neither | MixedPrecisionOptimizer |
    | fp32 | ``fp16=True`` | the Trainer's optimizer, and :class:`megascale.amp.GradScaler` |

    Args:
        args, kwargs: the trainer's own.
        megascale: options by name: ``dtype`` ("fp16" or "bf16", to cast a model that is given as a module), the loss
            scale's fields of :class:`OptimizerConfig` (``initial_loss_scale``, ``hysteresis``, ...), ``exp_avg_dtype``
            and ``exp_avg_sq_dtype`` ("int8" and "uint8": 8-bit moments, as ``optim="adamw_8bit"``),
            ``store_param_remainders``, ``backend``, ``max_consecutive_skips``, ... None: the class attribute
            ``megascale_options``.

    Raises:
        ArgumentError, ArgumentTypeError: by the constructor, for an option that is unknown, or that TrainingArguments
            decide; by ``train()`` for an ``optim`` that cannot be wrapped.
        UsageError: by the constructor, for a torch optimizer in ``optimizers=``, except under ``fp16=True``; by
            ``train()`` for autocast that would compute in another 16-bit format than that of the weights.
    """

    megascale_options: Mapping[str, Any] = {}
    """What ``megascale=None`` stands for."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if Trainer in cls.__mro__ and cls.__mro__.index(Trainer) < cls.__mro__.index(MegascaleTrainer):
            raise ArgumentTypeError(f"{cls.__name__} derives from MegascaleTrainer behind its trainer: name it first")

    def __init__(self, *args: Any, megascale: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        if not isinstance(self, Trainer):
            raise ArgumentTypeError("MegascaleTrainer is a mixin: write class MyTrainer(MegascaleTrainer, Trainer)")
        self._megascale = options_of(self.megascale_options if megascale is None else megascale)
        if self._megascale.dtype is not None:
            _cast(kwargs.get("model", args[0] if args else None), self._megascale.dtype)
        super().__init__(*args, **kwargs)
        if not self.args.fp16:  # under autocast the Trainer's own optimizer is scaled by its accelerator
            _check_optimizer(self)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator ours, wherever the Trainer makes one."""
        super().create_accelerator_and_postprocess()
        _adopt_accelerator(self, self._megascale)

    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """Return the optimizer that ``args.optim`` names, and its options.

        Raises ArgumentError for one that cannot be wrapped, or was never tried.
        """
        name = getattr(args.optim, "value", args.optim)
        if name in AS_THEY_ARE:
            made: tuple[Any, dict[str, Any]] = super().get_optimizer_cls_and_kwargs(args, model)
            return made
        if name not in OURS:
            raise ArgumentError(
                f"optim={name!r} of TrainingArguments is none of {', '.join((*AS_THEY_ARE, *OURS))}; "
                "for any other optimizer pass optimizer_cls_and_kwargs=(torch.optim.NAdam, {...}), which is wrapped"
            )
        options = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2)}
        kind, _ = OURS[name]
        return kind, options if kind is Lion else options | {"eps": args.adam_epsilon}

    def create_optimizer(self, model: Any = None) -> Any:
        """Make the Trainer's own optimizer, over its own groups, and wrap it; one of ours stays as it is."""
        if self.optimizer is not None:
            return super().create_optimizer(model)
        optimizer = super().create_optimizer(model)
        if isinstance(optimizer, MegascaleOptimizer) or self.args.fp16:
            return optimizer
        # FSDP2 replaces parameters, and their names in the groups stay.
        names = {id(param): name for name, param in (self.model if model is None else model).named_parameters()}
        for group in optimizer.param_groups:
            if all(id(param) in names for param in group["params"]):
                group.setdefault("param_names", [names[id(param)] for param in group["params"]])
        wrap = partial(_wrapped, self)
        self.optimizer: Any = UnshardedOptimizer(optimizer, wrap) if self.accelerator.is_fsdp2 else wrap(optimizer)
        return self.optimizer

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load ``scaler.pt``, that of fp16 autocast, if there is such a scaler; 16-bit weights have the optimizer's."""
        if self.accelerator.scaler is not None:
            super()._load_scaler(checkpoint)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, and beside each training loss the loss scale and the number of skipped steps so far."""
        optimizer = self.optimizer
        ours = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
        if "loss" in logs and isinstance(ours, MegascaleOptimizer):
            scale = {} if ours.grad_scaler is None else {"loss_scale": ours.get_loss_scale().item()}
            logs = {**logs, **scale, "skipped_steps": int(ours.num_skipped_steps)}
        elif "loss" in logs and self.accelerator.scaler is not None:
            logs = {**logs, "loss_scale": self.accelerator.scaler.get_scale()}
        super().log(logs, *args, **kwargs)


def adopt(trainer: T, **options: Any) -> T:
    """Let a trainer that exists train in 16 bits: ``adopt(trainer, dtype="fp16")``, before ``trainer.train()``.

    Returns the same object, whose class is now its own class with :class:`MegascaleTrainer`.

    Args:
        trainer: a ``transformers.Trainer`` or one that inherits from it, such as TRL's, without an optimizer; one of
            megascale's may have been passed to it.
        options: those of :class:`MegascaleTrainer`. ``dtype`` casts ``trainer.model``; a reference model of TRL's stays
            as it is.

    Raises:
        ArgumentError, ArgumentTypeError: as the constructor of :class:`MegascaleTrainer`.
        UsageError: if the trainer has a torch optimizer already, or is a MegascaleTrainer. Autocast is judged by
            ``trainer.train()``.
    """
    if not isinstance(trainer, Trainer):
        raise ArgumentTypeError(f"trainer must be a transformers.Trainer, got {type(trainer).__name__}")
    if isinstance(trainer, MegascaleTrainer):
        raise UsageError("the trainer is a MegascaleTrainer already: give its options as megascale={...}")
    _check_optimizer(trainer)
    chosen = options_of(options)
    if chosen.dtype is not None and trainer.optimizer is not None:
        raise UsageError("dtype casts the weights of an optimizer that exists: cast the model before you build that")
    _adopt_accelerator(trainer, chosen)
    if chosen.dtype is not None:
        _cast(trainer.model, chosen.dtype)
    adopted: Any = trainer
    adopted._megascale = chosen
    cls = type(adopted)
    adopted.__class__ = type(
        cls.__name__, (MegascaleTrainer, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__}
    )
    return trainer


def options_of(given: Mapping[str, Any]) -> NamedOptions:
    """Check options that stand beside TrainingArguments; see :meth:`NamedOptions.of`."""
    return NamedOptions.of(given, "TrainingArguments", FROM_ARGUMENTS)


def _adopt_accelerator(trainer: Any, options: NamedOptions) -> None:
    """Make a trainer's accelerator ours; under fp16 autocast with our scaler."""
    accelerator = trainer.accelerator
    scaler = options.autocast_scaler(accelerator.device.type, _IN_16_BITS) if trainer.args.fp16 else None
    adopt_accelerator(accelerator, grad_scaler=scaler)


def _check_optimizer(trainer: Any) -> None:
    """Raise UsageError for a torch optimizer that was passed: nothing would scale its loss."""
    if trainer.optimizer is not None and not isinstance(trainer.optimizer, MegascaleOptimizer):
        raise UsageError(
            f"the trainer has a {type(trainer.optimizer).__name__} already: leave optimizers= out, so that one is made "
            "from the arguments, or pass a megascale.MixedPrecisionOptimizer"
        )


def _cast(model: Any, dtype: torch.dtype) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"dtype casts a model that is given as a module, and model is {model!r}: leave dtype out, and load in "
            f"16 bits, model_init_kwargs={{'dtype': {str(dtype)!r}}} in TRL's configs"
        )
    cast_model(model, dtype)


def _wrapped(trainer: Any, optimizer: torch.optim.Optimizer) -> MixedPrecisionOptimizer:
    """Return the optimizer that trains the parameters which ``optimizer`` has now."""
    name = getattr(trainer.args.optim, "value", trainer.args.optim)
    is_named = trainer.optimizer_cls_and_kwargs is None and name in OURS
    moments = OURS[name][1] if is_named else {}
    config = trainer._megascale.config(trainer.model.parameters(), moments)
    return MixedPrecisionOptimizer(optimizer, config, build_grad_scaler(config))


__all__ = ["MegascaleTrainer", "adopt"]
