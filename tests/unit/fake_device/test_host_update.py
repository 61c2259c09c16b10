"""Main params and state in host memory, beside a device that is not there: who waits, and what travels."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascale import DistributedOptimizer, MixedPrecisionOptimizer, OptimizerConfig
from megascale.utils.dtensors import to_local
from megascale.utils.nests import tensors_in
from tests.fake_device.device import FakeDevice
from tests.fake_device.process import OnDevice
from tests.fake_device.record import Record
from tests.fake_device.training import CODES, scaler
from tests.training import bits_equal

COUNT, WIDTH = 4, 8


def _train(
    device: FakeDevice, overlap: bool, options: dict[str, Any]
) -> tuple[list[Record], list[Record], list[str], int]:
    """Return what each backward and its step asked of the device, and each forward; where state lives; this thread."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(COUNT))).half().cuda()
    config = OptimizerConfig(
        fp16=True, optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=overlap, clip_grad=1.0, **options
    )
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(model.named_parameters(), lr=1e-2), config, scaler())
    batch = torch.ones(2, WIDTH, dtype=torch.float16, device="cuda")
    steps, forwards = [], []
    for _ in range(4):
        with device.watch() as seen:
            loss = model(batch).float().square().mean()
        forwards.append(seen)
        optimizer.zero_grad()
        with device.watch() as seen:
            optimizer.scale_loss(loss).backward()
            optimizer.step()
            if overlap:  # the thread's calls belong to its step
                optimizer._member.main_params.wait()
        steps.append(seen)
    places = [value.device.type for entry in optimizer.optimizer.state.values() for value in entry.values()]
    places += [main.device.type for _, main in optimizer.main_params()]
    return steps, forwards, places, threading.get_ident()


@pytest.mark.parametrize("overlap", [False, True])
def test_where_state_lives_and_what_travels(on_device: OnDevice, overlap: bool) -> None:
    """State and main params are in host memory; of each parameter 2 bytes go down and 2 up, from pinned memory."""
    steps, _, places, _ = on_device(_train, overlap, {})
    assert set(places) == {"cpu"}
    size = 2 * WIDTH * WIDTH
    for seen in steps[1:]:
        moved = [what for what in seen.of("copy") if what.startswith(f"{size} ")]
        assert sorted(moved) == sorted([f"{size} from async pinned"] * COUNT + [f"{size} to async pinned"] * COUNT)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_the_caller_waits_for_nothing(on_device: OnDevice, fraction: float) -> None:
    """With overlap neither backward nor step() nor forward lets the calling thread wait for the device; ours does."""
    steps, forwards, _, caller = on_device(_train, True, {"optimizer_offload_fraction": fraction})
    for seen in (*steps, *forwards):
        assert [str(call) for call in seen if call.makes_host_wait() and call.thread == caller] == []
    for seen in steps:
        assert any(call.kind == "wait" and call.thread != caller for call in seen)


def _bytes_held(device: FakeDevice, overlap: bool, sharded: bool) -> float:
    """Return the most bytes per parameter that an iteration holds on the device."""
    width = 128
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(COUNT))).half().cuda()
    config = OptimizerConfig(
        fp16=True, optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=overlap, clip_grad=1.0
    )
    own = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    optimizer = (
        DistributedOptimizer(own, config, scaler(), modules=model)
        if sharded
        else MixedPrecisionOptimizer(own, config, scaler())
    )
    batch = torch.ones(1, width, dtype=torch.float16, device="cuda")
    for _ in range(3):
        device.take_most_bytes()
        optimizer.scale_loss(model(batch).float().square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish_param_gather()
    return device.take_most_bytes() / (COUNT * width * width)


@pytest.mark.default("False-4.1-True", "True-6.6-True")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("sharded", "most"), [(False, 4.1), (True, 6.6)])
def test_what_the_device_holds(on_device: OnDevice, overlap: bool, sharded: bool, most: float) -> None:
    """Bytes per parameter: weight and gradient, 4; with main grads 6, and the gradient that one layer has just made."""
    assert most - 0.3 < on_device(_bytes_held, overlap, sharded) <= most


def life_of(held: str, options: dict[str, Any]) -> tuple[list[Tensor], set[str]]:
    """Return weights and state after some steps with a load among them, and where main params and state live."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(COUNT))).half().cuda()
    if held == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer, mesh=init_device_mesh("cuda", (1,)))
        fully_shard(model, mesh=init_device_mesh("cuda", (1,)))
    given = {"backend": "reference", **options}  # which the simulated device can run
    config = OptimizerConfig(fp16=True, clip_grad=1.0, **given)
    own = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    if held in ("elements", "parameters"):
        optimizer: MixedPrecisionOptimizer = DistributedOptimizer(
            own, config, scaler(), modules=model, shard=held, bucket_numel=WIDTH * WIDTH
        )
    else:
        optimizer = MixedPrecisionOptimizer(own, config, scaler())
    batch = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).half().cuda()
    for step in range(4):
        optimizer.zero_grad()
        optimizer.scale_loss(model(batch).float().square().mean()).backward()
        optimizer.step()
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
    optimizer.finish_param_gather()
    mains = [to_local(main) for _, main in optimizer.main_params()]
    states = [to_local(value) for entry in optimizer.optimizer.state.values() for value in tensors_in(entry)]
    values = [value.detach().cpu() for value in (*mains, *states, *map(to_local, model.parameters()))]
    return values, {value.device.type for value in (*mains, *states)}


def _lives(_: FakeDevice, held: str, stored: dict[str, Any], way: dict[str, Any]) -> tuple[bool, set[str]]:
    if held == "fsdp2":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    (values, places), (others, _there) = life_of(held, stored | way), life_of(held, stored)
    assert len(values) == len(others)
    return all(map(bits_equal, values, others)), places


WHOLE = ("replicated", "fsdp2")
REMAINDERS: dict[str, Any] = {"store_param_remainders": True}
CASES: list[tuple[str, dict[str, Any], bool]] = [
    *[(held, {}, overlap) for held in (*WHOLE, "elements", "parameters") for overlap in (False, True)],
    *[(held, CODES, True) for held in WHOLE],
    *[(held, REMAINDERS, True) for held in (*WHOLE, "elements", "parameters")],
]


@pytest.mark.default("parameters-stored7-True", "replicated-stored10-True")
@pytest.mark.parametrize(("held", "stored", "overlap"), CASES)
def test_loaded_state_goes_where_state_lives(
    on_device: OnDevice, held: str, stored: dict[str, Any], overlap: bool
) -> None:
    """Main params and state are in host memory, DTensors' too, after a load as well; bits are those without offload."""
    way = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": overlap}
    assert on_device(_lives, held, stored, way) == (True, {"cpu"})
