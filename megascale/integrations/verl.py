"""verl: an engine in the place of its FSDP engine, for runs that have the key ``megascale`` in verl's config.

verl finds it through the entry point ``verl.plugins``, for "fsdp" and "fsdp2" on NVIDIA GPUs. Without the key in
``optim.override_optimizer_config`` verl gets its own engine. With it, this engine acts where a run asks for 16 bits:

- ``model_dtype: fp16`` or ``bf16``: weights in 16 bits with fp32 main params (FSDP2 only); fp16 has a loss scale;
- ``model_dtype: fp32``, ``mixed_precision.param_dtype: fp16``: :class:`megascale.amp.GradScaler` in the place of
  ShardedGradScaler, also for fused optimizers.

Checkpoints hold main params, scale and trackers, and load on any number of ranks.
"""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from verl.utils.device import get_device_name
from verl.workers.engine.base import BaseEngine, EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from megascale.amp import GradScaler
from megascale.builder import build_grad_scaler
from megascale.errors import ArgumentTypeError, UsageError
from megascale.integrations.named_options import NamedOptions
from megascale.integrations.replaced import replaced
from megascale.optimizer import MixedPrecisionOptimizer
from megascale.utils.dtypes import HALF_DTYPES

FOLDER = "megascale"
"""Inside of verl's folder of a step: weights, optimizer and scaler, by torch.distributed.checkpoint."""
KEY = "megascale"
"""Of verl's ``optim.override_optimizer_config``: asks for this engine, with a dict of options by name, or none."""

FROM_VERL = {
    "lr": "optim.lr",
    "weight_decay": "optim.weight_decay",
    "clip_grad": "optim.clip_grad",
    "adam_beta1": "optim.betas",
    "adam_beta2": "optim.betas",
    "optimizer": "optim.optimizer",
    "dtype": "model_dtype",
}
"""Fields that verl's configuration decides, and by which key."""

_GROWTH_INTERVAL = 400  # of verl's own scaler


Base: Any = object  # Subclasses also derive from an engine of verl's, which super() then finds.


