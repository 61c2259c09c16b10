"""Megatron-Core's config without Megatron: fields of its dataclass, as they are translated, accepted or refused.

With its wheel: tests/integrations/test_megatron.py.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import pytest
import torch
from torch import nn

from megascale import OptimizerConfig, build_optimizer
from megascale.errors import ArgumentError, ArgumentTypeError
from megascale.integrations.megatron_config import (
    KNOWN,
    LATER,
    REMEDIES,
    REQUIRED,
    check_grouping,
    from_megatron_config,
)


@dataclass
class _Declared:
    """Fields of Megatron-Core 0.16.1 with its defaults, and three that no release has."""

    optimizer: str = "adam"
    lr: float | None = None
    decoupled_lr: float | None = None
    decoupled_min_lr: float | None = None
    weight_decay: float = 0.01
    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype = torch.float32
    use_precision_aware_optimizer: bool = False
    main_grads_dtype: torch.dtype = torch.float32
    main_params_dtype: torch.dtype = torch.float32
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    fp8_recipe: str | None = None
    loss_scale: float | None = None
    initial_loss_scale: float = 2.0**32
    min_loss_scale: float = 1.0
    loss_scale_window: float = 1000
    hysteresis: int = 2
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    decoupled_weight_decay: bool = True
    sgd_momentum: float = 0.9
    muon_momentum: float = 0.95
    use_distributed_optimizer: bool = False
    overlap_param_gather: bool = False
    optimizer_cpu_offload: bool = False
    clip_grad: float = 1.0
    log_num_zeros_in_grad: bool = False
    timers: Callable[..., Any] | None = None
    newer: int = 3
    newer_list: list[int] = field(default_factory=lambda: [1])


def _named(module: str) -> type[Any]:
    """Return the dataclass as if ``module`` had declared it."""
    return type("OptimizerConfig", (_Declared,), {"__module__": module})


Megatron: Callable[..., Any] = _named("megatron.core.optimizer.optimizer_config")


def test_defaults_are_megatrons() -> None:
    """An untouched config differs from ours in the initial loss scale alone; a subclass of it is one too."""
    assert from_megatron_config(Megatron()) == OptimizerConfig(initial_loss_scale=2.0**32, clip_grad=1.0)
    assert from_megatron_config(type("Mine", (Megatron,), {})(lr=0.5)).lr == 0.5  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [OptimizerConfig(), _named("mymegatron")(), _Declared(), None])
def test_other_configs_are_refused(config: object) -> None:
    """Ours, one of the name from elsewhere, one from there under another name."""
    with pytest.raises(ArgumentTypeError, match="config must be a Megatron-Core OptimizerConfig, got"):
        from_megatron_config(config)


def test_another_class_of_megatrons_is_refused() -> None:
    """Its module alone does not make it an optimizer's config."""
    other = type("DistributedDataParallelConfig", (_Declared,), {"__module__": "megatron.core.distributed"})()
    with pytest.raises(ArgumentTypeError, match="got DistributedDataParallelConfig"):
        from_megatron_config(other)


