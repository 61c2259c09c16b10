"""Ranks on streams that run late: offload has the bits of the same life without, and each wait is needed for them.

Collectives are those of tests/fake_device/ranks.py: they travel between two processes, and end on a stream.
"""

import ast
import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from megascale import DistributedOptimizer, MixedPrecisionOptimizer, OptimizerConfig
from megascale.grad_sync import GradSync, reduction
from megascale.utils.dtensors import to_local
from megascale.utils.nests import tensors_in
from tests.fake_device.device import FakeDevice
from tests.fake_device.lives import COUNT, OVERLAP, STEPS, WAIT, WIDTH, Life, steps_and
from tests.fake_device.orders import RUNS, Run, differing, noticed, waits_of
from tests.fake_device.process import OnDevice
from tests.fake_device.ranks import StreamGroup
from tests.fake_device.training import scaler

SHARDED: dict[str, dict[str, Any]] = {
    "elements": {},
    "elements ahead": {"overlap_param_gather": True},
    "parameters": {"shard": "parameters"},
    "parameters ahead": {"shard": "parameters", "overlap_param_gather": True},
    "bf16 travels": {"reduce_dtype": torch.bfloat16},
    "hybrid": {},
}
"""Ways of holding that are a DistributedOptimizer's, and its options."""


@dataclass(frozen=True)
class Trained:
    """What an action needs."""

    module: nn.Sequential
    optimizer: MixedPrecisionOptimizer
    batch: Tensor


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(COUNT)))
    with torch.no_grad():
        for param in layers.parameters():
            param.mul_(2)
    return layers.half().cuda()


def _fully_sharded(module: nn.Sequential) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for part in (*module, module):
        fully_shard(part, mesh=mesh)


def _optimizer(module: nn.Sequential, held: str, way: dict[str, Any]) -> MixedPrecisionOptimizer:
    # The reference backend is made of operators, which this device can run.
    config = OptimizerConfig(fp16=True, clip_grad=0.5, backend="reference", **way)
    if held == "fsdp2":
        _fully_sharded(module)
    own = torch.optim.AdamW(module.named_parameters(), lr=1e-2)
    if held == "fsdp2":
        return MixedPrecisionOptimizer(own, config, scaler())
    if held == "synced":
        sync = GradSync(module.named_parameters(), bucket_numel=WIDTH * WIDTH)
        return MixedPrecisionOptimizer(own, config, scaler(), grad_sync=sync)
    options: dict[str, Any] = {"bucket_numel": WIDTH * WIDTH, "shard": "elements"} | SHARDED[held]
    if held == "hybrid":
        options["groups"] = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return DistributedOptimizer(own, config, scaler(), modules=module, **options)


@contextmanager
def _unsynced(trained: Trained) -> Iterator[None]:
    """Let ranks reduce nothing meanwhile."""
    sync: Any = trained.optimizer._member.grad_sync
    module: Any = trained.module
    is_fsdp2 = hasattr(module, "set_requires_gradient_sync")
    if is_fsdp2:
        module.set_requires_gradient_sync(False)
    with nullcontext() if is_fsdp2 else sync.no_sync():
        yield
    if is_fsdp2:
        module.set_requires_gradient_sync(True)


def _step(trained: Trained, passes: int = 1, factor: float = 1.0) -> list[Tensor]:
    trained.optimizer.zero_grad()
    shown = []
    for at in range(passes):
        meanwhile: AbstractContextManager[None] = _unsynced(trained) if at < passes - 1 else nullcontext()
        with meanwhile:
            out = trained.module(trained.batch)
            trained.optimizer.scale_loss(out.float().square().mean() * factor).backward()
            shown.append(out.detach())
    return [*shown, *trained.optimizer.step()[:2]]


def _overflow(trained: Trained) -> list[Tensor]:
    """One rank alone overflows."""
    return _step(trained, factor=float("inf") if dist.get_rank() == 1 else 1.0)


def _dropped(trained: Trained) -> list[Tensor]:
    """A pass is dropped, another one is in its place."""
    trained.optimizer.zero_grad()
    trained.optimizer.scale_loss(trained.module(trained.batch).float().square().mean()).backward()
    return _step(trained)


def _read(trained: Trained) -> list[Tensor]:
    return [to_local(value).clone() for value in trained.module.state_dict().values()]


def _state(trained: Trained) -> list[Tensor]:
    mains = [to_local(main).clone() for _, main in trained.optimizer.main_params()]
    return [*mains, *(to_local(one).clone() for entry in trained.optimizer.state.values() for one in tensors_in(entry))]


def _load(trained: Trained) -> list[Tensor]:
    trained.optimizer.load_state_dict(trained.optimizer.state_dict())
    return []


def _halve(trained: Trained) -> list[Tensor]:
    trained.module.load_state_dict({name: value / 2 for name, value in trained.module.state_dict().items()})
    return []


def _trip(trained: Trained) -> list[Tensor]:
    trained.optimizer.offload()
    trained.optimizer.reload()
    return []


ACTIONS: dict[str, Callable[[Trained], list[Tensor]]] = {
    "step": _step,
    "overflow": _overflow,
    "twice": lambda trained: _step(trained, passes=2),
    "dropped": _dropped,
    "read": _read,
    "state": _state,
    "load": _load,
    "halve": _halve,
    "offload": _trip,
}
HELD = ("synced", "elements", "elements ahead", "parameters", "parameters ahead", "fsdp2")
WAYS = {"overlap": OVERLAP, "waits": WAIT}


