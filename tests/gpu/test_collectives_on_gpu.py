"""Every collective of a step on the device's own communication: one rank, with the short cuts of one rank left out."""

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup

from megascale import DistributedOptimizer, StepGraph
from megascale.utils import collectives
from tests.counting import OperatorCounter
from tests.distributed.test_distributed_optimizer import Net, batch, net, same, sharded, weights
from tests.gpu import device

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_rank")]

LAYOUTS: dict[str, dict[str, Any]] = {
    "by elements": {},
    "by parameters": {"shard": "parameters"},
    "overlap": {"overlap_param_gather": True},
    "gathered in backward's order": {"bucket_numel": 100},
}


class _More(int):
    """The number 1, which says that it is more than 1: what asks whether there are others is told yes."""

    def __eq__(self, other: object) -> bool:
        return False

    def __gt__(self, other: int) -> bool:
        return int(self) >= other

    __hash__ = int.__hash__


@pytest.fixture
def not_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let groups of one rank communicate."""

    def size(group: ProcessGroup | None) -> int:
        return _More(1) if group is not None else 1

    for module in [module for name, module in sys.modules.items() if name.startswith("megascale.")]:
        if getattr(module, "group_size", None) is collectives.group_size and module is not collectives:
            monkeypatch.setattr(module, "group_size", size)
    monkeypatch.setattr(collectives, "group_size", size)
    monkeypatch.setattr(collectives, "is_alone_in_world", lambda: False)
    yield
    gc.collect()  # what has groups of the process goes before they do


def _trained(options: dict[str, Any], steps: int = 6) -> tuple[Net, DistributedOptimizer]:
    """Return a model and its optimizer after some steps, of which the third is skipped."""
    module = net().to(device())
    optimizer = sharded(module, clip_grad=1.0, **options)
    for step in range(steps):
        optimizer.zero_grad()
        loss = module(batch(step, 0, torch.float16).to(device())).float().square().mean()
        optimizer.scale_loss(loss * (torch.inf if step == 2 else 1.0)).backward()
        optimizer.step()
    optimizer.finish_param_gather()
    return module, optimizer


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_are_those_of_the_short_cut(layout: str, request: pytest.FixtureRequest) -> None:
    """Invariant 1: a sum over one rank that travels is the sum: in fp64, averaged, scattered and gathered."""
    expected = weights(_trained(LAYOUTS[layout])[0])
    request.getfixturevalue("not_alone")
    with OperatorCounter() as counter:
        module, optimizer = _trained(LAYOUTS[layout])
    assert same(weights(module), expected)
    assert optimizer.num_skipped_steps.item() == 1
    calls = sum(count for call, count in counter.counts.items() if "c10d" in str(call))
    assert calls >= 6 * 3, counter.counts  # of each step the statistics; of each bucket a reduction and a gather


def test_a_graph_holds_the_collectives(not_alone: None) -> None:
    """A replay reduces, sums and gathers: it has the bits of eager steps."""
    if device().type != "cuda":
        pytest.skip("StepGraph is CUDA's")
    trained = []
    for replays in (False, True):
        module, optimizer = _trained({})
        inputs = batch(7, 0, torch.float16).to(device())

        def backward(module: Net = module, optimizer: Any = optimizer, inputs: torch.Tensor = inputs) -> None:
            optimizer.scale_loss(module(inputs).float().square().mean()).backward()

        graph = StepGraph(optimizer, backward) if replays else None
        for _ in range(3):
            if graph is not None:
                graph.replay()
                continue
            optimizer.zero_grad()
            backward()
            optimizer.step()
        trained.append(weights(module))
    assert same(*trained)
