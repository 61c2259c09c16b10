"""Numbers that are none on one rank: the step is skipped on all, or the parameter is named on all."""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist

from tests.distributed.test_distributed_optimizer import flat, net, same, sharded, weights
from tests.pool import RankPool
from tests.reliability.faults import Fault


def poison(kind: str) -> tuple[list[bool], bool, str]:
    """Train with a NaN in rank 1's data, gradients or parameters.

    Returns whether each step landed, whether the skipped step changed no bit, and the error that ended it.
    """
    module = net()
    optimizer = sharded(module)
    landed: list[bool] = []
    unchanged = False
    try:
        for step in range(200 if kind == "parameters" else 6):
            faulty = step == 3 and dist.get_rank() == 1
            batch = torch.randn(6, 4).half()
            if faulty and kind == "data":
                batch[2, 1] = math.nan
            if step == 3 and kind == "parameters":
                with torch.no_grad():
                    module.second.weight[0, 0] = math.nan
            optimizer.zero_grad()
            factor = math.nan if faulty and kind == "gradients" else 1.0
            optimizer.scale_loss(module(batch).float().square().mean() * factor).backward()
            before = flat(optimizer.state_dict()) | weights(module) if step == 3 else {}
            landed.append(bool(optimizer.step().success))
            if step == 3:
                unchanged = same(before, flat(optimizer.state_dict()) | weights(module))
    except Exception as error:
        return landed, unchanged, f"{type(error).__name__}: {error}"
    return landed, unchanged, ""


def poisons(ranks: RankPool) -> Iterator[Fault]:
    """Inject each NaN: the step is skipped on all ranks, or the parameter is named on all."""
    for kind in ("data", "gradients", "parameters"):
        first, second = ranks.run(2, poison, kind)
        landed, unchanged, error = first
        if kind == "parameters":
            held = first == second and "NonFiniteParamError" in error and "second.weight" in error
            yield Fault("NaN", "in parameters", error, held)
            continue
        held = first == second and landed == [True, True, True, False, True, True] and unchanged
        yield Fault("NaN", f"in one rank's {kind}", "that step is skipped on all ranks, no bit changes", held)
