"""offload() and reload() over ranks: shards of both kinds, and DTensors of FSDP2."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascale import DistributedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.errors import MegascaleError, UsageError
from megascale.grad_sync import GradSync
from megascale.main_params import host_buffers
from megascale.utils import host_memory
from tests.distributed.test_distributed_optimizer import batch, net, same, sharded, weights
from tests.host_kernel import change_host_kernel
from tests.pool import RankPool
from tests.training import INNER

FP16 = torch.float16


def _step(optimizer: MixedPrecisionOptimizer, module: nn.Module, data: Tensor) -> None:
    optimizer.zero_grad()
    optimizer.scale_loss(module(data).float().square().mean()).backward()
    assert bool(optimizer.step().success)


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


def _failed_on(odd: int) -> list[str]:
    """Let the last update of one rank fail in its thread. Returns what two reads of the state raise."""
    module = net()
    config = OptimizerConfig(fp16=True, optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=True)
    scaler = DynamicGradScaler(8.0, 1.0, 2.0, 0.5, 3, 1)
    optimizer = DistributedOptimizer(INNER["adamw_fused"](module), config, scaler, modules=module)
    _step(optimizer, module, batch(0, dist.get_rank(), FP16))
    optimizer.finish_param_gather()  # the first update has ended
    if dist.get_rank() == odd:

        def fail(*_: Any) -> Any:
            raise ValueError("broken")

        change_host_kernel(optimizer, fail)
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
        assert "the last update failed in host memory, ValueError: broken" in message


def _with_a_slow_update(slow: bool) -> dict[str, Tensor]:
    """Return the weights after two steps whose updates, in the thread, begin late or not."""
    module = net()
    config = OptimizerConfig(fp16=True, optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=True)
    scaler = DynamicGradScaler(8.0, 1.0, 2.0, 0.5, 3, 1)
    optimizer = DistributedOptimizer(INNER["adamw_fused"](module), config, scaler, modules=module)

    def late(kernel: Any, *arguments: Any) -> Any:
        time.sleep(0.05 * slow)
        return kernel(*arguments)

    change_host_kernel(optimizer, late)
    for step in range(2):
        _step(optimizer, module, batch(step, dist.get_rank(), FP16))
    optimizer.finish_param_gather()
    return weights(module)


def test_a_shard_is_gathered_once_a_slow_thread_has_updated_it(ranks: RankPool) -> None:
    """Every rank has the others' new weights, however late these are computed."""
    for slow, quick in zip(
        ranks.run(2, _with_a_slow_update, True), ranks.run(2, _with_a_slow_update, False), strict=True
    ):
        assert same(slow, quick)


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
