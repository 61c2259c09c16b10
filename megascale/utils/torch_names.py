"""Names of torch that its documentation does not promise: each that megascale uses, and what happens without it.

``import megascale`` raises UnsupportedTorchError, which says what was found and what is supported, before one of these
is missed in the middle of a step. Tests compare this list with the sources, and with the torch that is installed.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from megascale.errors import UnsupportedTorchError

OLDEST, NEWEST = "2.11", "2.15"
"""The versions of torch that are supported: what CI tests is these two, and the one that .ci/torch.txt pins."""

AT_IMPORT = "`import megascale` raises UnsupportedTorchError"
AT_CONSTRUCTION = "the constructor of `megascale.amp.GradScaler` raises UnsupportedTorchError"
DTENSOR = "an UnsupportedTorchError with the first DTensor, when its optimizer is built"


@dataclass(frozen=True)
class TorchName:
    """A name of torch, and what it is to megascale.

    Attributes:
        path: where it is: a module's, a class's or its instances'.
        why: what it is used for.
        gone: what happens in a torch that does not have it.
    """

    path: str
    why: str
    gone: str = AT_IMPORT


_KERNELS = "one call for a list of tensors"
_HOOKS = "hooks of a torch optimizer, which the wrapper calls around its own state dicts"
_FILES = "what files of torch.save name; read as data, never called"
_FILES_GONE = "nothing: files that an earlier torch wrote still name it"
_SCALER = "megascale.amp.GradScaler is a subclass, and decides by it"

NAMES = (
    # Tensors
    TorchName("torch.Tensor._version", "tells that a tensor was written"),
    TorchName("torch.Tensor._values", "what a sparse gradient holds, to look for inf and NaN"),
    TorchName("torch.Tensor._is_zerotensor", "tells a tensor of zeros that has no memory"),
    TorchName("torch.Tensor._make_wrapper_subclass", "makes a ParamShard: a tensor with a shape and no memory"),
    TorchName("torch.Tensor._post_accumulate_grad_hooks", "tells whether a parameter's gradient has an owner already"),
    TorchName("torch._foreach_add_", _KERNELS),
    TorchName("torch._foreach_copy_", _KERNELS),
    TorchName("torch._foreach_div_", _KERNELS),
    TorchName("torch._foreach_mul_", _KERNELS),
    TorchName("torch._foreach_norm", _KERNELS),
    TorchName("torch._foreach_sub", _KERNELS),
    TorchName(
        "torch._C._dynamo.guards.TensorGuards",
        "tells in one call whether many tensors have the forms that they had",
        "nothing but time: dtype, shape, strides and flags of every tensor are read in every step, 0.3 us each",
    ),
    TorchName("torch._fused_adam_", "Adam of the backend `torch`"),
    TorchName("torch._fused_adamw_", "AdamW of the backend `torch`"),
    TorchName("torch._fused_sgd_", "SGD of the backend `torch`"),
    TorchName(
        "torch._subclasses.fake_tensor.FakeTensor", "a step inside a FakeTensorMode is refused on real parameters"
    ),
    TorchName("torch._C._TorchDispatchModeKey", "asks for a FakeTensorMode"),
    TorchName("torch._C._get_dispatch_mode", "tells whether a FakeTensorMode is active"),
    TorchName("torch._C._autograd._profiler_enabled", "spans cost nothing where no profiler runs"),
    TorchName(
        "torch._dynamo.eval_frame.OptimizedModule._orig_mod",
        "what torch.compile puts in front of the names of parameters: it is left out of names that are compared",
        "nothing, if names are as without torch.compile; else state dicts of a compiled and of the bare model differ",
    ),
    # torch.amp
    TorchName("torch._amp_foreach_non_finite_check_and_unscale_", "unscales gradients in place, as torch.amp does"),
    TorchName("torch.amp.grad_scaler._refresh_per_optimizer_state", "begins an iteration of a scaler"),
    TorchName("torch.amp.GradScaler._check_inf_per_device", "optimizers that take a grad_scaler call it; ours agrees"),
    TorchName("torch.amp.GradScaler._check_scale_growth_tracker", _SCALER),
    TorchName("torch.amp.GradScaler._found_inf_per_device", _SCALER),
    TorchName("torch.amp.GradScaler._lazy_init_scale_growth_tracker", "ours makes its trackers with it"),
    TorchName(
        "torch.amp.GradScaler._maybe_opt_step", "steps an optimizer whose update cannot be skipped on the device"
    ),
    TorchName("torch.amp.GradScaler._backoff_factor", _SCALER, AT_CONSTRUCTION),
    TorchName("torch.amp.GradScaler._device", _SCALER, AT_CONSTRUCTION),
    TorchName("torch.amp.GradScaler._enabled", _SCALER, AT_CONSTRUCTION),
    TorchName("torch.amp.GradScaler._growth_factor", _SCALER, AT_CONSTRUCTION),
    TorchName("torch.amp.GradScaler._growth_interval", _SCALER, AT_CONSTRUCTION),
    TorchName("torch.amp.GradScaler._growth_tracker", _SCALER, AT_CONSTRUCTION),
    TorchName("torch.amp.GradScaler._per_optimizer_states", _SCALER, AT_CONSTRUCTION),
    TorchName("torch.amp.GradScaler._scale", _SCALER, AT_CONSTRUCTION),
    # Optimizers and schedulers
    TorchName("torch.optim.Optimizer._optimizer_step_pre_hooks", "tells whether an optimizer has step hooks"),
    TorchName("torch.optim.Optimizer._optimizer_step_post_hooks", "tells whether an optimizer has step hooks"),
    TorchName("torch.optim.optimizer._global_optimizer_pre_hooks", "tells whether all optimizers have step hooks"),
    TorchName("torch.optim.optimizer._global_optimizer_post_hooks", "tells whether all optimizers have step hooks"),
    TorchName("torch.optim.Optimizer._optimizer_state_dict_pre_hooks", _HOOKS),
    TorchName("torch.optim.Optimizer._optimizer_state_dict_post_hooks", _HOOKS),
    TorchName("torch.optim.Optimizer._optimizer_load_state_dict_pre_hooks", _HOOKS),
    TorchName("torch.optim.Optimizer._optimizer_load_state_dict_post_hooks", _HOOKS),
    TorchName("torch.optim.Adam._init_group", "collects parameters and makes state as torch does"),
    TorchName(
        "torch.optim.Adam._step_supports_amp_scaling",
        "tells that an optimizer skips on the device",
        "megascale.amp.GradScaler reads found_inf on the host once a step, as for any other optimizer",
    ),
    TorchName(
        "torch.optim.lr_scheduler.LRScheduler._opt_called",
        "tells an LR scheduler that the optimizer has stepped",
        "nothing but a warning of torch, if it learns of steps in another way: that they came after the scheduler's",
    ),
    TorchName(
        "torch.optim.lr_scheduler.LRScheduler._wrapped_by_lr_sched",
        "tells a scheduler's wrapper of `step()` from a user's",
        "torch's own `step()` runs where a scheduler is attached: slower, the same results but for last bits",
    ),
    TorchName(
        "torch.optim.lr_scheduler.SequentialLR._schedulers",
        "finds the schedulers that one is made of",
        "an AttributeError when a LandedLRScheduler of a SequentialLR or ChainedScheduler is built",
    ),
    # Modules
    TorchName("torch.nn.Module._apply", "`module.to()` waits until parameters are whole"),
    TorchName("torch.nn.Module._parameters", "lends averages to the model; what a module reads in forward"),
    TorchName("torch.nn.Module._modules", "tells modules that hold nothing, and need not wait in forward"),
    TorchName("torch.nn.Module._buffers", "lends averages to the model"),
    TorchName("torch.nn.Module._forward_pre_hooks", "copies of a module have no hooks of ours"),
    TorchName("torch.nn.Module._compiled_call_impl", "a module compiled in place waits before its graph begins"),
    TorchName("torch._compile._disable_dynamo", "compiled code has a graph break where it calls the library"),
    TorchName("torch.nn.Module._state_dict_pre_hooks", "copies of a module have no hooks of ours"),
    TorchName("torch.nn.Module._load_state_dict_pre_hooks", "copies of a module have no hooks of ours"),
    TorchName(
        "torch.nn.Conv2d._conv_forward",
        "convolutions in fp32 of 16-bit weights, on a CPU",
        "the training program ends with an AttributeError at its first forward",
    ),
    TorchName(
        "torch.utils._pytree.tree_leaves",
        "finds tensors in a module's output",
        "`import megascale.debug` fails and names it",
    ),
    # torch.distributed
    TorchName(
        "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
        "finds the policy by which FSDP2 computes",
        "an AttributeError, when an optimizer of fp32 parameters under FSDP2 is built without a scaler",
    ),
    TorchName(
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._mp_policy",
        "tells that FSDP2 computes in fp16, which needs a loss scale",
        "nothing: fp32 parameters under a policy of fp16 train without a scale",
    ),
    TorchName(
        "torch.distributed.fsdp._common_utils._fsdp_flattened",
        "tells a parameter that FSDP1 has flattened, which is refused",
        "nothing, until a step finds that gradients or parameters differ between ranks",
    ),
    TorchName(
        "torch.distributed.algorithms.join.Joinable._join_config",
        "tells that a DistributedDataParallel is inside of join(), where a step is refused",
        "nothing, until a rank has run out of batches: then torch ends the processes, or ranks wait",
    ),
    TorchName("torch.distributed.device_mesh.DeviceMesh._flatten", "the group over several dimensions of a mesh"),
    TorchName("torch.distributed.distributed_c10d._get_default_store", "ranks meet there before one of them gathers"),
    TorchName(
        "torch.distributed.distributed_c10d._world",
        "a twin of some ranks is not counted among torch's groups",
    ),
    TorchName("torch.distributed.ProcessGroup._get_backend", "how long the ranks of a group wait for one another"),
    TorchName("torch.distributed.ProcessGroup._device_types", "how long the ranks of a group wait for one another"),
    TorchName(
        "torch._C._distributed_c10d.Backend.Options._timeout",
        "how long the ranks of a group wait for one another",
        "a new group is waited for without a limit of ours, as for a backend that does not say",
    ),
    TorchName(
        "torch.distributed.tensor.DTensor._local_tensor", "the tensor that kernels write, not a view of it", DTENSOR
    ),
    TorchName(
        "torch.distributed.tensor.placement_types._StridedShard",
        "parameters that FSDP2 has cut after tensor parallelism",
        "an ImportError that names it, when an optimizer is built on DTensors",
    ),
    TorchName(
        "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
        "which rows of a DTensor a rank has, for the groups of 8-bit moments",
        "an ImportError that names it, when an optimizer with 8-bit moments is built on DTensors",
    ),
    # Files of torch.save
    TorchName("torch._utils._rebuild_tensor_v2", "files of torch.save name it; makes their tensors"),
    TorchName("torch._utils._rebuild_parameter", _FILES, _FILES_GONE),
    TorchName("torch._utils._rebuild_parameter_with_state", _FILES, _FILES_GONE),
    TorchName("torch._tensor._rebuild_from_type_v2", _FILES, _FILES_GONE),
)


def missing(path: str) -> UnsupportedTorchError:
    """Return the error for a name that torch does not have."""
    return UnsupportedTorchError(
        f"torch {torch.__version__} has no {path}, which megascale needs; megascale supports torch {OLDEST} to "
        f"{NEWEST}: install one of these, or a megascale that is made for yours"
    )


def require() -> None:
    """Raise UnsupportedTorchError for the first name that is not there, of those that ``import megascale`` needs."""
    for name in NAMES:
        if name.gone == AT_IMPORT and not _is_there(name.path):
            raise missing(name.path)


def require_attributes(made: object, gone: str) -> None:
    """Raise UnsupportedTorchError if an instance of torch's class has not all attributes whose ``gone`` this is."""
    for name in NAMES:
        if name.gone == gone and not hasattr(made, name.path.rpartition(".")[2]):
            raise missing(name.path)


def _is_there(path: str) -> bool:
    """Whether torch has a module's name or a class's, or declares it for the class's instances."""
    if path.startswith("torch.distributed.") and not torch.distributed.is_available():
        return True  # megascale then runs on one rank, and does not ask
    first, *parts, last = path.split(".")
    owner: Any = torch
    for part in parts:
        first = f"{first}.{part}"
        try:
            owner = getattr(owner, part) if hasattr(owner, part) else importlib.import_module(first)
        except ImportError:
            return False
    return hasattr(owner, last) or any(last in getattr(kind, "__annotations__", {}) for kind in _kinds(owner))


def _kinds(owner: Any) -> tuple[type, ...]:
    return owner.__mro__ if isinstance(owner, type) else ()


require()
