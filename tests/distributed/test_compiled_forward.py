"""Models that torch.compile has compiled, whose weights arrive after step() has returned: gathered, or from the host.

The compiler's backend notes each graph and runs it as it is, so that what differs is when modules wait.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascale import DistributedOptimizer, MixedPrecisionOptimizer, OptimizerConfig
from megascale.step.host_update import HostUpdate
from megascale.utils.dtensors import to_local
from tests.host_kernel import change_host_kernel
from tests.pool import RankPool
from tests.training import bits_equal

pytestmark = pytest.mark.filterwarnings("ignore:Using `torch.compile")

OFFLOAD: dict[str, Any] = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True}
HELD: dict[str, tuple[int, dict[str, Any]]] = {
    "offloaded": (1, OFFLOAD),
    "gathered": (2, {}),
    "gathered from the host": (2, OFFLOAD),
}
"""The number of ranks, and the config's fields."""
WAYS = ("model", "model in place", "blocks", "blocks in place", "function")


class Block(nn.Module):
    """A block of a transformer, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.activation = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor like ``x``."""
        return x + self.down(self.activation(self.up(self.norm(x))))


class Model(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a number per row."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Compiler:
    """A backend of torch.compile. Attributes: sizes: of each graph, the number of its operations."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, _examples: Any) -> Callable[..., Any]:
        """Return the graph as it is."""
        self.sizes.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph

    def compile(self, model: Model, way: str, **options: Any) -> Callable[[Tensor], Tensor]:
        """Compile the model in one of WAYS. Returns what is to be called."""
        options["backend"] = self
        if way == "model":
            return torch.compile(model, **options)
        if way == "model in place":
            model.compile(**options)
        if way == "blocks":
            for index, block in enumerate(model.blocks):
                model.blocks[index] = torch.compile(block, **options)  # type: ignore[assignment]
        if way == "blocks in place":
            for block in model.blocks:
                block.compile(**options)
        if way == "function":
            return torch.compile(lambda x: model(x), **options)
        return model


def _model() -> Model:
    torch.manual_seed(1)
    return Model().bfloat16()


def _optimizer(model: nn.Module, held: str, options: dict[str, Any]) -> MixedPrecisionOptimizer:
    inner = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    config = OptimizerConfig(bf16=True, clip_grad=1.0, **options)
    if held == "offloaded":
        return MixedPrecisionOptimizer(inner, config)
    overlap = bool(options) or held != "plain"
    return DistributedOptimizer(inner, config, modules=model, overlap_param_gather=overlap, bucket_numel=300)


def _delay(optimizer: MixedPrecisionOptimizer) -> None:
    """Let updates in host memory end late, so that who does not wait reads old weights."""

    def late(kernel: Callable[..., Any], *arguments: Any) -> Any:
        time.sleep(0.02 * (1 + dist.get_rank()))
        return kernel(*arguments)

    if isinstance(optimizer._member.update, HostUpdate):
        change_host_kernel(optimizer, late)


def _weights(model: nn.Module) -> list[Tensor]:
    return [to_local(param.detach()).clone() for param in model.parameters()]


def _live(optimizer: MixedPrecisionOptimizer, forward: Callable[[Tensor], Tensor], steps: range = range(5)) -> None:
    """Take steps of two micro-batches, with an evaluation between."""
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        for part in range(2):
            data = torch.randn(4, 8, generator=generator).bfloat16()
            loss = forward(data).float().square().mean()
            if part == 0 and isinstance(optimizer, DistributedOptimizer):
                with optimizer.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        if step == 2:
            with torch.no_grad():
                forward(torch.ones(4, 8).bfloat16())
    optimizer.finish_param_gather()


def _graphs_and_bits(held: str, way: str, when: str) -> tuple[list[int], list[int], bool]:
    """Return the sizes of graphs without what arrives late, those with it, and whether weights are the same."""
    plain, compiler = Compiler(), Compiler()
    bare = plain.compile(_model(), way)
    bare(torch.ones(4, 8).bfloat16())

    reference = _model()
    _live(_optimizer(reference, "offloaded" if held == "offloaded" else "plain", {}), reference)

    model = _model()
    options = HELD[held][1]
    if when == "after":
        optimizer = _optimizer(model, held, options)
        forward = compiler.compile(model, way, fullgraph=True)
    else:
        forward = compiler.compile(model, way, fullgraph=True)
        if when == "after the first call":
            forward(torch.ones(4, 8).bfloat16())
        optimizer = _optimizer(forward if isinstance(forward, nn.Module) else model, held, options)
    _delay(optimizer)
    _live(optimizer, forward)
    return plain.sizes, compiler.sizes, all(map(bits_equal, _weights(reference), _weights(model)))


@pytest.fixture(autouse=True)
def _fresh_compiler(ranks: RankPool) -> None:
    for world in (1, 2):
        ranks.run(world, _reset)


def _reset() -> None:
    torch._dynamo.reset()


GRAPHS = [
    (held, *how)
    for held in HELD
    for how in [
        ("function", "after"),
        ("blocks in place", "before"),
        ("blocks", "before"),
        ("model", "after the first call"),
        ("model in place", "after the first call"),
    ]
]


@pytest.mark.default("offloaded-blocks in place-before", "gathered-function-after")
@pytest.mark.parametrize(("held", "way", "when"), GRAPHS)
def test_graphs_stay_whole(ranks: RankPool, held: str, way: str, when: str) -> None:
    """A compiled model has one graph, that which it has without the overlap, and the bits: its weights are awaited
    before. when: the model is compiled before the optimizer is built, or after.
    """
    for bare, sizes, is_same in ranks.run(HELD[held][0], _graphs_and_bits, held, way, when):
        assert is_same
        assert set(sizes) == set(bare)


def _now_and_then(held: str) -> bool:
    """Call the model in two steps, and compiled functions of its parts in the next two."""
    reference = _model()
    _live(_optimizer(reference, "offloaded" if held == "offloaded" else "plain", {}), reference)
    model, calls = _model(), 0
    parts = [torch.compile(lambda x, part=part: part(x), backend="eager") for part in (*model.blocks, model.head)]

    def forward(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls <= 4:
            return model(x)
        for part in parts:
            x = part(x)
        return x

    optimizer = _optimizer(model, held, HELD[held][1])
    _delay(optimizer)
    _live(optimizer, forward)
    return all(map(bits_equal, _weights(reference), _weights(model)))


@pytest.mark.slow
@pytest.mark.parametrize("held", HELD)
def test_compiled_from_some_step_on(ranks: RankPool, held: str) -> None:
    """Compiled code that is first called while weights are on their way has them, too."""
    assert all(ranks.run(HELD[held][0], _now_and_then, held))
