"""8-bit moments on several ranks: the same blocks and bits at any number of ranks, in checkpoints too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale import DistributedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.checkpoint import Checkpointer
from tests.checkpoint_cases import differences, state_of
from tests.pool import RankPool

CODES: dict[str, Any] = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}


class Model(nn.Module):
    """Tensors of 0 to 1,480 elements: shards cut the larger ones, and some have a last group that is not whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 37)
        self.wide = nn.Linear(37, 40)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(40, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return shape [..., 1]."""
        out: Tensor = self.head(self.wide(self.first(x).relu()).relu() * self.scale)
        return out + self.empty.sum()


def build(sharding: str, seed: int = 0, dtypes: dict[str, Any] = CODES) -> tuple[nn.Module, MixedPrecisionOptimizer]:
    """Return a model and its optimizer. ``sharding``: a value of DistributedOptimizer's, or "replicated"."""
    torch.manual_seed(seed)
    model = Model().half()
    inner = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    config, scaler = OptimizerConfig(fp16=True, **dtypes), DynamicGradScaler(2.0**10)
    if sharding == "replicated":
        return model, MixedPrecisionOptimizer(inner, config, scaler)
    return model, DistributedOptimizer(inner, config, scaler, modules=model, bucket_numel=300, shard=sharding)


def train(model: nn.Module, optimizer: MixedPrecisionOptimizer, first: int, last: int) -> dict[str, Any]:
    """Steps on the same samples on all ranks, one of which overflows. Returns everything."""
    for step in range(first, last):
        inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).half()
        optimizer.zero_grad()
        loss = model(inputs).float().square().mean()
        optimizer.scale_loss(loss * (torch.inf if step == 1 else 1.0)).backward()
        optimizer.step()
    return state_of(model, optimizer)


def _trained(sharding: str, last: int) -> dict[str, Any]:
    return train(*build(sharding), 0, last)


def _saved(sharding: str, directory: Path) -> dict[str, Any]:
    model, optimizer = build(sharding)
    state = train(model, optimizer, 0, 3)
    Checkpointer(directory).save(3, model, optimizer)
    return state


def _loaded(sharding: str, directory: Path, last: int, dtypes: dict[str, Any]) -> tuple[Any, Any]:
    model, optimizer = build(sharding, 1, dtypes)
    Checkpointer(directory).load(model, optimizer)
    return state_of(model, optimizer), train(model, optimizer, 3, last)


@pytest.mark.parametrize(
    ("sharding", "sizes"),
    [
        ("elements", (2,)),
        pytest.param("elements", (1, 4), marks=pytest.mark.slow),
        pytest.param("parameters", (2, 4), marks=pytest.mark.slow),
    ],
)
def test_blocks_do_not_depend_on_ranks(ranks: RankPool, sharding: str, sizes: tuple[int, ...]) -> None:
    """Shards train the same codes, scales and main params as one replica does: no shard cuts a group."""
    [alone] = ranks.run(1, _trained, "replicated", 5)
    assert alone["optimizer"]["optimizer"]["state"]["wide.weight"]["exp_avg_sq"].dtype == torch.uint8
    for size in sizes:
        for state in ranks.run(size, _trained, sharding, 5):
            assert differences(alone, state) == []


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        (("elements", 2), ("elements", 3)),
        *(
            pytest.param(("elements", n), (sharding, m), marks=pytest.mark.release)
            for n in (1, 2, 3, 4)
            for sharding in ("elements", "parameters")
            for m in (1, 2, 4)
        ),
        pytest.param(("parameters", 2), ("replicated", 1), marks=pytest.mark.slow),
        pytest.param(("replicated", 1), ("elements", 4), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_checkpoints_travel(ranks: RankPool, tmp_path: Path, saving: tuple[str, int], loading: tuple[str, int]) -> None:
    """What one number of ranks saved another loads bit for bit, and goes on as one rank that has never stopped."""
    saved = ranks.run(saving[1], _saved, saving[0], tmp_path)[0]
    [alone] = ranks.run(1, _loaded, "replicated", tmp_path, 5, CODES)
    for found, went_on in ranks.run(loading[1], _loaded, loading[0], tmp_path, 5, CODES):
        assert differences(saved, found) == []
        if loading[1] != 3:  # thirds of equal gradients do not add up to them exactly
            assert differences(alone[1], went_on) == []


def test_checkpoints_become_fp32(ranks: RankPool, tmp_path: Path) -> None:
    """A run with fp32 moments reads the same values at any number of ranks, and the other way round."""
    ranks.run(2, _saved, "elements", tmp_path)
    [(alone, _)] = ranks.run(1, _loaded, "replicated", tmp_path, 3, {})
    entry = alone["optimizer"]["optimizer"]["state"]["wide.weight"]
    assert entry["exp_avg"].dtype == entry["exp_avg_sq"].dtype == torch.float32
    assert set(entry) == {"step", "exp_avg", "exp_avg_sq"}
    for state, _ in ranks.run(3, _loaded, "elements", tmp_path, 3, {}):
        assert differences(alone, state) == []
