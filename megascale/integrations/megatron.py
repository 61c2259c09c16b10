"""Megatron-Core: megascale's optimizer in its training loop, with Megatron's config, groups, schedule and buffers.

:func:`get_megatron_optimizer` stands in for ``megatron.core.optimizer.get_megatron_optimizer``. Megatron's own
optimizers accept our grad scalers without this module. Checkpoints are in
:mod:`megascale.integrations.megatron_checkpoint`. Functions that need Megatron import it when they are called.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megascale.base_optimizer import MegascaleOptimizer
from megascale.builder import build_grad_scaler, build_inner_optimizer, effective_config
from megascale.config import OptimizerConfig
from megascale.distributed_optimizer import DistributedOptimizer
from megascale.errors import ArgumentError, ArgumentTypeError, UsageError
from megascale.integrations.megatron_checkpoint import load_megatron_checkpoint, megatron_state_dict
from megascale.integrations.megatron_config import from_megatron_config
from megascale.integrations.megatron_groups import overrides_refusal, params_refusal
from megascale.interop.megatron import WAY_OUT
from megascale.optimizer import MixedPrecisionOptimizer
from megascale.parallel import ParallelGroups
from megascale.utils.collectives import group_size, raise_together
from megascale.utils.dtensors import is_dtensor

__all__ = [
    "MegatronStepResult",
    "MegatronSurface",
    "get_megatron_optimizer",
    "load_megatron_checkpoint",
    "megatron_state_dict",
    "parallel_groups",
]


class MegatronStepResult(NamedTuple):
    """The result of a step that Megatron's training loop expects: host numbers, or None.

    Attributes:
        success: False where the step was skipped. A bool, as its loop tests ``is True``.
        grad_norm: of the unscaled, unclipped gradients; None for a skipped step.
        num_zeros_in_grad: None for a skipped step, and unless ``config.log_num_zeros_in_grad``.
    """

    success: bool
    grad_norm: float | None
    num_zeros_in_grad: int | None


class MegatronSurface:
    """A megascale optimizer with the methods that Megatron's training loop calls.

    :meth:`step` costs one host read, as in Megatron (which has more): its loop branches on the result.

    Args:
        optimizer: its ``param_groups`` must have Megatron's keys if Megatron's OptimizerParamScheduler drives it.

    Attributes:
        optimizer: the wrapped one, with our API.
        config: ours.
        is_stub_optimizer: False: a rank without trainable parameters is refused when the optimizer is built.
    """

    is_stub_optimizer = False

    def __init__(self, optimizer: MegascaleOptimizer) -> None:
        if not isinstance(optimizer, MegascaleOptimizer):
            raise ArgumentTypeError(
                f"optimizer must be a MixedPrecisionOptimizer or ChainedOptimizer, got {type(optimizer).__name__}"
            )
        self.optimizer = optimizer
        self.config: OptimizerConfig = optimizer._config

    # The step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop (or zero) ``param.grad``. ``zero_grad_buffer()`` zeroes the main grads of Megatron's buffers."""
        self.optimizer.zero_grad(set_to_none)

    def step(self) -> MegatronStepResult:
        """Take one step, or skip it on every rank alike. One host read."""
        result = self.optimizer.step()
        success, norm, zeros = torch.stack([value.double() for value in result]).tolist()
        if not success:
            return MegatronStepResult(False, None, None)
        return MegatronStepResult(True, norm, int(zeros) if self.config.log_num_zeros_in_grad else None)

    def prepare_grads(self) -> bool:
        """First half of a step: True if the step is skipped; the second half may then be left out. One host read."""
        return bool(self.optimizer.prepare_grads() > 0)

    def step_with_ready_grads(self) -> bool:
        """Second half of a step: True if it landed. One host read. Clipping is part of it."""
        return bool(self.optimizer.step_with_ready_grads().success)

    # The loss

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return ``loss * scale`` in at least fp32: Megatron's ``config.grad_scale_func``."""
        return self.optimizer.scale_loss(loss)

    def get_loss_scale(self) -> Tensor:
        """Return the current scale: fp32, shape [1], on the device; ones without a scaler."""
        return self.optimizer.get_loss_scale().reshape(1)

    # Parameters

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Live param groups: values that Megatron's OptimizerParamScheduler writes take effect at the next step."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """Each parameter's state, by model param (Megatron: by main param): :attr:`MixedPrecisionOptimizer.state`."""
        return self.optimizer.state

    def get_parameters(self) -> list[nn.Parameter]:
        """Return all model params (Megatron: main params), in the order of ``param_groups``."""
        return [param for group in self.param_groups for param in group["params"]]

    def reload_model_params(self, state_dict: Mapping[str, Any] | None = None) -> None:
        """Set every main param to its model param's value exactly, as after loading weights into the model.

        Raises:
            ArgumentError: for a ``state_dict`` of higher precision; Megatron's Float16 optimizer refuses it too.
        """
        if state_dict is not None:
            raise ArgumentError(
                "reload_model_params() reads the model, not a state_dict; load main params with load_state_dict()"
            )
        self.optimizer.reload_model_params()

    # State

    def state_dict(self, is_loading: bool = False) -> Any:
        """Return the state in Megatron's torch format, which its own optimizer loads; see :func:`megatron_state_dict`.

        ``is_loading`` has no effect, as state exists from the start.
        """
        return megatron_state_dict(self.optimizer)

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state of Megatron's torch format, its own or megascale's; see :func:`load_megatron_checkpoint`."""
        load_megatron_checkpoint(state_dict, self.optimizer)

    def sharded_state_dict(self, *_: Any, **__: Any) -> Any:
        """Raise UsageError: Megatron's torch_dist format is not supported.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "megascale neither writes nor reads Megatron's torch_dist format; save with --ckpt-format torch, or the "
            f"optimizer through megascale.checkpoint.Checkpointer, which reshards. {WAY_OUT}"
        )


class MainGrads:
    """The gradients that Megatron's DistributedDataParallel has accumulated and reduced: ``param.main_grad``.

    It is a :class:`megascale.grad_sync.reduced_grads.ReducedGrads`. A parameter without a main grad is updated from
    ``param.grad``.
    """

    compares_replicas = False
    """Megatron's own settings say which ranks' gradients are reduced, and when."""

    def main_grad(self, param: nn.Parameter) -> Tensor | None:
        """Return the live main grad of ``param``, in its shape."""
        grad: Tensor | None = getattr(param, "main_grad", None)
        return grad

    local_grad = main_grad
    """Every rank keeps all of it."""

    def finish(self) -> None:
        """Do nothing: Megatron's ``finish_grad_sync()`` has waited."""

    def zero_(self) -> None:
        """Do nothing: Megatron's ``zero_grad_buffer()`` zeroes."""


