"""Main params held as remainders on several ranks: the same bits at any number of ranks, in checkpoints too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.fsdp import fully_shard

from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.checkpoint import Checkpointer
from megascale.checkpoint.manifest import Manifest
from megascale.errors import StateDictError
from megascale.grad_sync import GradSync
from tests.checkpoint_cases import differences, message_of, state_of
from tests.distributed.test_compact_shards import CODES, build, train
from tests.meshes import mesh_of
from tests.pool import RankPool
from tests.training import same_bits

HELD: dict[str, Any] = {"store_param_remainders": True}


def _trained(sharding: str, last: int, options: dict[str, Any]) -> dict[str, Any]:
    return train(*build(sharding, dtypes=options), 0, last)


def _saved(sharding: str, directory: Path, options: dict[str, Any]) -> dict[str, Any]:
    model, optimizer = build(sharding, dtypes=options)
    state = train(model, optimizer, 0, 3)
    Checkpointer(directory).save(3, model, optimizer)
    return state


def _loaded(sharding: str, directory: Path, last: int, options: dict[str, Any]) -> tuple[Any, Any]:
    model, optimizer = build(sharding, 1, options)
    Checkpointer(directory).load(model, optimizer)
    return state_of(model, optimizer), train(model, optimizer, 3, last)


@pytest.mark.parametrize(
    ("sharding", "sizes", "options"),
    [
        ("elements", (2,), HELD),
        pytest.param("elements", (1, 4), HELD, marks=pytest.mark.slow),
        pytest.param("parameters", (2, 4), HELD, marks=pytest.mark.slow),
        pytest.param("elements", (2, 4), HELD | CODES, marks=pytest.mark.slow),
        pytest.param("parameters", (2, 4), HELD | CODES, marks=pytest.mark.slow),
    ],
)
def test_main_params_do_not_depend_on_ranks(
    ranks: RankPool, sharding: str, sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    """Shards train the same main params as one replica does, with a step that overflows."""
    [alone] = ranks.run(1, _trained, "replicated", 5, options)
    for size in sizes:
        for state in ranks.run(size, _trained, sharding, 5, options):
            assert differences(alone, state) == []


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        (("elements", 2), ("parameters", 1)),
        *(
            pytest.param((sharding, n), (other, m), marks=pytest.mark.slow)
            for sharding, n in (("elements", 1), ("elements", 4), ("parameters", 3))
            for other, m in (("elements", 2), ("parameters", 4), ("replicated", 1))
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("before", [HELD, {}], ids=["remainders", "fp32"])
def test_checkpoints_travel(
    ranks: RankPool, tmp_path: Path, saving: tuple[str, int], loading: tuple[str, int], before: dict[str, Any]
) -> None:
    """What one number of ranks saved another loads bit for bit, with remainders and without, and goes on alike."""
    saved = ranks.run(saving[1], _saved, saving[0], tmp_path, before)[0]
    [(_, alone)] = ranks.run(1, _loaded, "replicated", tmp_path, 5, HELD)
    for found, went_on in ranks.run(loading[1], _loaded, loading[0], tmp_path, 5, HELD):
        assert differences(saved, found) == []
        if loading[1] != 3:  # thirds of equal gradients do not add up to them exactly
            assert differences(alone, went_on) == []


def _kinds(sharding: str, directory: Path) -> tuple[str, list[str]]:
    """Save, and return the dtype of a saved main param, and the errors of loading what a checkpoint holds as it is."""
    model, optimizer = build(sharding, dtypes=HELD)
    train(model, optimizer, 0, 1)
    path = Checkpointer(directory).save(1, model, optimizer)
    saved = Manifest.read(path).metadata.state_dict_metadata["optimizer/main_params/wide.weight"]
    assert isinstance(saved, TensorStorageMetadata)
    held = optimizer.pack(copy=False, decode=False)
    return str(saved.properties.dtype), [message_of(StateDictError, lambda: optimizer.load_state_dict(held))]


@pytest.mark.default("parameters", "replicated")
@pytest.mark.parametrize("sharding", ["replicated", "elements", "parameters"])
def test_checkpoints_hold_remainders(ranks: RankPool, tmp_path: Path, sharding: str) -> None:
    """2 bytes a parameter. Without the weights beside them they are refused: they would be taken for numbers."""
    for dtype, [message] in ranks.run(2, _kinds, sharding, tmp_path):
        assert dtype == "torch.int16"
        assert "is held as a remainder (torch.int16), which means nothing without the weights beside it" in message


def _on_ranks(kind: str, options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).half()
    if kind == "fsdp2":
        fully_shard(module, mesh=mesh_of((torch.distributed.get_world_size(),), ("dp",)))
    sync = GradSync(module.named_parameters(), bucket_numel=20) if kind == "grad_sync" else None
    inner = torch.optim.AdamW(module.named_parameters(), lr=1e-2)
    config, scaler = OptimizerConfig(fp16=True, **options), DynamicGradScaler(2.0**6)
    optimizer = MixedPrecisionOptimizer(inner, config, scaler, grad_sync=sync)
    for step in range(4):
        optimizer.zero_grad()
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).half()
        optimizer.scale_loss(module(batch).float().square().mean() * (torch.inf if step == 1 else 1.0)).backward()
        optimizer.step()
    whole = {name: getattr(main, "full_tensor", lambda main=main: main)() for name, main in optimizer.main_params()}
    weights = {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in module.named_parameters()}
    return whole, weights


@pytest.mark.parametrize("kind", ["grad_sync", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_other_layouts_hold_them_too(ranks: RankPool, kind: str) -> None:
    """GradSync and FSDP2: the main params of the same run with fp32 ones."""
    expected = ranks.run(2, _on_ranks, kind, {})
    for (mains, weights), (theirs, others) in zip(ranks.run(2, _on_ranks, kind, HELD), expected, strict=True):
        assert same_bits(weights, others)
        assert same_bits(mains, theirs)
