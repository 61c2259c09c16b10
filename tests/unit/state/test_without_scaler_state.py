"""State dicts that hold no scaler's state, as a bf16 run or another program saves them, leave a scaler as it is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megascale import ChainedOptimizer, ConstantGradScaler, MixedPrecisionOptimizer
from megascale.base_optimizer import MegascaleOptimizer
from megascale.errors import StateDictError
from tests.training import Tiny, bits_equal, model, same_bits, set_grads, wrap

Load = Callable[[Tiny, MegascaleOptimizer, bool], None]


def _saved() -> tuple[Tiny, MixedPrecisionOptimizer]:
    """Return a bf16 run after a step."""
    module = model(torch.bfloat16)
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(module.named_parameters(), lr=1e-2))
    set_grads(module, 0)
    optimizer.step()
    return module, optimizer


def _without(**changes: Any) -> Load:
    """Load our own layout; ``changes`` replace entries, None removes them."""

    def load(module: Tiny, optimizer: MegascaleOptimizer, strict: bool) -> None:
        state = _saved()[1].state_dict() | {key: value for key, value in changes.items() if value is not None}
        for key in (key for key, value in changes.items() if value is None):
            del state[key]
        optimizer.load_state_dict(state, strict=strict)

    return load


def _through_torch(**options: Any) -> Load:
    def load(module: Tiny, optimizer: MegascaleOptimizer, strict: bool) -> None:
        state = get_optimizer_state_dict(*_saved(), options=StateDictOptions(**options))
        set_optimizer_state_dict(module, optimizer, state, options=StateDictOptions(strict=strict, **options))

    return load


LOADS: dict[str, Load] = {
    "an empty entry": _without(),
    "no entry": _without(grad_scaler=None),
    "torch's functions": _through_torch(),
    "torch's functions, flat": _through_torch(flatten_optimizer_state_dict=True),
    "torch's layout, to the optimizer": lambda module, optimizer, strict: optimizer.load_state_dict(
        get_optimizer_state_dict(*_saved()), strict=strict
    ),
}


@pytest.mark.default("torch's functions, flat-False", "torch's functions-True", "no entry-False")
@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("way", LOADS)
def test_the_scaler_keeps_its_state(way: str, chained: bool) -> None:
    """Main params, moments and step counts are taken. Strict says so, and refuses where even the entry is missing."""
    module = model(seed=1)
    own = wrap(module, scale=2.0**7)
    optimizer = ChainedOptimizer([own]) if chained else own
    if way == "no entry":
        with pytest.raises(StateDictError, match=r"lacks \['grad_scaler'\].*strict=False"):
            LOADS[way](module, optimizer, True)
        LOADS[way](module, optimizer, False)
    else:
        with pytest.warns(
            UserWarning, match="has no loss scale, and the optimizer's grad scaler stays as it is"
        ) as said:
            LOADS[way](module, optimizer, True)
        assert len([one for one in said if "load_state_dict()" in str(one.message)]) == 1
    saved, loaded = _saved()[1].state_dict(), optimizer.state_dict()
    assert same_bits(saved["main_params"], loaded["main_params"])
    assert saved["step_counts"] == loaded["step_counts"]
    assert all(map(same_bits, saved["optimizer"]["state"].values(), loaded["optimizer"]["state"].values()))
    assert loaded["grad_scaler"]["scale"] == 2.0**7
    set_grads(module, 1)
    assert optimizer.step().success


def test_a_constant_scale_needs_no_state() -> None:
    """Megatron-Core saves nothing of a constant scaler; the scale is what it was built with."""
    scaler = ConstantGradScaler(2.0**5)
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(model().named_parameters()), None, scaler)
    optimizer.load_state_dict(_saved()[1].state_dict())
    assert bits_equal(optimizer.get_loss_scale(), torch.tensor(2.0**5))