TRANSLATED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # as given
    (
        {"fp16": True, "lr": 0.5, "weight_decay": 0.2, "hysteresis": 3},
        {"lr": 0.5, "weight_decay": 0.2, "hysteresis": 3},
    ),
    ({"optimizer": "sgd", "sgd_momentum": 0.5}, {"optimizer": "sgd", "sgd_momentum": 0.5}),
    ({"optimizer": "lion"}, {"optimizer": "lion"}),
    # a scale counts where Megatron scales, and 0 is "dynamic"
    ({"loss_scale": 8}, {"loss_scale": None}),
    ({"loss_scale": 8, "fp16": True}, {"loss_scale": 8.0}),
    ({"loss_scale": 8, "bf16": True}, {"loss_scale": 8.0}),
    ({"loss_scale": 8, "use_distributed_optimizer": True}, {"loss_scale": 8.0, "use_distributed_optimizer": True}),
    ({"loss_scale": 0, "fp16": True}, {"loss_scale": None}),
    ({"loss_scale_window": 500.0}, {"loss_scale_window": 500}),
    ({"loss_scale_window": 500}, {"loss_scale_window": 500}),
    # it clips where the norm is above 0
    ({"clip_grad": -1.0}, {"clip_grad": 0.0}),
    ({"clip_grad": 0.25}, {"clip_grad": 0.25}),
    # no gather without sharding
    ({"overlap_param_gather": True}, {"overlap_param_gather": False}),
    ({"use_distributed_optimizer": True}, {"overlap_param_gather": False}),
    ({"overlap_param_gather": True, "use_distributed_optimizer": True}, {"overlap_param_gather": True}),
    # its own machinery
    ({"timers": print, "muon_momentum": 0.5, "params_dtype": torch.float16}, {"muon_momentum": 0.95}),
    # moments are those of its precision-aware optimizer only
    ({"exp_avg_dtype": torch.bfloat16}, {"exp_avg_dtype": torch.float32}),
    (
        {"use_precision_aware_optimizer": True, "exp_avg_sq_dtype": torch.bfloat16},
        {"exp_avg_dtype": torch.float32, "exp_avg_sq_dtype": torch.bfloat16},
    ),
]


