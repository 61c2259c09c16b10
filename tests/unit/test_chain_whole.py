"""A chain of optimizers is one optimizer: its step is whole or not at all, its errors come once, its hooks fire."""

import pytest
import torch

from megascale import ChainedOptimizer, ConstantGradScaler, MixedPrecisionOptimizer
from megascale.base_optimizer import MegascaleOptimizer
from megascale.errors import MainParamOverflowError, UsageError
from tests.training import Bag, grad_of, same_bits, set_grads


def _chain(module: Bag, scale: float = 1.0, lrs: tuple[float, ...] = (0.1, 0.1)) -> ChainedOptimizer:
    """An optimizer for each of ``lrs``, of one parameter each."""
    scaler = ConstantGradScaler(scale)
    return ChainedOptimizer(
        [
            MixedPrecisionOptimizer(
                torch.optim.SGD([(str(index), module[index])], lr=lr), None, scaler, grads_are_scaled=True
            )
            for index, lr in enumerate(lrs)
        ]
    )


def _module(count: int = 2) -> Bag:
    return Bag([torch.ones(4, dtype=torch.float16) for _ in range(count)])


@pytest.mark.parametrize("outgrown", [0, 1, 2])
def test_step_is_whole_where_a_main_param_outgrows_fp16(outgrown: int) -> None:
    """Invariant 10: whichever member's main param is too large for fp16, all members have stepped when it is raised, as
    on several ranks; and the step is counted.
    """
    module = _module(3)
    optimizer = _chain(module, lrs=(0.1, 0.1, 0.1))
    optimizer.param_groups[outgrown]["lr"] = 1e6
    set_grads(module, 0)
    before = {name: main.clone() for name, main in optimizer.main_params()}
    with pytest.raises(MainParamOverflowError, match=f"main param of '{outgrown}' is 65520 or more"):
        optimizer.step()
    for name, main in optimizer.main_params():
        assert not torch.equal(main, before[name])
        if name != str(outgrown):
            torch.testing.assert_close(module[int(name)].detach().float(), main, rtol=1e-3, atol=0)


@pytest.mark.parametrize("into", ["a member", "the chain"])
def test_halves_of_a_step_are_not_mixed(into: str) -> None:
    """A load, also into one member, drops the step that was prepared: no member takes its second half."""
    module = _module()
    optimizer = _chain(module)
    set_grads(module, 0)
    optimizer.prepare_grads()
    target: MegascaleOptimizer = optimizer if into == "the chain" else optimizer._optimizers[1]
    target.load_state_dict(target.state_dict())
    before = {name: main.clone() for name, main in optimizer.main_params()}
    with pytest.raises(UsageError, match=r"needs prepare_grads\(\) first"):
        optimizer.step_with_ready_grads()
    assert same_bits(before, dict(optimizer.main_params()))


def test_halves_of_a_step_make_a_whole() -> None:
    """The first tells of the decision; between them gradients can be clamped."""
    module, twin = _module(), _module()
    halves, whole = _chain(module), _chain(twin)
    set_grads(module, 0)
    set_grads(twin, 0)
    assert halves._decision is None
    found_inf = halves.prepare_grads()
    assert (found_inf.item(), found_inf.shape) == (0.0, ())
    assert halves._decision is not None
    halves.clip_grad_value_(0.25)
    assert halves.step_with_ready_grads().success
    for param in twin.parameters():
        grad_of(param).clamp_(-0.25, 0.25)
    whole.step()
    assert same_bits(dict(halves.main_params()), dict(whole.main_params()))


def test_clipping_of_a_member_alone_is_refused() -> None:
    """One norm clips all: a member's ``clip_grad`` set after chaining would be ignored. The chain's reaches all."""
    module = _module()
    optimizer = _chain(module)
    before = {name: main.clone() for name, main in optimizer.main_params()}
    for index in range(2):
        optimizer._optimizers[index].clip_grad = 0.5
        set_grads(module, 0)
        for half in (optimizer.prepare_grads, optimizer.step):
            with pytest.raises(UsageError, match=rf"optimizers\[{index}\]\.clip_grad was set to 0\.5.*set Chained"):
                half()
        optimizer._optimizers[index].clip_grad = 0.0
    assert same_bits(before, dict(optimizer.main_params()))
    optimizer.clip_grad = 0.5
    assert [member.clip_grad for member in optimizer._optimizers] == [0.5, 0.5]
    assert optimizer.step().success
