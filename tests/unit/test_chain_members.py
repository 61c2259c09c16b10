"""A chain does to all of its members what one optimizer does to its parameters."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale import (
    ChainedOptimizer,
    DynamicGradScaler,
    MixedPrecisionOptimizer,
    OptimizerConfig,
)
from megascale.errors import StateDictError
from tests.training import bits_equal


def _chain(count: int = 3) -> tuple[list[nn.Parameter], ChainedOptimizer]:
    params = [nn.Parameter(torch.full((3,), float(index)).half()) for index in range(1, count + 1)]
    scaler = DynamicGradScaler(2.0**4, 1.0, 2.0, 0.5, 100, 1)
    config = OptimizerConfig(fp16=True)
    members = [
        MixedPrecisionOptimizer(torch.optim.SGD([(f"p{index}", param)], lr=0.5), config, scaler, grads_are_scaled=True)
        for index, param in enumerate(params)
    ]
    return params, ChainedOptimizer(members)


def _mains(chain: ChainedOptimizer) -> list[Tensor]:
    return [main.clone() for _, main in chain.main_params()]


def test_reload_reaches_every_member() -> None:
    """reload_model_params() sets the main params of all members, not of one: writes through .data cannot be seen."""
    params, chain = _chain()
    before = _mains(chain)
    for param in params:
        param.data.add_(0.5)
    assert all(map(bits_equal, _mains(chain), before))
    chain.reload_model_params()
    assert all(bits_equal(main, param.float()) for main, param in zip(_mains(chain), params, strict=True))


def test_skips_are_counted_once() -> None:
    """A step that all members skip together, whichever has the overflow, changes no main param and counts as one, and a
    landed one as none.
    """
    params, chain = _chain()
    counts = []
    for poison in (0.0, math.inf, 0.0, math.nan, math.nan):
        chain.get_loss_scale()
        for param in params:
            param.grad = torch.ones_like(param)
        params[1].grad = torch.full_like(params[1], 1.0 + poison)
        before = _mains(chain)
        assert bool(chain.step().success) == (poison == 0.0)
        assert [bits_equal(*pair) for pair in zip(_mains(chain), before, strict=True)] == [poison != 0.0] * 3
        counts.append(int(chain.num_skipped_steps))
    assert counts == [0, 1, 1, 2, 3]
    assert [int(member.num_skipped_steps) for member in chain._optimizers] == [3, 3, 3]


@pytest.mark.parametrize("where", ["state", "main_params"])
def test_a_name_that_no_member_has_is_refused(where: str) -> None:
    """Whether a state dict has optimizer state of it, or a main param: by name, unless strict is False."""
    _, chain = _chain()
    saved = chain.state_dict()
    held = saved["optimizer"]["state"] if where == "state" else saved["main_params"]
    held["other"] = {} if where == "state" else torch.ones(3)
    before = _mains(chain)
    with pytest.raises(StateDictError, match="parameters that no optimizer has: 'other'"):
        chain.load_state_dict(saved)
    assert all(map(bits_equal, _mains(chain), before))
    chain.load_state_dict(saved, strict=False)
    assert all(map(bits_equal, _mains(chain), before))


def test_a_members_state_that_does_not_fit_is_refused() -> None:
    """By a check before the load, too."""
    _, chain = _chain()
    saved = chain.state_dict()

    def check(state_dict: dict[str, Any], *, strict: bool) -> None:
        for live, part in chain._live_parts(state_dict, strict):
            live.check(part, strict=strict)

    check(saved, strict=True)
    saved["main_params"]["p1"] = torch.ones(2)
    for call in (chain.load_state_dict, check):
        with pytest.raises(StateDictError, match=r"main param of 'p1' has shape \(2,\)"):
            call(saved, strict=True)
