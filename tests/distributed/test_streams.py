"""Every read comes behind the write that it needs, on whatever streams gradients, weights and buckets are used.

:mod:`tests.stream_model` says what an accelerator would be free to do. Here is what torch's engine and the user do: the
hooks of a backward run on the streams of their parameters' forward, the end of backward waits for all of them, and the
forward of a step waits for the step before it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megascale import DistributedOptimizer, MixedPrecisionOptimizer, OptimizerConfig
from megascale.grad_sync import GradSync
from megascale.utils import streams
from megascale.utils.streams import Arrival, Lent, WriteOrder
from tests.pool import RankPool
from tests.stream_model import StreamModel

LAYERS = 5
SIDES = 3
"""Streams of forward and backward; 0 is the main one."""

Place = tuple[int, int]
"""A layer, and the stream that works on it."""


@dataclass(frozen=True)
class Plan:
    """How a step runs: forward's layers in order, and for each micro-batch the order in which gradients come."""

    forward: list[Place]
    backwards: list[list[Place]]


def _places(draw: st.DrawFn) -> list[Place]:
    layers = draw(st.permutations(range(LAYERS)))
    return [(layer, draw(st.integers(0, SIDES - 1))) for layer in layers[: draw(st.integers(1, LAYERS))]]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Return a plan; some layers may be unused."""
    return Plan(_places(draw), [_places(draw) for _ in range(draw(st.integers(1, 3)))])


class _Life:
    """A model of small layers whose work is on several streams."""

    def __init__(self, model: StreamModel) -> None:
        self.model = model
        self.sides = [model.main, *(model.stream(f"side {index}") for index in range(1, SIDES))]
        self.layers = nn.ModuleList(nn.Linear(4, 2, bias=False) for _ in range(LAYERS)).bfloat16()
        with torch.no_grad():
            for param in self.layers.parameters():
                param.fill_(0.5)
        self.data = torch.ones(1, 4, dtype=torch.bfloat16)

    def begin_step(self) -> None:
        """The user's part: what runs on other streams comes behind the step before."""
        for side in self.sides[1:]:
            side.wait_stream(self.model.main)

    def forward(self, places: list[Place]) -> None:
        """Read weights, through the modules. The loss comes behind all of them."""
        for layer, side in places:
            with self.model.on(self.sides[side]), torch.no_grad():
                self.layers[layer](self.data)
        self._main_waits(places)

    def backward(self, places: list[Place]) -> None:
        """Hand gradients over as the engine does, which waits at the end for every stream that it used."""
        for layer, side in places:
            [param] = self.layers[layer].parameters()
            with self.model.on(self.sides[side]):
                param.grad = torch.full_like(param, 1.0 + dist.get_rank())
                for hook in list((param._post_accumulate_grad_hooks or {}).values()):
                    hook(param)
        self._main_waits(places)

    def _main_waits(self, places: list[Place]) -> None:
        for side in {side for _, side in places if side}:
            self.model.main.wait_stream(self.sides[side])

    def micro_batches(self, plan: Plan, no_sync: Callable[[], Any]) -> None:
        """All of a step's: the last one reduces."""
        for index, places in enumerate(plan.backwards):
            with no_sync() if index + 1 < len(plan.backwards) else nullcontext():
                self.backward(places)

    def expected(self, plan: Plan) -> list[float]:
        """Return each layer's mean gradient over two ranks."""
        return [
            1.5 * sum(layer == index for places in plan.backwards for layer, _ in places) for index in range(LAYERS)
        ]


def _waits_for_nobody(order: WriteOrder, part: str = "") -> None:
    order._writers[part] = streams.current_stream(order._device)


def _lends_nothing(lent: Lent, tensor: Tensor) -> None:
    pass


def _waits_once(arrival: Arrival) -> bool:
    arrival._wait()
    return True


WITHOUT: dict[str, tuple[Any, str, Any]] = {
    "a write waits for the one before": (WriteOrder, "write", _waits_for_nobody),
    "a use waits for all writers": (WriteOrder, "join", lambda order: order._writers.clear()),
    "memory is kept for its streams": (streams, "keep", lambda tensor, stream: None),
    "scratch is held for its reader": (Lent, "lend", _lends_nothing),
    "every stream waits for a gather": (Arrival, "wait", _waits_once),
}
"""What the library does for streams, and what it is without it."""


