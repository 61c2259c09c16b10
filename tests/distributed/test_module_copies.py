"""Copies of a model whose parameters an optimizer gathers or whose gradients it takes: as without, and on their own."""

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable
from itertools import product
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from megascale import DistributedOptimizer, MixedPrecisionOptimizer
from tests.distributed.test_distributed_optimizer import Net, batch, config_of, same, scaler, weights
from tests.distributed.test_lifetimes import MAKERS, _hooks_on, _train
from tests.pool import RankPool

FP16 = torch.float16


class _Own(Net):
    """Copies itself, as users' modules do, and leaves out what cannot be copied; reads a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.cache = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        """Return shape [..., 1]."""
        return super().forward(x) * self.gain

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "cache"}

    def __deepcopy__(self, memo: Any) -> "_Own":
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k != "cache"})
        return made


def _saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return cast(nn.Module, torch.load(file, weights_only=False))


def _queued(module: nn.Module) -> nn.Module:
    return cast(nn.Module, pickle.loads(ForkingPickler.dumps(copy.deepcopy(module))))


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "AveragedModel": lambda module: AveragedModel(module).module,
    "torch.save": _saved,
    "pickle": lambda module: cast(nn.Module, pickle.loads(pickle.dumps(module))),
    "ForkingPickler": _queued,
    "deepcopy of a shallow copy": lambda module: copy.deepcopy(copy.copy(module)),
}


def _model(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().to(FP16)


def _copied(maker: str, kind: type[nn.Module], how: str) -> list[Any]:
    module, twin = _model(kind), _model(kind)
    optimizer, other = MAKERS[maker](module), MAKERS["sharded" if maker == "overlapped" else maker](twin)
    _train(optimizer, module, range(2))
    _train(other, twin, range(2))
    optimizer.finish_param_gather()
    made = COPIES[how](module)
    equal = same(weights(made), weights(twin))
    apart = not {p.data_ptr() for p in made.parameters()} & {p.data_ptr() for p in module.parameters()}
    is_free = not made.get_parameter("first.weight")._post_accumulate_grad_hooks
    _alone(made)
    _train(optimizer, module, range(2, 3))  # the model goes on as it would have
    _train(other, twin, range(2, 3))
    module.state_dict()
    return [equal, apart, is_free, same(weights(module), weights(twin))]


def _alone(made: nn.Module) -> None:
    """Train a copy with torch alone; its gradients are its own, and stay with it."""
    before = weights(made)
    made(batch(0, dist.get_rank(), FP16)).float().square().mean().backward()
    assert all(param.grad is not None for param in made.parameters())
    torch.optim.SGD(made.parameters(), lr=0.1).step()
    assert not same(before, weights(made))


@pytest.mark.default("made9-pickle", "made1-AveragedModel", "made4-ForkingPickler")
@pytest.mark.parametrize(
    ("made", "how"), list(product([("overlapped", Net), ("overlapped", _Own), ("sync", Net)], COPIES))
)
def test_copies_are_whole_and_on_their_own(ranks: RankPool, made: tuple[str, type[nn.Module]], how: str) -> None:
    """A copy trains alone; the original trains on. Under overlap_param_gather they failed: hooks could not be pickled,
    or reached the old optimizer.
    """
    assert ranks.run(2, _copied, *made, how) == [[True] * 4] * 2


def _shared(maker: str, kind: type[nn.Module]) -> list[bool]:
    module, twin = _model(kind), _model(kind)
    optimizer, other = MAKERS[maker](module), MAKERS["sharded" if maker == "overlapped" else maker](twin)
    _train(optimizer, module, range(2))
    _train(other, twin, range(2))
    shallow = copy.copy(module)
    data = batch(9, dist.get_rank(), FP16)
    equal = [torch.equal(shallow(data), twin(data))]
    _train(optimizer, module, range(2, 3))
    _train(other, twin, range(2, 3))
    equal.append(torch.equal(shallow(data), twin(data)))  # waits as the module itself does
    optimizer.finish_param_gather()
    module.share_memory()
    _train(other, twin, range(3, 4))
    _train(optimizer, module, range(3, 4))
    equal += [all(p.is_shared() for p in module.parameters())]
    module.state_dict()
    return [*equal, same(weights(module), weights(twin))]


@pytest.mark.parametrize(("maker", "kind"), [("overlapped", Net), ("overlapped", _Own), ("sync", Net)])
def test_shallow_copies_and_shared_memory(ranks: RankPool, maker: str, kind: type[nn.Module]) -> None:
    """copy.copy shares the parameters and waits for them; after share_memory() training goes on bit for bit."""
    for equal in ranks.run(2, _shared, maker, kind):
        assert all(equal), equal


def _two_over_one_module() -> list[Any]:
    module = _model(Net)
    halves = [list(module.named_parameters())[:4], list(module.named_parameters())[4:]]
    optimizers: list[MixedPrecisionOptimizer] = [
        DistributedOptimizer(
            torch.optim.AdamW(half), config_of(FP16), scaler(FP16), modules=module, overlap_param_gather=True
        )
        for half in halves
    ]
    first = _hooks_on(module)
    optimizers.pop(0)
    gc.collect()
    one = _hooks_on(module)
    optimizers.pop()
    gc.collect()
    return [first > one > 0, _hooks_on(module)]


def test_two_optimizers_over_one_module_let_go_one_by_one(ranks: RankPool) -> None:
    """Each takes off what it hung on the module, in any order."""
    assert ranks.run(2, _two_over_one_module) == [[True, 0]] * 2
