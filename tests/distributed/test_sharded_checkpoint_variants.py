"""Sharded checkpoints of other models: grown, shrunk, frozen, of another dtype, with scalar parameters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megascale import DistributedOptimizer, MixedPrecisionOptimizer
from megascale.checkpoint import Checkpointer
from megascale.errors import CheckpointError, StateDictError
from tests.checkpoint_cases import differences, message_of
from tests.distributed.test_distributed_optimizer import INNER, config_of, scaler
from tests.distributed.test_sharded_checkpoint import BF16, FP16, Model, build, full, save
from tests.pool import RankPool


class Grown(Model):
    """Model with a parameter more, and without its last layer's old name."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Parameter(torch.ones(3))


class Shrunk(Model):
    """Model without `cube`."""

    def __init__(self) -> None:
        super().__init__()
        del self.cube


def _variant(kind: str) -> tuple[nn.Module, DistributedOptimizer]:
    torch.manual_seed(1)
    model: nn.Module = {"grown": Grown, "shrunk": Shrunk}.get(kind, Model)().half()
    if kind == "frozen":
        model.get_parameter("first.weight").requires_grad_(False)
    if kind == "thawed":
        model.get_submodule("frozen").requires_grad_(True)
    return model, DistributedOptimizer(
        INNER["adamw"](model), config_of(FP16), scaler(FP16), modules=model, bucket_numel=300
    )


def _load_variant(directory: Path, kind: str) -> tuple[str, list[str], tuple[str, ...], dict[str, Any], dict[str, Any]]:
    model, optimizer = _variant(kind)
    before = full(model, optimizer)
    checkpointer = Checkpointer(directory)
    error = StateDictError if kind in ("frozen", "thawed") else CheckpointError
    message = message_of(error, lambda: checkpointer.load(model, optimizer))
    changed = differences(before, full(model, optimizer))
    skipped = checkpointer.load(model, optimizer, strict=False).skipped
    return message, changed, skipped, before, full(model, optimizer)


VARIANTS = {
    "grown": ("'tail' is missing in the checkpoint", ["'tail' is missing"]),
    "shrunk": ("'cube' is not in the model", ["'cube' is not in"]),
    "frozen": ("'first.weight', frozen here", []),
    "thawed": ("frozen.weight", []),
}


@pytest.mark.default("shrunk")
@pytest.mark.parametrize("kind", VARIANTS)
def test_added_removed_frozen_and_thawed_parameters(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    """By name in the error, with nothing changed; or, not strict, listed, and all the rest is loaded."""
    wanted, listed = VARIANTS[kind]
    [saved] = ranks.run(1, save, tmp_path, FP16, "adamw")
    for message, changed, skipped, before, after in ranks.run(2, _load_variant, tmp_path, kind):
        assert wanted in message
        assert changed == []
        assert len(skipped) == len(listed)
        assert all(line in found for line, found in zip(sorted(listed), sorted(skipped), strict=True))
        for name, main in after["optimizer"]["main_params"].items():
            source = saved["optimizer"] if name in saved["optimizer"]["main_params"] else before["optimizer"]
            if name in ("frozen.weight", "frozen.bias"):
                # Thawed: a main param follows the loaded weight.
                assert differences(main, saved["model"][name].float()) == []
            else:
                assert differences(source["main_params"][name], main) == []
        for name in after["model"].keys() & saved["model"].keys():
            assert differences(saved["model"][name], after["model"][name]) == []


def _other_dtype(directory: Path) -> tuple[str, list[str], float]:
    """Load a bf16 checkpoint whose main params fp16 cannot hold."""
    model, optimizer = build(1, FP16)
    before = full(model, optimizer)
    checkpointer = Checkpointer(directory)
    try:
        checkpointer.load(model, optimizer, strict=False)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    return message, differences(before, full(model, optimizer)), float(model.get_parameter("first.bias").abs().max())


def _save_large(directory: Path) -> None:
    model, optimizer = build(0, BF16)
    with torch.no_grad():
        model.get_parameter("first.bias").fill_(1e5)
    Checkpointer(directory).save(0, model, optimizer)


def test_values_too_large_for_fp16_change_nothing(ranks: RankPool, tmp_path: Path) -> None:
    """A bf16 checkpoint is looked at before it is let into an fp16 model's live shards."""
    ranks.run(1, _save_large, tmp_path)
    for message, changed, _ in ranks.run(2, _other_dtype, tmp_path):
        assert "MainParamOverflowError" in message
        assert "'first.bias' holds values of 65520 or more" in message
        assert changed == []


SCALAR_KEEPERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
}


class Scalars(nn.Module):
    """Three 0-d parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.tensor(float(i + 1)) for i in range(3))

    def take_steps(self, optimizer: Any) -> None:
        """Take two steps along constant gradients."""
        for _ in range(2):
            optimizer.zero_grad()
            torch.stack([weight * (i + 2.0) for i, weight in enumerate(self.weights)]).sum().backward()
            optimizer.step()


def _trained_scalars(directory: Path, inner: str) -> list[dict[str, Any]]:
    """Return states of an unsharded optimizer, a sharded one wrapped as late, and two that loaded it. Also: later."""
    alone, late, fresh, restored = (Scalars() for _ in range(4))
    bare, trained = (SCALAR_KEEPERS[inner](scalars.named_parameters()) for scalars in (alone, late))
    alone.take_steps(bare)
    plain = MixedPrecisionOptimizer(bare, replicas_may_differ=True)
    alone.take_steps(plain)
    late.take_steps(trained)
    shards = DistributedOptimizer(trained, modules=late)
    late.take_steps(shards)
    fresh.load_state_dict(late.state_dict())
    loaded = DistributedOptimizer(SCALAR_KEEPERS[inner](fresh.named_parameters()), modules=fresh)
    loaded.load_state_dict(plain.state_dict())
    again = DistributedOptimizer(SCALAR_KEEPERS[inner](restored.named_parameters()), modules=restored)
    Checkpointer(directory).save(1, late, shards)
    Checkpointer(directory).load(restored, again)
    states = [optimizer.state_dict() for optimizer in (plain, shards, loaded, again)]
    for one, scalars in ((shards, late), (loaded, fresh), (again, restored)):
        scalars.take_steps(one)
    return [*states, *(one.state_dict() for one in (shards, loaded, again))]


@pytest.mark.default("adamw", "asgd")
@pytest.mark.parametrize("inner", SCALAR_KEEPERS)
def test_state_of_scalar_parameters_is_sharded(ranks: RankPool, tmp_path: Path, inner: str) -> None:
    """State of a 0-d parameter lies on the rank that holds it, a step count on each: trained before, and loaded. Where
    the first step makes state, a checkpoint's step count was read as a piece of its parameter.
    """
    for states in ranks.run(2, _trained_scalars, tmp_path, inner):
        found = [one["optimizer"]["state"] for one in states]
        for one, other in ((0, 1), (0, 2), (0, 3), (4, 5), (4, 6)):
            assert differences(found[one], found[other]) == []
