"""What does not fit on one rank is the same named error on every rank, and none is left waiting."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascale import DistributedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer
from megascale.errors import MegascaleError
from megascale.grad_sync import GradSync
from tests.pool import RankPool
from tests.training import Bag, bits_equal

SHAPES = [(4, 4), (16,), (3, 8), (40,)]


def _freed_grad(bag: Bag, optimizer: MixedPrecisionOptimizer) -> None:
    bag[1].grad.untyped_storage().resize_(0)  # type: ignore[union-attr]


def _small_grad(bag: Bag, optimizer: MixedPrecisionOptimizer) -> None:
    assert bag[1].grad is not None
    bag[1].grad.data = bag[1].grad[:1]


def _cast(bag: Bag, optimizer: MixedPrecisionOptimizer) -> None:
    bag.bfloat16()


def _grown(bag: Bag, optimizer: MixedPrecisionOptimizer) -> None:
    bag[1].data = torch.zeros(99).half()


def _state_cut(bag: Bag, optimizer: MixedPrecisionOptimizer) -> None:
    for param in bag.params:
        state = optimizer._inner.state[param]
        state["exp_avg"] = torch.zeros(state["exp_avg"].numel() + 1)


def _state_partial(bag: Bag, optimizer: MixedPrecisionOptimizer) -> None:
    del optimizer._inner.state[bag[1]]["exp_avg"]


def _option(bag: Bag, optimizer: MixedPrecisionOptimizer) -> None:
    optimizer._inner.param_groups[0]["lr"] = "0.1"


def _option_lacks(bag: Bag, optimizer: MixedPrecisionOptimizer) -> None:
    del optimizer._inner.param_groups[0]["eps"]


def _unforeseen(bag: Bag, optimizer: MixedPrecisionOptimizer) -> None:
    optimizer._inner.param_groups[0]["maximize"] = torch.ones(2)


def _unreadable(bag: Bag, optimizer: MixedPrecisionOptimizer) -> None:
    optimizer._inner.param_groups[0]["params"] = map(int, ["three"])


BREAKS: dict[str, tuple[Callable[[Bag, MixedPrecisionOptimizer], None], str, str]] = {
    "freed_grad": (_freed_grad, "GradientError", "the gradient of 'params.1' has lost its memory"),
    "small_grad": (_small_grad, "GradientError", "the gradient of 'params.1' is (1,)"),
    "cast": (_cast, "UsageError", "parameter 'params.0' became (4, 4) torch.bfloat16"),
    "grown": (_grown, "UsageError", "parameter 'params.1' became (99,)"),
    "state_cut": (_state_cut, "UsageError", "['exp_avg'] is ("),
    "state_partial": (_state_partial, "UsageError", "the optimizer's state of 'params.1' has"),
    "option": (_option, "ArgumentTypeError", "lr of a param group must be a number"),
    "option_lacks": (_option_lacks, "ArgumentError", "a param group lacks 'eps'"),
    "unforeseen": (_unforeseen, "RankError", "RuntimeError: Boolean value of Tensor"),
    "unreadable": (_unreadable, "RankError", "ValueError: invalid literal for int()"),
}


def _make(kind: str) -> tuple[Bag, MixedPrecisionOptimizer]:
    torch.manual_seed(0)
    bag = Bag(torch.randn(shape).half() for shape in SHAPES)
    inner = torch.optim.AdamW(bag.named_parameters(), lr=1e-2)
    scaler = DynamicGradScaler(4.0, 1.0, 2.0, 0.5, 3, 1)
    if kind == "sharded":
        return bag, DistributedOptimizer(inner, None, scaler, modules=bag, bucket_numel=32)
    sync = GradSync(bag.named_parameters(), bucket_numel=32) if kind == "grad_sync" else None
    return bag, MixedPrecisionOptimizer(inner, None, scaler, named_parameters=bag.named_parameters(), grad_sync=sync)


def _backward(bag: Bag, optimizer: MixedPrecisionOptimizer, kind: str) -> None:
    optimizer.zero_grad()
    if kind == "replicated":
        scale = optimizer.get_loss_scale()
        for param in bag.params:
            param.grad = (torch.randn(param.shape) * scale).half()
    else:
        loss = sum((param.float() * torch.randn(param.shape)).sum() for param in bag.params)
        optimizer.scale_loss(loss).backward()


def _fails_together(kind: str, broken: str, culprit: int) -> tuple[str, str, bool]:
    bag, optimizer = _make(kind)
    before: list[Any] = []
    for _ in range(2):
        torch.manual_seed(len(before))
        _backward(bag, optimizer, kind)
        optimizer.step()
    values = [param.detach().clone() for param in bag.params]
    data = [param.data for param in bag.params]
    states = {param: dict(optimizer._inner.state[param]) for param in bag.params}
    torch.manual_seed(7)
    _backward(bag, optimizer, kind)
    scale = optimizer.get_loss_scale()
    options = dict(optimizer._inner.param_groups[0])
    if dist.get_rank() == culprit:
        BREAKS[broken][0](bag, optimizer)
    with pytest.raises(MegascaleError) as caught:
        optimizer.step()
    assert torch.equal(scale, optimizer.get_loss_scale())
    if dist.get_rank() == culprit:  # mend it
        for param, held in zip(bag.params, data, strict=True):
            param.data = held
            optimizer._inner.state[param] = states[param]
        optimizer._inner.param_groups[0].update(options)
    unchanged = all(bits_equal(param.detach(), value) for param, value in zip(bag.params, values, strict=True))
    torch.manual_seed(8)
    _backward(bag, optimizer, kind)
    optimizer.step()
    total = torch.cat([param.detach().float().reshape(-1) for param in bag.params])
    gathered = [torch.zeros_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, total)
    same = all(bits_equal(gathered[0], one) for one in gathered)
    return type(caught.value).__name__, str(caught.value), unchanged and same


@pytest.mark.default("freed_grad-replicated")
@pytest.mark.parametrize(("broken", "kind"), list(product(BREAKS, ["replicated", "grad_sync", "sharded"])))
def test_every_rank_raises_what_one_has_found(ranks: RankPool, broken: str, kind: str) -> None:
    """Invariants 9 and 10: before a bit changes; mended, the next step works, and ranks hold the same parameters."""
    if broken.endswith("grad") and kind != "replicated":
        pytest.skip("its gradients are GradSync's own")
    for culprit in range(2):
        for name, message, is_right in ranks.run(2, _fails_together, kind, broken, culprit):
            _, expected_name, expected_message = BREAKS[broken]
            assert name == expected_name
            assert message.startswith(f"rank {culprit}: ")
            assert expected_message in message
            assert is_right


def _moves_are_followed(kind: str) -> list[list[torch.Tensor]]:
    results = []
    for moves in (False, True):
        bag, optimizer = _make(kind)
        optimizer.clip_grad = 0.1  # by the norm of gradients, measured where they lie
        for step in range(5):
            # Replicas without a reduction have the same gradients.
            torch.manual_seed(step if kind == "replicated" else step + 10 * dist.get_rank())
            _backward(bag, optimizer, kind)
            if moves and step == 1:
                bag.share_memory()
                for param in bag.params:
                    for value in optimizer._inner.state[param].values():
                        value.share_memory_()
            if moves and step == 2:
                for param in bag.params:
                    param.data = param.data.clone()
                    entry = optimizer._inner.state[param]
                    entry.update({name: value.clone() for name, value in entry.items()})
            if moves and step == 3 and kind != "replicated":
                sync = optimizer._recipe.members[0].grad_sync
                assert sync is not None
                sync.finish()
                for param in bag.params:
                    main_grad = sync.main_grad(param)
                    assert main_grad is not None
                    main_grad.share_memory_()
            optimizer.step()
        results.append([param.detach().clone() for param in bag.params])
    return results


@pytest.mark.default("sharded", "replicated")
@pytest.mark.parametrize("kind", ["replicated", "grad_sync", "sharded"])
def test_what_moves_on_any_rank_is_followed(ranks: RankPool, kind: str) -> None:
    """Parameters and buckets lie in other memory, state was assigned: the bits are the same."""
    for left, moved in ranks.run(2, _moves_are_followed, kind):
        assert all(bits_equal(a, b) for a, b in zip(left, moved, strict=True))


REPLACED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "shape": lambda main_grad: main_grad.view(4, 4),
    "integers": lambda main_grad: main_grad.view(torch.int32),
    "negative bit": lambda main_grad: main_grad._neg_view(),
    "shape, elsewhere": lambda main_grad: torch.zeros(4, 4),
}


def _replaced_main_grad(by: str) -> str:
    bag, optimizer = _make("grad_sync")
    _backward(bag, optimizer, "grad_sync")
    optimizer.step()
    sync = optimizer._recipe.members[0].grad_sync
    assert sync is not None
    _backward(bag, optimizer, "grad_sync")
    sync.finish()
    if dist.get_rank() == 1:
        main_grad = sync.main_grad(bag[1])
        assert main_grad is not None
        main_grad.data = REPLACED[by](main_grad)
    before = [param.detach().clone() for param in bag.params]
    with pytest.raises(MegascaleError) as caught:
        optimizer.step()
    assert all(bits_equal(param.detach(), old) for param, old in zip(bag.params, before, strict=True))
    return str(caught.value)


@pytest.mark.parametrize("by", REPLACED)
def test_main_grad_of_another_form_is_refused(ranks: RankPool, by: str) -> None:
    """What GradSync.main_grad() returned lies in its bucket as something else than the fp32 numbers that were reduced
    there: an error on all ranks, before a bit changes.
    """
    for message in ranks.run(2, _replaced_main_grad, by):
        assert message.startswith("rank 1: the main grad of 'params.1' was given another shape, dtype or memory")


def _momentum_is_switched_on(kind: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    bag = Bag(torch.randn(shape).half() for shape in SHAPES)
    inner = torch.optim.SGD(bag.named_parameters(), lr=1e-2)
    scaler = DynamicGradScaler(4.0, 1.0, 2.0, 0.5, 3, 1)
    optimizer: MixedPrecisionOptimizer
    if kind == "sharded":
        optimizer = DistributedOptimizer(inner, None, scaler, modules=bag, bucket_numel=32)
    else:
        sync = GradSync(bag.named_parameters(), bucket_numel=32)
        optimizer = MixedPrecisionOptimizer(inner, None, scaler, grad_sync=sync)
    for step in range(4):
        torch.manual_seed(step)
        _backward(bag, optimizer, kind)
        if step == 2:
            inner.param_groups[0]["momentum"] = 0.9
        optimizer.step()
    return [param.detach() for param in bag.params]


def test_momentum_that_is_switched_on_is_the_same_sharded(ranks: RankPool) -> None:
    """Buffers are made at the step that needs them first, whole or in pieces."""
    for whole, sharded in zip(
        ranks.run(2, _momentum_is_switched_on, "grad_sync"),
        ranks.run(2, _momentum_is_switched_on, "sharded"),
        strict=True,
    ):
        assert all(bits_equal(a, b) for a, b in zip(whole, sharded, strict=True))
