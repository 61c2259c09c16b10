"""Weights for a rollout are whole and current on every rank, whatever still runs."""

import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megascale import DistributedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.main_params import weight_arrivals
from megascale.rollout import rollout_weights
from megascale.utils import collectives
from tests.fsdp2_cases import Case, gathered_weights, train
from tests.pool import RankPool
from tests.training import INNER, model, same_bits, set_grads, wrap


def _sharded(overlap: bool) -> tuple[dict[str, Tensor], int]:
    module = model()
    waited, last = 0, nn.Identity()  # a root that has no parameters, as a loss
    optimizer = DistributedOptimizer(
        INNER["adamw_fused"](module),
        None,
        DynamicGradScaler(2.0**10),
        modules=[module, last],
        overlap_param_gather=overlap,
        bucket_numel=64,
        grads_are_scaled=True,
    )
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).half()
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.scale_loss(last(module(x)).float().square().mean()).backward()
        optimizer.step()
    finish = optimizer._gather.wait

    def counted() -> None:
        nonlocal waited
        waited += 1
        finish()

    optimizer._gather.wait = counted  # type: ignore[method-assign]
    found = {name: value.clone() for name, value in rollout_weights(module, optimizer)}
    return found, waited


def test_gathers_have_ended(ranks: RankPool) -> None:
    """overlap_param_gather=True: what is read equals what is read without overlap, on both ranks."""
    [expected, _] = ranks.run(2, _sharded, False)
    for found, waited in ranks.run(2, _sharded, True):
        assert waited
        assert same_bits(found, expected[0])


def test_weights_have_arrived_from_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """overlap_cpu_optimizer_d2h_h2d=True, and a thread that is late: what is read are the weights of the last step."""
    send = weight_arrivals._send

    def late(*arguments: Any) -> None:
        time.sleep(0.05)
        send(*arguments)

    monkeypatch.setattr(weight_arrivals, "_send", late)

    def trained(**options: Any) -> dict[str, Tensor]:
        module = model()
        config = OptimizerConfig(fp16=True, clip_grad=1.0, **options)
        inner = INNER["adamw_fused"](module)
        optimizer = MixedPrecisionOptimizer(inner, config, DynamicGradScaler(2.0**10), grads_are_scaled=True)
        for seed in range(3):
            set_grads(module, seed)
            module(torch.ones(2, 4).half())  # the modules are known to read their weights
            optimizer.step()
        return {name: value.clone() for name, value in rollout_weights(module, optimizer)}

    assert same_bits(trained(optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=True), trained())


def _fsdp2() -> tuple[Any, Any]:
    case = Case()
    module, optimizer = case.build()
    train(module, optimizer, case, range(3), {})
    return dict(rollout_weights(module, optimizer)), gathered_weights(module)


def test_shards_are_gathered_one_by_one(ranks: RankPool) -> None:
    """FSDP2: whole fp16 weights on every rank."""
    for weights, expected in ranks.run(2, _fsdp2):
        assert {value.dtype for value in weights.values()} == {torch.float16}
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


def _wrapped() -> list[str]:
    return [name for name, _ in rollout_weights(torch.compile(DistributedDataParallel(model(torch.float32))))]  # type: ignore[arg-type]


def test_names_are_the_models_own(ranks: RankPool) -> None:
    """Without the prefixes of DistributedDataParallel and torch.compile."""
    assert ranks.run(2, _wrapped) == [list(model().state_dict())] * 2


def test_dtype() -> None:
    """fp32 weights are sent in 16 bits on request, integers stay."""
    module = torch.nn.BatchNorm1d(4)
    sent = dict(rollout_weights(module, dtype=torch.bfloat16))
    assert sent["weight"].dtype == torch.bfloat16
    assert sent["num_batches_tracked"].dtype == torch.int64


def test_without_overlap_nothing_is_copied() -> None:
    """A replicated model's tensors are its own memory."""
    module = model()
    optimizer = wrap(module)
    set_grads(module, 0)
    optimizer.step()
    for name, tensor in rollout_weights(module, optimizer):
        assert tensor.data_ptr() == module.state_dict()[name].data_ptr()


def _one_rank_first(patience: float) -> tuple[list[str], list[str]]:
    """Return the names of a rank's weights, and what it was warned of; the second rank comes later."""
    module = nn.Linear(4, 4).to(torch.bfloat16)
    fully_shard(module)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(collectives, "PATIENCE_S", patience)
        if dist.get_rank() == 1:
            time.sleep(0.3)
        names = [*dict(rollout_weights(module)), *dict(rollout_weights(module))]
    return names, [str(one.message) for one in caught if "rollout_weights" in str(one.message)]


def test_a_rank_that_is_late_is_waited_for(ranks: RankPool) -> None:
    """A rank that is alone for long warns and names the others; once they come, all have the weights."""
    [first, warned], [second, quiet] = ranks.run(2, _one_rank_first, 0.05)
    assert first == second == ["weight", "bias"] * 2
    assert quiet == []
    [message] = warned
    assert "rank 0 waits for ranks [1]" in message
    assert "Call it on every rank" in message
