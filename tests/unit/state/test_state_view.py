"""``optimizer.state``: what it shows, and what may be written through it."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale import MixedPrecisionOptimizer
from megascale.errors import UsageError
from megascale.state.torch_layout import ADDED
from tests.training import Sign, Tiny, bits_equal, model, same_bits, same_values, set_grads, snapshot, wrap

OWN = ["step", "exp_avg", "exp_avg_sq"]


def _step(module: nn.Module, optimizer: MixedPrecisionOptimizer, step: int) -> None:
    set_grads(module, step, 1e6 if step == 1 else 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _trained(**options: Any) -> tuple[Tiny, MixedPrecisionOptimizer]:
    module = model()
    optimizer = wrap(module, **options)
    for step in range(3):
        _step(module, optimizer, step)
    return module, optimizer


def test_entries() -> None:
    """Each parameter's own entries, live, then ours; the main param is the live one; the scaler's are its values."""
    module, optimizer = _trained()
    weight = module.first.weight
    entries, own = optimizer.state[weight], optimizer._inner.state[weight]
    assert list(entries) == [*OWN, *ADDED]
    assert len(entries) == len(OWN) + len(ADDED)
    assert all(entries[name] is own[name] for name in OWN)
    assert entries["main_param"] is dict(optimizer.main_params())["first.weight"]
    assert entries["grad_scaler_scale"].item() == optimizer.get_loss_scale().item() == 2.0**9
    assert [entries[f"step_counts_{key}"].item() for key in ("landed", "skipped")] == [2, 1]
    assert entries["num_states"].item() == len(OWN)
    assert "main_param" in entries
    assert "exp_avg" in entries
    assert "other" not in entries
    with pytest.raises(KeyError, match="other"):
        entries["other"]
    assert type(entries.copy()) is dict
    assert "'num_states': tensor(3)" in repr(entries)


def test_parameters() -> None:
    """All parameters of the groups, frozen and stateless ones too; none but these; never false."""
    module = model()
    module.first.bias.requires_grad_(False)
    optimizer = wrap(module, lambda m: Sign(m.named_parameters()))  # makes its state at its first step
    assert optimizer.state
    assert list(optimizer.state) == list(module.parameters())
    assert len(optimizer.state) == 7
    assert list(optimizer.state[module.first.bias]) == list(optimizer.state[module.first.weight]) == list(ADDED)
    assert module.first.bias in optimizer.state
    other = nn.Parameter(torch.zeros(1))
    assert other not in optimizer.state
    assert optimizer.state.get(other) is None


def test_weights_that_were_loaded_show() -> None:
    """Whoever saves main params saves what the model holds now, not what it held before."""
    module, optimizer = _trained()
    loaded = {name: value * 0.5 for name, value in module.state_dict().items()}
    module.load_state_dict(loaded)
    for name, param in module.named_parameters():
        assert bits_equal(optimizer.state[param]["main_param"].half(), loaded[name])


def _replace_each(optimizer: MixedPrecisionOptimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            entries = optimizer.state[param]
            for name, value in entries.items():
                if isinstance(value, Tensor):
                    entries[name] = value.clone()


def _replace_whole(optimizer: MixedPrecisionOptimizer) -> None:
    for param, entries in optimizer.state.items():
        moved = {name: value.clone() if isinstance(value, Tensor) else value for name, value in entries.items()}
        optimizer.state[param] = moved


def _replace_all(optimizer: MixedPrecisionOptimizer) -> None:
    optimizer.state = {
        param: {name: value.clone() if isinstance(value, Tensor) else value for name, value in entries.items()}
        for param, entries in optimizer.state.items()
    }


@pytest.mark.default("_replace_each-stored2", "_replace_all-stored1", "_replace_whole-stored0")
@pytest.mark.parametrize("stored", [{}, {"store_param_remainders": True}, {"exp_avg_dtype": torch.int8}])
@pytest.mark.parametrize("move", [_replace_each, _replace_whole, _replace_all])
def test_a_loop_that_moves_the_state(move: Callable[[MixedPrecisionOptimizer], None], stored: dict[str, Any]) -> None:
    """As Lightning's does: other memory, the same values. They are taken in; main params stay, no bit changes."""
    module, optimizer = _trained(**stored)
    twin_module, twin = _trained(**stored)
    held = dict(optimizer.main_params())
    places = {name: main.data_ptr() for name, main in held.items()}
    inner = optimizer._inner.state[module.first.weight]["exp_avg"].data_ptr()
    move(optimizer)
    assert optimizer._inner.state[module.first.weight]["exp_avg"].data_ptr() != inner
    assert all(
        next(iter(entries)) in OWN and not set(entries) & set(ADDED) for entries in optimizer._inner.state.values()
    )
    if "store_param_remainders" not in stored:
        assert all(main is held[name] and main.data_ptr() == places[name] for name, main in optimizer.main_params())
    for step in (5, 6):
        _step(module, optimizer, step)
        _step(twin_module, twin, step)
    assert optimizer._inner.state[module.first.weight]["exp_avg"].data_ptr() == inner
    assert same_bits(snapshot(optimizer, module), snapshot(twin, twin_module))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("main_param", torch.zeros(2), "of 'first.weight' was assigned another 'main_param'"),
        ("main_param", torch.zeros(6, 4), "another 'main_param'"),
        ("main_param", torch.zeros(6, 4, device="meta"), "another 'main_param'"),
        ("main_param", None, "another 'main_param'"),
        ("grad_scaler_scale", torch.tensor(3.0), "of 'first.weight' was assigned another 'grad_scaler_scale'"),
        ("grad_scaler_scale", None, "another 'grad_scaler_scale'"),
        ("num_states", torch.tensor(2), "another 'num_states'"),
        ("step_counts_landed", 2, "another 'step_counts_landed'"),
    ],
)
def test_what_cannot_be_written(name: str, value: Any, message: str) -> None:
    """What shows another place's value is not changed in silence, and stays."""
    module, optimizer = _trained()
    before = snapshot(optimizer, module)
    with pytest.raises(UsageError, match=message):
        optimizer.state[module.first.weight][name] = value
    with pytest.raises(UsageError, match="cannot be deleted"):
        del optimizer.state[module.first.weight][name]
    assert same_bits(snapshot(optimizer, module), before)


