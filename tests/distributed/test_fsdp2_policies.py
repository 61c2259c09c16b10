"""FSDP2's MixedPrecisionPolicy(param_dtype=torch.float16) over fp32 parameters: its gradients need a loss scale."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megascale import ConstantGradScaler, MixedPrecisionOptimizer
from megascale.errors import ArgumentError
from tests.pool import RankPool

FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
FP32 = MixedPrecisionPolicy(param_dtype=torch.float32)


def _built(of_layer: MixedPrecisionPolicy, of_root: MixedPrecisionPolicy, chosen: str, scale: float) -> str:
    """Return what the constructor says, or "" and train. ``chosen``: the layer whose parameters are updated."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    other = nn.Linear(4, 4)
    fully_shard(other, mp_policy=FP16)  # nobody's
    fully_shard(model[0], mp_policy=of_layer)
    fully_shard(model, mp_policy=of_root)
    named = [(name, param) for name, param in model.named_parameters() if name.startswith(chosen)]
    scaler = ConstantGradScaler(scale) if scale else None
    try:
        optimizer = MixedPrecisionOptimizer(torch.optim.SGD(named, lr=0.1), grad_scaler=scaler)
    except ArgumentError as error:
        return str(error)
    if of_layer == of_root:  # else the layers take inputs of different dtypes
        optimizer.scale_loss(model(torch.ones(2, 4)).float().sum()).backward()
        assert optimizer.step().success
    return ""


@pytest.mark.parametrize(
    ("of_layer", "of_root", "chosen", "scale", "named"),
    [
        (FP16, FP16, "", 0.0, "weight'"),
        (FP16, BF16, "", 0.0, "'weight'"),
        (BF16, FP16, "", 0.0, "'1.weight'"),
        (BF16, FP16, "0", 0.0, None),
        (FP16, BF16, "1", 0.0, None),
        (BF16, BF16, "", 0.0, None),
        (FP32, FP32, "", 0.0, None),
        (FP16, FP16, "", 8.0, None),
    ],
    ids=["fp16", "fp16 layer", "fp16 root", "other layer", "root alone", "bf16", "fp32", "scaled"],
)
def test_a_policy_of_fp16_needs_a_scaler(
    ranks: RankPool,
    of_layer: MixedPrecisionPolicy,
    of_root: MixedPrecisionPolicy,
    chosen: str,
    scale: float,
    named: str | None,
) -> None:
    """On every rank, with the parameter's name; not where another module has the policy, or there is a scale.

    Only fp32 parameters under FSDP2: fp16 ones are refused without a scaler in every layout, and bf16 ones are cast to
    fp16 by nobody.
    """
    told = ranks.run(2, _built, of_layer, of_root, chosen, scale)
    assert told[0] == told[1]
    if named is None:
        assert told[0] == ""
    else:
        assert "MixedPrecisionPolicy(param_dtype=torch.float16)" in told[0]
        assert named in told[0]
