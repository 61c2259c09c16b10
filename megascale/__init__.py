"""megascale: mixed precision optimizers for training on many ranks.

Five names are enough for most loops:

- ``cast_model(model, torch.float16)`` casts parameters, and leaves buffers in fp32.
- ``MixedPrecisionOptimizer(optimizer, grad_scaler=..., clip_grad=1.0)`` wraps a torch optimizer, alone, under DDP or
  FSDP2; ``scale_loss(loss).backward()`` goes before its ``step()``.
- ``DistributedOptimizer`` is the same with main params and optimizer state sharded over ranks.
- ``DynamicGradScaler()`` is the loss scale that fp16 needs; bf16 needs none.
- ``OptimizerConfig`` has the rest: 8-bit moments, remainders, backends, offload.
"""

from megascale.utils.supported_torch import explained

try:
    from megascale.builder import build_optimizer
    from megascale.casting import cast_model
    from megascale.chained import ChainedOptimizer
    from megascale.config import OptimizerConfig
    from megascale.distributed_optimizer import DistributedOptimizer
    from megascale.estimation import estimate
    from megascale.grad_scaler import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler
    from megascale.lion import Lion
    from megascale.optimizer import MixedPrecisionOptimizer, StepResult
    from megascale.parallel import ParallelGroups
    from megascale.step_graph import StepGraph
    from megascale.utils import gloo_threads as gloo_threads  # so that processes that use gloo also exit cleanly
    from megascale.version import VERSION
except (ImportError, AttributeError) as error:
    raise explained(error)  # noqa: B904  # it has its cause

__version__ = VERSION

__all__ = [
    "ChainedOptimizer",
    "ConstantGradScaler",
    "DistributedOptimizer",
    "DynamicGradScaler",
    "Lion",
    "MegatronGradScaler",
    "MixedPrecisionOptimizer",
    "OptimizerConfig",
    "ParallelGroups",
    "StepGraph",
    "StepResult",
    "build_optimizer",
    "cast_model",
    "estimate",
]
