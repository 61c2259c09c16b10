"""What a run really holds, sends and writes: measured on ranks, to compare estimates with."""

import functools
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
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
from megascale.estimation.sizes import PRECISIONS
from megascale.grad_sync import GradSync
from megascale.utils.nests import tensors_in
from tests.training import Bag

NUMELS = (300_000, 1_000, 250_000, 7, 123_457, 4_096, 64, 500_000, 333_333, 100, 16_000, 3)
MATRICES = ((500, 600), (1_000,), (250, 1_000), (7,), (351, 353), (64, 64), (64,), (1_000, 500), (3, 100), (3,))
"""Shapes of a model for Muon."""
BUCKET = 400_000
TRAINING = "training"
INNER: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(m.named_parameters(), lr=1e-3),
    "adam": lambda m: torch.optim.Adam(m.named_parameters(), lr=1e-3),
    "amsgrad": lambda m: torch.optim.AdamW(m.named_parameters(), lr=1e-3, amsgrad=True),
    "sgd": lambda m: torch.optim.SGD(m.named_parameters(), lr=1e-3),
    "momentum": lambda m: torch.optim.SGD(m.named_parameters(), lr=1e-3, momentum=0.9),
    "lion": lambda m: Lion(m.named_parameters(), lr=1e-3),
}


class Measured(NamedTuple):
    """One rank's bytes: by kind, at the peak, in a checkpoint; calls and bytes by operation."""

    held: dict[str, int]
    peak: int
    checkpoint: int
    calls: dict[str, int]
    payload: dict[str, int]


class _Given(torch.autograd.Function):
    """A loss of 0 whose gradient is 0.5, made when backward reaches the parameter."""

    @staticmethod
    def forward(ctx: Any, param: Tensor) -> Tensor:
        ctx.like = param
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> Tensor:
        return torch.full_like(ctx.like, 0.5)


class GivenGrads(Bag):
    """A model without activations."""

    def forward(self) -> Tensor:
        """Return a loss."""
        loss = torch.zeros((), requires_grad=True)
        for param in self.params:
            loss = loss + _Given.apply(param)
        return loss


def shapes_for(optimizer: str) -> list[tuple[int, ...]]:
    """Return the shapes of the model that is measured with an optimizer."""
    return list(MATRICES) if optimizer == "muon" else [(numel,) for numel in NUMELS]


def measure(precision: str, sharding: str, optimizer: str, options: dict[str, Any], folder: str) -> Measured:
    """Train two steps on this rank, and return what they held, sent and wrote."""
    gc.collect()  # the profiler would count what others free
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        module, wrapped, forward = _build(precision, sharding, optimizer, options)
        # oneDNN's products have memory of their own, which depends on the processor.
        with torch.backends.mkldnn.flags(enabled=False), _counted() as (calls, payload), _training():
            for _ in range(2):
                calls.clear()
                payload.clear()
                wrapped.zero_grad()
                wrapped.scale_loss(forward()).backward()
                for sync in _syncs(wrapped):
                    sync.finish()
                held = _held(module, wrapped, forward)
                wrapped.step()
    path = save(folder, 1, module, wrapped)
    checkpoint = sum(file.stat().st_size for file in path.iterdir())
    return Measured(held, _peak(profile) + held["messages"], checkpoint, dict(calls), dict(payload))


def _training() -> torch.profiler.record_function:
    return torch.profiler.record_function(TRAINING)


def _syncs(wrapped: MixedPrecisionOptimizer | ChainedOptimizer) -> list[Any]:
    """Return the GradSync of the optimizer, or of each of a chain, where there is one."""
    members = wrapped.optimizers if isinstance(wrapped, ChainedOptimizer) else [wrapped]
    found = [getattr(member, "grad_sync", None) for member in members]
    return [sync for sync in found if sync is not None]


