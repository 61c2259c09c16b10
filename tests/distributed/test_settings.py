"""What ranks that hold the same parameters must set alike: a difference is one named error on all of them."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megascale import (
    ChainedOptimizer,
    ConstantGradScaler,
    DistributedOptimizer,
    DynamicGradScaler,
    MixedPrecisionOptimizer,
    OptimizerConfig,
)
from megascale.errors import UsageError
from megascale.grad_sync import GradSync
from tests.checkpoint_cases import message_of
from tests.pool import RankPool

WAYS = ("DDP", "GradSync", "DistributedOptimizer", "ChainedOptimizer")
Optimizer = MixedPrecisionOptimizer | ChainedOptimizer


def _built(way: str) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).half()
    config, scaler = OptimizerConfig(fp16=True), DynamicGradScaler(256.0)
    named = list(net.named_parameters())
    if way == "DistributedOptimizer":
        return net, DistributedOptimizer(torch.optim.AdamW(named, lr=0.1), config, scaler, modules=net)
    sync = None if way == "DDP" else GradSync(named)
    groups = [[{"params": named}]] if way != "ChainedOptimizer" else [[{"params": named[:2]}], [{"params": named[2:]}]]
    made = [MixedPrecisionOptimizer(torch.optim.AdamW(one, lr=0.1), config, scaler, grad_sync=sync) for one in groups]
    module: nn.Module = DistributedDataParallel(net) if way == "DDP" else net
    return module, made[0] if len(made) == 1 else ChainedOptimizer(made)


def _step(module: nn.Module, optimizer: Optimizer, step: int) -> None:
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
    loss = module(torch.randn(4, 6, generator=generator).half()).float().square().mean()
    optimizer.scale_loss(loss).backward()
    optimizer.step()


def _set(**options: Any) -> Callable[[Optimizer], None]:
    def change(optimizer: Optimizer) -> None:
        optimizer.param_groups[0].update(options)

    return change


def _clip(optimizer: Optimizer) -> None:
    optimizer.clip_grad = 0.5


def _constant(optimizer: Optimizer) -> None:
    optimizer.grad_scaler = ConstantGradScaler(256.0)


def _interval(optimizer: Optimizer) -> None:
    assert isinstance(optimizer.grad_scaler, DynamicGradScaler)
    optimizer.grad_scaler.growth_interval = 7


def _reset(optimizer: Optimizer) -> None:
    assert isinstance(optimizer.grad_scaler, DynamicGradScaler)
    optimizer.grad_scaler.hysteresis_reset = "clean_step"


def _loaded_scale(optimizer: Optimizer) -> None:
    assert optimizer.grad_scaler is not None
    optimizer.grad_scaler.load_state_dict({**optimizer.grad_scaler.state_dict(), "scale": torch.tensor([64.0])})


CHANGES: dict[str, tuple[Callable[[Optimizer], None], str]] = {
    "lr": (_set(lr=0.2), "lr of param group 0"),
    "weight_decay": (_set(weight_decay=0.5), "weight_decay of param group 0"),
    "betas": (_set(betas=(0.5, 0.9)), "betas of param group 0"),
    "maximize": (_set(maximize=True), "maximize of param group 0"),
    "clip_grad": (_clip, "clip_grad is "),
    "scaler": (_constant, "grad_scaler"),
    "growth_interval": (_interval, "grad_scaler"),
    "hysteresis_reset": (_reset, "grad_scaler"),
    "loaded scale": (_loaded_scale, "grad_scaler"),
}


def _differing(way: str, name: str, other: int) -> tuple[str, bool, bool]:
    module, optimizer = _built(way)
    _step(module, optimizer, 0)
    before = [param.detach().clone() for param in module.parameters()]
    change, _ = CHANGES[name]
    if dist.get_rank() == other:
        change(optimizer)
    message = message_of(UsageError, lambda: _step(module, optimizer, 1))
    unchanged = all(torch.equal(param, old) for param, old in zip(module.parameters(), before, strict=True))
    change(optimizer)  # alike on all ranks
    optimizer.zero_grad()
    _step(module, optimizer, 2)
    return message, unchanged, all(torch.isfinite(param).all() for param in module.parameters())


@pytest.mark.default("GradSync-growth_interval")
@pytest.mark.parametrize(("way", "name"), list(product(WAYS, CHANGES)))
def test_settings_of_one_rank_are_every_ranks_error(ranks: RankPool, way: str, name: str) -> None:
    """Invariant 12: a setting that one rank alone has changed would let the ranks part in silence. All raise one error
    that names it, before a bit has changed, and go on once it is the same everywhere.
    """
    for size, other in ((2, 0), (2, 1), (4, 2)):
        results = ranks.run(size, _differing, way, name, other)
        assert len({message for message, _, _ in results}) == 1
        for message, unchanged, is_finite in results:
            assert ("decide together have other loss scales" in message) == ("grad_scaler" in CHANGES[name][1])
            assert ("hold the same parameters have other settings" in message) == (
                "grad_scaler" not in CHANGES[name][1]
            )
            assert CHANGES[name][1] in message
            if name == "lr":
                rates = ("0.2", 0, "0.1", 1) if other == 0 else ("0.1", 0, "0.2", other)
                assert "lr of param group 0 is {} on rank {} and {} on rank {};".format(*rates) in message
            assert unchanged
            assert is_finite


def _other_config(field: str, value: Any, other: int) -> tuple[str, bool]:
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    config = OptimizerConfig(**({field: value} if dist.get_rank() == other else {}))
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(net.parameters()), config)
    DistributedDataParallel(net)(torch.ones(4, 6)).sum().backward()
    before = net.weight.detach().clone()
    return message_of(UsageError, optimizer.step), torch.equal(net.weight, before)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("grad_norm_skip_threshold", 3.0),
        ("max_consecutive_skips", 4),
        ("log_num_zeros_in_grad", True),
        ("exp_avg_dtype", torch.int8),
    ],
)
def test_a_config_of_one_rank_is_every_ranks_error(ranks: RankPool, field: str, value: Any) -> None:
    """Invariant 12: a field that a step reads, and that one rank alone has set, is named on all of them."""
    for size, other in ((2, 1), (4, 0)):
        for message, unchanged in ranks.run(size, _other_config, field, value, other):
            assert f"config.{field} is " in message
            assert str(value) in message
            assert unchanged


def _other_config_in_a_chain() -> str:
    net = nn.Linear(2, 2)
    other = OptimizerConfig(exp_avg_dtype=torch.bfloat16 if dist.get_rank() else torch.float32)
    made = [
        MixedPrecisionOptimizer(torch.optim.AdamW([named]), config)
        for named, config in zip(net.named_parameters(), (OptimizerConfig(), other), strict=True)
    ]
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    return message_of(UsageError, ChainedOptimizer(made).step)


def test_a_chains_config_is_named_with_its_place(ranks: RankPool) -> None:
    """Invariant 12: of several optimizers, the message says whose config it is."""
    for message in ranks.run(2, _other_config_in_a_chain):
        assert "optimizers[1].config.exp_avg_dtype is torch.float32 on rank 0 and torch.bfloat16 on rank 1" in message


def _other_backend(way: str, other: int) -> tuple[str, bool]:
    torch.manual_seed(0)
    net = nn.Linear(6, 3).bfloat16()
    config = OptimizerConfig(bf16=True, backend="torch" if dist.get_rank() == other else "reference")
    named = list(net.named_parameters())
    inner, module = torch.optim.AdamW(named), net
    if way == "DistributedOptimizer":
        optimizer: MixedPrecisionOptimizer = DistributedOptimizer(inner, config, modules=net)
    elif way == "GradSync":
        optimizer = MixedPrecisionOptimizer(inner, config, grad_sync=GradSync(named))
    else:
        optimizer, module = MixedPrecisionOptimizer(inner, config), DistributedDataParallel(net)  # type: ignore[assignment]
    module(torch.ones(4, 6).bfloat16()).float().square().mean().backward()
    if way == "DistributedOptimizer":
        return "", bool(optimizer.step().success)
    before = net.weight.detach().clone()
    return message_of(UsageError, optimizer.step), torch.equal(net.weight, before)


@pytest.mark.parametrize("way", ["DDP", "GradSync"])
@pytest.mark.parametrize("other", [0, 1])
def test_another_backend_on_one_rank_is_named(ranks: RankPool, way: str, other: int) -> None:
    """Invariant 12: a rank without a compiler falls back to ``torch``, whose roundings differ: replicas would part."""
    for message, unchanged in ranks.run(2, _other_backend, way, other):
        first, second = ("torch", "reference") if other == 0 else ("reference", "torch")
        first, second = (f"'AdamW, backend {name}'" for name in (first, second))
        told = f"how the optimizer updates is {first} on rank 0 and {second} on rank 1;"
        assert told in message
        assert unchanged


def test_backends_of_shards_may_differ(ranks: RankPool) -> None:
    """No element is updated by two ranks, so none can part."""
    assert ranks.run(2, _other_backend, "DistributedOptimizer", 1) == [("", True)] * 2


def _equal() -> list[bool]:
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    inner = torch.optim.Adam(net.parameters(), lr=1 if dist.get_rank() else 1.0)
    optimizer = MixedPrecisionOptimizer(inner)
    landed = []
    others: list[dict[str, Any]] = [{}, {"betas": [0.9, 0.999]}, {"weight_decay": -0.0}, {"maximize": 0}]
    for options in others:
        if dist.get_rank():
            inner.param_groups[0].update(options)
        for param in net.parameters():
            param.grad = torch.ones_like(param)
        landed.append(bool(optimizer.step().success))
    return landed


def test_equal_settings_of_other_types_are_alike(ranks: RankPool) -> None:
    """1 is 1.0, a list holds what a tuple holds, and -0.0 is 0.0: the step is taken."""
    assert ranks.run(2, _equal) == [[True] * 4] * 2


def _too_large_for_a_float() -> str:
    net = nn.Linear(4, 4)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    inner.defaults["limit"] = 0  # as an optimizer of the user's own may have
    inner.param_groups[0]["limit"] = 10**400 + dist.get_rank()
    optimizer = MixedPrecisionOptimizer(inner)
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    return message_of(UsageError, optimizer.step)


def test_integers_of_any_size_are_compared(ranks: RankPool) -> None:
    """Also those that no float can hold."""
    for message in ranks.run(2, _too_large_for_a_float):
        assert "limit of param group 0 is '1000" in message


def _vouched() -> tuple[float, bool]:
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    inner = torch.optim.SGD(net.parameters(), lr=0.1 * (1 + dist.get_rank()))
    optimizer = MixedPrecisionOptimizer(inner, replicas_may_differ=True)
    net(torch.ones(2, 4)).sum().backward()
    return inner.param_groups[0]["lr"], bool(optimizer.step().success)


def test_ranks_that_may_part_set_what_they_like(ranks: RankPool) -> None:
    """replicas_may_differ=True vouches for the settings, too."""
    assert ranks.run(2, _vouched) == [(0.1, True), (0.2, True)]


def _prepared(other: int) -> str:
    module, optimizer = _built("GradSync")
    _step(module, optimizer, 0)
    _step(module, optimizer, 1)
    if dist.get_rank() == other:
        assert isinstance(optimizer, MixedPrecisionOptimizer)
        state = optimizer.state_dict()
    else:
        state = optimizer.state_dict()
        state["step_counts"] = {"landed": 1, "skipped": 0}
    optimizer.load_state_dict(state)
    return message_of(UsageError, lambda: _step(module, optimizer, 2))


def test_another_state_dict_on_one_rank_is_every_ranks_error(ranks: RankPool) -> None:
    """A rank that loads the state of an earlier step than the others is found by the number of steps in it."""
    for other in (0, 1):
        first, second = ranks.run(2, _prepared, other)
        assert first == second
        assert f"the number of steps taken is {2 - other} on rank 0 and {1 + other} on rank 1;" in first


def _beside_new_parameters() -> tuple[bool, str]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    named = list(net.named_parameters())
    net[1].requires_grad_(False)
    sync = GradSync(named[:2])
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(named, lr=0.1), grad_sync=sync)
    net(torch.ones(2, 6)).square().mean().backward()
    landed = bool(optimizer.step().success)
    optimizer.zero_grad()
    net[1].requires_grad_(True)
    sync.add(named[2:])
    net(torch.ones(2, 6)).square().mean().backward()
    optimizer.param_groups[0]["lr"] = 0.1 + dist.get_rank()
    return landed, message_of(UsageError, optimizer.step)


def test_a_setting_is_named_beside_new_parameters(ranks: RankPool) -> None:
    """Parameters that are new in the step, with the same values on every rank, are not what differs."""
    for landed, message in ranks.run(2, _beside_new_parameters):
        assert landed
        assert "lr of param group 0 is 0.1 on rank 0 and 1.1 on rank 1;" in message


def _grouped(listing: str, kind: str) -> tuple[str, bool]:
    """Take a step under DDP after rank 1 alone has grouped its parameters as ``kind`` says."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    named = list(net.named_parameters())
    groups = {
        "usual": [named[:2], named[2:]],
        "moved": [named[:1], named[1:]],
        "exchanged": [[named[0], named[3]], [named[2], named[1]]],  # weights decay, biases too, but others
        "exchanged shapes": [[named[1], named[3]], [named[0], named[2]]],
        "another order": [named[1::-1], named[:1:-1]],
    }[kind if dist.get_rank() else "usual"]
    params = [group if listing == "named" else [param for _, param in group] for group in groups]
    options = [{"params": params[0], "weight_decay": 0.1}, {"params": params[1], "weight_decay": 0.0}]
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(options))
    DistributedDataParallel(net)(torch.ones(2, 3)).square().mean().backward()
    before = [param.detach().clone() for param in net.parameters()]
    if kind == "another order":
        return "", bool(optimizer.step().success)
    message = message_of(UsageError, optimizer.step)
    return message, all(torch.equal(param, old) for param, old in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("listing", "kind", "told"),
    [
        ("named", "moved", "the param group of '0.bias' is 0 on rank 0 and 1 on rank 1;"),
        ("named", "exchanged", "the param group of '0.bias' is 0 on rank 0 and 1 on rank 1;"),
        ("unnamed", "moved", "the param group of parameters of shape (3,) is (0, 1) on rank 0 and (1, 1) on rank 1;"),
        ("unnamed", "exchanged shapes", "parameters of shape (3, 3) is (0, 1) on rank 0 and (1, 1) on rank 1;"),
    ],
)
def test_a_parameter_in_another_group_on_one_rank_is_named(ranks: RankPool, listing: str, kind: str, told: str) -> None:
    """Invariant 12: it would take other options there, in silence, though all options are the same on every rank."""
    for message, unchanged in ranks.run(2, _grouped, listing, kind):
        assert told in message
        assert unchanged