def get_megatron_optimizer(
    config: Any,
    model_chunks: Sequence[nn.Module],
    config_overrides: Any = None,
    use_gloo_process_groups: bool = True,
    pg_collection: Any = None,
    dump_param_to_param_group_map: str | None = None,
    *,
    groups: ParallelGroups | None = None,
) -> MegatronSurface:
    """Build megascale's optimizer with the arguments and param groups of Megatron's function of this name.

    One optimizer serves dense and expert parameters with one scale (Megatron: one scaler each). As in Megatron,
    the ``wd_mult`` of a group takes effect through its OptimizerParamScheduler.

    Args:
        config: Megatron's OptimizerConfig; see :func:`megascale.integrations.megatron_config.from_megatron_config`.
        model_chunks: wrapped in Megatron's DistributedDataParallel (whose main grads are used), or plain.
            ``use_distributed_optimizer`` needs plain ones: our DistributedOptimizer reduces gradients itself.
        config_overrides: Megatron's, by ParamKey. None: its standard ones, which exempt biases and norms from weight
            decay. They may set the keys that its OptimizerParamScheduler reads, and options of the inner optimizer.
        use_gloo_process_groups: no effect: no more groups are created.
        pg_collection: Megatron's ProcessGroupCollection, spanning the world. None: those of ``parallel_state``.
        dump_param_to_param_group_map: must be None.
        groups: used in place of ``pg_collection``.

    Raises:
        ArgumentError: on every rank alike, naming what is not supported, and the remedy.
    """
    from megatron.core.optimizer import _get_param_groups, get_standard_config_overrides
    from megatron.core.utils import unwrap_model

    ours = from_megatron_config(config)
    chunks = list(model_chunks)
    names = _names(unwrap_model(chunks))
    overrides = get_standard_config_overrides(config) if config_overrides is None else config_overrides
    options = build_inner_optimizer(ours, [{"params": [nn.Parameter(torch.zeros(0))]}]).defaults
    resolved = groups or parallel_groups(pg_collection)
    error = (
        _refusal(ours, chunks, group_size(resolved.data_parallel), dump_param_to_param_group_map)
        or params_refusal(names)
        or overrides_refusal(config, chunks, overrides, options)
    )
    raise_together(error, resolved.grad_stats)
    # In the order of Megatron's checkpoints: the dense optimizer's groups, then the expert optimizer's.
    made: list[dict[str, Any]] = _get_param_groups(chunks, config, overrides)
    inner = build_inner_optimizer(ours, sorted(made, key=lambda group: bool(group["is_expert_parallel"])))
    scaler = build_grad_scaler(ours)
    ours = effective_config(ours, inner, scaler)
    if ours.use_distributed_optimizer:
        return MegatronSurface(
            DistributedOptimizer(
                inner,
                ours,
                scaler,
                modules=chunks,
                groups=resolved,
                overlap_param_gather=ours.overlap_param_gather,
            )
        )
    return MegatronSurface(
        MixedPrecisionOptimizer(inner, ours, scaler, groups=resolved, named_parameters=names, grad_sync=MainGrads())
    )


