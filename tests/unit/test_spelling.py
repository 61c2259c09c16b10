"""An argument that does not exist is an error that names the one that was meant."""

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megascale import (
    ChainedOptimizer,
    ConstantGradScaler,
    DistributedOptimizer,
    DynamicGradScaler,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    ParallelGroups,
    build_optimizer,
    cast_model,
    cli,
    estimate,
)
from megascale.amp import GradScaler
from megascale.averages import AveragedMainParams
from megascale.checkpoint import Checkpointer, load, save
from megascale.errors import ArgumentError, ArgumentTypeError
from megascale.estimation import Setup
from megascale.grad_sync import GradSync
from megascale.kernels import select_backend
from megascale.schedules import LandedLRScheduler
from megascale.step_graph import StepGraph
from megascale.utils.spelling import nearest

CONSTRUCTORS: list[Callable[..., Any]] = [
    AveragedMainParams,
    ChainedOptimizer,
    Checkpointer,
    ConstantGradScaler,
    DistributedOptimizer,
    DynamicGradScaler,
    GradScaler,
    GradSync,
    LandedLRScheduler,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    ParallelGroups,
    Setup,
    StepGraph,
]
FUNCTIONS: list[Callable[..., Any]] = [build_optimizer, cast_model, load, save]


@pytest.mark.parametrize("constructor", CONSTRUCTORS, ids=lambda constructor: constructor.__name__)
def test_an_unknown_argument_names_the_nearest(constructor: Callable[..., Any]) -> None:
    """Of every constructor, for each of its arguments with a letter too many; before anything else is looked at."""
    names = list(inspect.signature(constructor).parameters)
    for name in names:
        with pytest.raises(ArgumentTypeError) as caught:
            constructor(**{f"{name}x": None})
        assert str(caught.value) == f"{constructor.__name__} has no argument '{name}x'; did you mean '{name}'?"
        assert isinstance(caught.value, TypeError)  # as Python's own


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_an_unknown_argument_of_a_function_likewise(function: Callable[..., Any]) -> None:
    """Of those that take many."""
    for name in inspect.signature(function).parameters:
        with pytest.raises(ArgumentTypeError) as caught:
            function(**{f"{name}x": None})
        assert str(caught.value) == f"{function.__name__}() has no argument '{name}x'; did you mean '{name}'?"


@pytest.mark.parametrize("callable_", [*CONSTRUCTORS, *FUNCTIONS], ids=lambda callable_: callable_.__name__)
def test_a_missing_argument_is_named(callable_: Callable[..., Any]) -> None:
    """With how it is written and where it is explained, whichever of the needed arguments is left out."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(callable_).parameters.values()
    needed = [one.name for one in parameters if one.default is one.empty and one.kind in named]
    for name in needed:
        with pytest.raises(ArgumentTypeError) as caught:
            callable_(**dict.fromkeys(set(needed) - {name}))
        assert f"needs the argument '{name}': pass {name}=...; see help({callable_.__name__})" in str(caught.value)


def test_modules_of_a_distributed_optimizer_are_asked_for() -> None:
    """The argument that the replicated optimizer does not have; others may be given by position."""
    inner = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(ArgumentTypeError, match=r"DistributedOptimizer needs the argument 'modules': pass modules="):
        DistributedOptimizer(inner, None, DynamicGradScaler())  # type: ignore[call-arg]


def test_a_scaler_in_the_place_of_the_config() -> None:
    """The likeliest slip: the message says what to write."""
    inner = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    for scaler in (DynamicGradScaler(), torch.amp.GradScaler("cpu", enabled=False)):
        for build in (
            lambda scaler: MixedPrecisionOptimizer(inner, scaler),
            lambda scaler: DistributedOptimizer(inner, scaler, modules=nn.Linear(1, 1)),
        ):
            with pytest.raises(ArgumentTypeError, match="pass a scaler by its name, grad_scaler="):
                build(scaler)


@pytest.mark.parametrize(
    ("take", "nearest_one"),
    [
        (lambda: OptimizerConfig(backend="trition"), "triton"),
        (lambda: select_backend("Native"), "native"),
        (lambda: OptimizerConfig(optimizer="adamm"), "adam"),
        (lambda: OptimizerConfig(hysteresis_reset="grow"), "growth"),
        (lambda: DynamicGradScaler(hysteresis_reset="cleanstep"), "clean_step"),
        (lambda: GradSync([], reduction="men"), "mean"),
        (lambda: estimate(10, sharding="zero"), "zero1"),
        (lambda: estimate(10, sharding="distributed"), "zero1"),
        (lambda: estimate(10, sharding="replicated"), "ddp"),
        (lambda: estimate(10, rank_s=2), "ranks"),
        (lambda: estimate(10, optimizer="adamW"), "adamw"),
        (
            lambda: build_optimizer(OptimizerConfig(lr=0.1), nn.Linear(1, 1), overrides={"*": {"weight_deca": 0.0}}),
            "weight_decay",
        ),
    ],
)
def test_a_name_that_is_a_value_names_the_nearest(take: Callable[[], object], nearest_one: str) -> None:
    """Backends, optimizers' rules, modes, options of overrides."""
    with pytest.raises(ArgumentError, match=rf"got '\w+'; did you mean '{nearest_one}'\?$"):
        take()


