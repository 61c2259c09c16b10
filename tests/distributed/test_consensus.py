"""What differs between ranks is named: each field of a config, what a late host learns, and only what differs."""

from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megascale import MixedPrecisionOptimizer, OptimizerConfig, ParallelGroups, build_optimizer
from megascale.errors import MegascaleError, UsageError
from megascale.grad_sync import GradSync
from megascale.step.consensus import Consensus
from tests.checkpoint_cases import message_of
from tests.pool import RankPool
from tests.training import Bag

FP16: dict[str, Any] = {"fp16": True}
OFFLOAD: dict[str, Any] = {"optimizer_cpu_offload": True}
SGD, LION, MUON = ({"optimizer": name} for name in ("sgd", "lion", "muon"))
OTHERWISE: dict[str, tuple[dict[str, Any], Any]] = {
    "fp16": ({}, True),
    "loss_scale": (FP16, 8.0),
    "initial_loss_scale": (FP16, 8.0),
    "min_loss_scale": (FP16, 8.0),
    "max_loss_scale": (FP16, 2.0**20),
    "loss_scale_window": (FP16, 7),
    "hysteresis": (FP16, 7),
    "hysteresis_reset": (FP16, "clean_step"),
    "loss_scale_growth_factor": (FP16, 4.0),
    "loss_scale_backoff_factor": (FP16, 0.25),
    "clip_grad": ({}, 0.5),
    "log_num_zeros_in_grad": ({}, True),
    "grad_norm_skip_threshold": ({}, 3.0),
    "max_consecutive_skips": ({}, 7),
    "max_overflows_at_min_scale": (FP16, 7),
    "backend": ({"backend": "torch"}, "reference"),
    "exp_avg_dtype": ({}, torch.bfloat16),
    "exp_avg_sq_dtype": ({}, torch.bfloat16),
    "store_param_remainders": (FP16, True),
    "optimizer_cpu_offload": ({}, True),
    "optimizer_offload_fraction": (OFFLOAD, 0.5),
    "overlap_cpu_optimizer_d2h_h2d": (OFFLOAD, True),
    "pin_cpu_grads": (OFFLOAD, False),
    "pin_cpu_params": (OFFLOAD, False),
    "overlap_param_gather": ({"use_distributed_optimizer": True}, True),
    "optimizer": ({}, "sgd"),
    "lr": ({}, 0.5),
    "weight_decay": ({}, 0.5),
    "adam_beta1": ({}, 0.5),
    "adam_beta2": ({}, 0.5),
    "adam_eps": ({}, 0.5),
    "decoupled_weight_decay": ({}, False),
    "sgd_momentum": (SGD, 0.5),
    "lion_beta1": (LION, 0.5),
    "lion_beta2": (LION, 0.5),
    "muon_momentum": (MUON, 0.5),
    "muon_nesterov": (MUON, False),
    "muon_num_ns_steps": (MUON, 7),
    "muon_coefficient_type": (MUON, "polar_express"),
    "muon_adjust_lr_fn": (MUON, "match_rms_adamw"),
    "muon_adam_lr": (MUON, 0.5),
    "muon_ns_dtype": ({**MUON, "muon_ns_dtype": torch.bfloat16}, torch.float32),
}
"""For each field of a config what the other ranks have, and what rank 1 has."""

FREE = {
    "bf16": "says which parameters there may be, and these are compared",
    "use_distributed_optimizer": "another class, which tests/distributed/test_one_rank_differs.py compares",
}


def _set_otherwise(names: list[str]) -> dict[str, str]:
    """Return what a step said that rank 1 alone has otherwise, by field."""
    told = {}
    for name in names:
        usual, value = OTHERWISE[name]
        options = {"lr": 0.1, "weight_decay": 0.1, **usual, **({name: value} if dist.get_rank() == 1 else {})}
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if usual is FP16:
            net = net.half()

        def train(options: dict[str, Any] = options, net: nn.Module = net) -> None:
            optimizer = build_optimizer(OptimizerConfig(**options), net, grads_are_scaled=True)
            for param in net.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()

        before = [param.detach().clone() for param in net.parameters()]
        try:
            train()
            told[name] = "nothing was raised"
        except MegascaleError as error:
            told[name] = str(error)
        if not all(map(torch.equal, net.parameters(), before)):
            told[name] += ", and values have changed"
    return told