@pytest.mark.parametrize("listing", ["named", "unnamed"])
def test_the_order_within_a_param_group_is_free(ranks: RankPool, listing: str) -> None:
    """Of a rank that lists the same parameters in another order, each takes the same options."""
    assert ranks.run(2, _grouped, listing, "another order") == [("", True)] * 2


def _moved_later() -> tuple[bool, str]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).half()
    params = list(net.parameters())
    groups: list[dict[str, Any]] = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:]}]
    inner = torch.optim.AdamW(groups)
    config, scaler = OptimizerConfig(fp16=True), DynamicGradScaler(256.0)
    optimizer = MixedPrecisionOptimizer(inner, config, scaler, named_parameters=net.named_parameters())
    module = DistributedDataParallel(net)
    _step(module, optimizer, 0)
    if dist.get_rank():
        inner.param_groups[1]["params"].append(inner.param_groups[0]["params"].pop())
    return bool(optimizer.num_skipped_steps == 0), message_of(UsageError, lambda: _step(module, optimizer, 1))


def test_a_parameter_that_is_moved_later_is_named(ranks: RankPool) -> None:
    """Invariant 12: groups are looked at whenever their lists have changed."""
    for landed, message in ranks.run(2, _moved_later):
        assert landed
        assert "the param group of '0.bias' is 0 on rank 0 and 1 on rank 1;" in message