def test_a_value_that_is_like_none_gets_no_guess() -> None:
    """The list of values is in the message all the same."""
    with pytest.raises(ArgumentError, match=r"got 'fastest'$"):
        OptimizerConfig(backend="fastest")
    with pytest.raises(ArgumentError, match=r"got 7$"):
        OptimizerConfig(backend=7)  # type: ignore[arg-type]


def test_a_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the console command."""
    with pytest.raises(SystemExit):
        cli.main(["trian"])
    assert "there is no command 'trian'; did you mean 'train'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("grad_clip", "clip_grad"), ("init_loss_scale", "initial_loss_scale"), ("bfloat16", "bf16"), ("lr_", "lr")],
)
def test_fields_of_a_config(wrong: str, right: str) -> None:
    """Words in another order, too, and in `dataclasses.replace`."""
    with pytest.raises(ArgumentTypeError, match=f"no argument '{wrong}'; did you mean '{right}'"):
        OptimizerConfig(**{wrong: 1.0})  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=f"did you mean '{right}'"):
        dataclasses.replace(OptimizerConfig(), **{wrong: 1.0})  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["max_norm", "max_grad_norm", "gradient_clipping", "gradient_clip_val"])
def test_names_that_other_libraries_have(wrong: str) -> None:
    """They share no letters with ours."""
    with pytest.raises(ArgumentTypeError, match="did you mean 'clip_grad'"):
        MixedPrecisionOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(2))]), **{wrong: 1.0})  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="did you mean 'clip_grad'"):
        OptimizerConfig(**{wrong: 1.0})  # type: ignore[arg-type]


def test_a_subclass_may_have_arguments_of_its_own() -> None:
    """Those that it hands on are looked at."""

    class Named(MixedPrecisionOptimizer):
        def __init__(self, optimizer: torch.optim.Optimizer, name: str, **more: Any) -> None:
            super().__init__(optimizer, **more)
            self.name = name

    inner = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    assert Named(inner, name="mine").name == "mine"
    with pytest.raises(ArgumentTypeError, match="did you mean 'grad_scaler'"):
        Named(inner, name="mine", scaler=None)


def test_decorated_classes_are_what_they_were() -> None:
    """They are copied, pickled and read by `help()` as before."""
    config = OptimizerConfig(fp16=True)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert (
        str(inspect.signature(ConstantGradScaler))
        == "(initial_scale: float, *, device: torch.device | str | None = None) -> None"
    )
    assert [field.name for field in dataclasses.fields(config)] == list(inspect.signature(OptimizerConfig).parameters)


def test_the_nearest_of_several() -> None:
    """Letters count, the order of words does not."""
    assert nearest("windw", ["window", "winding"]) == "window"
    assert nearest("scale_min", ["max_scale", "min_scale", "scale"]) == "min_scale"
