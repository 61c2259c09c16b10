"""offload() and reload() over ranks: shards of both kinds, and DTensors of FSDP2."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megascale import DistributedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.errors import MegascaleError, UsageError
from megascale.grad_sync import GradSync
from megascale.main_params import host_buffers, update_unit
from megascale.step.host_update import HostUpdate
from megascale.utils import host_memory
from megascale.utils.dtensors import to_local
from megascale.utils.nests import tensors_in
from tests.distributed.test_distributed_optimizer import batch, flat, net, same, sharded, weights
from tests.meshes import mesh_of
from tests.pool import RankPool
from tests.training import INNER, Tiny, bits_equal, model

FP16 = torch.float16


def _step(optimizer: MixedPrecisionOptimizer, module: nn.Module, data: Tensor) -> None:
    optimizer.zero_grad()
    optimizer.scale_loss(module(data).float().square().mean()).backward()
    assert bool(optimizer.step().success)


def _shards(shard: str, overlap: bool) -> list[bool]:
    options: dict[str, Any] = {"shard": shard, "overlap_param_gather": overlap}
    module, twin = net(), net()
    ours, theirs = sharded(module, **options), sharded(twin, **options)
    seen = []
    for step in range(4):
        data = batch(step, dist.get_rank(), FP16)
        _step(ours, module, data)
        _step(theirs, twin, data)
        ours.offload()
        seen.append(same(flat(ours.state_dict()), flat(theirs.state_dict())))
        if step == 1:
            loaded = {name: value / 2 for name, value in module.state_dict().items()}
            module.load_state_dict(loaded)
            twin.load_state_dict(loaded)
        ours.reload()
    return [*seen, same(flat(ours.state_dict()), flat(theirs.state_dict()))]


@pytest.mark.default("parameters-True")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("shard", ["elements", "parameters"])
def test_shards(ranks: RankPool, shard: str, overlap: bool) -> None:
    """A sharded life with trips to host memory has the bits of one without; whole state dicts come from there."""
    assert ranks.run(2, _shards, shard, overlap) == [[True] * 5] * 2


def _fully_sharded(options: dict[str, Any]) -> list[bool]:
    mesh = mesh_of((dist.get_world_size(),), ("dp",))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)

    def build() -> tuple[Tiny, MixedPrecisionOptimizer]:
        module = model()
        for layer in module.children():
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        scaler = DynamicGradScaler(2.0**8, 1.0, 2.0, 0.5, 3, 1)
        config = OptimizerConfig(fp16=True, clip_grad=0.1, **options)
        return module, MixedPrecisionOptimizer(INNER["adamw_fused"](module), config, scaler)

    (module, ours), (twin, theirs) = build(), build()
    seen = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        data = torch.randn(4, 4, generator=generator).half()
        _step(ours, module, data)
        _step(theirs, twin, data)
        ours.offload()
        mine, other = ours.state_dict()["main_params"], theirs.state_dict()["main_params"]
        seen.append(all(bits_equal(to_local(mine[name]), to_local(other[name])) for name in mine))
        ours.reload()
    return [*seen, all(map(bits_equal, *([to_local(one) for one in own.parameters()] for own in (module, twin))))]


@pytest.mark.default("remainders")
@pytest.mark.parametrize("options", [{}, {"store_param_remainders": True}], ids=["fp32", "remainders"])
def test_fsdp2(ranks: RankPool, options: dict[str, Any]) -> None:
    """The same of DTensors, whose local tensors go."""
    assert ranks.run(2, _fully_sharded, options) == [[True] * 5] * 2


THERE: dict[str, Any] = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True}


def _in_host_memory(held: str, fraction: float, stored: dict[str, Any]) -> list[bool]:
    def build(options: dict[str, Any]) -> tuple[nn.Module, MixedPrecisionOptimizer]:
        module = net()
        inner = torch.optim.AdamW(module.named_parameters(), lr=1e-2)
        config = OptimizerConfig(fp16=True, clip_grad=0.1, **options)
        scaler = DynamicGradScaler(2.0**8, 1.0, 2.0, 0.5, 3, 1)
        if held == "synced":
            sync = GradSync(module.named_parameters())
            return module, MixedPrecisionOptimizer(inner, config, scaler, grad_sync=sync)
        return module, DistributedOptimizer(
            inner, config, scaler, modules=module, shard=held, overlap_param_gather=True, bucket_numel=30
        )

    module, ours = build(stored | THERE | {"optimizer_offload_fraction": fraction})
    twin, theirs = build(stored)
    _delay(ours)
    seen = []
    for step in range(4):
        data = batch(step, dist.get_rank(), FP16)
        _step(ours, module, data)
        _step(theirs, twin, data)
        if step != 1:  # then forward comes next, and has to wait by itself
            seen.append(same(flat(ours.state_dict()), flat(theirs.state_dict())))
    return [*seen, same(weights(module), weights(twin))]


def _delay(optimizer: MixedPrecisionOptimizer) -> None:
    """Let the thread's updates come late, so that who does not wait reads old weights. Ranks differ."""
    update = optimizer._member.update
    assert isinstance(update, HostUpdate)
    inner = update._host.apply

    def late(*arguments: Any) -> Any:
        time.sleep(0.02 * (1 + dist.get_rank()))
        return inner(*arguments)

    update._host.apply = late  # type: ignore[method-assign, assignment]


