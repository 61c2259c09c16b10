"""Steps of many ranks, as one rank of two sees them, on a device that is not there: collectives move nothing here.

What gloo does between real ranks is tested in tests/distributed; what ranks wait for on streams that run late, in
test_life.py. NCCL itself shows on a GPU only.
"""

import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from megascale import DistributedOptimizer, MixedPrecisionOptimizer
from megascale.errors import ArgumentError, UsageError
from megascale.grad_sync import GradSync
from megascale.grad_sync.bucket import SyncedBucket
from megascale.kernels import Statistic
from megascale.main_params.group_scales import decoded_where_cut
from megascale.utils import collectives
from tests.fake_device.device import FakeDevice
from tests.fake_device.models import BUILD, CONFIG, adamw, loss_of, model, world_of_two
from tests.fake_device.process import OnDevice
from tests.fake_device.record import Record
from tests.fake_device.table import table
from tests.fake_device.training import parameters, scaler, wrap

KINDS = [pytest.param(one, marks=() if one == "sharded" else pytest.mark.slow) for one in BUILD]
UPDATE = {"measure_kernel", "total_kernel", "decide_kernel", "rescale_kernel", "update_kernel"}


def _train(device: FakeDevice, kind: str, ranks: int) -> list[Record]:
    """Return what construction asked of the device, and each step: forward, backward and update."""
    if ranks > 1:
        world_of_two()
    module = model()
    with device.watch() as construction:
        optimizer, loss = BUILD[kind](module)
    records = [construction]
    for _ in range(4):
        with device.watch() as seen:
            optimizer.zero_grad()
            optimizer.scale_loss(loss()).backward()
            optimizer.step()
        records.append(seen)
    return records


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_step_waits(on_device: OnDevice, kind: str, ranks: int) -> None:
    """Forward, backward with reductions, update and gather: nobody waits, from the first step on."""
    construction, *steps = on_device(_train, kind, ranks)
    assert len(construction.syncs()) <= 2  # replicas are compared, once for each member
    assert [seen.syncs() for seen in steps] == [[]] * 4
    assert set(steps[-1].launches()) == UPDATE
    assert steps[1].launches() == steps[2].launches() == steps[3].launches()
    assert all(not seen.of("load") for seen in steps[1:])


def _without_gradients(device: FakeDevice) -> tuple[list[str], list[float]]:
    errors = torch.ones((), dtype=torch.float64, device="cuda")
    [member] = wrap(torch.optim.AdamW(parameters(2), lr=1e-3), log_num_zeros_in_grad=True)._recipe.members
    with device.watch() as seen:
        stats = member.measure(member.grads.failed(UsageError("an error")), errors, scaled=True)
    return [str(call) for call in seen if call.makes_host_wait()], stats.vector.tolist()


def test_a_rank_without_gradients_waits_for_nothing(on_device: OnDevice) -> None:
    """Of few parameters or large buckets a rank may own none; its statistics are zeros, beside its errors."""
    waits, vector = on_device(_without_gradients)
    assert waits == []
    expected = [0.0] * len(vector)
    expected[Statistic.ERRORS] = expected[Statistic.SCALED] = 1.0
    assert vector == expected


def _trained_by_nobody(device: FakeDevice) -> tuple[bool, str]:
    optimizer = wrap(torch.optim.AdamW(parameters(2), lr=1e-3))
    with device.watch() as seen:
        optimizer.step()
    with pytest.raises(UsageError) as raised:
        optimizer.step()
    return any(call.makes_host_wait() for call in seen), str(raised.value)


def test_an_optimizer_without_gradients_is_refused_one_step_late(on_device: OnDevice) -> None:
    """The host does not wait for the first step's statistics, so that the second raises what the first has found."""
    waits, message = on_device(_trained_by_nobody)
    assert not waits
    assert "no parameter of the optimizer has a gradient" in message


def _never_sets_a_device(device: FakeDevice) -> int:
    torch.cuda.set_device(0)  # as it is from the start
    place = torch.device("cuda", dist.get_rank())
    module = model().to(place)
    optimizer = DistributedOptimizer(adamw(module), CONFIG, scaler(), modules=module)
    x = torch.ones(8, 4, dtype=torch.float16, device=place)
    optimizer.scale_loss(module(x).float().square().mean()).backward()
    return optimizer.step().success.get_device()


def test_a_program_need_not_set_its_device(on_device: OnDevice) -> None:
    """Torch sends objects over NCCL from the current device, which is every rank's first one here."""
    assert on_device.ranks(2, _never_sets_a_device) == [0, 1]


UNEVEN: list[tuple[list[int], list[str]]] = [
    ([640, 570], ["_reduce_scatter", "_all_gather"]),
    ([640, 640], ["_reduce_scatter", "_all_gather"]),
    ([640, 64], ["reduce_scatter", "all_gather"]),
]
"""Elements of two parameters, each whole on a rank of its own, and the messages that reduce and gather them."""


