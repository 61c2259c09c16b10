"""Forward and backward on several streams: what reads gradients, weights and buckets comes behind what wrote them.

On the simulated device a missing wait gives other bits, or memory that is written when it is free.
"""

import gc
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascale import DistributedOptimizer, MixedPrecisionOptimizer, OptimizerConfig
from megascale.grad_sync import GradSync
from megascale.grad_sync.sharded_sync import ShardedGradSync
from megascale.utils.streams import Arrival, WriteOrder
from tests.fake_device.device import FakeDevice
from tests.fake_device.orders import RUNS
from tests.fake_device.process import OnDevice
from tests.meshes import hybrid_groups

LAYERS = 6
"""Of 8 elements each; two are a bucket."""


def _live(options: dict[str, Any], by_layer: bool) -> list[float]:
    """Train three steps of two micro-batches. Returns weights, losses, and gradients that hooks have read.

    Args:
        options: "sharded": of a DistributedOptimizer, else of a GradSync; "dropped": that, while it reduces.
        by_layer: layers have streams of their own, else micro-batches have.
    """
    options = dict(options)
    is_sharded, is_dropped = options.pop("sharded", False), options.pop("dropped", False)
    layers = nn.ModuleList(nn.Linear(4, 2, bias=False) for _ in range(LAYERS)).bfloat16().cuda()
    sides, main = [torch.Stream("cuda") for _ in range(3)], torch.accelerator.current_stream()
    with torch.no_grad():
        for param in layers.parameters():
            param.fill_(0.5)
    inner = torch.optim.SGD(layers.parameters(), lr=0.5)
    config = OptimizerConfig(bf16=True, backend="reference", optimizer="sgd", lr=0.5)
    seen: list[Tensor] = []
    if is_sharded:
        optimizer: Any = DistributedOptimizer(inner, config, modules=layers, bucket_numel=16, **options)
        no_sync = optimizer.no_sync
    else:
        sync = GradSync(layers.named_parameters(), bucket_numel=16, **options)
        optimizer, no_sync = MixedPrecisionOptimizer(inner, config, grad_sync=sync), sync.no_sync
        for param in layers.parameters():
            sync.register_reduced_hook(param, lambda grad: seen.append(grad.clone()))
    data = torch.ones(1, 4, dtype=torch.bfloat16, device="cuda") * (1 + dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        for side in sides:
            side.wait_stream(main)
        for batch in range(2):
            with sides[batch] if not by_layer else nullcontext(), no_sync() if batch == 0 else nullcontext():
                losses = []
                for index, layer in enumerate(layers):
                    with sides[(index + batch) % 3] if by_layer else nullcontext():
                        losses.append(layer(data).float().sum() * (1 + index + batch))
                for side in reversed(sides) if by_layer else ():  # whoever came first is not waited for first
                    main.wait_stream(side)
                seen.append(torch.stack(losses).detach())  # else its graph would keep the streams of this micro-batch
                optimizer.scale_loss(torch.stack(losses).sum()).backward()
        for side in sides:
            main.wait_stream(side)
        if not is_sharded:
            sync.finish()
        for side in sides:  # the next batch is loaded there
            with side:
                torch.zeros(1, device="cuda")
        optimizer.step()
    if is_dropped:
        sync.zero_()
        torch.stack([layer(data).float().sum() for layer in layers]).sum().backward()
        del optimizer, sync, no_sync, inner
        gc.collect()
        torch.empty(1, device="cuda")
    torch.accelerator.synchronize()
    return torch.cat([value.detach().float().flatten() for value in (*layers.parameters(), *seen)]).tolist()


def _waits_for_nobody(order: WriteOrder, part: str = "") -> None:
    order._writers[part] = torch.accelerator.current_stream(order._device)


def _waits_once(arrival: Arrival) -> bool:
    if arrival._event is None:
        arrival._event = (arrival._wait(), torch.accelerator.current_stream(arrival._device).record_event())[1]
    return False


LIVES: dict[str, tuple[dict[str, Any], bool, tuple[Any, str, Any]]] = {
    "a write waits for the one before": ({}, False, (WriteOrder, "write", _waits_for_nobody)),
    "a use waits for all writers": ({}, True, (WriteOrder, "join", lambda order: order._writers.clear())),
    "memory is kept for its streams": (
        {"dropped": True},
        True,
        (torch.Tensor, "record_stream", lambda tensor, stream: None),
    ),
    "every stream waits for a gather": (
        {"sharded": True, "overlap_param_gather": True},
        True,
        (Arrival, "wait", _waits_once),
    ),
}
"""What the library does for streams; a life that needs it, and what the library is without it."""


def _noticed(device: FakeDevice, name: str) -> list[str]:
    """Return in which orders the life goes wrong, with all that the library does, and without one of it."""
    options, by_layer, without = LIVES[name]
    expected, wrong = _live(options, by_layer), []
    for run in RUNS:
        for kind in ("whole", "without"):
            with pytest.MonkeyPatch.context() as patched:
                if kind == "without":
                    patched.setattr(*without)
                try:
                    with device.running(*run):
                        is_wrong = _live(options, by_layer) != expected
                except Exception:  # memory that is written when it is free
                    is_wrong = True
            wrong += [kind] * is_wrong
    return wrong


@pytest.mark.default("a use waits for all writers")
@pytest.mark.parametrize("name", LIVES)
def test_each_order_is_needed(on_device: OnDevice, name: str) -> None:
    """In no order does a life go wrong, and without one of the library's waits it does."""
    every = on_device.ranks(2, _noticed, name)
    assert all("whole" not in wrong for wrong in every)
    assert any(every)


def _waits_in_backward(device: FakeDevice) -> tuple[Counter[str], set[int]]:
    """Return which lines of reductions wait for messages, and on which streams."""
    layers = nn.ModuleList(nn.Linear(4, 2, bias=False) for _ in range(LAYERS)).bfloat16().cuda()
    options: dict[str, Any] = {"reduce_dtype": torch.bfloat16, "groups": hybrid_groups(), "bucket_numel": 16}
    sync = ShardedGradSync(layers.named_parameters(), **options)
    data = torch.ones(1, 4, dtype=torch.bfloat16, device="cuda")
    with device.watch() as seen:
        torch.stack([layer(data).sum() for layer in layers]).sum().backward()
    sync.finish()
    waits = [call for call in seen if call.kind == "block" and call.line().startswith("grad_sync.reduction")]
    return Counter(call.line().split()[-1] for call in waits), {call.stream[1] for call in waits}


def test_backward_waits_for_no_reduction(on_device: OnDevice) -> None:
    """A stream of reductions waits: for a sum in 16 bits, whose copy is added back, and then, still in backward, for
    that over the copies of the shard on other nodes.
    """
    for waits, on in on_device.ranks(4, _waits_in_backward):
        assert waits == {"wait": LAYERS // 2, "wait_for_replicas": LAYERS // 2}
        assert len(on) == 1
        assert 0 not in on
