"""Parameters that one rank alone takes in, or alone leaves out: all ranks learn of it, and train on."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascale import ConstantGradScaler, DistributedOptimizer, MixedPrecisionOptimizer
from megascale.averages import AveragedMainParams
from megascale.errors import ArgumentError, UsageError
from megascale.grad_sync import GradSync
from megascale.utils import collectives
from tests.checkpoint_cases import message_of
from tests.pool import RankPool


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).half()


def _backward(net: nn.Module, optimizer: MixedPrecisionOptimizer) -> None:
    optimizer.zero_grad()
    optimizer.scale_loss(net(torch.ones(2, 6).half()).float().square().mean()).backward()


def _weights(net: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in net.parameters()]


def _unfrozen(faulty: int, first: int) -> tuple[str, bool, bool]:
    net = _network()
    net[first:].requires_grad_(False)
    inner = torch.optim.AdamW(net.named_parameters(), lr=0.1)
    optimizer = DistributedOptimizer(inner, None, ConstantGradScaler(8.0), modules=net)
    if first:
        _backward(net, optimizer)
        optimizer.step()
    net[1].requires_grad_(dist.get_rank() == faulty)
    if first or dist.get_rank() == faulty:
        _backward(net, optimizer)
    before = _weights(net)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "timeout_of", lambda group: timedelta(seconds=1))
        message = message_of(UsageError, optimizer.step)
    is_unchanged = all(map(torch.equal, before, _weights(net)))
    net[1].requires_grad_(True)
    _backward(net, optimizer)
    return message, is_unchanged, bool(optimizer.step().success)


@pytest.mark.parametrize("faulty", [0, 1])
@pytest.mark.parametrize("first", [0, 1])
def test_one_rank_alone_unfreezes_a_parameter(ranks: RankPool, faulty: int, first: int) -> None:
    """Under a DistributedOptimizer it compares what it takes in with ranks that never came: all waited for ever.

    ``first``: the first layer that was frozen when the optimizer was built.
    """
    for message, is_unchanged, success in ranks.run(2, _unfrozen, faulty, first):
        assert f"on rank {faulty} waits for ranks [{1 - faulty}]" in message
        assert "after parameters were unfrozen" in message
        assert is_unchanged
        assert success


def _added(faulty: int, sharded: bool) -> tuple[str, int, bool]:
    net = _network()
    inner = torch.optim.AdamW(net[0].named_parameters(), lr=0.1)
    scaler = ConstantGradScaler(8.0)
    if sharded:
        optimizer: MixedPrecisionOptimizer = DistributedOptimizer(inner, None, scaler, modules=net)
    else:
        sync = GradSync(net.named_parameters())
        optimizer = MixedPrecisionOptimizer(inner, None, scaler, grad_sync=sync)
    named = list(net[1].named_parameters(prefix="1"))
    group = {"params": named, "lr": 0.01}
    is_faulty = dist.get_rank() == faulty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "timeout_of", lambda of: timedelta(seconds=1))
        wrong = group | {"params": [*named, ("meta", nn.Parameter(torch.empty(2, device="meta")))]}
        call = lambda: optimizer.add_param_group(wrong if is_faulty else group)  # noqa: E731
        message = message_of(ArgumentError if is_faulty else UsageError, call)
    num_groups = len(optimizer.param_groups)
    dist.barrier()  # a call that follows at once is what the other rank waits for
    optimizer.add_param_group(group)
    _backward(net, optimizer)
    return message, num_groups, bool(optimizer.step().success)


@pytest.mark.parametrize("faulty", [0, 1])
@pytest.mark.parametrize("sharded", [True, False])
def test_one_rank_alone_adds_a_wrong_group(ranks: RankPool, faulty: int, sharded: bool) -> None:
    """Its error came before the exchange in which the others waited for ever. No rank has added anything."""
    for rank, (message, num_groups, success) in enumerate(ranks.run(2, _added, faulty, sharded)):
        assert ("is on the meta device" if rank == faulty else f"rank {rank} waits for ranks [{faulty}]") in message
        assert (num_groups, success) == (1, True)


def _averaged(faulty: int, call: str) -> tuple[str, int]:
    net = _network()
    inner = torch.optim.AdamW(net.named_parameters(), lr=0.1)
    optimizer = DistributedOptimizer(inner, None, ConstantGradScaler(8.0), modules=net)
    averages, message = AveragedMainParams(net, optimizer), ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "timeout_of", lambda group: timedelta(seconds=1))
        if dist.get_rank() == faulty:
            calls = {"applied": lambda: averages.applied().__enter__()}
            message = message_of(UsageError, calls.get(call, getattr(averages, call)))
    dist.barrier()
    return message, len(averages.state_dict()["averages"])


@pytest.mark.parametrize("faulty", [0, 1])
@pytest.mark.parametrize("call", ["state_dict", "model_state_dict", "applied"])
def test_one_rank_alone_asks_for_the_averages(ranks: RankPool, faulty: int, call: str) -> None:
    """Of pieces: it waited for the whole timeout, and the process group was of no use afterwards."""
    for rank, (message, num_averages) in enumerate(ranks.run(2, _averaged, faulty, call)):
        assert (f"on rank {rank} waits for ranks [{1 - faulty}]" in message) == (rank == faulty)
        assert num_averages == 4


def _unowned() -> tuple[str, int]:
    net = _network()
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), None, ConstantGradScaler(8.0), modules=net)
    group = {"params": [nn.Parameter(torch.ones(2).half())]}
    return message_of(ArgumentError, lambda: optimizer.add_param_group(group)), len(optimizer.param_groups)


def test_a_parameter_that_modules_do_not_own_is_not_added(ranks: RankPool) -> None:
    """As at construction: no module would wait for its gather, and forward would read old weights."""
    assert [num for message, num in ranks.run(2, _unowned) if "modules do not own parameter '4'" in message] == [1, 1]
