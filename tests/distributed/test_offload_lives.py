"""Random lives on two ranks, with main params in host memory, have the bits of the same lives without."""

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.offload_lives import ACTIONS, Life, first_difference
from tests.pool import RankPool

THERE: dict[str, Any] = {"optimizer_cpu_offload": True}
WAYS = [
    THERE | {"overlap_cpu_optimizer_d2h_h2d": True},
    THERE | {"optimizer_offload_fraction": 0.5},
]
HELD: dict[str, Any] = {"store_param_remainders": True}
COMPACT = HELD | {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}
LENGTH = 10


def _life(held: str, stored: dict[str, Any], seed: int, folder: Path) -> str:
    actions = random.Random(seed).choices(ACTIONS, k=LENGTH)
    return first_difference(held, stored, WAYS, actions, folder)


def _errors(held: str, folder: Path) -> list[str]:
    life = Life(held, WAYS[0], folder)
    found = [life.act(action, at) for at, action in enumerate(["step", *ACTIONS, *ACTIONS])]
    return [one for one in found if isinstance(one, str)]


HOLDERS = ("synced", "elements", "parameters", "fsdp2")


@pytest.mark.default("synced")
@pytest.mark.parametrize("held", HOLDERS)
def test_every_action_is_one(ranks: RankPool, held: str, tmp_path: Path) -> None:
    """No life is one of errors only: each action works among the others."""
    assert ranks.run(2, _errors, held, tmp_path) == [[]] * 2


@pytest.mark.default("parameters-0")
@pytest.mark.parametrize(("held", "seed"), list(product(HOLDERS, range(12))))
def test_random_lives(ranks: RankPool, held: str, seed: int, tmp_path: Path) -> None:
    """Each way of holding parameters, with a seed's actions: loads and checkpoints among them."""
    stored: dict[str, Any] = ({}, HELD if held == "fsdp2" else COMPACT)[seed % 2]  # groups of 32 do not fit its parts
    assert ranks.run(2, _life, held, stored, seed, tmp_path) == [""] * 2
