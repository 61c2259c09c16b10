"""fp16 training under FSDP2 (``fully_shard``), whose parameters are DTensors over the data-parallel ranks."""

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megascale import MixedPrecisionOptimizer, OptimizerConfig
from tests.pool import RankPool
from tests.training import model


def _data(step: int, rank: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(100 * step + rank)).half()


def _moved() -> float:
    module = model(dtype=torch.bfloat16)
    fully_shard(module)
    config = OptimizerConfig(bf16=True, store_param_remainders=True)
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(module.named_parameters(), 1e-3), config)
    for step in range(3):
        optimizer.zero_grad()
        module(_data(step, 0).bfloat16()).float().square().mean().backward()
        optimizer.step()
    before = [main.to_local().clone() for _, main in optimizer.main_params() if isinstance(main, DTensor)]
    module.to("cpu")
    after = [main.to_local() for _, main in optimizer.main_params() if isinstance(main, DTensor)]
    return max((one - other).abs().max().item() for one, other in zip(before, after, strict=True) if one.numel())


def test_a_move_keeps_remainders(ranks: RankPool) -> None:
    """FSDP2's ``module.to()`` puts other tensors of the same elements into the DTensors: nobody wrote a weight."""
    assert ranks.run(1, _moved) == [0.0]