AMOUNTS: dict[str, tuple[float, dict[str, Any]]] = {
    "all": (1.0, {}),
    "half": (0.5, {}),
    "half of remainders": (0.5, {"store_param_remainders": True}),
}
HOLDERS = ("synced", "elements", "parameters")


@pytest.mark.default("half of remainders-elements")
@pytest.mark.parametrize("held", HOLDERS)
@pytest.mark.parametrize("amount", AMOUNTS)
def test_in_host_memory(ranks: RankPool, held: str, amount: str) -> None:
    """optimizer_cpu_offload over ranks, with all overlaps, has the bits of the same life without."""
    fraction, stored = AMOUNTS[amount]
    assert ranks.run(2, _in_host_memory, held, fraction, stored) == [[True] * 4] * 2


def _too_little_on_one_rank() -> tuple[str, bool]:
    module = net()
    config = OptimizerConfig(fp16=True, optimizer_cpu_offload=True)
    scaler = DynamicGradScaler(8.0, 1.0, 2.0, 0.5, 3, 1)
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(module.named_parameters()), config, scaler)
    before = weights(module)
    optimizer.scale_loss(module(batch(0, 0, FP16)).float().square().mean()).backward()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank():
            patch.setattr(host_buffers, "allocate", lambda *_, **__: host_memory.allocate([1 << 60], pin=False))
        with pytest.raises(UsageError) as caught:
            optimizer.step()
    is_unchanged = same(before, weights(module))
    _step(optimizer, module, batch(0, 0, FP16))
    return str(caught.value), is_unchanged


def test_too_little_memory_for_gradients_on_one_rank(ranks: RankPool) -> None:
    """Invariant 7: all ranks refuse the first step, name the bytes, and have changed nothing; the next one is taken."""
    first, second = ranks.run(2, _too_little_on_one_rank)
    assert first == second
    assert first[0].startswith(f"rank 1: {1 << 60} bytes of host memory are needed, and torch could not allocate them")
    assert first[1]


def _dtensors_in_host_memory(fraction: float, prefetch: bool, options: dict[str, Any]) -> list[bool]:
    mesh = mesh_of((dist.get_world_size(),), ("dp",))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)

    def build(own: dict[str, Any]) -> tuple[Tiny, MixedPrecisionOptimizer]:
        module = model()
        layers = list(module.children())
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        for layer in layers[:-1] if prefetch else ():
            assert isinstance(layer, FSDPModule)
            layer.set_modules_to_forward_prefetch([layers[-1]])  # type: ignore[list-item]
        config = OptimizerConfig(fp16=True, clip_grad=0.1, **own)
        scaler = DynamicGradScaler(2.0**8, 1.0, 2.0, 0.5, 3, 1)
        return module, MixedPrecisionOptimizer(INNER["adamw_fused"](module), config, scaler)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update_unit, "SLICE", 16)  # several slices, whose weights arrive one after the other
        module, ours = build(options | THERE | {"optimizer_offload_fraction": fraction})
    twin, theirs = build(options)
    _delay(ours)
    seen = []
    for step in range(6):
        for one, optimizer in ((module, ours), (twin, theirs)):
            data = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).half()
            optimizer.zero_grad()
            loss = one(data).float().square().mean() * (float("inf") if step == 1 else 1.0)
            optimizer.scale_loss(loss).backward()
            optimizer.step()
        if step % 2 == 0:  # nobody waits for the weights but the next forward
            continue
        seen.append(all(map(bits_equal, _locals(ours.state_dict()), _locals(theirs.state_dict()))))
        if step == 3:
            for optimizer in (ours, theirs):
                optimizer.load_state_dict(optimizer.state_dict())
    assert any(param.on_host is not None for param in ours._member.main_params)
    ours.finish_param_gather()
    return [*seen, all(map(bits_equal, *([to_local(one) for one in own.parameters()] for own in (module, twin))))]


