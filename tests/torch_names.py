"""Names of torch that its documentation does not promise: those that megascale may use, and those that its sources use."""

# ruff: noqa: E501  # a name and its use are one line
import ast
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PRIVATE = re.compile(r"_(?!_)\w*[a-zA-Z]\w*")
NAMES = {
    # Tensors
    "torch.Tensor._version": "tells that a tensor was written",
    "torch.Tensor._values": "what a sparse gradient holds, to look for inf and NaN",
    "torch.Tensor._make_wrapper_subclass": "makes a ParamShard: a tensor with a shape and no memory",
    "torch.Tensor._post_accumulate_grad_hooks": "tells whether a parameter's gradient has an owner already",
    "torch._foreach_add_": "one call for a list of tensors",
    "torch._foreach_copy_": "one call for a list of tensors",
    "torch._foreach_div_": "one call for a list of tensors",
    "torch._foreach_mul_": "one call for a list of tensors",
    "torch._foreach_norm": "one call for a list of tensors",
    "torch._foreach_sub": "one call for a list of tensors",
    "torch._C._dynamo.guards.TensorGuards": "tells in one call whether many tensors have the forms that they had",
    "torch._fused_adam_": "Adam of the backend `torch`",
    "torch._fused_adamw_": "AdamW of the backend `torch`",
    "torch._fused_sgd_": "SGD of the backend `torch`",
    "torch._C._autograd._profiler_enabled": "torch's span of a whole step is opened where a profiler runs alone",
    "torch._C._profiler._RecordFunctionFast": "spans of a step's parts, which cost nothing where no profiler runs",
    "torch._dynamo.eval_frame.OptimizedModule._orig_mod": "what torch.compile puts in front of the names of parameters: it is left out of names that are compared",
    # torch.amp
    "torch._amp_foreach_non_finite_check_and_unscale_": "unscales gradients in place, as torch.amp does",
    "torch.amp.grad_scaler._refresh_per_optimizer_state": "begins an iteration of a scaler",
    "torch.amp.GradScaler._check_inf_per_device": "optimizers that take a grad_scaler call it; ours agrees",
    "torch.amp.GradScaler._check_scale_growth_tracker": "megascale.amp.GradScaler is a subclass, and decides by it",
    "torch.amp.GradScaler._found_inf_per_device": "megascale.amp.GradScaler is a subclass, and decides by it",
    "torch.amp.GradScaler._lazy_init_scale_growth_tracker": "ours makes its trackers with it",
    "torch.amp.GradScaler._maybe_opt_step": "steps an optimizer whose update cannot be skipped on the device",
    "torch.amp.GradScaler._backoff_factor": "megascale.amp.GradScaler is a subclass, and decides by it",
    "torch.amp.GradScaler._device": "megascale.amp.GradScaler is a subclass, and decides by it",
    "torch.amp.GradScaler._enabled": "megascale.amp.GradScaler is a subclass, and decides by it",
    "torch.amp.GradScaler._growth_factor": "megascale.amp.GradScaler is a subclass, and decides by it",
    "torch.amp.GradScaler._growth_interval": "megascale.amp.GradScaler is a subclass, and decides by it",
    "torch.amp.GradScaler._growth_tracker": "megascale.amp.GradScaler is a subclass, and decides by it",
    "torch.amp.GradScaler._per_optimizer_states": "megascale.amp.GradScaler is a subclass, and decides by it",
    "torch.amp.GradScaler._scale": "megascale.amp.GradScaler is a subclass, and decides by it",
    # Optimizers and schedulers
    "torch.optim.Optimizer._optimizer_step_pre_hooks": "tells whether an optimizer has step hooks",
    "torch.optim.Optimizer._optimizer_step_post_hooks": "tells whether an optimizer has step hooks",
    "torch.optim.optimizer._global_optimizer_pre_hooks": "tells whether all optimizers have step hooks",
    "torch.optim.optimizer._global_optimizer_post_hooks": "tells whether all optimizers have step hooks",
    "torch.optim.Optimizer._optimizer_state_dict_pre_hooks": "hooks of a torch optimizer, which the wrapper calls around its own state dicts",
    "torch.optim.Optimizer._optimizer_state_dict_post_hooks": "hooks of a torch optimizer, which the wrapper calls around its own state dicts",
    "torch.optim.Optimizer._optimizer_load_state_dict_pre_hooks": "hooks of a torch optimizer, which the wrapper calls around its own state dicts",
    "torch.optim.Optimizer._optimizer_load_state_dict_post_hooks": "hooks of a torch optimizer, which the wrapper calls around its own state dicts",
    "torch.optim.Adam._init_group": "collects parameters and makes state as torch does",
    "torch.optim.Adam._step_supports_amp_scaling": "tells that an optimizer skips on the device",
    "torch.optim.lr_scheduler.LRScheduler._opt_called": "tells an LR scheduler that the optimizer has stepped",
    "torch.optim.lr_scheduler.LRScheduler._wrapped_by_lr_sched": "tells a scheduler's wrapper of `step()` from a user's",
    # Modules
    "torch.nn.Module._parameters": "lends averages to the model; what a module reads in forward",
    "torch.nn.Module._modules": "tells modules that hold nothing, and need not wait in forward",
    "torch.nn.Module._buffers": "lends averages to the model",
    "torch._compile._disable_dynamo": "compiled code has a graph break where it calls the library",
    "torch.nn.Conv2d._conv_forward": "convolutions in fp32 of 16-bit weights, on a CPU",
    "torch.utils._pytree.tree_leaves": "finds tensors in a module's output",
    # torch.distributed
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": "finds the policy by which FSDP2 computes",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._mp_policy": "tells that FSDP2 computes in fp16, which needs a loss scale",
    "torch.distributed.fsdp._common_utils._fsdp_flattened": "tells a parameter that FSDP1 has flattened, which is refused",
    "torch.distributed.algorithms.join.Joinable._join_config": "tells that a DistributedDataParallel is inside of join(), where a step is refused",
    "torch.distributed.device_mesh.DeviceMesh._flatten": "the group over several dimensions of a mesh",
    "torch.distributed.distributed_c10d._get_default_store": "ranks meet there before one of them gathers",
    "torch.distributed.distributed_c10d._world": "a twin of some ranks is not counted among torch's groups",
    "torch.distributed.ProcessGroup._get_backend": "how long the ranks of a group wait for one another",
    "torch.distributed.ProcessGroup._device_types": "how long the ranks of a group wait for one another",
    "torch._C._distributed_c10d.Backend.Options._timeout": "how long the ranks of a group wait for one another",
    "torch.distributed.tensor.DTensor._spec": "how a gradient is placed, compared as one object with its parameter's",
    "torch.distributed.tensor.DTensor._local_tensor": "the tensor that kernels write, not a view of it",
    "torch.distributed.tensor.placement_types._StridedShard": "parameters that FSDP2 has cut after tensor parallelism",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": "which rows of a DTensor a rank has, for the groups of 8-bit moments",
    # Files of torch.save
    "torch._utils._rebuild_tensor_v2": "files of torch.save name it; makes their tensors",
    "torch._utils._rebuild_parameter": "what files of torch.save name; read as data, never called",
    "torch._utils._rebuild_parameter_with_state": "what files of torch.save name; read as data, never called",
    "torch._tensor._rebuild_from_type_v2": "what files of torch.save name; read as data, never called",
}
"""Path (a module's, a class's or its instances'), and what it is used for."""

