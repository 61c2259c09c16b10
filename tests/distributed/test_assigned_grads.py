"""Gradients that do not come by backward, under a GradSync or a DistributedOptimizer: used, or refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megascale import DistributedOptimizer, MixedPrecisionOptimizer
from megascale.errors import ArgumentError, GradientError, UsageError
from megascale.grad_sync import GradSync
from tests.distributed.test_distributed_optimizer import INNER, batch, config_of, net, same, weights
from tests.pool import RankPool

FP32 = torch.float32
OVERLAP = {"sync": True, "sync at the end": False, "sharded": True, "sharded at the end": False}


def _make(kind: str, module: nn.Module) -> MixedPrecisionOptimizer:
    inner, overlap = INNER["sgd"](module), OVERLAP[kind]
    if kind.startswith("sharded"):
        return DistributedOptimizer(inner, modules=module, bucket_numel=300, overlap_grad_reduce=overlap)
    sync = GradSync(module.named_parameters(), bucket_numel=300, overlap=overlap)
    return MixedPrecisionOptimizer(inner, config_of(FP32), grad_sync=sync)


def _loss(module: nn.Module, step: int, rank: int) -> Tensor:
    return module(batch(step, rank, FP32)).square().mean()


def _grads(module: nn.Module, step: int, rank: int) -> list[Tensor]:
    return list(torch.autograd.grad(_loss(module, step, rank), list(module.parameters())))


def _expected(moment: str, steps: int) -> dict[str, Tensor]:
    """Train with the means of all ranks' gradients, put where torch reads them."""
    module = net(FP32)
    optimizer = INNER["sgd"](module)
    for step in range(steps):
        world = range(dist.get_world_size())
        by_rank = [_grads(module, step, rank) for rank in world]
        if moment == "before backward":
            by_rank = [[grad + grad for grad in grads] for grads in by_rank]
        for param, *grads in zip(module.parameters(), *by_rank, strict=True):
            param.grad = torch.stack(grads).mean(0)
        optimizer.step()
    return weights(module)


def _assign(module: nn.Module, grads: list[Tensor]) -> None:
    for param, grad in zip(module.parameters(), grads, strict=True):
        param.grad = grad


def _used(kind: str, moment: str) -> bool:
    module = net(FP32)
    optimizer = _make(kind, module)
    rank = dist.get_rank()
    for step in range(2):
        optimizer.zero_grad()
        if moment == "for some":  # a loss of which only the head is trained by backward
            grads = _grads(module, step, rank)
            trained = list(module.head.parameters())
            torch.autograd.backward(_loss(module, step, rank), inputs=trained)
            for param, grad in zip(module.parameters(), grads, strict=True):
                if all(param is not one for one in trained):
                    param.grad = grad
        else:
            _assign(module, _grads(module, step, rank))
            if moment == "before backward":
                _loss(module, step, rank).backward()
        assert bool(optimizer.step().success)
        assert all(param.grad is None for param in module.parameters())
    expected = _expected(moment, 2)
    return all(torch.allclose(value, expected[name], atol=1e-6) for name, value in weights(module).items())


@pytest.mark.parametrize("moment", ["before backward", "instead of backward", "for some"])
@pytest.mark.parametrize("kind", OVERLAP)
def test_assigned_gradients_are_used(ranks: RankPool, kind: str, moment: str) -> None:
    """Gradients put into param.grad before backward are added to, instead of backward they are reduced like any other:
    they were ignored, and the step trained with zeros.
    """
    assert ranks.run(2, _used, kind, moment) == [True, True]


def _refused(kind: str, put: Callable[[nn.Module, MixedPrecisionOptimizer], None], everywhere: bool) -> list[Any]:
    module = net(FP32)
    optimizer = _make(kind, module)
    _loss(module, 0, dist.get_rank()).backward()
    if everywhere or dist.get_rank() == 1:
        put(module, optimizer)
    before = weights(module)
    with pytest.raises(GradientError) as caught:
        optimizer.step()
    untouched = same(before, weights(module))
    module.requires_grad_(True)
    for step in range(2):
        optimizer.zero_grad()
        _loss(module, step, dist.get_rank()).backward()
        assert bool(optimizer.step().success)
    return [str(caught.value), untouched, weights(module)]


def _after_backward(module: nn.Module, _: MixedPrecisionOptimizer) -> None:
    module.get_parameter("second.bias").grad = torch.ones(11)


def _after_finish(module: nn.Module, optimizer: MixedPrecisionOptimizer) -> None:
    param = module.get_parameter("second.bias")
    sync = optimizer._member.grad_sync
    assert sync is not None
    sync.finish()
    param.grad = torch.ones_like(param)


def _frozen(module: nn.Module, _: MixedPrecisionOptimizer) -> None:
    param = module.get_parameter("second.bias")
    param.requires_grad_(False)
    param.grad = torch.ones_like(param)


def _sparse(module: nn.Module, _: MixedPrecisionOptimizer) -> None:
    param = module.get_parameter("second.bias")
    param.grad = torch.ones_like(param).to_sparse()


