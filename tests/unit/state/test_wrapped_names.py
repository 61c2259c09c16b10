"""Names that differ by what wrappers put into them alone are one parameter's: state dicts and checkpoints load."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from megascale import ChainedOptimizer, DistributedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer, cast_model
from megascale.checkpoint import load, save
from megascale.config import OptimizerConfig
from megascale.errors import CheckpointError, StateDictError
from megascale.utils.param_names import renames
from tests.checkpoint_cases import differences, train

Wrap = Callable[[nn.Module], nn.Module]


class Holder(nn.Module):
    """Puts ``module.`` in front of names, as DistributedDataParallel does, with no process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call the module inside."""
        y: torch.Tensor = self.module(x)
        return y


def _compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def _partly_compiled(module: nn.Module) -> nn.Module:
    assert isinstance(module, nn.Sequential)
    module[0] = _compiled(module[0])
    return module


WRAPS: dict[str, Wrap] = {
    "bare": lambda module: module,
    "module": Holder,
    "compiled": _compiled,
    "both": lambda module: Holder(_compiled(module)),
    "both the other way": lambda module: _compiled(Holder(module)),
    "a part": _partly_compiled,
}


def _built(wrap: Wrap, seed: int, sharded: bool = False, **options: Any) -> tuple[nn.Module, MixedPrecisionOptimizer]:
    """A small model, wrapped, and an optimizer that has the wrapped model's names."""
    torch.manual_seed(seed)
    model = wrap(cast_model(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), torch.float16))
    adam = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    scaler = DynamicGradScaler(64.0, 1.0, 2.0, 0.5, 2, 1)
    config = OptimizerConfig(fp16=True, **options)
    if sharded:
        return model, DistributedOptimizer(adam, config, scaler, modules=model)
    return model, MixedPrecisionOptimizer(adam, config, scaler)


def _values(model: nn.Module, optimizer: MixedPrecisionOptimizer) -> list[Any]:
    """Everything that a checkpoint restores, without names, in the order of the model."""
    own = optimizer.state_dict()
    return [
        [value.clone() for value in model.state_dict().values()],
        list(own["optimizer"]["state"].values()),
        list(own["main_params"].values()),
        own["grad_scaler"],
        own["step_counts"],
    ]


@pytest.mark.default("bare-both", "a part-both the other way", "compiled-a part")
@pytest.mark.parametrize(
    ("here", "there"),
    [
        *(("bare", there) for there in WRAPS),
        *((here, "both the other way") for here in WRAPS),
        ("compiled", "a part"),
        ("both", "module"),
    ],
)
def test_a_state_dict_loads_whatever_wraps_the_model(there: str, here: str) -> None:
    """And training goes on with the same bits."""
    model, optimizer = _built(WRAPS[there], 0)
    train(model, optimizer, 0, 3)
    other, loaded = _built(WRAPS[here], 1)
    given = optimizer.state_dict()
    names = list(given["main_params"])
    loaded.load_state_dict(given)
    assert list(given["main_params"]) == names  # what was given has not changed
    assert list(loaded.state_dict()["optimizer"]["state"]) == [name for name, _ in other.named_parameters()]
    assert differences(_values(other, loaded)[1:], _values(model, optimizer)[1:]) == []


@pytest.mark.default("compiled-bare-True-False", "module-a part-True-True")
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("remainders", [False, True])
@pytest.mark.parametrize(("there", "here"), [("bare", "both"), ("compiled", "bare"), ("module", "a part")])
def test_a_checkpoint_loads_whatever_wraps_the_model(
    tmp_path: Path, there: str, here: str, remainders: bool, sharded: bool
) -> None:
    """Model, optimizer and buffers; also main params that are held as remainders of weights under other names."""
    options: dict[str, Any] = {"store_param_remainders": remainders}
    model, optimizer = _built(WRAPS[there], 0, **options)
    train(model, optimizer, 0, 3)
    save(tmp_path, 3, model, optimizer)
    other, loaded = _built(WRAPS[here], 1, sharded, **options)
    assert load(tmp_path, other, loaded).skipped == ()
    assert differences(_values(other, loaded), _values(model, optimizer)) == []
    save(tmp_path, 4, other, loaded)  # under its own names
    third, again = _built(WRAPS[there], 2, **options)
    load(tmp_path, third, again)
    assert differences(_values(third, again), _values(model, optimizer)) == []