OTHERS = {
    "sys": {"_getframe", "_current_frames"},
    "typing": {"_make", "_replace"},  # documented methods of named tuples
    "triton": {"_elementwise_max", "_sum_combine"},
    "lightning": {"_after_closure", "_clip_gradients", "_optimizer"},
    "accelerate": {"_optimizers", "_use_scaler"},
    "megatron": {"_get_param_groups", "_weight_remat_world_size"},
    "verl": {"_is_offload_optimizer", "_is_offload_param", "_qat_enabled", "_rank_"},  # the last: part of a file's name
}
"""Private names of others, which no list of torch's has."""


def uses(package: Path) -> dict[str, set[str]]:
    """Return the private names of torch that the files of ``package`` use, each with these files.

    A name is a dotted path where the code has one (``torch._foreach_add_``, or what is imported), or one of a class
    that the code inherits from; else an attribute's or a string's bare name (``_version``).
    """
    found: dict[str, set[str]] = defaultdict(set)
    trees = {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
    defined = {path: _defined(tree) for path, tree in trees.items()}
    everywhere = set().union(*defined.values())
    for path, tree in trees.items():
        # Files of one folder may know one another's private names, and all those of an optimizer; any inherits from any.
        own = set().union(*(names for other, names in defined.items() if other.parent in (path.parent, package)))
        own |= _of_self(tree) & everywhere
        names = {name for name in _named(tree) if "." in name or name not in own} | set(_inherited(tree))
        for name in names - set().union(*OTHERS.values()):
            if not any(other.startswith(name + ".") for other in names):
                found[name].add(str(path.relative_to(package)))
    return found


def listed_as(use: str) -> list[str]:
    """Return the paths of the list that are this use: of the same name, or with the module that it names."""
    if "." in use:
        return [path for path in NAMES if path == use or path.startswith(use + ".")]
    return [path for path in NAMES if path.rpartition(".")[2] == use]


def _is_private(name: str) -> bool:
    return any(PRIVATE.fullmatch(part) for part in name.split("."))


def _defined(tree: ast.Module) -> set[str]:
    """Return the private names that a file makes itself: functions, classes, variables, attributes of its objects."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self")):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=ast.Tuple(elts=slots)):
                names |= {str(slot.value) for slot in slots if isinstance(slot, ast.Constant)}
    return names


def _of_self(tree: ast.Module) -> set[str]:
    """Return the names that a file uses of ``self`` or ``super()``."""
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {one.attr for one in attributes if ast.unparse(one.value) in ("self", "super()")}


def _named(tree: ast.Module) -> Iterator[str]:
    """Yield the private names in imports, attributes and strings."""
    modules = {"module": "torch.nn.Module"} | _imported(tree)  # a variable of that name is never one of ours
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "torch":
                yield from (f"{module}.{one.name}" for one in names if _is_private(f"{module}.{one.name}"))
            case ast.Import(names=names):
                yield from (one.name for one in names if one.name.startswith("torch.") and _is_private(one.name))
            case ast.Attribute(attr=attr) if PRIVATE.fullmatch(attr):
                first, _, rest = ast.unparse(node).partition(".")
                yield f"{modules[first]}.{rest}" if first in modules and re.fullmatch(r"[\w.]+", rest) else attr
            case ast.Constant(value=str(text)) if re.fullmatch(r"[\w.]+", text) and _is_private(text):
                yield text


def _imported(tree: ast.Module) -> dict[str, str]:
    """Return what a file imports of torch: names in the file, and their paths."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found |= {
                    one.asname or "torch": one.name if one.asname else "torch" for one in names if _torchs(one.name)
                }
            case ast.ImportFrom(module=str(module), names=names) if _torchs(module):
                found |= {one.asname or one.name: f"{module}.{one.name}" for one in names}
    return found