REFUSED = {
    "after backward": (_after_backward, "it was put there after backward"),
    "after finish": (_after_finish, "it was put there after backward"),
    "frozen": (_frozen, "the parameter is frozen"),
    "sparse": (_sparse, "has layout torch.sparse_coo"),
}


@pytest.mark.default(
    "sync at the end-frozen-True",
    "sharded-after finish-False",
    "sync at the end-sparse-True",
    "sync at the end-after backward-False",
)
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("kind", ["sync at the end", "sharded"])
def test_gradients_that_would_be_ignored_are_refused(ranks: RankPool, kind: str, case: str, everywhere: bool) -> None:
    """A gradient that was put beside that of backward has no meaning here: every rank raises the same error at that
    step, nothing has changed, and after zero_grad() training goes on.
    """
    put, reason = REFUSED[case]
    (first, *_), (second, *_) = results = ranks.run(2, _refused, kind, put, everywhere)
    assert "'second.bias' has" in first if case != "sparse" else "the gradient of 'second.bias' has layout" in first
    assert reason in first
    assert first.removesuffix(" (ranks 0, 1 failed)") == second.removesuffix(" (ranks 0, 1 failed)")
    for _, untouched, trained in results:
        assert untouched
        assert same(trained, results[0][2])


def _under_ddp(kind: str, options: dict[str, Any], is_first: bool) -> str:
    module = net(FP32)
    if is_first:
        network = DistributedDataParallel(module, **options)
        optimizer = _make(kind, module)
    else:
        optimizer = _make(kind, module)
        network = DistributedDataParallel(module, **options)
    before = weights(module)
    network(batch(0, dist.get_rank(), FP32)).square().mean().backward()
    with pytest.raises(GradientError) as at_the_step:
        optimizer.step()
    assert same(before, weights(module))
    del network
    optimizer.zero_grad()
    _loss(module, 0, dist.get_rank()).backward()
    assert bool(optimizer.step().success)
    optimizer.zero_grad()
    network = DistributedDataParallel(module, **options)  # also around a model that has trained
    network(batch(1, dist.get_rank(), FP32)).square().mean().backward()
    with pytest.raises(GradientError, match="would be ignored"):
        optimizer.step()
    return str(at_the_step.value)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("sync", {}), ("sharded at the end", {"gradient_as_bucket_view": True}), ("sharded", {})],
)
def test_ddp_around_a_synced_model_is_refused(
    ranks: RankPool, kind: str, options: dict[str, Any], is_first: bool
) -> None:
    """DistributedDataParallel reduces gradients that were taken already, and leaves its own: refused at the first step
    on every rank. Dropped, training goes on.
    """
    for message in ranks.run(2, _under_ddp, kind, options, is_first):
        assert "would be ignored" in message
        assert "If a DistributedDataParallel is around the module, drop it" in message


def _hidden_by_ddp(kind: str, options: dict[str, Any]) -> bool:
    ends = []
    for is_wrapped in (False, True):
        module = net(FP32)
        optimizer = _make(kind, module)
        network = DistributedDataParallel(module, **options) if is_wrapped else module
        for step in range(3):
            network(batch(step, dist.get_rank(), FP32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(weights(module))
    return same(*ends)


@pytest.mark.parametrize("kind", ["sync", "sharded"])
@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_what_ddp_hides_is_right(ranks: RankPool, kind: str, option: str) -> None:
    """With these options DistributedDataParallel writes no gradients, and cannot be seen: bits are those without it."""
    assert ranks.run(2, _hidden_by_ddp, kind, {option: True}) == [True, True]


def _not_given() -> list[str]:
    module = net(FP32)
    sync = GradSync(module.named_parameters())
    with pytest.raises(ArgumentError) as at_once:
        MixedPrecisionOptimizer(INNER["sgd"](module))
    sync.detach()
    optimizer = MixedPrecisionOptimizer(INNER["sgd"](module))
    sync = GradSync(module.head.named_parameters())
    before = weights(module)
    _loss(module, 0, dist.get_rank()).backward()
    with pytest.raises(UsageError) as at_the_step:
        optimizer.step()
    assert same(before, weights(module))
    sync.detach()
    optimizer.zero_grad()
    _loss(module, 0, 0).backward()  # the same on every rank, as nobody reduces
    assert bool(optimizer.step().success)
    return [str(at_once.value), str(at_the_step.value)]


def test_a_gradsync_that_the_optimizer_was_not_given(ranks: RankPool) -> None:
    """It takes the gradients, and the optimizer would step without them, success=True: refused at construction, or at
    the first step where the GradSync was made later.
    """
    for at_once, at_the_step in ranks.run(2, _not_given):
        assert "parameter 'first.weight' belongs to a live GradSync, which takes its gradients in backward" in at_once
        assert "the gradient of 'weight' was taken by a GradSync in backward" in at_the_step.replace("head.", "")
        assert all("give that GradSync to this optimizer (grad_sync=...)" in text for text in (at_once, at_the_step))