def _build(
    precision: str, sharding: str, optimizer: str, options: dict[str, Any]
) -> tuple[nn.Module, MixedPrecisionOptimizer | ChainedOptimizer, Callable[[], Tensor]]:
    dtype = PRECISIONS[precision]
    module = GivenGrads(torch.zeros(shape, dtype=dtype) for shape in shapes_for(optimizer))
    of_config = ("exp_avg_dtype", "exp_avg_sq_dtype", "store_param_remainders")
    state = {key: value for key, value in options.items() if key in of_config}
    grads = {key: value for key, value in options.items() if key not in state}
    config = OptimizerConfig(fp16=precision == "fp16", bf16=precision == "bf16", **state)
    if optimizer == "muon":
        config = replace(
            config,
            optimizer="muon",
            lr=1e-3,
            muon_ns_dtype=torch.bfloat16,
            use_distributed_optimizer=sharding == "distributed",
        )
        return module, build_optimizer(config, module, bucket_numel=BUCKET), module
    inner, scaler = INNER[optimizer](module), DynamicGradScaler()
    if sharding == "distributed":
        sharded = DistributedOptimizer(inner, config, scaler, modules=module, bucket_numel=BUCKET, **grads)
        return module, sharded, module
    if sharding == "grad_sync":
        sync = GradSync(module.named_parameters(), bucket_numel=BUCKET, **grads)
        synced = MixedPrecisionOptimizer(inner, config, scaler, grad_sync=sync)
        synced.grad_sync = sync  # type: ignore[attr-defined]
        return module, synced, module
    forward: Callable[[], Tensor] = module
    if dist.get_world_size() > 1:
        # What its first broadcast takes is freed in a thread that the profiler does not see.
        forward = DistributedDataParallel(module, init_sync=False)
    return module, MixedPrecisionOptimizer(inner, config, scaler), forward


def _held(module: nn.Module, wrapped: MixedPrecisionOptimizer | ChainedOptimizer, forward: Any) -> dict[str, int]:
    params = list(module.parameters())
    syncs = _syncs(wrapped)
    own = {param.untyped_storage().data_ptr() for param in params}
    parts = wrapped.optimizers if isinstance(wrapped, ChainedOptimizer) else [wrapped]
    state = [value for part in parts for value in tensors_in(part.optimizer.state)]
    memories = [param.memory for part in parts for param in part.live_state().main_params]
    mains = [memory for memory in memories if memory.untyped_storage().data_ptr() not in own]
    messages = [sync._thread._memory for sync in syncs if sync._thread._memory is not None]
    return {
        "model params": storage_bytes(params),
        "model buffers": 0,
        "gradients": storage_bytes(param.grad for param in params if param.grad is not None),
        "main grads": storage_bytes(bucket.memory.flat for sync in syncs for bucket in sync.buckets),
        "main params": storage_bytes(mains),
        "moments": storage_bytes(state),
        "messages": storage_bytes(messages),
    }


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of ``tensors``, each counted once."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(nbytes for address, nbytes in found.items() if address)


def _peak(profile: torch.profiler.profile) -> int:
    """Return how far torch's allocator rose during training in this thread, which is not that of messages."""
    held = highest = 0
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    [start] = [event.start_ns() for event in events if event.name() == TRAINING]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes() if event.name() == "[memory]" else 0
        highest = max(highest, held) if event.start_ns() >= start else highest
    return highest


@contextmanager
def _counted() -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Count calls and bytes given to all_reduce, and to the operations that send messages, from whatever thread."""
    calls: Counter[str] = Counter()
    payload: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in ("all_reduce", "isend")}

    def spy(name: str, original: Callable[..., Any], tensor: Tensor, *args: Any, **options: Any) -> Any:
        if tensor.nbytes:  # else a probe, which asks whether a rank is there
            calls[name] += 1
            payload[name] += tensor.nbytes
        return original(tensor, *args, **options)

    for name, original in originals.items():
        setattr(dist, name, functools.partial(spy, name, original))
    try:
        yield calls, payload
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
