"""Main params held as remainders on several ranks: the same bits at any number of ranks, in checkpoints too."""

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megascale.checkpoint import Checkpointer
from megascale.checkpoint.manifest import Manifest
from megascale.errors import StateDictError
from tests.checkpoint_cases import differences, message_of, state_of
from tests.distributed.test_compact_shards import build, train
from tests.pool import RankPool

HELD: dict[str, Any] = {"store_param_remainders": True}


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