@pytest.mark.parametrize(("there", "here"), [("bare", "both"), ("both", "bare"), ("module", "compiled")])
def test_torchs_functions(there: str, here: str) -> None:
    """A state dict in torch's layout, which torch's functions make."""
    model, optimizer = _built(WRAPS[there], 0)
    train(model, optimizer, 0, 3)
    other, loaded = _built(WRAPS[here], 1)
    inner = other.module if isinstance(other, Holder) else other
    given = get_optimizer_state_dict(model.module if isinstance(model, Holder) else model, optimizer)
    set_optimizer_state_dict(inner, loaded, given)
    assert differences(_values(other, loaded)[1:], _values(model, optimizer)[1:]) == []


def test_a_chain() -> None:
    """Whose state dict is split by names."""

    def chain(wrap: Wrap, seed: int) -> tuple[nn.Module, ChainedOptimizer]:
        torch.manual_seed(seed)
        model = wrap(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)))
        named = list(model.named_parameters())
        parts = [torch.optim.AdamW(named[:2], lr=0.1), torch.optim.SGD(named[2:], lr=0.1, momentum=0.9)]
        return model, ChainedOptimizer([MixedPrecisionOptimizer(part) for part in parts])

    model, optimizer = chain(WRAPS["compiled"], 0)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    _, loaded = chain(WRAPS["module"], 1)
    loaded.load_state_dict(optimizer.state_dict())
    ours, theirs = loaded.state_dict(), optimizer.state_dict()
    assert differences(list(ours["optimizer"]["state"].values()), list(theirs["optimizer"]["state"].values())) == []


# Which name is which


def test_a_name_that_both_sides_have_is_itself() -> None:
    """A model that really has an attribute `module`, beside a parameter of the same name without it."""

    class Model(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.weight = nn.Parameter(torch.randn(3))
            self.module = nn.Linear(3, 1, bias=False)

    def built(wrap: Wrap, seed: int) -> tuple[nn.Module, MixedPrecisionOptimizer]:
        model = wrap(Model(seed))
        return model, MixedPrecisionOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1))

    model, optimizer = built(WRAPS["bare"], 0)
    other, loaded = built(WRAPS["bare"], 1)
    other.load_state_dict(dict(zip(other.state_dict(), model.state_dict().values(), strict=True)))
    loaded.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("given", "live", "named"),
    [
        (["module.w", "_orig_mod.w"], ["w"], "state dict has both 'module.w' and '_orig_mod.w'"),
        (["w"], ["module.w", "_orig_mod.module.w"], "what loads it has both 'module.w' and '_orig_mod.module.w'"),
        (["a.module.w", "module.a.w"], ["a.w"], "state dict has both 'a.module.w' and 'module.a.w'"),
    ],
)
def test_two_names_that_become_one_are_an_error(given: list[str], live: list[str], named: str) -> None:
    """It names both: whichever was taken, the other would be lost."""
    with pytest.raises(StateDictError, match=named):
        renames(given, live, "state dict")


def test_a_collision_in_a_state_dict_or_checkpoint_changes_nothing(tmp_path: Path) -> None:
    """The error comes before anything has changed; of a checkpoint's model it is a CheckpointError."""

    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2, bias=False)
            self.add_module("_orig_mod", nn.Linear(2, 2, bias=False))

    torch.manual_seed(0)
    twins = Twins()
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(twins.named_parameters(), lr=0.1, momentum=0.9))
    save(tmp_path, 0, twins, optimizer)
    single = nn.Linear(2, 2, bias=False)
    before = single.weight.clone()
    live = MixedPrecisionOptimizer(torch.optim.SGD(single.named_parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(StateDictError, match=r"both 'module.weight' and '_orig_mod.weight'"):
        live.load_state_dict(optimizer.state_dict())
    with pytest.raises(CheckpointError, match=r"the checkpoint has both 'module.weight' and '_orig_mod.weight'"):
        load(tmp_path, single, strict=False)
    assert torch.equal(single.weight, before)