def _messages(device: FakeDevice) -> list[list[str]]:
    found = []
    for numels, _ in UNEVEN:
        module = nn.ParameterList(torch.ones(numel, device="cuda") for numel in numels)
        inner = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, modules=module, shard="parameters")
        names = ("_reduce_scatter", "_all_gather", "reduce_scatter", "all_gather")
        places = [(collectives if name.startswith("_") else dist, name) for name in names]
        with pytest.MonkeyPatch.context() as patched:
            for place, name in places:
                patched.setattr(place, name, Mock(wraps=getattr(place, name)))
            torch.stack([param.sum() for param in module]).sum().backward()
            optimizer.step()
            found.append([name for place, name in places if getattr(place, name).called])
    return found


def test_shards_of_whole_parameters_are_padded_where_that_is_little(on_device: OnDevice) -> None:
    """NCCL makes a message of each rank of shards that are not equal."""
    assert on_device.ranks(2, _messages) == [[messages for _, messages in UNEVEN]] * 2


def _sharded_over_gloo(device: FakeDevice) -> None:
    world_of_two()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:gloo")
        BUILD["sharded"](model())


def test_shards_of_a_device_are_not_sent_by_gloo(on_device: OnDevice) -> None:
    """It would take a device's address for one of the host: an error says so when the optimizer is built."""
    with pytest.raises(
        ArgumentError, match=r'gloo sends no shards of parameters on cuda:0.*init_process_group\("nccl"'
    ):
        on_device(_sharded_over_gloo)


def _backward_on_two_devices(device: FakeDevice) -> tuple[int, list[int]]:
    """Return how many threads had gradients, and the buckets whose reductions they started."""
    world_of_two()
    parts = [nn.Linear(8, 8, device=f"cuda:{index}") for index in range(2)]
    named = [(f"{index}.{name}", param) for index, part in enumerate(parts) for name, param in part.named_parameters()]
    sync = GradSync(named, bucket_numel=10)
    threads, started, start, begun = set(), [], SyncedBucket.start, threading.Event()

    def arrive(grad: Tensor) -> None:
        threads.add(threading.get_ident())
        if grad.device.index == 0:
            begun.wait(30)

    for _, param in named:
        param.register_hook(arrive)

    def slow(bucket: SyncedBucket, divisor: Any) -> None:
        started.append(sync.buckets.index(bucket))
        begun.set()
        time.sleep(0.2)  # the other device's gradients arrive meanwhile
        start(bucket, divisor)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SyncedBucket, "start", slow)
        torch.autograd.backward([part(torch.ones(4, 8, device=part.weight.device)).sum() for part in parts])
    sync.finish()
    return len(threads), started


def test_threads_of_backward_start_each_bucket_once(on_device: OnDevice) -> None:
    """Backward has a thread for each device: whoever comes first starts a bucket, always in the same order."""
    assert on_device(_backward_on_two_devices) == (2, [0, 1, 2, 3])


def _fully_sharded(device: FakeDevice) -> list[Record]:
    world_of_two()
    module = model()
    fully_shard(module, mesh=init_device_mesh("cuda", (2,)))
    optimizer = MixedPrecisionOptimizer(adamw(module), CONFIG, scaler())
    loss = loss_of(module)
    records = []
    for _ in range(4):
        optimizer.zero_grad()
        optimizer.scale_loss(loss()).backward()
        with device.watch() as seen:
            optimizer.step()
        records.append(seen)
    return records


@pytest.mark.slow
def test_fsdp2(on_device: OnDevice) -> None:
    """DTensor parameters of ``fully_shard``: the step waits for nothing. FSDP2's own waits are not looked at."""
    records = on_device(_fully_sharded)
    assert [seen.syncs() for seen in records] == [[]] * 4
    assert set(records[-1].launches()) == UPDATE


def _codes_of_a_cut_weight(device: FakeDevice) -> str:
    mesh = init_device_mesh("cuda", (2,))
    weight = distribute_tensor(torch.zeros(6, 8, device="cuda"), mesh, [Shard(0)])  # 24 elements each: 32 have a scale
    codes = {"exp_avg": weight.to(torch.int8), "exp_avg_sq": weight.to(torch.uint8)}
    return str(decoded_where_cut(codes | {f"{name}_scale": torch.ones(2) for name in codes}, weight)["exp_avg"].device)


def test_codes_of_a_checkpoint_are_decoded_where_fsdp2_cuts_their_groups(on_device: OnDevice) -> None:
    """Codes come on the device of their weight and scales on the host: a load failed, as it mixed them."""
    assert on_device.ranks(2, _codes_of_a_cut_weight) == ["cuda:0", "cuda:1"]


@pytest.mark.slow
def test_the_documentation_shows_what_is_counted(on_device: OnDevice) -> None:
    """The table of benchmarks/results/device_calls.md, line by line."""
    page = Path("benchmarks/results/device_calls.md").read_text()
    assert table(on_device) in page