def test_every_field_of_a_config_is_named_or_free(ranks: RankPool) -> None:
    """Invariant 12: a field that is set otherwise on one rank alone is named on every rank before a bit has changed,
    itself or what it has made. A field that is new fails here until it is thought of.
    """
    assert {field.name for field in fields(OptimizerConfig)} == OTHERWISE.keys() | FREE.keys()
    first, second = ranks.run(2, _set_otherwise, list(OTHERWISE))
    assert first == second
    for name, message in first.items():
        assert " on rank 0 and " in message, (name, message)
        assert " on rank 1" in message, (name, message)
        assert not message.endswith("values have changed"), (name, message)


def _made(**options: Any) -> tuple[Bag, MixedPrecisionOptimizer]:
    torch.manual_seed(0)
    bag = Bag(torch.randn(3) for _ in range(3))
    return bag, MixedPrecisionOptimizer(torch.optim.SGD(bag.named_parameters(), lr=0.1), **options)


def _backward(bag: Bag, left_out: tuple[int, ...] = ()) -> None:
    for index, param in enumerate(bag.params):
        param.grad = None if index in left_out else torch.ones_like(param)


def _left_out(of_all: tuple[int, ...], of_one: tuple[int, ...], one: int, late: bool) -> str:
    bag, optimizer = _made()
    optimizer._recipe.errors.on_host = not late  # as on an accelerator
    _backward(bag, of_all + of_one * (dist.get_rank() == one))
    if late:
        assert not optimizer.step().success
        _backward(bag)  # nothing differs any more
    return message_of(UsageError, optimizer.step)


@pytest.mark.parametrize("late", [False, True])
def test_only_what_one_rank_leaves_out_is_named(ranks: RankPool, late: bool) -> None:
    """Not what all leave out, nor the ranks that leave out only that; also where the host learns of it one step later,
    when that rank leaves out nothing any more.
    """
    for message in ranks.run(3, _left_out, (0,), (1, 2), 2, late):
        assert "the reason to leave 'params.1' out of the step is nothing on rank 0 and that it is frozen" in message
        assert "on rank 2 (different too: the reason to leave 'params.2' out of the step)" in message
        assert "params.0" not in message
    for message in ranks.run(3, _left_out, (), (1,), 0, late):
        assert "the reason to leave 'params.1' out of the step is that it is frozen" in message
        assert "in no param group on rank 0 and nothing on rank 1;" in message


def _late_setting(steps: int) -> tuple[str, bool]:
    bag, optimizer = _made()
    optimizer._recipe.errors.on_host = False
    for _ in range(steps):
        _backward(bag)
        assert optimizer.step().success
    group = optimizer.param_groups[0]
    group["lr"] = 0.1 + dist.get_rank()
    _backward(bag)
    assert not optimizer.step().success
    group["lr"] = 0.1
    _backward(bag)
    message = message_of(UsageError, optimizer.step)
    _backward(bag)
    return message, bool(optimizer.step().success)


def test_a_late_host_names_the_setting_of_the_step_before(ranks: RankPool) -> None:
    """Facts are kept of two steps: a setting that was put right meanwhile is still named, and training goes on."""
    for steps in (0, 3):
        for message, landed in ranks.run(2, _late_setting, steps):
            assert "lr of param group 0 is 0.1 on rank 0 and 1.1 on rank 1;" in message
            assert landed


def _groups_emptied(way: str) -> str:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    named = list(net.named_parameters())
    sync = GradSync(named) if way == "GradSync" else None
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(named, lr=0.1), grad_sync=sync)
    if dist.get_rank():
        optimizer.param_groups[0]["params"] = []
    net(torch.ones(2, 3)).sum().backward()
    return message_of(UsageError, optimizer.step)


@pytest.mark.parametrize("way", ["DDP", "GradSync"])
def test_a_rank_without_any_parameters_is_named(ranks: RankPool, way: str) -> None:
    """It has no settings: what it lacks is told, not None for each of them."""
    for message in ranks.run(2, _groups_emptied, way):
        assert "the param group of 'weight' is [0] on rank 0 and nothing on rank 1" in message


def _nothing_differs() -> str:
    groups = ParallelGroups.of(None)
    consensus = Consensus(groups)
    consensus.vote({None: [{"a": 1}]})
    return message_of(UsageError, lambda: consensus.explain(None))


def test_a_difference_that_has_no_name_is_an_error(ranks: RankPool) -> None:
    """Invariant 12: a step that is skipped because ranks differ is never skipped in silence."""
    for message in ranks.run(2, _nothing_differs):
        assert "the ranks disagree about this step" in message