@contextmanager
def _without(name: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if name:
            patch.setattr(*WITHOUT[name])
        yield


def _note(seen: dict[int, list[float]], index: int, grad: Tensor) -> None:
    seen[index] = grad.unique().tolist()


def _sync_life(plan: Plan, options: dict[str, Any], off: str = "") -> list[str]:
    with StreamModel() as model, _without(off):
        life = _Life(model)
        hooked, seen = options.pop("hooked", False), dict[int, list[float]]()
        sync = GradSync(life.layers.named_parameters(), bucket_numel=16, **options)
        for index, param in enumerate(life.layers.parameters()) if hooked else ():
            sync.register_reduced_hook(param, partial(_note, seen, index))
        for _ in range(2):
            sync.zero_()
            life.begin_step()
            life.micro_batches(plan, sync.no_sync)
            sync.finish()
            means = [sync.main_grad(param).unique().tolist() for param in life.layers.parameters()]  # type: ignore[union-attr]
            assert means == [[mean] for mean in life.expected(plan)]
            assert all(mean == means[index] for index, mean in seen.items())
            assert not hooked or len(plan.backwards[-1]) < LAYERS or len(seen) == LAYERS
            seen.clear()
        sync.detach()
        del sync
        errors, model.errors = model.errors, []
    return errors


def _optimizer_life(plan: Plan, options: dict[str, Any], off: str = "") -> list[str]:
    with StreamModel() as model, _without(off):
        life = _Life(model)
        inner = torch.optim.SGD(life.layers.parameters(), lr=0.5)
        config = OptimizerConfig(bf16=True, backend="reference", optimizer="sgd", lr=0.5)
        optimizer: MixedPrecisionOptimizer
        if options.pop("sharded"):
            optimizer = DistributedOptimizer(inner, config, modules=life.layers, bucket_numel=16, **options)
            no_sync = optimizer.no_sync
        else:
            sync = GradSync(life.layers.named_parameters(), bucket_numel=16, **options)
            optimizer = MixedPrecisionOptimizer(inner, config, grad_sync=sync)
            no_sync = sync.no_sync
        for _ in range(2):
            optimizer.zero_grad()
            life.begin_step()
            life.forward(plan.forward)
            life.micro_batches(plan, no_sync)
            optimizer.step()
        life.begin_step()
        life.forward(plan.forward)
        life.layers.state_dict()
        for param in life.layers.parameters():
            assert param.unique().numel() == 1
        errors, model.errors = model.errors, []
    return errors


SYNC_OPTIONS: dict[str, dict[str, Any]] = {
    "overlapped": {},
    "16 bit": {"reduce_dtype": torch.bfloat16},
    "at the end": {"overlap": False},
    "with hooks": {"hooked": True},
    "with hooks, 16 bit": {"hooked": True, "reduce_dtype": torch.bfloat16},
}
OPTIMIZER_OPTIONS: dict[str, dict[str, Any]] = {
    "replicated": {"sharded": False},
    "sharded": {"sharded": True},
    "sharded, 16 bit": {"sharded": True, "reduce_dtype": torch.bfloat16},
    "sharded, gather overlaps": {"sharded": True, "overlap_param_gather": True},
    "sharded, nothing overlaps": {"sharded": True, "overlap_grad_reduce": False},
}
EXAMPLES = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.default("with hooks")
@pytest.mark.parametrize("options", SYNC_OPTIONS)
@given(plan=plans())
@EXAMPLES
def test_grad_sync_orders_its_streams(ranks: RankPool, options: str, plan: Plan) -> None:
    """Gradients that come on several streams, micro-batch by micro-batch, are all in the reduction."""
    assert ranks.run(2, _sync_life, plan, dict(SYNC_OPTIONS[options])) == [[], []]


@pytest.mark.parametrize(
    "options", [pytest.param(name, marks=[] if name == "sharded" else pytest.mark.slow) for name in OPTIMIZER_OPTIONS]
)
@given(plan=plans())
@EXAMPLES
def test_optimizers_order_their_streams(ranks: RankPool, options: str, plan: Plan) -> None:
    """From gradients over reduction, step and gather to the next forward, and to a state dict."""
    assert ranks.run(2, _optimizer_life, plan, dict(OPTIMIZER_OPTIONS[options])) == [[], []]


ALL = range(LAYERS)
RACY: dict[str, tuple[Callable[..., list[str]], Plan, dict[str, Any], str]] = {
    "a write waits for the one before": (
        _sync_life,
        Plan([], [[(layer, 1) for layer in ALL], [(layer, 2) for layer in ALL]]),
        SYNC_OPTIONS["overlapped"],
        "aten.add_.Tensor on side 2, not behind write",
    ),
    "a use waits for all writers": (
        _sync_life,
        Plan([], [[(layer, 1 + layer % 2) for layer in reversed(ALL)]]),
        SYNC_OPTIONS["overlapped"],
        "all_reduce on comm, not behind write",
    ),
    "memory is kept for its streams": (
        _sync_life,
        Plan([], [[(layer, 1 + layer % 2) for layer in reversed(ALL)]]),
        SYNC_OPTIONS["16 bit"],
        "is freed, not behind",
    ),
    "scratch is held for its reader": (
        _sync_life,
        Plan([], [[(layer, 0) for layer in reversed(ALL)]]),
        SYNC_OPTIONS["with hooks, 16 bit"],
        "is freed, not behind",
    ),
    "every stream waits for a gather": (
        _optimizer_life,
        Plan([(layer, layer % 2) for layer in ALL], [[(layer, 0) for layer in ALL]]),
        OPTIMIZER_OPTIONS["sharded, gather overlaps"],
        "aten.mm.default on main, not behind write",
    ),
}
"""For each of :data:`WITHOUT` a step that needs it, and what goes wrong."""


@pytest.mark.default(
    "every stream waits for a gather", "memory is kept for its streams", "scratch is held for its reader"
)
@pytest.mark.parametrize("name", RACY)
def test_each_order_is_needed(ranks: RankPool, name: str) -> None:
    """The model finds the race where the library would not wait; and none where it does."""
    life, plan, options, error = RACY[name]
    assert ranks.run(2, life, plan, dict(options)) == [[], []]
    for found in ranks.run(2, life, plan, dict(options), name):
        assert any(error in each for each in found), found
