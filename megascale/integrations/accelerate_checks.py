"""What an Accelerator refuses: optimizers and formats with which it would train wrongly, each with the remedy."""

from collections.abc import Iterable
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor

from megascale.base_optimizer import MegascaleOptimizer
from megascale.errors import UsageError
from megascale.integrations.accelerate_prepared import PreparedOptimizer
from megascale.utils.dtensors import is_dtensor

UNSUPPORTED = {
    DistributedType.DEEPSPEED: "DeepSpeed's engine owns the step",
    DistributedType.MEGATRON_LM: "Megatron-LM's engine owns the step",
    DistributedType.XLA: "gradients are reduced inside Accelerate's own wrapper",
    DistributedType.FSDP: "FSDP1 flattens the parameters under the optimizer; use fsdp_version=2",
}

_COMPUTED_IN = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""By ``mixed_precision``, the dtype of its autocast."""


def check_fits(accelerator: Any, optimizer: MegascaleOptimizer) -> None:
    """Raise UsageError for one of our optimizers that would train wrongly with ``accelerator``."""
    name = type(optimizer).__name__
    check_engine(accelerator, name)
    if any(part._reduces_in_backward for part in optimizer._parts()):
        raise UsageError(
            f"the {name} reduces gradients itself, which accelerator.accumulate() cannot hold back: build a "
            "MixedPrecisionOptimizer without grad_sync, and let DistributedDataParallel reduce, or shard by FSDP2"
        )
    check_precision(accelerator, name, (param for group in optimizer.param_groups for param in group["params"]))
    # FSDP2 has put its shards where they belong.
    are_shards = all(is_dtensor(param) for group in optimizer.param_groups for param in group["params"])
    own, device = accelerator.device, optimizer._device
    if not are_shards and (device.type, device.index or 0) != (own.type, own.index or 0):
        raise UsageError(
            f"the {name} was built on {device}, the accelerator is on {own}: call model.to(accelerator.device) before "
            "you build the optimizer"
        )
    if optimizer.grad_scaler is None:
        if accelerator.scaler is not None:
            raise UsageError(
                f"the {name} has no grad_scaler, and would take gradients of the loss that the accelerator scales as "
                "they are: use mixed_precision='no' with torch.autocast around forward, and a DynamicGradScaler in the "
                f"{name}, or prepare the torch optimizer itself"
            )
        return
    # Nobody else may scale the same loss. On a CPU Accelerate makes no scaler for "fp16", and computes in fp32.
    if accelerator.scaler is not None or accelerator.mixed_precision == "fp16":
        raise UsageError(
            f"the {name} scales the loss, and so does the accelerator: use mixed_precision='no' and a model in fp16"
        )
    for other in accelerator._optimizers:
        if not isinstance(other, PreparedOptimizer):
            raise unscaled_beside_scaled(other.optimizer)
        if other.optimizer.grad_scaler is optimizer.grad_scaler:
            raise UsageError(
                "two prepared optimizers share one grad scaler, which each would update: chain them with "
                "megascale.ChainedOptimizer"
            )


def check_engine(accelerator: Any, name: str) -> None:
    """Raise UsageError where another engine owns the step that an optimizer called ``name`` would take."""
    if accelerator.distributed_type in UNSUPPORTED and not accelerator.is_fsdp2:
        reason = UNSUPPORTED[accelerator.distributed_type]
        raise UsageError(
            f"Accelerate runs as {accelerator.distributed_type.value}, which a {name} cannot join: {reason}"
        )


def check_precision(accelerator: Any, name: str, params: Iterable[Tensor]) -> None:
    """Raise UsageError where a forward would compute in another 16-bit format than that of ``name``'s parameters.

    Autocast rounds parameters to its own dtype in every forward, and so does FSDP2 with a ``param_dtype``: what was
    chosen for the parameters would be lost in silence.
    """
    held = {param.dtype for param in params if param.is_floating_point() and param.dtype.itemsize == 2}
    computed = _COMPUTED_IN.get(accelerator.mixed_precision)
    if computed is not None and held - {computed}:
        raise UsageError(
            f"mixed_precision={accelerator.mixed_precision!r} computes in {computed}, and parameters of the {name} are "
            f"{(held - {computed}).pop()}: use mixed_precision='no' (bf16=False and fp16=False in TrainingArguments "
            f"and in TRL's configs, which set bf16=True by themselves), or cast the model to {computed}"
        )
    policy = getattr(accelerator.state.fsdp_plugin, "mixed_precision_policy", None) if accelerator.is_fsdp2 else None
    gathered = getattr(policy, "param_dtype", None)
    if gathered is not None and gathered.itemsize == 2 and held - {gathered}:
        raise UsageError(
            f"the FSDP plugin's MixedPrecisionPolicy(param_dtype={gathered}) computes in {gathered}, and parameters of "
            f"the {name} are {(held - {gathered}).pop()}: leave param_dtype out, or cast the model to {gathered}"
        )


def check_autocast(params: Iterable[Tensor]) -> None:
    """Raise UsageError for fp16 weights that are trained under fp16 autocast: nobody keeps fp32 main params of them."""
    if any(param.dtype == torch.float16 for param in params if param.requires_grad):
        raise UsageError(
            "mixed_precision='fp16' (fp16=True of TrainingArguments) means autocast over fp32 weights, and the weights "
            "that are trained are torch.float16, which would have no fp32 main params: use mixed_precision='no' "
            "(fp16=False) and a MixedPrecisionOptimizer, or keep the weights in fp32"
        )


def two_with_one_scale(optimizer: torch.optim.Optimizer) -> UsageError:
    """Return the error for a second torch optimizer, whose gradients the first one's update would leave scaled."""
    return UsageError(
        f"a {type(optimizer).__name__} would be the second optimizer of one grad_scaler, which updates its scale after "
        "the step of each (after another training call accelerator.free_memory() first): put all parameters into one "
        "optimizer, or wrap each in a MixedPrecisionOptimizer with a scaler of its own, with mixed_precision='no' and "
        "torch.autocast around forward"
    )


def unscaled_beside_scaled(optimizer: torch.optim.Optimizer) -> UsageError:
    """Return the error for a torch optimizer beside one of ours that scales the loss."""
    return UsageError(
        f"a {type(optimizer).__name__} would take gradients of a scaled loss as they are: wrap it in a "
        "MixedPrecisionOptimizer, too, which trains fp32 parameters as well"
    )
