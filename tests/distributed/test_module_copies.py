"""Copies of a model whose parameters an optimizer gathers or whose gradients it takes: as without, and on their own."""

import copy
import gc
import io
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from megascale import DistributedOptimizer, MixedPrecisionOptimizer
from tests.distributed.test_distributed_optimizer import batch, config_of, net, same, scaler, weights
from tests.distributed.test_lifetimes import MAKERS, _hooks_on, _train
from tests.pool import RankPool

FP16 = torch.float16


def _saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return cast(nn.Module, torch.load(file, weights_only=False))


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "AveragedModel": lambda module: AveragedModel(module).module,
    "torch.save": _saved,
}


def _copied(maker: str, how: str) -> list[Any]:
    module, twin = net(), net()
    optimizer, other = MAKERS[maker](module), MAKERS["sharded" if maker == "overlapped" else maker](twin)
    _train(optimizer, module, range(2))
    _train(other, twin, range(2))
    optimizer.finish_param_gather()
    made = COPIES[how](module)
    equal = same(weights(made), weights(twin))
    apart = not {p.data_ptr() for p in made.parameters()} & {p.data_ptr() for p in module.parameters()}
    is_free = not made.get_parameter("first.weight")._post_accumulate_grad_hooks
    _alone(made)
    _train(optimizer, module, range(2, 3))  # the model goes on as it would have
    _train(other, twin, range(2, 3))
    module.state_dict()
    return [equal, apart, is_free, same(weights(module), weights(twin))]


def _alone(made: nn.Module) -> None:
    """Train a copy with torch alone; its gradients are its own, and stay with it."""
    before = weights(made)
    made(batch(0, dist.get_rank(), FP16)).float().square().mean().backward()
    assert all(param.grad is not None for param in made.parameters())
    torch.optim.SGD(made.parameters(), lr=0.1).step()
    assert not same(before, weights(made))


@pytest.mark.default("torch.save-overlapped", "AveragedModel-overlapped")
@pytest.mark.parametrize("maker", ["overlapped", "sync"])
@pytest.mark.parametrize("how", COPIES)
def test_copies_are_whole_and_on_their_own(ranks: RankPool, maker: str, how: str) -> None:
    """A copy trains alone; the original trains on. Under overlap_param_gather they failed: hooks could not be pickled,
    or reached the old optimizer.
    """
    assert ranks.run(2, _copied, maker, how) == [[True] * 4] * 2


def _two_over_one_module() -> list[Any]:
    module = net()
    halves = [list(module.named_parameters())[:4], list(module.named_parameters())[4:]]
    optimizers: list[MixedPrecisionOptimizer] = [
        DistributedOptimizer(
            torch.optim.AdamW(half), config_of(FP16), scaler(FP16), modules=module, overlap_param_gather=True
        )
        for half in halves
    ]
    first = _hooks_on(module)
    optimizers.pop(0)
    gc.collect()
    one = _hooks_on(module)
    optimizers.pop()
    gc.collect()
    return [first > one > 0, _hooks_on(module)]


def test_two_optimizers_over_one_module_let_go_one_by_one(ranks: RankPool) -> None:
    """Each takes off what it hung on the module, in any order."""
    assert ranks.run(2, _two_over_one_module) == [[True, 0]] * 2
