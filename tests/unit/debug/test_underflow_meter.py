"""UnderflowMeter and local_grad(): what fp16 loses of the gradients, and how far they are from overflow."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from megascale import (
    ChainedOptimizer,
    ConstantGradScaler,
    DistributedOptimizer,
    MixedPrecisionOptimizer,
)
from megascale.debug import UnderflowMeter
from megascale.errors import ArgumentError, UsageError
from megascale.grad_sync import GradSync
from tests.counting import OperatorCounter
from tests.pool import RankPool

SCALE = 2.0**10


def _wrapped(**options: Any) -> tuple[list[nn.Parameter], MixedPrecisionOptimizer]:
    params = [nn.Parameter(torch.ones(4).half()), nn.Parameter(torch.ones(8).half())]
    inner = torch.optim.SGD([{"params": [("a", params[0])]}, {"params": [("b", params[1])]}], lr=0.0)
    options = {"config": None} | options
    scaler = ConstantGradScaler(SCALE)
    return params, MixedPrecisionOptimizer(inner, grad_scaler=scaler, grads_are_scaled=True, **options)


def _give(params: list[nn.Parameter]) -> None:
    params[0].grad = torch.tensor([0.0, 2.0**-15, 2.0**-14, 1.0]).half()
    params[1].grad = torch.full((8,), 2.0**12).half()


def test_shares_and_headroom() -> None:
    """Zeros and subnormals of each group, headroom in powers of two, and a scale that uses it."""
    params, optimizer = _wrapped()
    meter = UnderflowMeter(optimizer, every=3)
    for _ in range(2):
        assert meter.latest == {}
        _give(params)
        optimizer.step()
    assert meter.latest == {
        "step": 0.0,
        "scale": SCALE,
        "group0/zeros": 0.25,
        "group0/subnormals": 0.25,
        "group0/headroom": math.log2(65504),
        "group1/zeros": 0.0,
        "group1/subnormals": 0.0,
        "group1/headroom": math.log2(65504) - 12,
        "suggested_scale": SCALE * 2.0**2,
    }


def test_only_sampled_steps_cost_operators() -> None:
    """Invariant 5: between two samples a step dispatches what it does without a meter; a sample reads nothing.

    Any step hook, and the meter is one, makes torch open its profiler's span. So both have one.
    """
    params, optimizer = _wrapped()
    counts = []
    for every in (None, 4):
        empty = optimizer.register_step_post_hook(lambda *_: None)
        meter = None if every is None else UnderflowMeter(optimizer, every)
        for index in range(8):
            _give(params)
            with OperatorCounter() as counter:
                optimizer.step()
            assert counter.host_reads == 0
            if index in (2, 3, 6, 7):
                counts.append(counter.counts)
        empty.remove()
        if meter is not None:
            assert meter.latest["step"] == 4
            meter.remove()
            assert not optimizer._optimizer_step_post_hooks
    assert all(count == counts[0] for count in counts)


def _gathered(sharded: bool) -> tuple[dict[str, float], int, float]:
    """Return what all ranks tell of two parameters, and how many collectives a measured step had more than another.

    And the share of zeros of the first that this rank alone tells of.
    """
    model = nn.ParameterDict({"a": torch.ones(8).half(), "b": torch.ones(3).half()})
    inner = torch.optim.SGD([{"params": [one]} for one in model.named_parameters()], lr=0.0)
    scaler = ConstantGradScaler(SCALE)
    optimizer = (
        DistributedOptimizer(inner, None, scaler, modules=model, bucket_numel=1)
        if sharded
        else MixedPrecisionOptimizer(inner, None, scaler, grad_sync=GradSync(model.named_parameters()))
    )
    factors = torch.tensor([0.0, 0.0, 0.0, 2.0**-26, 1.0, 2.0, 4.0, 8.0])

    def collectives() -> int:
        optimizer.zero_grad()
        with CommDebugMode() as mode:
            loss = (model["a"].float() * factors).sum() + 2 * model["b"].float().sum()
            optimizer.scale_loss(loss).backward()
            optimizer.step()
        return mode.get_total_counts()

    meter = UnderflowMeter(optimizer, every=2)
    assert meter.flush(gather=True) == {}
    more = collectives() - collectives()
    early = UnderflowMeter(optimizer) if dist.get_rank() == 0 else None
    collectives()
    with pytest.raises(UsageError, match=r"different steps, -1, 0 \(-1: none\); make the UnderflowMeter on all ranks"):
        (early or UnderflowMeter(optimizer)).flush(gather=True)
    return meter.flush(gather=True), more, meter.flush().get("group0/zeros", -1.0)


@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_agree_on_request(ranks: RankPool, sharded: bool) -> None:
    """Every element counts once, whether ranks hold all of them or pieces. Steps send nothing more."""
    together = {
        "step": 2.0,
        "scale": SCALE,
        "group0/zeros": 0.375,
        "group0/subnormals": 0.125,
        "group0/headroom": math.log2(65504) - 13,
        "group1/zeros": 0.0,
        "group1/subnormals": 0.0,
        "group1/headroom": math.log2(65504) - 11,
        "suggested_scale": SCALE * 2.0,
    }
    results = ranks.run(2, _gathered, sharded)
    for found, more, _ in results:
        assert found == pytest.approx(together)
        assert more == 0
    assert [own for _, _, own in results] == [0.375, -1.0 if sharded else 0.375]  # the second has no piece of it


def test_a_skipped_step_is_no_sample() -> None:
    """The sample before it stays; flush() waits for the newest."""
    params, optimizer = _wrapped()
    meter = UnderflowMeter(optimizer, every=1)
    _give(params)
    optimizer.step()
    assert meter.flush()["step"] == 0
    _give(params)
    params[0].grad = torch.full((4,), math.inf).half()
    optimizer.step()
    assert meter.flush()["step"] == 0


def _place(grad: Tensor | None) -> int:
    assert grad is not None
    return grad.data_ptr()


def test_local_grad_of_plain_and_synced_parameters() -> None:
    """``param.grad`` as it is, or the main grad; a name that is not there is refused with those that are."""
    params, optimizer = _wrapped()
    assert optimizer.local_grad("a") is None
    _give(params)
    assert _place(optimizer.local_grad("a")) == _place(params[0].grad)
    with pytest.raises(ArgumentError, match=r"name='c' is no trainable parameter .*; those are 'a', 'b'"):
        optimizer.local_grad("c")
    model: nn.Module = nn.Linear(2, 1).half()
    weight = dict(model.named_parameters())["weight"]
    sync = GradSync(model.named_parameters())
    inner = torch.optim.SGD(model.named_parameters(), lr=0.0)
    synced = MixedPrecisionOptimizer(inner, None, ConstantGradScaler(SCALE), grad_sync=sync)
    assert _place(synced.local_grad("weight")) == _place(sync.main_grad(weight))
    chain = ChainedOptimizer([synced])
    assert _place(chain.local_grad("weight")) == _place(sync.main_grad(weight))
    with pytest.raises(ArgumentError, match="name='c' is no parameter of these optimizers"):
        chain.local_grad("c")


def _pieces() -> dict[str, list[float]]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False).half()
    inner = torch.optim.SGD(model.named_parameters(), lr=0.0)
    optimizer = DistributedOptimizer(inner, None, ConstantGradScaler(SCALE), modules=model, bucket_numel=1)
    optimizer.zero_grad()
    optimizer.scale_loss((model(torch.tensor([[1.0, 2.0, 4.0]]).half())).float().sum()).backward()
    optimizer.step()
    grad = optimizer.local_grad("weight")
    assert grad is not None
    return {"weight": (grad / SCALE).tolist()}


def test_local_grad_of_a_sharded_parameter(ranks: RankPool) -> None:
    """Each rank has its piece, scaled; together they are the gradient."""
    assert [part for rank in ranks.run(2, _pieces) for part in rank["weight"]] == [1.0, 2.0, 4.0, 1.0, 2.0, 4.0]
