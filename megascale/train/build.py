"""Builds the objects of a run from its options: task, optimizer, scaler, learning rate schedule."""

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from megascale import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler, OptimizerConfig, build_optimizer
from megascale.base_optimizer import MegascaleOptimizer
from megascale.rules import ADAM, MUON, VARIANTS
from megascale.schedules import LandedLRScheduler
from megascale.train.config import OptimizerOptions, ScalerConfig, TrainConfig
from megascale.train.tasks import Task

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def build_task(config: TrainConfig) -> Task:
    """Return the task of ``config``. Its libraries are imported only here."""
    if config.task == "digits":
        from megascale.train.digits import DigitsTask

        return DigitsTask(config.digits, config.seed)
    from megascale.train.text import TextTask

    return TextTask(config.text, config.seed)


def lr_factor(options: OptimizerOptions, landed: int, steps: int) -> float:
    """Return the fraction of the peak learning rate after ``landed`` of ``steps``: warm-up, then ``schedule``."""
    warmup = min(1.0, (landed + 1) / options.warmup_steps) if options.warmup_steps else 1.0
    decay = 0.5 * (1 + math.cos(math.pi * landed / steps)) if options.schedule == "cosine" else 1.0
    return warmup * decay


def build_schedule(config: TrainConfig, optimizer: MegascaleOptimizer, landed: int = 0) -> LandedLRScheduler:
    """Return the schedule of ``config`` after ``landed`` steps, and set the rate of the param groups.

    The rate depends only on the number of landed steps, so a resumed run needs nothing else of its past, and may have
    another total number of steps.
    """
    options = config.optimizer
    for group in optimizer.param_groups:
        is_adams = options.adam_lr is not None and "betas" in group
        group["lr"] = group["initial_lr"] = options.adam_lr if is_adams else options.lr
    return LandedLRScheduler(
        LambdaLR(optimizer, lambda done: lr_factor(config.optimizer, done, config.steps), last_epoch=landed - 1)
    )


def build_grad_scaler(config: ScalerConfig) -> MegatronGradScaler | None:
    """Return the scaler of ``config``, or None."""
    options = {name: value for name, value in vars(config).items() if name not in ("scaler_type", "scale")}
    if config.scaler_type == "dynamic":
        return DynamicGradScaler(config.scale, **options)
    return ConstantGradScaler(config.scale) if config.scaler_type == "static" else None


def build_wrapped_optimizer(config: TrainConfig, model: nn.Module) -> MegascaleOptimizer:
    """Return the optimizer of ``config`` over ``model``'s parameters.

    Each rule reads its own of the fields that say which torch optimizer it is.
    """
    options = config.optimizer
    rule, variant = VARIANTS[options.name]
    threshold = options.grad_norm_skip_threshold
    same = ("lr", "weight_decay", "clip_grad", "overlap_param_gather")
    limits = ("max_consecutive_skips", "max_overflows_at_min_scale")
    wrapped = OptimizerConfig(
        optimizer=rule.name,
        decoupled_weight_decay=rule is not ADAM or variant.kind in rule.decoupled,
        sgd_momentum=options.momentum,
        muon_momentum=options.momentum,
        muon_adam_lr=options.adam_lr,
        adam_beta1=options.beta1,
        adam_beta2=options.beta2,
        use_distributed_optimizer=options.sharded,
        fp16=config.precision == "fp16",
        bf16=config.precision == "bf16",
        log_num_zeros_in_grad=True,
        grad_norm_skip_threshold=math.inf if threshold is None else threshold,
        **{name: getattr(options, name) for name in (*same, *limits)},
    )
    # Muon's recipe spares biases and norms the weight decay; here the others do not.
    overrides = None if options.name == MUON.name else {"*": {"weight_decay": options.weight_decay}}
    scaler = build_grad_scaler(config.scaler)
    return build_optimizer(wrapped, model, overrides=overrides, grad_scaler=scaler, bucket_numel=options.bucket_numel)
