"""Weights that others write into DTensors, as FSDP2 and tensor parallelism hold them, are followed."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from megascale import MixedPrecisionOptimizer, OptimizerConfig
from megascale.main_params.main_param import MainParam
from megascale.main_params.write_tracker import WriteTracker
from tests.meshes import mesh_of
from tests.pool import RankPool

LOADED = 0.5


def _whole(module: nn.Linear) -> Tensor:
    weight = module.weight
    assert isinstance(weight, DTensor)
    values = torch.full(tuple(weight.shape), LOADED, dtype=weight.dtype)
    return distribute_tensor(values, weight.device_mesh, weight.placements)


def _copy(module: nn.Linear) -> None:
    module.weight.copy_(_whole(module))


def _local(module: nn.Linear) -> None:
    assert isinstance(module.weight, DTensor)
    module.weight.to_local().fill_(LOADED)


def _loaded(module: nn.Linear) -> None:
    module.load_state_dict({"weight": _whole(module)})


def _set(module: nn.Linear) -> None:
    set_model_state_dict(module, {"weight": _whole(module)})


WAYS: dict[str, Callable[[nn.Linear], None]] = {
    "copy_": _copy,
    "local": _local,
    "load_state_dict": _loaded,
    "set_model_state_dict": _set,
}


def _written(way: str, parallelism: str, dtype: torch.dtype, remainders: bool) -> tuple[float, float, int]:
    torch.manual_seed(0)
    module = nn.Linear(32, 5, bias=False).to(dtype)
    mesh = mesh_of((dist.get_world_size(),), ("shard",))
    if parallelism == "FSDP2":
        fully_shard(module, mesh=mesh)
    else:
        parallelize_module(module, mesh, ColwiseParallel())
    config = OptimizerConfig(bf16=dtype == torch.bfloat16, store_param_remainders=remainders)
    inner = torch.optim.SGD(module.named_parameters(), lr=1e-6)
    optimizer = MixedPrecisionOptimizer(inner, config)

    def step() -> None:
        optimizer.zero_grad()
        module(torch.ones(2, 32, dtype=dtype)).float().sum().backward()
        assert optimizer.step().success

    followed = 0
    sync = MainParam.sync_from_model

    def counted(param: MainParam) -> None:
        nonlocal followed
        followed += 1
        sync(param)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MainParam, "sync_from_model", counted)
        step()
        step()
        untouched = followed
    with torch.no_grad():
        WAYS[way](module)
    main = dict(optimizer.main_params())["weight"]
    assert isinstance(main, DTensor)
    found = main.full_tensor()[-1, -1].item()
    step()
    assert isinstance(module.weight, DTensor)
    return found, module.weight.full_tensor().float().mean().item(), untouched


FORMS = {"bf16": (torch.bfloat16, False), "remainders": (torch.bfloat16, True), "fp32": (torch.float32, False)}


@pytest.mark.default("load_state_dict-FSDP2-bf16", "local-FSDP2-remainders")
@pytest.mark.parametrize(
    ("way", "parallelism", "form"),
    [
        *product(WAYS, ["FSDP2"], ["bf16", "remainders"]),
        *product(["copy_", "local"], ["tensor parallel"], ["remainders", "fp32"]),
    ],
)
def test_writes_to_dtensors_are_followed(ranks: RankPool, way: str, parallelism: str, form: str) -> None:
    """Invariant 6: weights loaded into the model are never silently reverted. Torch counts a write to a DTensor in the
    DTensor, not in its local tensor. Steps without such a write read no weight again.
    """
    for main, weight, untouched in ranks.run(2, _written, way, parallelism, *FORMS[form]):
        assert main == LOADED
        assert weight == pytest.approx(LOADED, abs=1e-3)
        assert untouched == 0


def _replaced() -> tuple[list[int], list[int]]:
    mesh = mesh_of((dist.get_world_size(),), ("shard",))
    param = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh))
    tracker = WriteTracker([param])
    before = tracker.written()
    param._local_tensor = torch.ones(4, 4)  # type: ignore[attr-defined]  # of the same version: 0
    return before, tracker.written()


def test_a_local_tensor_put_in_the_place_of_another_is_a_write(ranks: RankPool) -> None:
    """No version tells of it, only the place: that was not compared once it was known to be unchanged."""
    assert ranks.run(2, _replaced) == [([], [0])] * 2