def _locals(saved: dict[str, Any]) -> list[Tensor]:
    return [to_local(one) for one in tensors_in(saved)]


@pytest.mark.default("1.0-True-fp32")
@pytest.mark.parametrize("options", [{}, {"store_param_remainders": True}], ids=["fp32", "remainders"])
@pytest.mark.parametrize(("fraction", "prefetch"), [(1.0, True), (0.5, False)])
def test_dtensors_in_host_memory(ranks: RankPool, fraction: float, prefetch: bool, options: dict[str, Any]) -> None:
    """FSDP2's shards: each rank's main params and state in its host's memory have the bits of a life without."""
    assert ranks.run(2, _dtensors_in_host_memory, fraction, prefetch, options) == [[True] * 4] * 2


def _failed_on(odd: int) -> list[str]:
    """Let the last update of one rank fail in its thread. Returns what two reads of the state raise."""
    module = net()
    config = OptimizerConfig(fp16=True, optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=True)
    scaler = DynamicGradScaler(8.0, 1.0, 2.0, 0.5, 3, 1)
    optimizer = DistributedOptimizer(INNER["adamw_fused"](module), config, scaler, modules=module)
    _step(optimizer, module, batch(0, dist.get_rank(), FP16))
    update = optimizer._member.update
    assert isinstance(update, HostUpdate)
    optimizer.finish_param_gather()  # the first update has ended
    if dist.get_rank() == odd:

        def fail(*_: Any) -> Any:
            raise ValueError("broken")

        update._host.apply = fail  # type: ignore[assignment]
    _step(optimizer, module, batch(1, dist.get_rank(), FP16))
    told = []
    for read in (optimizer.state_dict, optimizer.state_dict):
        try:
            read()
        except MegascaleError as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


@pytest.mark.parametrize("odd", [0, 1])
def test_no_rank_reads_the_state_of_an_update_that_failed_on_one(ranks: RankPool, odd: int) -> None:
    """Main params may be updated in part there: every rank is told, once."""
    for [message] in ranks.run(2, _failed_on, odd):
        assert "the update of the step before failed in host memory, ValueError: broken" in message


def _one_rank_is_away() -> list[str]:
    module = net()
    scaler = DynamicGradScaler(8.0, 1.0, 2.0, 0.5, 3, 1)
    inner = torch.optim.AdamW(module.named_parameters())
    optimizer = MixedPrecisionOptimizer(inner, OptimizerConfig(fp16=True), scaler)
    before = [param.clone() for param in module.parameters()]
    optimizer.scale_loss(module(batch(0, 0, FP16)).float().square().mean()).backward()
    if dist.get_rank() == 1:
        optimizer.offload()
    try:
        optimizer.step()
    except Exception as error:
        unchanged = all(bits_equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
        return [type(error).__name__, str("reload()" in str(error) or "rank 1" in str(error)), str(unchanged)]
    return []


def test_one_rank_that_forgot_to_reload(ranks: RankPool) -> None:
    """All ranks raise at the same step, and no rank has updated."""
    first, second = ranks.run(2, _one_rank_is_away)
    assert second == ["UsageError", "True", "True"]
    assert first[1:] == ["True", "True"]


def _forgot_to_reload(kind: str, away: list[int]) -> list[str]:
    module = net()
    if kind == "sharded":
        optimizer: MixedPrecisionOptimizer = sharded(module)
    else:
        inner = torch.optim.AdamW(module.named_parameters())
        sync = GradSync(module.named_parameters())
        scaler = DynamicGradScaler(8.0, 1.0, 2.0, 0.5, 3, 1)
        optimizer = MixedPrecisionOptimizer(inner, OptimizerConfig(fp16=True), scaler, grad_sync=sync)
    before = weights(module)
    optimizer.zero_grad()
    if dist.get_rank() in away:
        optimizer.offload()
    try:
        optimizer.step()
    except Exception as error:
        said = "" if "reload()" in str(error) or "on rank" in str(error) else str(error)
        unchanged = str(same(before, weights(module)))
        optimizer.reload()
        _step(optimizer, module, batch(0, dist.get_rank(), FP16))
        return [said, unchanged]
    return ["no error"]


@pytest.mark.parametrize("away", [[0, 1], [1]])
@pytest.mark.parametrize("kind", ["synced", "sharded"])
def test_a_step_without_backward_while_main_grads_are_away(ranks: RankPool, kind: str, away: list[int]) -> None:
    """Reductions that backward has not started are not made in memory that offload() has freed, and other ranks do not
    wait for them: every rank raises, and the next step, after reload(), is a step like any other.
    """
    assert ranks.run(2, _forgot_to_reload, kind, away) == [["", "True"]] * 2