def test_a_parameters_state_is_a_dict() -> None:
    """Anything else is named where it is assigned: the next step ended with a TypeError that named nothing."""
    module, optimizer = _trained()
    before, weight = snapshot(optimizer, module), module.first.weight
    message = "optimizer.state of 'first.weight' was assigned a Tensor.*assign a dict of its entries"
    with pytest.raises(UsageError, match=message):
        optimizer.state[weight] = torch.ones(6, 4)
    with pytest.raises(UsageError, match=message):
        optimizer.state = {weight: torch.ones(6, 4)}
    assert same_bits(snapshot(optimizer, module), before)


def test_a_copy_of_a_main_param_that_is_not_finite_may_be_assigned() -> None:
    """As a program does that moves the state of a run which has diverged."""
    module, optimizer = _trained()
    entries = optimizer.state[module.first.weight]
    entries["main_param"][0, 0], entries["main_param"][0, 1] = torch.nan, torch.inf
    main = entries["main_param"]
    entries["main_param"] = main.clone()
    assert entries["main_param"] is main


def test_own_entries_are_written_through() -> None:
    """What the wrapped optimizer keeps may be set, deleted and dropped, as in its own state."""
    module, optimizer = _trained()
    weight, inner = module.first.weight, optimizer._inner
    mine = {name: torch.ones(6, 4) for name in OWN[1:]}
    optimizer.state[weight] = mine
    assert inner.state[weight] is mine
    optimizer.state[weight]["more"] = 1
    assert mine["more"] == 1
    del optimizer.state[weight]["more"]
    assert optimizer.state[weight].pop("exp_avg") is not None
    assert list(mine) == ["exp_avg_sq"]
    optimizer.state[weight].clear()
    assert mine == {}
    del optimizer.state[weight]
    assert weight not in inner.state
    optimizer.state[weight]["exp_avg"] = torch.ones(6, 4)
    assert list(inner.state[weight]) == ["exp_avg"]
    optimizer.state["global"] = {"count": 1}
    held: Any = inner.state
    assert held["global"] == optimizer.state["global"] == {"count": 1}
    assert list(optimizer.state)[-1] == "global"
    optimizer.state.clear()
    assert len(inner.state) == 0


def test_the_whole_state_is_assigned() -> None:
    """Itself: nothing changes. Another mapping: its entries are the wrapped optimizer's."""
    _, optimizer = _trained()
    inner, held = optimizer._inner, optimizer._inner.state
    optimizer.state = optimizer.state
    assert inner.state is held
    mine: Any = defaultdict(dict, held)
    view = optimizer.state
    optimizer.state = mine
    assert inner.state is not held
    assert same_values(dict(inner.state), dict(mine))
    optimizer.state = view  # as torch's swap_in_optimizer_params_and_state() puts it back
    assert inner.state is held


def test_entries_that_are_kept_do_not_keep_the_wrapper() -> None:
    """Invariant 11: the torch optimizer is free when the wrapper is dropped, whoever looks at its state still."""
    module, optimizer = _trained()
    inner, entries = optimizer._inner, optimizer.state[module.first.weight]
    main = entries["main_param"]
    del optimizer
    assert entries["main_param"] is main
    inner.step()