def parallel_groups(pg_collection: Any = None) -> ParallelGroups:
    """Return Megatron's process groups as a ParallelGroups; `grad_stats` is the whole world, so that all ranks agree.

    Args:
        pg_collection: with ``dp_cp`` (or ``dp``), ``tp``, ``mp``, ``expt_dp`` and ``expt_tp`` (missing: ``tp``).
            None: those of ``parallel_state``.

    Raises:
        ArgumentError: for a collection that does not span the world, and for what Megatron calls weight_remat.
    """
    from megatron.core import parallel_state

    # From 0.19.2 on; without them, 0 and None. A collection need not be that of parallel_state.
    for kind, group in (("gtp", "gtp_remat"), ("expert_gtp", "expt_gtp_remat")):
        for owner, size in (
            ("parallel_state", getattr(parallel_state, f"get_{kind}_weight_remat_world_size", int)()),
            ("pg_collection", group_size(getattr(pg_collection, group, None))),
        ):
            if size > 1:
                raise ArgumentError(
                    f"Megatron's {owner} splits single weights over {size} ranks more ({kind}_weight_remat), which "
                    "megascale does not; set that size to 1"
                )
    if pg_collection is None:
        return ParallelGroups(
            data_parallel=parallel_state.get_data_parallel_group(with_context_parallel=True),
            tensor_parallel=parallel_state.get_tensor_model_parallel_group(),
            expert_data_parallel=parallel_state.get_expert_data_parallel_group(),
            expert_tensor_parallel=parallel_state.get_expert_tensor_parallel_group(),
            grad_stats=dist.group.WORLD,
        )
    data = getattr(pg_collection, "dp_cp", None) or pg_collection.dp
    spanned = group_size(data) * group_size(pg_collection.mp)
    if spanned != dist.get_world_size():
        raise ArgumentError(
            f"pg_collection spans {spanned} ranks of {dist.get_world_size()}; pass groups=ParallelGroups(...) whose "
            "grad_stats holds the ranks that step together"
        )
    return ParallelGroups(
        data_parallel=data,
        tensor_parallel=pg_collection.tp,
        expert_data_parallel=pg_collection.expt_dp,
        expert_tensor_parallel=getattr(pg_collection, "expt_tp", None) or pg_collection.tp,
        grad_stats=dist.group.WORLD,
    )


def _refusal(
    config: OptimizerConfig, chunks: Sequence[nn.Module], ranks: int, dump: str | None
) -> ArgumentError | None:
    """Return the error for bad arguments on this rank. ``ranks``: the number of data-parallel ranks."""
    if not any(param.requires_grad for chunk in chunks for param in chunk.parameters()):
        return ArgumentError(
            "model_chunks of this rank have no trainable parameter; leave one trainable in each pipeline stage"
        )
    kinds = {kind.__name__ for chunk in chunks for kind in type(chunk).__mro__}
    if "MimoModel" in kinds:
        return ArgumentError(
            "model_chunks hold a MimoModel, whose modules have process groups of their own; build one optimizer for "
            "each module with groups=, and put them into a ChainedOptimizer"
        )
    wrappings: list[Any] = [chunk.ddp_config for chunk in chunks if hasattr(chunk, "ddp_config")]
    if "FullyShardedDataParallelV2" in kinds or any(
        getattr(wrapping, "use_megatron_fsdp", False) for wrapping in wrappings
    ):
        return ArgumentError("model_chunks are wrapped in Megatron's FSDP; use torch's fully_shard, or its plain DDP")
    if any(wrapping.use_distributed_optimizer for wrapping in wrappings):
        return ArgumentError(
            "ddp_config.use_distributed_optimizer is True: its buffers hold gradient shards for Megatron's own "
            "DistributedOptimizer; set it False, or leave the model unwrapped and let config.use_distributed_optimizer "
            "choose megascale's"
        )
    if wrappings and config.use_distributed_optimizer:
        return ArgumentError(
            "config.use_distributed_optimizer is True and model_chunks are wrapped in Megatron's "
            "DistributedDataParallel, which would reduce every gradient a second time; leave the model unwrapped"
        )
    if ranks > 1 and not config.use_distributed_optimizer and not all(map(_reduces, chunks)):
        return ArgumentError(
            f"model_chunks have no wrapper that reduces gradients over the {ranks} data-parallel ranks; wrap them in "
            "Megatron's or torch's DistributedDataParallel, or set config.use_distributed_optimizer=True"
        )
    if dump is not None:
        return ArgumentError("dump_param_to_param_group_map is not done here; leave it None, and read param_groups")
    return None


def _reduces(chunk: nn.Module) -> bool:
    """Return whether a wrapper reduces the gradients of ``chunk`` over the data-parallel ranks."""
    wrapped = hasattr(chunk, "ddp_config") or any(isinstance(part, DistributedDataParallel) for part in chunk.modules())
    return wrapped or any(is_dtensor(param) for param in chunk.parameters())


def _names(chunks: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Return the unwrapped chunks' parameters by name, prefixed by the chunk's index if there are several."""
    prefixes = [f"{index}." if len(chunks) > 1 else "" for index in range(len(chunks))]
    return [
        (prefix + name, param)
        for prefix, chunk in zip(prefixes, chunks, strict=True)
        for name, param in chunk.named_parameters()
    ]