def _torchs(module: str) -> bool:
    return module.split(".")[0] == "torch"


def _inherited(tree: ast.Module) -> Iterator[str]:
    """Yield the private names of torch's classes that a class which inherits from them uses or overrides."""
    modules = _imported(tree)
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for base in map(ast.unparse, node.bases):
            first, dot, rest = base.partition(".")
            if first not in modules or base in ("Tensor", "torch.Tensor"):
                continue
            path = modules[first] + dot + rest
            theirs = _of_class(resolve(path))
            yield from (f"{path}.{name}" for name in set(_named(node)) & theirs)  # type: ignore[arg-type]
            yield from (
                f"{path}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef) and one.name in theirs
            )


def _of_class(kind: type) -> set[str]:
    """Return the private attributes and methods that torch's classes among a class's bases have in their source."""
    bases = [base for base in kind.__mro__ if _torchs(base.__module__) and not base.__module__.startswith("torch._C")]
    return {name for base in bases for name in re.findall(r"(?:self\.|def )(_(?!_)\w+)", inspect.getsource(base))}


def resolve(path: str) -> Any:
    """Return what a dotted path names; raises AttributeError or ImportError if it is not there."""
    first, *parts = path.split(".")
    found: Any = importlib.import_module(first)
    for part in parts:
        first = f"{first}.{part}"
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(first)
    return found
