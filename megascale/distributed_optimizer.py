"""DistributedOptimizer: the same recipe with main params and optimizer state sharded over data-parallel ranks."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from megascale.config import OptimizerConfig
from megascale.errors import ArgumentError, ArgumentTypeError
from megascale.grad_scaler import MegatronGradScaler
from megascale.grad_sync.layout import DEFAULT_BUCKET_NUMEL
from megascale.grad_sync.sharded_sync import ShardedGradSync
from megascale.main_params.base import MainParams
from megascale.main_params.gather import ParamGather
from megascale.main_params.owned import OwnedMainParams
from megascale.main_params.sharded import ShardedMainParams
from megascale.optimizer import MixedPrecisionOptimizer
from megascale.parallel import ParallelGroups
from megascale.rules import ELEMENTWISE
from megascale.step.arguments import check_arguments
from megascale.step.known_optimizers import refuse_sums_over_parameters
from megascale.step.misuse import BUILD_LAST
from megascale.utils import validate


class DistributedOptimizer(MixedPrecisionOptimizer):
    """MixedPrecisionOptimizer with ZeRO stage 1 (arXiv 1910.02054), after Megatron-Core's ``DistributedOptimizer``.

    The modules stay plain: no DistributedDataParallel around them. Hooks add up gradients in main grads and
    reduce-scatter them bucket by bucket during backward. Each rank updates the shard that it owns, and the parameters
    are gathered again. A rank holds the model params, one main grad per parameter, and main params and optimizer state
    of its shard. Parameters become contiguous views of flat buckets.

    Parameters belong to one such optimizer (or GradSync) at a time. When it is garbage-collected its hooks are removed
    and all parameters are whole; they stay views of the buckets.

    Shards are cut in one of two ways. By elements: all are equal, and cut parameters anywhere; for an optimizer whose
    update of an element reads no other element. By parameters: each parameter has one owner, whose optimizer sees it
    whole; for Muon, Adafactor, LAMB, Shampoo and any other whose update of a parameter reads no other parameter. One
    that takes a norm over all parameters is refused where that is known, as LAMB's with ``max_grad_norm``.
    Parameters get owners costliest first, by a cost computed from the shape: :mod:`megascale.grad_sync.owners`.

    ``state`` holds this rank's 1-D pieces or whole parameters, :meth:`main_params` yields them. :meth:`state_dict` is
    whole: gathered into host memory, it loads into a MixedPrecisionOptimizer too. :mod:`megascale.checkpoint` gathers
    nothing.

    Args:
        optimizer: see ``shard``.
        config, grad_scaler, clip_grad, groups: see :class:`MixedPrecisionOptimizer`. ``groups.data_shard`` ranks share
            one copy.
        modules: the model, or its chunks, that own the optimizer's parameters; they give the names.
        grad_dtype, reduce_dtype: dtype of the main grads (None: fp32), and of messages (None: the same); see GradSync.
        reduction: "mean" over ``groups.data_parallel``, or "sum"; ``grad_sync.set_divisor`` for any other divisor.
        bucket_numel: elements that are reduced and gathered at once.
        overlap_grad_reduce: reduce during backward. False: at the step.
        overlap_param_gather: let the gather overlap the next forward; every module waits for its own parameters. Not
            for models in which a module reads another module's parameters without calling it.
        broadcast_params: take the first rank's values of parameters that differ between ranks. False: raise.
        elementwise: True: you guarantee it, for an optimizer that is not torch's.
        shard: "elements", "parameters", or "auto": elements where the optimizer is known to be elementwise.
        grads_are_scaled: see :class:`MixedPrecisionOptimizer`.

    Raises:
        ArgumentError, ArgumentTypeError: before anything has changed. On every rank alike where ranks have passed
            different parameters, or arguments that decide about messages, naming the values of two ranks. A rank that
            alone passes a wrong argument raises alone, and the others wait for it until their process group's timeout.
            Different scalers, configs and values of ``clip_grad`` are found by the first step, on all ranks.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig | None = None,
        grad_scaler: MegatronGradScaler | None = None,
        *,
        modules: nn.Module | Sequence[nn.Module],
        clip_grad: float | None = None,
        groups: ParallelGroups | ProcessGroup | DeviceMesh | None = None,
        grad_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        reduction: str = "mean",
        bucket_numel: int = DEFAULT_BUCKET_NUMEL,
        overlap_grad_reduce: bool = True,
        overlap_param_gather: bool = False,
        broadcast_params: bool = False,
        elementwise: bool | None = None,
        shard: str = "auto",
        grads_are_scaled: bool = False,
    ) -> None:
        check_arguments(optimizer, config, grad_scaler, sharded=True)
        if config is not None and config.overlap_param_gather and not overlap_param_gather:
            raise ArgumentError(
                "config.overlap_param_gather=True has no effect: the argument overlap_param_gather is False; pass it "
                "too, or let megascale.build_optimizer(config, model) build everything from the config"
            )
        by_parameter = is_sharded_by_parameter(optimizer, shard, elementwise)
        if by_parameter:
            refuse_sums_over_parameters(optimizer)
        chunks = chunks_of(modules)
        names = _names(chunks, optimizer)
        resolved = ParallelGroups.of(groups)
        self.grad_sync = ShardedGradSync(
            [],
            groups=resolved,
            grad_dtype=torch.float32 if grad_dtype is None else grad_dtype,
            reduce_dtype=reduce_dtype,
            reduction=reduction,
            bucket_numel=bucket_numel,
            overlap=validate.flag("overlap_grad_reduce", overlap_grad_reduce),
            by_parameter=by_parameter,
        )
        self._gather = ParamGather(chunks, overlap=validate.flag("overlap_param_gather", overlap_param_gather))
        self._shards = (OwnedMainParams if by_parameter else ShardedMainParams)(
            names.items(),
            resolved,
            self.grad_sync,
            self._gather,
            broadcast=validate.flag("broadcast_params", broadcast_params),
        )
        try:
            super().__init__(
                optimizer,
                config,
                grad_scaler,
                clip_grad=clip_grad,
                groups=resolved,
                named_parameters=names.items(),
                grad_sync=self.grad_sync,
                grads_are_scaled=grads_are_scaled,
            )
        except BaseException:  # the traceback may keep this object
            self.grad_sync.detach()
            self._gather.detach()
            raise

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward only accumulates: for every micro-batch of a step but the last."""
        return self.grad_sync.no_sync()

    @override
    def _make_main_params(self, _named: Iterable[tuple[str, Tensor]]) -> MainParams:
        return self._shards


def is_sharded_by_parameter(optimizer: torch.optim.Optimizer, shard: str, elementwise: bool | None) -> bool:
    """Return whether shards hold whole parameters. ``elementwise``: the caller says that the optimizer is elementwise.

    Raises ArgumentError, naming the optimizer, for shard="elements" with one that is not known to be elementwise.
    """
    validate.one_of("shard", shard, ("auto", "elements", "parameters"))
    if elementwise is not None:
        validate.flag("elementwise", elementwise)
    is_elementwise = type(optimizer) in ELEMENTWISE or bool(elementwise)
    if shard == "elements" and not is_elementwise:
        raise ArgumentError(
            f"optimizer {type(optimizer).__name__} is not known to be elementwise, and with shard='elements' a shard "
            "holds pieces of parameters: pass shard='parameters', which keeps each parameter whole on one rank; or, if "
            "each element is updated from itself alone, pass elementwise=True"
        )
    return shard == "parameters" or not is_elementwise


def chunks_of(modules: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules of a model that was given whole or in chunks. Raises ArgumentTypeError for anything else."""
    chunks = [*modules] if isinstance(modules, Iterable) and not isinstance(modules, nn.Module) else [modules]
    if not chunks or not all(isinstance(chunk, nn.Module) for chunk in chunks):
        kinds = ", ".join(type(chunk).__name__ for chunk in chunks)  # not the values, of tensors
        raise ArgumentTypeError(f"modules must be a module or a list of modules, got [{kinds}]")
    return chunks


def _names(chunks: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return the modules' parameters by name, in their order, which is assumed to be that of forward.

    Also those that are not the optimizer's yet: a param group that is added later has the modules' names, too.
    """
    if any(isinstance(module, DistributedDataParallel) for chunk in chunks for module in chunk.modules()):
        raise ArgumentError(
            "modules holds a DistributedDataParallel, which would reduce every gradient a second time; pass the bare "
            "module"
        )
    names: dict[str, nn.Parameter] = {}
    found: set[int] = set()
    for index, chunk in enumerate(chunks):
        prefix = f"{index}." if len(chunks) > 1 else ""
        for name, param in chunk.named_parameters():
            if id(param) not in found:  # one that chunks share has the first one's name
                names[prefix + name] = param
                found.add(id(param))
    params = [param for group in optimizer.param_groups for param in group["params"]]
    missing = [index for index, param in enumerate(params) if id(param) not in found]
    if missing:
        raise ArgumentError(
            f"modules do not own parameter {missing[0]} of the optimizer (and {len(missing) - 1} more); pass "
            f"every module whose parameters it updates; {BUILD_LAST}"
        )
    return names