@pytest.mark.parametrize(("given", "expected"), TRANSLATED)
def test_fields_are_translated(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """What a field means there it means here."""
    mapped = from_megatron_config(Megatron(**given))
    assert {name: getattr(mapped, name) for name in expected} == expected


@pytest.mark.parametrize(("threshold", "expected"), [(2.5, 2.5), (math.nan, math.inf), (math.inf, math.inf)])
def test_threshold_of_newer_releases(threshold: float, expected: float) -> None:
    """0.19.2 declares it, and skips where it is finite."""
    newer = type("OptimizerConfig", (Megatron,), {"grad_norm_skip_threshold": threshold})  # type: ignore[arg-type]
    assert from_megatron_config(newer()).grad_norm_skip_threshold == expected


def _version(declared: Iterable[tuple[Any, ...]], **options: Any) -> Any:
    """Return a dataclass of Megatron's with these fields, as ``make_dataclass`` takes them."""
    made = make_dataclass("OptimizerConfig", declared, **options)
    made.__module__ = "megatron.core.optimizer.optimizer_config"  # from Python 3.12 on, a namespace cannot say so
    return made


def _newer(*declared: tuple[Any, ...], **namespace: Any) -> Callable[..., Any]:
    """Return a later version's dataclass: ``declared`` fields come on top."""
    newer: Callable[..., Any] = _version(declared, bases=(_Declared,), namespace=namespace, kw_only=True)
    return newer


UNTOUCHED: dict[str, Any] = {
    "number": (int, 3),
    "none": (str | None, None),
    "list": (list[int], field(default_factory=lambda: [1])),
    "tensor": (torch.Tensor, field(default_factory=lambda: torch.zeros(3))),
}
CHANGED: dict[str, Any] = {"number": 4, "none": "all", "list": [], "tensor": torch.ones(2)}


@pytest.mark.parametrize("kind", UNTOUCHED)
def test_a_new_field_is_accepted_until_it_is_changed(kind: str) -> None:
    """A feature of a later version is off until somebody asks for it: the rule holds for every kind of default."""
    version = _newer(("feature", *UNTOUCHED[kind]))
    assert from_megatron_config(version(lr=0.5)) == from_megatron_config(Megatron(lr=0.5))
    config = version(lr=0.5)
    config.feature = CHANGED[kind]
    with pytest.raises(ArgumentError, match=r"config.feature is .*, which .* does not know this field: "):
        from_megatron_config(config)


def test_the_default_is_that_of_the_version() -> None:
    """Of the class that Megatron declares, not one that is written here: 3 in one version, 5 in another."""
    for default in (3, 5):
        version = _newer(("feature", int, default))
        from_megatron_config(version())
        with pytest.raises(ArgumentError, match=f"config.feature is 4, .*leave it at {default}"):
            from_megatron_config(version(feature=4))


def test_a_subclass_that_switches_a_new_field_on_is_refused() -> None:
    """The default that counts is that of the class which declared the field first; a field of its own is its own."""
    version: Any = _newer(("feature", bool, False))
    mine = make_dataclass("Mine", [("feature", bool, True), ("own", int, 3)], bases=(version,), kw_only=True)
    with pytest.raises(ArgumentError, match=r"config.feature is True, .*: leave it at False"):
        from_megatron_config(mine())
    from_megatron_config(mine(feature=False))
    with pytest.raises(ArgumentError, match=r"config.own is 4, .*: leave it at 3"):
        from_megatron_config(mine(feature=False, own=4))


def test_a_new_field_without_a_default_is_refused() -> None:
    """Nothing says which value is off."""
    with pytest.raises(
        ArgumentError, match=r"config.feature is 3, .*know this field: pass a megascale.OptimizerConfig$"
    ):
        from_megatron_config(_newer(("feature", int))(feature=3))


@pytest.mark.parametrize("name", REMEDIES)
def test_what_is_refused_stays_refused_where_it_is_the_default(name: str) -> None:
    """A version or subclass that switches on what we do not do asks for it, though nobody changed the field."""
    with pytest.raises(ArgumentError, match=f"config.{name} is True, which megascale does not do"):
        from_megatron_config(_newer((name, bool, True))())


@pytest.mark.parametrize("name", REQUIRED)
def test_a_renamed_field_is_told(name: str) -> None:
    """A version that lacks a field which we read holds its value elsewhere: our default could be another one."""
    names = {n: f for n, f in _Declared.__dataclass_fields__.items() if n != name}
    version = _version([(n, Any, f.default) for n, f in names.items() if n in KNOWN])
    with pytest.raises(ArgumentError, match=f"config has no field {name}, .*; pass a megascale.OptimizerConfig"):
        from_megatron_config(version())


def test_fields_that_a_version_lacks() -> None:
    """What came later, or can only be off, has our default; a field that became a property is read all the same."""
    lacking = _version(
        [(name, Any, getattr(_Declared, name)) for name in REQUIRED if name != "clip_grad"],
        namespace={"clip_grad": property(lambda self: 0.25)},
    )
    assert not set(LATER) & _Declared.__dataclass_fields__.keys()
    assert from_megatron_config(lacking()) == OptimizerConfig(initial_loss_scale=2.0**32, clip_grad=0.25)
    check_grouping(lacking())


PRECISE = {"use_precision_aware_optimizer": True}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": "muon"}, "config.optimizer is 'muon', .* choose one of 'adam', 'sgd', 'lion'$"),
    ({"optimizer_cpu_offload": True}, "config.optimizer_cpu_offload is True, .*not a fraction: set it False"),
    ({"fp8_recipe": "delayed"}, "config.fp8_recipe is 'delayed', .*leave it None"),
    ({"newer": 4}, "config.newer is 4, .*does not know this field: leave it at 3"),
    ({"newer_list": []}, r"config.newer_list is \[\], .*leave it at \[1\]"),
    ({"loss_scale_window": 2.5}, "loss_scale_window must be an integer, got 2.5"),
    (PRECISE | {"main_params_dtype": torch.float16}, "config.main_params_dtype is torch.float16; it is torch.float32"),
    (PRECISE | {"main_grads_dtype": torch.bfloat16}, "config.main_grads_dtype is torch.bfloat16"),
    (PRECISE | {"exp_avg_dtype": torch.uint8}, "config.exp_avg_dtype is torch.uint8, .*a scale of its own"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_is_not_done_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    """The field, its value and the remedy."""
    with pytest.raises(ArgumentError, match=message):
        from_megatron_config(Megatron(**given))


def test_grouping_is_refused_by_who_makes_other_groups() -> None:
    """The config itself may ask for Megatron's groups; build_optimizer makes others."""
    given = Megatron(lr=0.5, decoupled_lr=0.25)
    assert from_megatron_config(given).lr == 0.5
    for refuse in (lambda: check_grouping(given), lambda: build_optimizer(given, nn.Linear(2, 2))):
        with pytest.raises(ArgumentError, match=r"config.decoupled_lr is 0.25, .*; group parameters with overrides"):
            refuse()
    check_grouping(Megatron(newer=4))