class MegascaleEngine(Base):
    """A mixin before an FSDP engine of verl's: see :mod:`megascale.integrations.verl`."""

    verls: type[BaseEngine]
    """verl's own engine."""
    scaler: Any
    optimizer: Any

    def __new__(cls, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> Any:
        """Return an engine of verl's own class unless the config asks for this one: verl's registry knows no config."""
        if KEY in (getattr(optimizer_config, "override_optimizer_config", None) or {}):
            return super().__new__(cls)
        return cls.verls(model_config, engine_config, optimizer_config, checkpoint_config)

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        """Shard the model; with verl's own means, but for the scaler."""
        self._check_precision(module)
        sharded: nn.Module = super()._build_fsdp_module(module)
        if self.scaler is not None and not _has_16_bits(sharded):  # else _build_optimizer() sets it
            self.scaler = self._options().autocast_scaler(
                get_device_name(),
                "set model_dtype: fp16",
                growth_interval=_GROWTH_INTERVAL,
                process_group=self.get_data_parallel_group(),
            )
        return sharded

    def _build_optimizer(self, module: nn.Module) -> Any:
        """Build verl's own optimizer, and wrap it where weights have 16 bits."""
        given: Mapping[str, Any] = self.optimizer_config.override_optimizer_config
        theirs = {name: value for name, value in given.items() if name != KEY}  # torch's class does not take our key
        with replaced(self, "optimizer_config", replace(self.optimizer_config, override_optimizer_config=theirs)):
            optimizer = super()._build_optimizer(module)
        if not _has_16_bits(module):
            return optimizer
        own = self._options().config(module.parameters(), {})
        wrapped = MixedPrecisionOptimizer(
            optimizer, own, build_grad_scaler(own), named_parameters=module.named_parameters()
        )
        self.scaler = SimpleNamespace(scale=wrapped.scale_loss)  # verl multiplies losses by it, no more
        return wrapped

    def optimizer_step(self) -> float:
        """Step, or skip on all ranks alike; return the norm of the unscaled gradients before clipping."""
        if not isinstance(self.optimizer, MixedPrecisionOptimizer):
            norm: float = super().optimizer_step()
            return norm
        measured = self.optimizer.clip_grad_norm_(self.optimizer_config.clip_grad)
        self.optimizer.step()
        if self._qat_enabled:
            from verl.utils.qat.core import invalidate_all_scales

            invalidate_all_scales(self.module)
        return measured.item()

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move weights, optimizer or gradients, as verl does around rollouts; main params go with the optimizer."""
        is_ours = optimizer and isinstance(self.optimizer, MixedPrecisionOptimizer)
        if model and isinstance(self.optimizer, MixedPrecisionOptimizer):
            self.optimizer.finish_param_gather()
        super().to(device, model=model, optimizer=optimizer and not is_ours, grad=grad)
        if is_ours and device == get_device_name():
            self.optimizer.reload()
        elif is_ours:
            self.optimizer.offload()

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Save as verl does; the optimizer, with the scaler and the weights that belong to it, for any world size."""
        if not self._is_ours() or not self.checkpoint_manager.should_save_optimizer:
            super().save_checkpoint(local_path, *args, **kwargs)
            return
        with _without(self.checkpoint_manager, "checkpoint_save_contents", "optimizer"):
            super().save_checkpoint(local_path, *args, **kwargs)
        weights, optimizer = get_state_dict(self.module, self.optimizer)
        dcp_save({"model": weights, "optimizer": optimizer, **self._scaler_state()}, checkpoint_id=_folder(local_path))
        dist.barrier()

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Load what :meth:`save_checkpoint` has written, on any number of ranks, or what verl's own engine has.

        On another number of ranks each keeps its random state: verl's files of it are one a rank.
        """
        has_own = local_path is not None and Path(_folder(local_path)).is_dir()
        if not (self._is_ours() and has_own and self.checkpoint_manager.should_load_optimizer):
            super().load_checkpoint(local_path, *args, **kwargs)
            return
        with replaced(self, "_is_offload_optimizer", False):
            self.to(get_device_name(), model=self._is_offload_param, grad=False)
            self._load(local_path, *args, **kwargs)
        if self._is_offload_optimizer:
            self.to("cpu", model=False, grad=False)
        dist.barrier()

    def _load(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Load weights, optimizer and scaler from our folder, and what else there is from verl's files."""
        weights, optimizer = get_state_dict(self.module, self.optimizer)
        state = {"model": weights, "optimizer": optimizer, **self._scaler_state()}
        dcp_load(state, checkpoint_id=_folder(local_path))
        # Weights first: set_state_dict() writes them last, and a write of weights resets remainders.
        set_model_state_dict(self.module, weights)
        set_optimizer_state_dict(self.module, self.optimizer, optimizer)
        if "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])
        manager = self.checkpoint_manager
        if Path(local_path, _extra(dist.get_world_size(), dist.get_rank())).exists():
            with _without(manager, "checkpoint_load_contents", "model", "optimizer"):
                super().load_checkpoint(local_path, *args, **kwargs)
        elif manager.should_load_extra and self.lr_scheduler is not None:
            files = sorted(Path(local_path).glob(_extra("*", 0)))
            saved = torch.load(files[0], weights_only=False)["lr_scheduler"] if files else None
            if saved is not None:
                self.lr_scheduler.load_state_dict(saved)

    def _options(self) -> NamedOptions:
        given = self.optimizer_config.override_optimizer_config[KEY]
        if given is not None and not isinstance(given, Mapping):
            raise ArgumentTypeError(
                f"optim.override_optimizer_config.{KEY} must be a dict of options, such as {{}}, got {given!r}"
            )
        return NamedOptions.of(given or {}, "verl's configuration", FROM_VERL)

    def _is_ours(self) -> bool:
        return isinstance(self.optimizer, MixedPrecisionOptimizer) or isinstance(self.scaler, GradScaler)

    def _scaler_state(self) -> dict[str, Any]:
        """Return the state of a scaler that is not the optimizer's own."""
        return {"scaler": self.scaler.state_dict()} if isinstance(self.scaler, GradScaler) else {}

    def _check_precision(self, module: nn.Module) -> None:
        """Raise UsageError for weights in 16 bits under FSDP1, or in another format than that of the forward."""
        held = {param.dtype for param in module.parameters() if param.requires_grad} & set(HALF_DTYPES)
        if not held or self.engine_config.forward_only:
            return
        if self.engine_config.strategy != "fsdp2":
            raise UsageError(
                f"strategy: {self.engine_config.strategy} flattens weights in {held.pop()}, to which main params "
                "cannot be added: set strategy: fsdp2, or model_dtype: fp32"
            )
        from verl.utils.torch_dtypes import PrecisionType

        chosen = PrecisionType.to_dtype((self.engine_config.mixed_precision or {}).get("param_dtype", "bf16"))
        if held != {chosen}:
            raise UsageError(
                f"model_dtype gives weights in {(held - {chosen}).pop()}, and mixed_precision.param_dtype computes in "
                f"{chosen}: set both to the same, or model_dtype: fp32"
            )


class MegascaleLMEngine(MegascaleEngine, FSDPEngineWithLMHead):
    """verl's actor engine; see :class:`MegascaleEngine`."""

    verls = FSDPEngineWithLMHead


class MegascaleValueEngine(MegascaleEngine, FSDPEngineWithValueHead):
    """verl's critic engine; see :class:`MegascaleEngine`."""

    verls = FSDPEngineWithValueHead


def _has_16_bits(module: nn.Module) -> bool:
    return any(param.dtype in HALF_DTYPES for param in module.parameters())


def _without(manager: Any, contents: str, *kinds: str) -> AbstractContextManager[None]:
    """Return a context in which verl's checkpoint manager leaves out some of what it would save or load."""
    return replaced(manager, contents, [kind for kind in getattr(manager, contents) if kind not in kinds])


def _folder(local_path: str) -> str:
    return os.path.join(local_path, FOLDER)


def _extra(world_size: int | str, rank: int) -> str:
    """Return the name of verl's file of the schedule and a rank's random state."""
    return f"extra_state_world_size_{world_size}_rank_{rank}.pt"


for _model_type, _engine in (("language_model", MegascaleLMEngine), ("value_model", MegascaleValueEngine)):
    # verl looks a vendor's engine up before that of a kind of device.
    EngineRegistry.register(model_type=_model_type, backend=["fsdp", "fsdp2"], device="cuda", vendor="nvidia")(_engine)
