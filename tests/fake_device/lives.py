"""Lives of an optimizer on the simulated device: what is trained, how, and what comes between steps.

A life with main params in host memory shows the same bits as without, in each order of the device's streams.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascale import DistributedOptimizer, MixedPrecisionOptimizer, OptimizerConfig
from megascale.grad_sync import GradSync
from megascale.main_params import update_unit
from megascale.utils.dtensors import to_local
from megascale.utils.nests import tensors_in
from tests.fake_device.training import CODES, scaler

COUNT, WIDTH = 4, 8
STEPS = ("step", "overflow", "twice", "step")
OVERLAP: dict[str, Any] = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True}
WAIT: dict[str, Any] = {"optimizer_cpu_offload": True}


@dataclass(frozen=True)
class Life:
    """What is trained, how, and what comes between steps.

    Attributes:
        held: how parameters are held.
        way: of offload; the other life has none.
        actions: one after the other, of ``ACTIONS``.
        stored: what both lives have: how state is stored.
        slices: each parameter is a slice of its own.
    """

    held: str
    way: dict[str, Any]
    actions: tuple[str, ...] = STEPS
    stored: tuple[tuple[str, Any], ...] = ()
    slices: bool = False


def model_of_life() -> nn.Sequential:
    """Return a few layers whose gradients overflow at times."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(COUNT)))
    with torch.no_grad():
        for param in layers.parameters():
            param.mul_(2)
    return layers.half().cuda()


def _fully_sharded(module: nn.Sequential) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    mesh = init_device_mesh("cuda", (1,))
    for part in (*module, module):
        fully_shard(part, mesh=mesh)


def optimizer_of(module: nn.Module, life: Life, way: dict[str, Any]) -> MixedPrecisionOptimizer:
    """Return the optimizer of a life, with or without offload."""
    # The reference backend is made of operators, which this device can run.
    config = OptimizerConfig(fp16=True, clip_grad=0.5, backend="reference", **dict(life.stored), **way)
    own = torch.optim.AdamW(module.named_parameters(), lr=1e-2)
    if life.held in ("replicated", "fsdp2"):
        return MixedPrecisionOptimizer(own, config, scaler())
    if life.held == "synced":
        sync = GradSync(module.named_parameters(), bucket_numel=WIDTH * WIDTH)
        return MixedPrecisionOptimizer(own, config, scaler(), grad_sync=sync)
    return DistributedOptimizer(
        own,
        config,
        scaler(),
        modules=module,
        shard=life.held,
        bucket_numel=WIDTH * WIDTH,
    )


Trained = tuple[nn.Sequential, MixedPrecisionOptimizer, Tensor]
"""A model, its optimizer, a batch."""


def _step(trained: Trained, passes: int = 1, factor: float = 1.0) -> list[Tensor]:
    module, optimizer, batch = trained
    optimizer.zero_grad()
    shown = []
    for at in range(passes):
        sync = optimizer._member.grad_sync
        with sync.no_sync() if isinstance(sync, GradSync) and at < passes - 1 else nullcontext():
            out = module(batch)
            optimizer.scale_loss(out.float().square().mean() * factor).backward()
            shown.append(out.detach())
    return [*shown, *optimizer.step()[:2]]


def backward(trained: Trained) -> None:
    """Run forward and backward once."""
    trained[1].scale_loss(trained[0](trained[2]).float().square().mean()).backward()


def _last(trained: Trained) -> list[Tensor]:
    """The last layer alone has a gradient."""
    trained[1].zero_grad()
    backward(trained)
    for param in list(trained[0].parameters())[:-1]:
        param.grad = None
    return list(trained[1].step()[:2])


def grads_of(trained: Trained) -> Iterator[Tensor]:
    """Yield what this rank has of each gradient, reduced."""
    module, optimizer, _ = trained
    sync = optimizer._member.grad_sync
    if isinstance(sync, GradSync):
        sync.finish()
    for param in module.parameters():
        grad = sync.local_grad(param) if isinstance(sync, GradSync) else param.grad
        if grad is not None and param.requires_grad:
            yield grad


def _clipped(trained: Trained) -> list[Tensor]:
    """Gradients are written after backward, in place."""
    trained[1].zero_grad()
    backward(trained)
    for grad in grads_of(trained):
        grad.clamp_(-1, 1)
    return list(trained[1].step()[:2])


def _divided(trained: Trained) -> list[Tensor]:
    """The divisor is set when backward has divided already."""
    trained[1].zero_grad()
    backward(trained)
    sync = trained[1]._member.grad_sync
    if isinstance(sync, GradSync):
        sync.set_divisor(3.0)
    return list(trained[1].step()[:2])


def _away(trained: Trained) -> list[Tensor]:
    """Between backward and step all is moved to host memory, and back; other things are in its memory meanwhile."""
    list(trained[1].main_params())
    trained[1].zero_grad()
    backward(trained)
    list(grads_of(trained))
    trained[1].offload()
    others = [torch.full((WIDTH * WIDTH,), 7.0, device="cuda") for _ in range(COUNT)]
    trained[1].reload()
    del others
    return list(trained[1].step()[:2])


def _replaced(trained: Trained) -> list[Tensor]:
    """Gradients are other tensors after backward."""
    trained[1].zero_grad()
    backward(trained)
    for param in trained[0].parameters():
        if param.grad is not None:
            param.grad = param.grad * 0.5
    return list(trained[1].step()[:2])


def _dropped(trained: Trained) -> list[Tensor]:
    """A pass is dropped, another one is in its place; gradients are zeroed where they are, after the step too."""
    trained[1].zero_grad()
    backward(trained)
    trained[1].zero_grad()
    backward(trained)
    result = list(trained[1].step()[:2])
    trained[1].zero_grad(set_to_none=False)
    return result


