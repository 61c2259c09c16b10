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
)
from megascale.checkpoint import Checkpointer
from megascale.errors import ArgumentTypeError
from megascale.utils.spelling import nearest

CONSTRUCTORS: list[Callable[..., Any]] = [
    ChainedOptimizer,
    Checkpointer,
    ConstantGradScaler,
    DistributedOptimizer,
    DynamicGradScaler,
    MixedPrecisionOptimizer,
    OptimizerConfig,
]


@pytest.mark.parametrize("constructor", CONSTRUCTORS, ids=lambda constructor: constructor.__name__)
def test_an_unknown_argument_names_the_nearest(constructor: Callable[..., Any]) -> None:
    """Of every constructor, for each of its arguments with a letter too many; before anything else is looked at."""
    names = list(inspect.signature(constructor).parameters)
    for name in names:
        with pytest.raises(ArgumentTypeError) as caught:
            constructor(**{f"{name}x": None})
        assert str(caught.value) == f"{constructor.__name__} has no argument '{name}x'; did you mean '{name}'?"
        assert isinstance(caught.value, TypeError)  # as Python's own


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
