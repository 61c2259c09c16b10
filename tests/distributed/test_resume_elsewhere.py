"""Runs that go on in another precision, from a plain torch optimizer, or with other names of parameters.

Moments and options are what was saved. Main params are those that were saved, else the model's weights.
"""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd

from megascale import MixedPrecisionOptimizer
from megascale.checkpoint import load, save
from tests.cells import CELLS, Cell, Given, adamw, integers
from tests.fsdp2_cases import gathered_weights, unlike, whole, whole_state
from tests.pool import RankPool

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
BY_POSITION = [cell for cell in CELLS if cell.layout != "zero1"]


def _trained(cell: Cell, inner: Any = adamw) -> tuple[Given, MixedPrecisionOptimizer]:
    model = cell.model()
    optimizer = cell.optimizer(model, inner)
    for step in range(2):
        optimizer.zero_grad()
        cell.backward(optimizer, model, integers(cell.shapes, seed=step + 1, unit=2.0**-7))
        optimizer.step()
    return model, optimizer


def _copy_weights(model: nn.Module, source: nn.Module) -> None:
    with torch.no_grad():
        for param, other in zip(model.parameters(), source.parameters(), strict=True):
            param.copy_(other)


def _fp32(optimizer: MixedPrecisionOptimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return main params, whole, by the model's names; fp32 parameters are their own."""
    saved = optimizer.state_dict()["main_params"]
    return {name: whole(saved.get(name, param)).float() for name, param in model.named_parameters()}


def _moments(optimizer: MixedPrecisionOptimizer) -> dict[str, Any]:
    """Return all state of the wrapped optimizer, by position."""
    state = whole_state(optimizer)
    places = [path.split("/") for path in state if path.startswith("/optimizer/state/")]
    names = list(dict.fromkeys(place[3] for place in places))
    return {f"{names.index(place[3])}/{'/'.join(place[4:])}": state["/".join(place)] for place in places}


def _in_another_precision(cell: Cell, dtype: torch.dtype, folder: str) -> list[str]:
    """Resume a run of ``dtype`` in ``cell``, by both ways; return what is not as it should be."""
    source_cell, wrong = replace(cell, dtype=dtype), []
    source, trained = _trained(source_cell)
    save(folder, 1, source, trained)
    for way in ("load_state_dict", "checkpoint"):
        model = cell.model()
        optimizer = cell.optimizer(model)
        fresh_scale = optimizer.get_loss_scale().item()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if way == "checkpoint":
                load(folder, model, optimizer)
            else:
                _copy_weights(model, source)
                optimizer.load_state_dict(trained.state_dict())
        expected = _fp32(trained, source)
        rounds = way == "load_state_dict" and dtype == torch.float32
        if rounds:  # a state dict has no weights
            expected = {name: value.to(cell.dtype).float() for name, value in expected.items()}
        wrong += [f"{way} main param {name}" for name in unlike(expected, _fp32(optimizer, model))]
        rounded = {name: value.to(cell.dtype) for name, value in expected.items()}
        wrong += [f"{way} weight {name}" for name in unlike(rounded, gathered_weights(model))]
        wrong += [f"{way} moment {name}" for name in unlike(_moments(trained), _moments(optimizer))]
        keeps = cell.dtype == dtype == torch.float16
        scale = trained.get_loss_scale().item() if keeps else fresh_scale
        wrong += [] if optimizer.get_loss_scale().item() == scale else [f"{way} scale"]
        told = " ".join(str(one.message) for one in said)
        has_changed = (cell.dtype == torch.float16) != (dtype == torch.float16) or (rounds and cell.dtype != dtype)
        is_first = torch.distributed.get_rank() == 0
        wrong += [] if ("load_state_dict() takes" in told) == (has_changed and is_first) else [f"{way} said {told!r}"]
        before = gathered_weights(model)
        cell.backward(optimizer, model, integers(cell.shapes, seed=9, unit=2.0**-7))
        wrong += [] if bool(optimizer.step().success) and unlike(before, gathered_weights(model)) else [f"{way} step"]
        wrong += [] if "compact" not in str(cell) or _holds_codes(optimizer) else [f"{way} codes"]
    return wrong


def _holds_codes(optimizer: MixedPrecisionOptimizer) -> bool:
    return all(
        value.dtype in (torch.int8, torch.uint8)
        for key, value in _moments(optimizer).items()
        if key.endswith(("exp_avg", "exp_avg_sq"))
    )


@pytest.mark.default("bfloat16-zero1-fp32")
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_run_goes_on_in_another_precision(cell: Cell, ranks: RankPool, tmp_path: Path) -> None:
    """From fp16, bf16 and fp32, by state dict and by checkpoint: main params round into the new weights, moments stay,
    a loss scale goes or stays new, and the first rank says so. Each was an error. All cells exist.
    """
    for dtype in DTYPES:
        folder = str(tmp_path / str(dtype))
        for wrong in ranks.run(cell.world_size, _in_another_precision, cell, dtype, folder):
            assert wrong == [], f"from {dtype}"


def _from_torch(cell: Cell, dtype: torch.dtype) -> list[str]:
    """Resume a plain AdamW over weights of ``dtype`` in ``cell``; return what is not as it should be."""
    source = replace(cell, dtype=dtype).model()
    plain = torch.optim.AdamW(source.parameters(), lr=2.0**-7)
    for param, grad in zip(source.parameters(), integers(cell.shapes, 1), strict=True):
        param.grad = torch.empty_like(param).copy_(_like(param, grad))
    plain.step()
    model = cell.model()
    _copy_weights(model, source)
    optimizer = cell.optimizer(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if cell.layout == "fsdp2":
            dsd.set_optimizer_state_dict(model, optimizer, dsd.get_optimizer_state_dict(source, plain))
        else:
            optimizer.load_state_dict(plain.state_dict())
    mains = {name: whole(param).to(cell.dtype).float() for name, param in source.named_parameters()}
    wrong = unlike(mains, _fp32(optimizer, model))
    if cell.state == "fp32":
        wrong += unlike(_moments_of_torch(plain), _moments(optimizer))
    told = len([one for one in said if "load_state_dict() takes" in str(one.message)])
    lacks = cell.dtype != torch.float32
    return wrong if told == int(lacks and torch.distributed.get_rank() == 0) else [*wrong, f"told {told} times"]


def _moments_of_torch(plain: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state of a torch optimizer as :func:`_moments` does, in fp32."""
    [group] = plain.param_groups
    return {
        f"{position}/{key}": whole(value).float()
        for position, param in enumerate(group["params"])
        for key, value in plain.state[param].items()
    }


def _like(param: Tensor, whole_value: Tensor) -> Tensor:
    """Return this rank's part of a tensor, placed as ``param``."""
    if not isinstance(param, torch.distributed.tensor.DTensor):
        return whole_value
    return torch.distributed.tensor.distribute_tensor(whole_value, param.device_mesh, param.placements)


@pytest.mark.default("bfloat16-replicated-fp32")
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_plain_optimizers_run_goes_on(cell: Cell, ranks: RankPool) -> None:
    """A plain AdamW's state dict, over weights of any dtype: its moments, in fp32, and the weights as main params.

    Under FSDP2 through torch's functions. All cells exist; in the compact ones its moments become codes.
    """
    for dtype in DTYPES:
        for wrong in ranks.run(cell.world_size, _from_torch, cell, dtype):
            assert wrong == [], f"from {dtype}"


@pytest.mark.filterwarnings("ignore:load_state_dict")
@pytest.mark.parametrize("kind", ["Adafactor", "NAdam"])
def test_state_made_for_16_bit_weights_is_fp32_from_then_on(kind: str) -> None:
    """Of optimizers that run their own step(), also of shapes that are not the weights'. In fp32 it stayed 16-bit."""
    shapes = [(8, 4), (4,)]
    source, model = Given(shapes).bfloat16(), Given(shapes)
    plain = getattr(torch.optim, kind)(source.parameters())
    source(integers(shapes, 1)).backward()
    plain.step()
    _copy_weights(model, source)
    optimizer = MixedPrecisionOptimizer(getattr(torch.optim, kind)(model.named_parameters()))
    optimizer.load_state_dict(plain.state_dict())
    loaded = optimizer.state_dict()["optimizer"]["state"]
    for (name, _), param in zip(model.named_parameters(), source.parameters(), strict=True):
        for key, value in plain.state[param].items():
            assert loaded[name][key].dtype == torch.float32
            assert torch.equal(loaded[name][key], value.float())


def _unnamed(named: Any) -> torch.optim.Optimizer:
    return adamw([param for _, param in named])


def _in_groups(named: Any, *, named_here: bool) -> torch.optim.Optimizer:
    pairs = list(named)
    halves: list[dict[str, Any]] = [{"params": pairs[1:]}, {"params": pairs[:1], "weight_decay": 0.25}]
    if not named_here:
        halves = [half | {"params": [param for _, param in half["params"]]} for half in halves]
    return torch.optim.AdamW(halves, lr=2.0**-7)


INNER = {
    "one group": (adamw, _unnamed),
    "two groups in another order": (
        lambda named: _in_groups(named, named_here=True),
        lambda named: _in_groups(named, named_here=False),
    ),
}


def _with_other_names(cell: Cell, kind: str, turned: bool, folder: str) -> list[str]:
    """Save from ``parameters()`` and load with ``named_parameters()``, or the reverse; return what differs."""
    first, second = INNER[kind][::-1] if turned else INNER[kind]
    source, trained = _trained(cell, first)
    save(folder, 1, source, trained)
    wrong = []
    for way in ("load_state_dict", "checkpoint"):
        model = cell.model()
        optimizer = cell.optimizer(model, second)
        if way == "checkpoint":
            load(folder, model, optimizer)
        else:
            _copy_weights(model, source)
            optimizer.load_state_dict(trained.state_dict())
        mains = [[whole(main) for main in one.state_dict()["main_params"].values()] for one in (trained, optimizer)]
        wrong += [] if all(map(torch.equal, *mains)) and len(mains[0]) == len(mains[1]) else [f"{way} main params"]
        wrong += [f"{way} {name}" for name in unlike(_moments(trained), _moments(optimizer))]
        wrong += [f"{way} {name}" for name in unlike(gathered_weights(source), gathered_weights(model))]
        decays = [[group["weight_decay"] for group in one.param_groups] for one in (trained, optimizer)]
        wrong += [] if decays[0] == decays[1] else [f"{way} {decays}"]
    return wrong


@pytest.mark.default(
    "bfloat16-replicated-fp32-one group-True", "float32-fsdp2-compact-two groups in another order-True"
)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", INNER)
@pytest.mark.parametrize("cell", BY_POSITION, ids=str)
def test_names_and_positions_are_the_same_parameters(
    cell: Cell, kind: str, turned: bool, ranks: RankPool, tmp_path: Path
) -> None:
    """In the order of the param groups, as torch counts. The error advised to leave moments out.

    Not in ZeRO-1's cells: a DistributedOptimizer has its modules' names always.
    """
    for wrong in ranks.run(cell.world_size, _with_other_names, cell, kind, turned, str(tmp_path)):
        assert wrong == []


def test_a_list_of_parameters_has_names_that_look_like_positions() -> None:
    """They are names: an optimizer of some of them, in another order, loads each by its own."""
    params = nn.ParameterList([nn.Parameter(torch.full((2,), float(index))) for index in range(3)]).bfloat16()
    named = dict(params.named_parameters())
    source = MixedPrecisionOptimizer(torch.optim.SGD(named.items(), lr=0.5))
    saved = source.state_dict()
    other = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(3)]).bfloat16()
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD([*other.named_parameters()][::-1], lr=0.5))
    optimizer.load_state_dict(saved)
    assert [param.tolist() for param in other] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def _back_to_torch(cell: Cell) -> list[str]:
    """Go on with a plain AdamW over fp32 weights, and come back; return what is not as it should be."""
    source, trained = _trained(cell)
    if cell.state == "compact":  # torch cannot read codes
        other = cell.model()
        _copy_weights(other, source)
        wide = replace(cell, state="fp32").optimizer(other)
        wide.load_state_dict(trained.state_dict())
        source, trained = other, wide
    saved, mains, moments = trained.state_dict(), _fp32(trained, source), _moments(trained)
    model = replace(cell, dtype=torch.float32).model()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(_like(param, mains[name]))
    plain = torch.optim.AdamW(model.parameters(), lr=1.0)
    plain.load_state_dict(saved["optimizer"])
    wrong = [] if plain.param_groups[0]["lr"] == 2.0**-7 else ["rate"]
    wrong += unlike(moments, _moments_of_torch(plain))
    for param, grad in zip(model.parameters(), integers(cell.shapes, 7), strict=True):
        param.grad = torch.empty_like(param).copy_(_like(param, grad))
    plain.step()
    again = cell.model()
    _copy_weights(again, model)
    optimizer = replace(cell, state="fp32").optimizer(again)
    optimizer.load_state_dict(plain.state_dict())
    return wrong + unlike(_moments_of_torch(plain), _moments(optimizer))


@pytest.mark.default("float32-replicated-compact", "float16-zero1-fp32")
@pytest.mark.filterwarnings("ignore:load_state_dict")
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_plain_optimizer_takes_over_and_gives_back(cell: Cell, ranks: RankPool) -> None:
    """``state_dict()["optimizer"]`` is a torch optimizer's. ZeRO-1's run goes on replicated, 8-bit moments in fp32."""
    for wrong in ranks.run(cell.world_size, _back_to_torch, cell):
        assert wrong == []
