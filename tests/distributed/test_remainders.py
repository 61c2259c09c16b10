"""Main params held as remainders: what a checkpoint holds of them, and a module that is moved."""

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megascale import MixedPrecisionOptimizer, OptimizerConfig
from megascale.checkpoint import Checkpointer
from megascale.checkpoint.manifest import Manifest
from megascale.errors import StateDictError
from tests.checkpoint_cases import message_of
from tests.distributed.test_checkpoint_table import Run
from tests.pool import RankPool
from tests.training import model


def _kinds(layout: str, directory: Path) -> tuple[str, list[str]]:
    """Save, and return the dtype of a saved main param, and the errors of loading what a checkpoint holds as it is."""
    run = Run(layout, 2, "remainders")
    model, optimizer = run.build(0)
    run.step(model, optimizer, 0)
    path = Checkpointer(directory).save(1, model, optimizer)
    saved = Manifest.read(path).metadata.state_dict_metadata["optimizer/main_params/weights.0"]
    assert isinstance(saved, TensorStorageMetadata)
    held = optimizer._pack(copy=False, decode=False)
    return str(saved.properties.dtype), [message_of(StateDictError, lambda: optimizer.load_state_dict(held))]


@pytest.mark.default("parameters", "replicated")
@pytest.mark.parametrize("layout", ["replicated", "elements", "parameters"])
def test_checkpoints_hold_remainders(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    """2 bytes a parameter. Without the weights beside them they are refused: they would be taken for numbers."""
    for dtype, [message] in ranks.run(2, _kinds, layout, tmp_path):
        assert dtype == "torch.int16"
        assert "is held as a remainder (torch.int16), which means nothing without the weights beside it" in message


def _moved() -> float:
    module = model(dtype=torch.bfloat16)
    fully_shard(module)
    config = OptimizerConfig(bf16=True, store_param_remainders=True)
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(module.named_parameters(), 1e-3), config)
    for step in range(3):
        optimizer.zero_grad()
        module(
            torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).bfloat16()
        ).float().square().mean().backward()
        optimizer.step()
    before = [main.to_local().clone() for _, main in optimizer.main_params() if isinstance(main, DTensor)]
    module.to("cpu")
    after = [main.to_local() for _, main in optimizer.main_params() if isinstance(main, DTensor)]
    return max((one - other).abs().max().item() for one, other in zip(before, after, strict=True) if one.numel())


def test_a_move_keeps_remainders(ranks: RankPool) -> None:
    """FSDP2's ``module.to()`` puts other tensors of the same elements into the DTensors: nobody wrote a weight."""
    assert ranks.run(1, _moved) == [0.0]
