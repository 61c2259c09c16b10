"""What a run really holds and writes: measured on ranks, to compare estimates with."""

import gc
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megascale import (
    ChainedOptimizer,
    DistributedOptimizer,
    DynamicGradScaler,
    Lion,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    build_optimizer,
)
from megascale.checkpoint import save
from megascale.estimation import OF_CONFIG, PRECISIONS
from megascale.grad_sync import GradSync
from megascale.utils.dtensors import to_local
from megascale.utils.nests import tensors_in
from tests.meshes import mesh_of
from tests.training import Bag

MATRICES = ((500, 600), (1_000,), (250, 1_000), (7,), (352, 351), (64, 64), (64,), (1_000, 500), (3, 100), (3,))
"""Shapes of the model that is measured: 1,178,926 elements."""
BUCKET = 400_000
INNER: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(m.named_parameters(), lr=1e-3),
    "adam": lambda m: torch.optim.Adam(m.named_parameters(), lr=1e-3),
    "amsgrad": lambda m: torch.optim.AdamW(m.named_parameters(), lr=1e-3, amsgrad=True),
    "sgd": lambda m: torch.optim.SGD(m.named_parameters(), lr=1e-3),
    "momentum": lambda m: torch.optim.SGD(m.named_parameters(), lr=1e-3, momentum=0.9),
    "lion": lambda m: Lion(m.named_parameters(), lr=1e-3),
}


class Measured(NamedTuple):
    """One rank's bytes by kind, and those of a checkpoint's files."""

    held: dict[str, int]
    checkpoint: int


class GivenGrads(Bag):
    """A model without activations to speak of."""

    def forward(self) -> Tensor:
        """Return a loss, shape []."""
        return torch.stack([param.sum() for param in self.params]).sum()


def measure(
    shapes: tuple[tuple[int, ...], ...],
    precision: str,
    sharding: str,
    optimizer: str,
    options: dict[str, Any],
    folder: str,
) -> Measured:
    """Train two steps on this rank, and return what they held and wrote."""
    gc.collect()
    module, wrapped, forward = _build(shapes, precision, sharding, optimizer, options)
    for _ in range(2):
        wrapped.zero_grad()
        wrapped.scale_loss(forward()).backward()
        for sync in _syncs(wrapped):
            sync.finish()
        held = _held(module, wrapped)
        wrapped.step()
    path = save(folder, 1, module, wrapped)
    return Measured(held, sum(file.stat().st_size for file in path.iterdir()))


def _syncs(wrapped: MixedPrecisionOptimizer | ChainedOptimizer) -> list[Any]:
    """Return the GradSync of the optimizer, or of each of a chain, where there is one."""
    found = [getattr(one, "grad_sync", None) for one in wrapped._parts()]
    return [sync for sync in found if sync is not None]


def _build(
    shapes: tuple[tuple[int, ...], ...], precision: str, sharding: str, optimizer: str, options: dict[str, Any]
) -> tuple[nn.Module, MixedPrecisionOptimizer | ChainedOptimizer, Callable[[], Tensor]]:
    module = GivenGrads(torch.zeros(shape, dtype=PRECISIONS[precision]) for shape in shapes)
    state = {key: value for key, value in options.items() if key in OF_CONFIG}
    grads = {key: value for key, value in options.items() if key not in state}
    config = OptimizerConfig(fp16=precision == "fp16", bf16=precision == "bf16", **state)
    if optimizer == "muon":
        config = replace(config, optimizer="muon", lr=1e-3, muon_ns_dtype=torch.bfloat16)
        config = replace(config, use_distributed_optimizer=sharding == "zero1")
        return module, build_optimizer(config, module, bucket_numel=BUCKET), module
    if sharding == "fsdp2":
        fully_shard(module, mesh=mesh_of((dist.get_world_size(),), ("dp",)))
    inner, scaler = INNER[optimizer](module), DynamicGradScaler()
    if sharding == "zero1":
        sharded = DistributedOptimizer(inner, config, scaler, modules=module, bucket_numel=BUCKET, **grads)
        return module, sharded, module
    if sharding == "grad_sync":
        sync = GradSync(module.named_parameters(), bucket_numel=BUCKET, **grads)
        synced = MixedPrecisionOptimizer(inner, config, scaler, grad_sync=sync)
        synced.grad_sync = sync  # type: ignore[attr-defined]
        return module, synced, module
    forward: Callable[[], Tensor] = module
    if sharding == "ddp" and dist.get_world_size() > 1:
        forward = DistributedDataParallel(module)
    return module, MixedPrecisionOptimizer(inner, config, scaler), forward


def _held(module: nn.Module, wrapped: MixedPrecisionOptimizer | ChainedOptimizer) -> dict[str, int]:
    params = [to_local(param) for param in module.parameters()]
    weights = {param.untyped_storage().data_ptr() for param in params}
    state = [to_local(value) for one in wrapped._parts() for value in tensors_in(one._inner.state)]
    memories = [to_local(param.memory) for one in wrapped._parts() for param in one._live_state().main_params]
    return {
        "model params": storage_bytes(params),
        "gradients": storage_bytes(to_local(p.grad) for p in module.parameters() if p.grad is not None),
        "main grads": storage_bytes(bucket.memory.flat for sync in _syncs(wrapped) for bucket in sync.buckets),
        "main params": storage_bytes(one for one in memories if one.untyped_storage().data_ptr() not in weights),
        "moments": storage_bytes(state),
    }


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of ``tensors``, each counted once."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(nbytes for address, nbytes in found.items() if address)