def _prepared(trained: Trained) -> list[Tensor]:
    """A step is taken in two halves, and gradients are written between them."""
    trained[1].zero_grad()
    backward(trained)
    trained[1].prepare_grads()
    for grad in grads_of(trained):
        grad.mul_(0.5)
    return list(trained[1].step_with_ready_grads()[:2])


def _read(trained: Trained) -> list[Tensor]:
    return [value.clone() for value in trained[0].state_dict().values()]


def _state(trained: Trained) -> list[Tensor]:
    mains = [to_local(main).clone() for _, main in trained[1].main_params()]
    return [*mains, *(to_local(one).clone() for entry in trained[1].state.values() for one in tensors_in(entry))]


def _copied(trained: Trained) -> list[Tensor]:
    return [param.detach() for param in copy.deepcopy(trained[0]).parameters()]


def _trip(trained: Trained) -> list[Tensor]:
    list(trained[1].main_params())  # takes over a parameter that was frozen: what is away does not
    trained[1].offload()
    kept = [to_local(main).clone() for _, main in trained[1].main_params()]
    trained[1].reload()
    return kept


def _load(trained: Trained) -> list[Tensor]:
    trained[1].load_state_dict(trained[1].state_dict())
    return []


def _halve(trained: Trained) -> list[Tensor]:
    trained[0].load_state_dict({name: value / 2 for name, value in trained[0].state_dict().items()})
    return []


def _freeze(trained: Trained) -> list[Tensor]:
    weight = trained[0][1].weight
    weight.requires_grad_(not weight.requires_grad)
    return []


def _grow(trained: Trained) -> list[Tensor]:
    """A parameter is added after backward."""
    optimizer = trained[1]
    optimizer.zero_grad()
    backward(trained)
    weight = nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=torch.float16, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizer.add_param_group({"params": [weight], "param_names": [f"new {len(optimizer.param_groups)}"]})
    return list(optimizer.step()[:2])


def _rate(trained: Trained) -> list[Tensor]:
    trained[1].param_groups[0]["lr"] *= 0.5
    return []


def _on_two_streams(trained: Trained) -> list[Tensor]:
    """Two streams that nobody orders use the weights, one after the other."""
    module, _, batch = trained
    with torch.no_grad():
        first = module(batch)
        with torch.Stream("cuda") as side:
            second = module(batch)
            side.synchronize()
        return [first, second]


ACTIONS: dict[str, Callable[[Trained], list[Tensor]]] = {
    "step": _step,
    "overflow": lambda trained: _step(trained, factor=float("inf")),
    "twice": lambda trained: _step(trained, passes=2),
    "clipped": _clipped,
    "replaced": _replaced,
    "divided": _divided,
    "away": _away,
    "dropped": _dropped,
    "prepared": _prepared,
    "last": _last,
    "read": _read,
    "state": _state,
    "copy": _copied,
    "trip": _trip,
    "load": _load,
    "halve": _halve,
    "freeze": _freeze,
    "grow": _grow,
    "rate": _rate,
    "streams": _on_two_streams,
}


def lived(life: Life, way: dict[str, Any]) -> list[Tensor]:
    """Return what a life shows: results of forward and of steps, what is read between them, and what is left."""
    with pytest.MonkeyPatch.context() as patched:
        if life.slices:
            patched.setattr(update_unit, "SLICE", 1)
        return _lived_so(life, way)


def _lived_so(life: Life, way: dict[str, Any]) -> list[Tensor]:
    module = model_of_life()
    if life.held == "fsdp2":
        _fully_sharded(module)
    optimizer = optimizer_of(module, life, way)
    batch = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).half().cuda()
    torch.accelerator.synchronize()
    shown = [value for action in life.actions for value in ACTIONS[action]((module, optimizer, batch))]
    optimizer.finish_param_gather()
    mains = [to_local(main) for _, main in optimizer.main_params()]
    states = [to_local(value) for entry in optimizer.state.values() for value in tensors_in(entry)]
    left = [*shown, *mains, *states, *map(to_local, module.parameters())]
    return [value.detach().cpu() for value in left]


def actions_of(held: str) -> list[str]:
    """Return what can be done: FSDP2 refuses a deep copy, and main grads are not in ``param.grad``; a
    parameter that is added must be one that others reduce or shard.
    """
    without = {"fsdp2": {"copy", "divided", "grow"}, "replicated": {"divided"}}.get(held, {"last", "replaced", "grow"})
    return [action for action in ACTIONS if action not in without]


def steps_and(action: str) -> tuple[str, ...]:
    """Return steps with an action after each."""
    return tuple(one for step in STEPS for one in (step, action))


HELD = ("replicated", "synced", "elements", "parameters", "fsdp2")
WAYS = {"overlap": OVERLAP, "waits": WAIT}
LIVES: dict[str, list[Life]] = {
    **{f"{held}, {name}": [Life(held, way)] for held in HELD for name, way in WAYS.items()},
    "slices": [Life("replicated", OVERLAP, slices=True)],
    "codes": [Life("replicated", OVERLAP, stored=tuple(CODES.items()))],
    "fraction": [Life("replicated", OVERLAP | {"optimizer_offload_fraction": 0.5})],
    "pageable": [Life("replicated", OVERLAP | {"pin_cpu_grads": False, "pin_cpu_params": False})],
    **{
        f"{held}, {action}": [Life(held, OVERLAP, steps_and(action))]
        for held in HELD
        for action in actions_of(held)
        if action not in STEPS
    },
}