def _lived(life: Life, way: dict[str, Any]) -> list[Tensor]:
    """Return what a life shows this rank: results of forward and of steps, what is read, and what is left."""
    module = _model()
    optimizer = _optimizer(module, life.held, way)
    batch = torch.linspace(-1, 1 + dist.get_rank(), 2 * WIDTH).view(2, WIDTH).half().cuda()
    torch.accelerator.synchronize()
    trained = Trained(module, optimizer, batch)
    shown = [value for action in life.actions for value in ACTIONS[action](trained)]
    optimizer.finish_param_gather()
    left = [*shown, *_state(trained), *map(to_local, module.parameters())]
    return [value.detach().cpu() for value in left]


LIVES: dict[str, Life] = {
    **{f"{held}, {name}": Life(held, way) for held in HELD for name, way in WAYS.items()},
    **{
        f"{held}, {action}": Life(held, OVERLAP, steps_and(action))
        for held in HELD
        for action in ACTIONS
        if action not in STEPS
    },
    "bf16 travels": Life("bf16 travels", OVERLAP),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "synced, overlap" else pytest.mark.release) for name in LIVES]
)
def test_no_bit_differs(on_device: OnDevice, name: str) -> None:
    """Steps, an overflow of one rank, accumulation, readers: in each order the bits of a life without offload."""
    assert on_device.ranks(2, differing, _lived, [LIVES[name]], RUNS[:5]) == [[], []]


def _random_lives(device: FakeDevice, held: str, seed: int) -> list[Any]:
    draw = random.Random(seed)  # the same on each rank
    ways = list(WAYS.values())
    lives = [Life(held, draw.choice(ways), tuple(draw.choices(list(ACTIONS), k=6))) for _ in range(3)]
    return differing(device, _lived, lives, RUNS[:5])


@pytest.mark.release
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("held", HELD)
def test_random_lives(on_device: OnDevice, held: str, seed: int) -> None:
    """Actions in a random order, the same on both ranks."""
    assert on_device.ranks(2, _random_lives, held, seed) == [[], []]


@pytest.mark.slow
def test_shards_of_two_copies(on_device: OnDevice) -> None:
    """Four ranks: each shard is on two of them, which reduce it once more."""
    assert on_device.ranks(4, differing, _lived, [Life("hybrid", OVERLAP)], RUNS[:5]) == [[]] * 4


def _collectives(device: FakeDevice, held: str) -> dict[str, list[int]]:
    """Return the elements that each collective of a life has sent, without offload and by each way of it."""
    found = {}
    every = StreamGroup._every
    ways: dict[str, dict[str, Any]] = {"without": {}, **WAYS}
    for name, way in ways.items():
        sent = found[name] = list[int]()
        with pytest.MonkeyPatch.context() as patched:

            def counted(group: StreamGroup, mine: Tensor, *rest: Any, sent: list[int] = sent) -> list[Tensor]:
                sent.append(mine.numel())
                return every(group, mine, *rest)

            patched.setattr(StreamGroup, "_every", counted)
            _lived(Life(held, way), way)
        sent.sort()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "held", [pytest.param(one, marks=() if one == "elements ahead" else pytest.mark.slow) for one in HELD]
)
def test_collectives_are_those_of_a_life_without(on_device: OnDevice, held: str) -> None:
    """As many, of the same sizes, in any thread."""
    for found in on_device.ranks(2, _collectives, held):
        assert len(found["without"]) > len(STEPS)
        assert all(sent == found["without"] for sent in found.values()), found


WAITS: dict[str, tuple[str, int, Life]] = {
    "statistics of gradients": ("utils.collectives all_reduce_sum_", 2, Life("elements", OVERLAP)),
    "gathered params": ("utils.collectives _keep_error", 2, Life("elements ahead", OVERLAP)),
    "reduced gradients": ("grad_sync.reduction end", 2, Life("synced", OVERLAP)),
    "reduced shards": ("grad_sync.reduction end", 2, Life("parameters", OVERLAP)),
    "shards of two copies": ("grad_sync.reduction wait_for_replicas", 4, Life("hybrid", OVERLAP)),
    "gradients divided aside": ("utils.streams join", 2, Life("synced", OVERLAP)),
    "scratch that is read aside": ("utils.streams write", 2, Life("bf16 travels", OVERLAP)),
}
"""What is waited for; the function that waits, ranks, and a life of them that goes wrong without."""


def _noticed(device: FakeDevice, awaited: str) -> dict[str, list[Run]]:
    function, _, life = WAITS[awaited]
    return noticed(device, _lived, life, function, RUNS[:2])


@pytest.mark.default("reduced gradients")
@pytest.mark.parametrize("awaited", WAITS)
def test_each_wait_for_a_collective_is_needed(on_device: OnDevice, awaited: str) -> None:
    """Without one wait for what other ranks send, bits differ in some order: removing it makes this file fail."""
    for found in on_device.ranks(WAITS[awaited][1], _noticed, awaited):
        assert found
        assert all(found.values()), found


def _waits_of_reductions() -> set[str]:
    """Return the lines that wait for what a reduction gives."""
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(reduction))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "wait":
            works = node.func.value
            if isinstance(works, ast.Attribute) and works.attr in {"_work", "_over_replicas"}:
                found.add(f"grad_sync.reduction:{node.lineno}")
    return found


def _all_lines(device: FakeDevice) -> set[str]:
    lives = [life for _, ranks, life in WAITS.values() if ranks == dist.get_world_size()]
    return {line.split(" ")[0] for life in lives for line in waits_of(device, _lived, life)}


@pytest.mark.slow
def test_every_wait_for_a_reduction_is_among_them(on_device: OnDevice) -> None:
    """A wait that is added to a reduction is looked at here too."""
    in_source = _waits_of_reductions()
    assert in_source
    assert in_source <= on_device.ranks(2, _all_lines)[0] | on_device.ranks(4, _all_lines)[0]
