"""What a step asks of a device: ``python -m tests.fake_device.table`` prints benchmarks/results/device_calls.md."""

from collections.abc import Callable

import torch

from megascale import amp
from tests.fake_device.device import FakeDevice
from tests.fake_device.models import BUILD, model
from tests.fake_device.process import OnDevice
from tests.fake_device.record import Record
from tests.fake_device.training import CODES, INNER, give_grads, parameters, take_steps, wrap

HEAD = """\
| optimizer | waits at construction | waits in a step | Triton launches | torch's operators | copies to the host |
|---|---|---|---|---|---|"""

NONE: dict[str, object] = {}
Steps = tuple[Record, list[Record]]
"""What construction asked of the device, and each of some steps."""


def plain(device: FakeDevice, inner: str, count: int, moved: bool, options: dict[str, object] = NONE) -> Steps:
    """Return steps of a MixedPrecisionOptimizer."""
    params = parameters(count)
    with device.watch() as construction:
        optimizer = wrap(INNER[inner](params), **options)
    return construction, take_steps(device, optimizer, params, moved=moved)


def grouped(device: FakeDevice, count: int) -> Steps:
    """Return steps of AdamW with a param group, of a rate of its own, for each five of ``count`` parameters."""
    params = parameters(count)
    groups = [{"params": params[at : at + 5], "lr": 1e-3 / (at + 1)} for at in range(0, count, 5)]
    with device.watch() as construction:
        optimizer = wrap(INNER["adamw"](groups))
    return construction, take_steps(device, optimizer, params)


def trained(device: FakeDevice, kind: str) -> Steps:
    """Return steps, without forward and backward, of an optimizer of ranks, of which there is one."""
    module = model()
    with device.watch() as construction:
        optimizer, loss = BUILD[kind](module)
    steps = []
    for _ in range(4):
        optimizer.zero_grad()
        optimizer.scale_loss(loss()).backward()
        with device.watch() as seen:
            optimizer.step()
        steps.append(seen)
    return construction, steps


def scaled(device: FakeDevice) -> Steps:
    """Return steps of ``amp.GradScaler`` with torch's fused AdamW, its update included."""
    params = parameters(6, torch.float32)
    with device.watch() as construction:
        optimizer, scaler = torch.optim.AdamW(params, lr=1e-3, fused=True), amp.GradScaler("cuda")
        scaler.scale(torch.ones((), device="cuda"))
    steps = []
    for _ in range(4):
        give_grads(params)
        with device.watch() as seen:
            scaler.step(optimizer)
            scaler.update()
        steps.append(seen)
    return construction, steps


ROWS: dict[str, tuple[Callable[..., Steps], tuple[object, ...]]] = {
    "AdamW, 10 tensors": (plain, ("adamw", 10, False)),
    "AdamW, 100 tensors": (plain, ("adamw", 100, False)),
    "AdamW, 1000 tensors": (plain, ("adamw", 1000, False)),
    "AdamW, 100 tensors, gradients that move": (plain, ("adamw", 100, True)),
    "AdamW, 100 tensors in 20 param groups": (grouped, (100,)),
    "AdamW, remainders": (plain, ("adamw", 100, False, {"store_param_remainders": True})),
    "AdamW, 8-bit moments and remainders": (plain, ("adamw", 100, False, {"store_param_remainders": True, **CODES})),
    "Adam, amsgrad": (plain, ("adam_amsgrad", 100, False)),
    "SGD": (plain, ("sgd", 100, False)),
    "SGD, momentum": (plain, ("sgd_momentum", 100, False)),
    "SGD, momentum and dampening": (plain, ("sgd_dampening", 100, False)),
    "Lion": (plain, ("lion", 100, False)),
    "DistributedOptimizer": (trained, ("sharded",)),
    "GradSync": (trained, ("synced",)),
    "ChainedOptimizer of two": (trained, ("chained",)),
    "`amp.GradScaler`, torch's fused AdamW": (scaled, ()),
}


def row(name: str, construction: Record, steps: list[Record]) -> str:
    """Return a line of the table. The first step counts among those that may wait; the last one is shown."""
    waits = max(len(seen.syncs()) for seen in steps)
    last = steps[-1]
    to_host = sum(" from " in copy for copy in last.of("copy"))
    operators = sum(last.operators().values())
    cells = (len(construction.syncs()), waits, len(last.launches()), operators, to_host)
    return f"| {name} | {' | '.join(map(str, cells))} |"


def table(on_device: OnDevice) -> str:
    """Return the table, in Markdown."""
    lines = [row(name, *on_device(function, *arguments)) for name, (function, arguments) in ROWS.items()]
    return "\n".join([HEAD, *lines])


if __name__ == "__main__":
    print(table(OnDevice()))
