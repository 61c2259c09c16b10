"""What a DistributedOptimizer refuses, by name."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from megascale import DistributedOptimizer, OptimizerConfig
from megascale.errors import ArgumentError, ArgumentTypeError, GradientError, UsageError
from tests.distributed.test_distributed_optimizer import (
    INNER,
    config_of,
    net,
    scaler,
    sharded,
)
from tests.pool import RankPool
from tests.training import Sign


def _not_elementwise() -> dict[str, str]:
    module = net()
    kinds: dict[str, Any] = {
        "Adafactor": lambda: torch.optim.Adafactor(module.parameters()),
        "Muon": lambda: torch.optim.Muon([p for p in module.parameters() if p.dim() == 2]),
        "Sign": lambda: Sign(module.parameters()),
    }
    messages = {}
    for name, make in kinds.items():
        with pytest.raises(ArgumentError) as caught:
            DistributedOptimizer(
                make(), config_of(torch.float16), scaler(torch.float16), modules=module, shard="elements"
            )
        messages[name] = str(caught.value)
        assert not any(param._post_accumulate_grad_hooks for param in module.parameters())
    return messages


def test_optimizers_that_need_whole_parameters_are_refused_by_name(ranks: RankPool) -> None:
    """Adafactor and Muon look at whole matrices; an unknown optimizer may. By elements, an error names the way out."""
    for messages in ranks.run(2, _not_elementwise):
        for name, message in messages.items():
            assert f"optimizer {name} is not known to be elementwise" in message
            assert "pass shard='parameters'" in message


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"modules": []}, ArgumentTypeError, r"modules must be a module or a list of modules, got \[\]"),
    (
        {"modules": [nn.Linear(1, 1), "head"]},
        ArgumentTypeError,
        r"modules must be a module or a list of modules, got \[L",
    ),
    ({"modules": nn.Linear(1, 1)}, ArgumentError, r"modules do not own parameter 0 of the optimizer \(and 9 more\)"),
    ({"bucket_numel": 0}, ArgumentError, r"bucket_numel must be 1 or more, got 0"),
    ({"reduction": "max"}, ArgumentError, r"reduction must be one of 'mean', 'sum', got 'max'"),
    ({"overlap_grad_reduce": 1}, ArgumentTypeError, r"overlap_grad_reduce must be True or False, got 1"),
    ({"overlap_param_gather": None}, ArgumentTypeError, r"overlap_param_gather must be True or False, got None"),
    ({"broadcast_params": "yes"}, ArgumentTypeError, r"broadcast_params must be True or False, got 'yes'"),
    ({"shard": "rows"}, ArgumentError, r"shard must be one of 'auto', 'elements', 'parameters', got 'rows'"),
    ({"elementwise": 1}, ArgumentTypeError, r"elementwise must be True or False, got 1"),
    ({"grad_dtype": torch.int32}, ArgumentError, r"grad_dtype and reduce_dtype must be floating point"),
    ({"groups": "world"}, ArgumentTypeError, r"groups must be None, a ParallelGroups"),
    ({"grad_scaler": None}, ArgumentError, r"grad_scaler is None, but fp16 gradients need one"),
    ({"config": OptimizerConfig(bf16=True)}, ArgumentError, r"config.fp16 is False, but the optimizer has fp16"),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_bad_argument_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """Every argument is checked by name, before a parameter is moved or hooked."""
    module = net()
    before = [param.data_ptr() for param in module.parameters()]
    defaults: dict[str, Any] = {
        "config": config_of(torch.float16),
        "grad_scaler": scaler(torch.float16),
        "modules": module,
    }
    with pytest.raises(error, match=message):
        DistributedOptimizer(INNER["adamw"](module), **(defaults | options))
    assert [param.data_ptr() for param in module.parameters()] == before
    assert not any(param._post_accumulate_grad_hooks for param in module.parameters())


def _wrapped_modules() -> list[str]:
    messages = []
    sharded_already = net()
    fully_shard(sharded_already)
    for module in (nn.parallel.DistributedDataParallel(net()), sharded_already):
        with pytest.raises(ArgumentError) as caught:
            sharded(module)
        messages.append(str(caught.value))
    return messages


def test_modules_that_reduce_or_shard_already_are_refused(ranks: RankPool) -> None:
    """Under DDP every gradient would be reduced twice; FSDP2 shards already."""
    for under_ddp, under_fsdp in ranks.run(2, _wrapped_modules):
        assert "modules holds a DistributedDataParallel" in under_ddp
        assert "is a DTensor, whose own mesh reduces its gradient; use MixedPrecisionOptimizer" in under_fsdp


def test_chunks_have_names_of_their_own() -> None:
    """Two chunks may call their parameters alike."""
    chunks = [nn.Linear(2, 2), nn.Linear(2, 2)]
    params = [param for chunk in chunks for param in chunk.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD(params), modules=chunks)
    assert optimizer.param_names() == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_wrapping_twice_is_refused() -> None:
    """A wrapped optimizer is not an inner optimizer."""
    module = net()
    with pytest.raises(ArgumentTypeError, match=r"is a DistributedOptimizer already"):
        DistributedOptimizer(sharded(module), modules=module)


def test_model_cast_after_wrapping_is_refused() -> None:
    """module.float() tears parameters from their buckets."""
    module = net()
    optimizer = sharded(module)
    module.float()
    with pytest.raises(UsageError, match=r"parameter 'first.weight' became .* torch.float32 .* cast the model first"):
        optimizer.step()


def _sparse() -> str:
    module = nn.Embedding(4, 3, sparse=True)
    optimizer = DistributedOptimizer(torch.optim.SGD(module.named_parameters()), modules=module, broadcast_params=True)
    with pytest.raises(GradientError) as caught:
        module(torch.tensor([1])).sum().backward()
    assert optimizer.param_names() == ["weight"]
    return str(caught.value)


def test_sparse_gradient_is_refused_by_name(ranks: RankPool) -> None:
    """A sparse embedding is named in backward, with the way out."""
    for message in ranks.run(2, _sparse):
        assert "the gradient of 'weight' has layout torch.sparse_coo; build the layer with sparse=False" in message
