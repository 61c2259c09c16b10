"""One table of what is refused: the call, the class of its error, and the words of the message that name the way out.

A row is for a mistake that a user is likely to make, with its likely spelling. What a refusal leaves unchanged, and
which variants of the mistake it sees, are tests of their own beside the code. To add a row: a function that makes the
mistake and raises, at module level, as it travels to the ranks by name. tests/refused.py has the rows of this process.
"""

import copy
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from megascale import (
    DistributedOptimizer,
    DynamicGradScaler,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    ParallelGroups,
    cast_model,
)
from megascale.amp import GradScaler
from megascale.checkpoint import Checkpointer
from megascale.debug import report_overflows
from megascale.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    GradientError,
    InnerStepError,
    StateDictError,
    UsageError,
)
from megascale.grad_sync import GradSync
from megascale.metrics import StepMetrics
from megascale.rollout import rollout_weights
from megascale.utils import collectives
from tests.meshes import mesh_of
from tests.pool import RankPool
from tests.refused import ARGUMENTS, Refusal
from tests.whole_optimizers import Lamb, Shampoo


def _model() -> nn.Module:
    return cast_model(nn.Linear(4, 4), torch.bfloat16)


def _under_fsdp1(use_orig_params: bool) -> None:
    model = FullyShardedDataParallel(_model(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    MixedPrecisionOptimizer(torch.optim.AdamW(model.parameters()))


def _fsdp1_zero1() -> None:
    model = FullyShardedDataParallel(_model(), use_orig_params=True, device_id=torch.device("cpu"))
    DistributedOptimizer(torch.optim.AdamW(model.parameters()), modules=model)


def _uneven_batches() -> None:
    wrapped = DistributedDataParallel(_model())
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(wrapped.parameters()))
    with wrapped.join():
        for _ in range(3 + dist.get_rank()):
            optimizer.zero_grad()
            wrapped(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum().backward()
            optimizer.step()


def _whole_matrices_under_fsdp2() -> None:
    model = _model()
    fully_shard(model)
    optimizer = MixedPrecisionOptimizer(Shampoo(model.named_parameters()))
    for _ in range(2):  # an error of step() is raised by the next one, on every rank
        optimizer.zero_grad()
        model(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()


class AdamW8bit(torch.optim.AdamW):
    """Named as torchao's."""

    __module__ = "torchao.optim.adam"


class FusedLAMB(Lamb):
    """With the options of apex's."""

    def __init__(self, named: Any, max_grad_norm: float = 1.0) -> None:
        super().__init__([{"params": list(named), "max_grad_norm": max_grad_norm}])


class Prodigy(torch.optim.SGD):
    """Named as the one that estimates a step size from all parameters."""


class Holding(Lamb):
    """Holds another optimizer of the same parameters."""

    def __init__(self, named: Any) -> None:
        named = list(named)
        super().__init__(named)
        self.bases = [FusedLAMB(named)]


class Delegating(Lamb):
    """Shares the state of the optimizer that it holds, whose param groups are others."""

    def __init__(self, named: Any) -> None:
        named = list(named)
        self.base = FusedLAMB(named)
        super().__init__(named)
        self.state = self.base.state


def _replicated(kind: Callable[..., torch.optim.Optimizer], **fields: Any) -> None:
    config = OptimizerConfig(**({"bf16": True} | fields))
    MixedPrecisionOptimizer(kind([_model().weight]), config)


def _by_parameters(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
    model = _model()
    DistributedOptimizer(kind(model.named_parameters()), modules=model, **options)


def _fp16_policy_without_a_scaler() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    fully_shard(model)
    MixedPrecisionOptimizer(torch.optim.AdamW(model.parameters()))


def _bf16_policy_over_fp16() -> None:
    model = nn.Linear(4, 4, dtype=torch.float16)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    MixedPrecisionOptimizer(torch.optim.AdamW(model.parameters()), grad_scaler=DynamicGradScaler())


def _a_path_for_a_sink() -> None:
    StepMetrics(None, ["steps.csv"])  # type: ignore[list-item]


def _metrics_on_one_rank() -> None:
    _on_the_first_rank(StepMetrics)


def _built_before_fully_shard() -> None:
    model = _model()
    inner = torch.optim.AdamW(model.parameters())
    fully_shard(model)
    optimizer = MixedPrecisionOptimizer(inner)
    model(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum().backward()
    optimizer.step()


def _named_after_fully_shard() -> None:
    model = _model()
    inner = torch.optim.AdamW(model.parameters())
    fully_shard(model)
    MixedPrecisionOptimizer(inner, named_parameters=model.named_parameters())


def _built_before_to_empty() -> None:
    model = nn.Linear(4, 4, device="meta", dtype=torch.bfloat16)
    inner = torch.optim.AdamW(model.parameters())
    DistributedOptimizer(inner, modules=model.to_empty(device="cpu"))


def _modules_of_another_model() -> None:
    DistributedOptimizer(torch.optim.AdamW(_model().parameters()), modules=_model())


def _synced_another_model() -> None:
    grad_sync = GradSync(_model().named_parameters())
    MixedPrecisionOptimizer(torch.optim.AdamW(_model().parameters()), grad_sync=grad_sync)


def _reports_on_another_model() -> None:
    report_overflows(MixedPrecisionOptimizer(torch.optim.AdamW(_model().parameters())), model=_model())


def _rollout_on_one_rank() -> None:
    model = _model()
    fully_shard(model)
    _on_the_first_rank(lambda: dict(rollout_weights(model)))


def _zero1_state_on_one_rank() -> None:
    model = _model()
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), modules=model)
    _on_the_first_rank(optimizer.state_dict)


def _wrong_on_one_rank(call: str, wrong: Any, right: Any) -> None:
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(_model().parameters()))
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    getattr(optimizer, call)(right if dist.get_rank() else wrong)


def _fewer_positions() -> None:
    saved = MixedPrecisionOptimizer(torch.optim.AdamW(_model().parameters())).state_dict()
    more = cast_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.bfloat16)
    MixedPrecisionOptimizer(torch.optim.AdamW(more.named_parameters())).load_state_dict(saved)


def _on_the_first_rank(call: Callable[[], Any]) -> None:
    """Make a call on one rank, whose process group waits for a fraction of a second, not for half an hour."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "timeout_of", lambda _: timedelta(seconds=0.2))
        if dist.get_rank() == 0:
            call()


OFFLOAD: dict[str, Any] = {"bf16": True, "optimizer_cpu_offload": True}


class OwnAdamW(torch.optim.AdamW):
    """A user's subclass, whose ``step()`` may be another one."""


def _offload_of_a_subclass() -> None:
    model = _model()
    config = OptimizerConfig(**OFFLOAD, overlap_cpu_optimizer_d2h_h2d=True)
    DistributedOptimizer(OwnAdamW(model.named_parameters()), config, modules=model)


_LAST = "from the parameters of the model that is trained"


def _clamp_while_weights_arrive() -> None:
    model = _model()
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), modules=model, overlap_param_gather=True)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
        with torch.no_grad():
            for weight in model.parameters():
                weight.clamp_(-0.1, 0.1)


def _backward_without_zero_grad() -> None:
    model = _model()
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), modules=model)
    for _ in range(2):
        model(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()


def _sharded_already() -> None:
    model = _model()
    fully_shard(model)
    DistributedOptimizer(torch.optim.AdamW(model.parameters()), modules=model)


def _reduced_by_ddp() -> None:
    model = DistributedDataParallel(_model())
    DistributedOptimizer(torch.optim.AdamW(model.parameters()), modules=model)


def _sparse_in_backward() -> None:
    module = nn.Embedding(4, 3, sparse=True)
    optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters()), modules=module, broadcast_params=True)
    module(torch.tensor([1])).sum().backward()
    optimizer.step()


def _cut_groups_of_codes() -> None:
    mesh = mesh_of((2,), ("dp",))
    weight = nn.Parameter(distribute_tensor(torch.zeros(7, 16).bfloat16(), mesh, [Shard(0)]))
    MixedPrecisionOptimizer(torch.optim.AdamW([("w", weight)]), OptimizerConfig(bf16=True, exp_avg_dtype=torch.int8))


def _experts_of_one_name() -> None:
    """Each rank's would be saved under the same name, and all but the first be lost."""
    model = _model()
    model.get_parameter("weight").allreduce = False  # type: ignore[attr-defined]
    groups = ParallelGroups(dist.group.WORLD, expert_data_parallel=None)
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.named_parameters()), modules=model, groups=groups)
    with tempfile.TemporaryDirectory() as folder:
        Checkpointer(folder, groups=groups).save(0, model, optimizer)


def _copied_scaler_of_ranks() -> None:
    copy.deepcopy(GradScaler("cpu", process_group=dist.group.WORLD))


def _cut_beyond_the_group() -> None:
    mesh = mesh_of((2,), ("dp",))
    weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    MixedPrecisionOptimizer(torch.optim.SGD([("w", weight)]), groups=ParallelGroups())


_FSDP1, _FSDP1_VIEWS = (partial(_under_fsdp1, use_orig_params=views) for views in (False, True))
_PRODIGY = partial(_by_parameters, Prodigy, shard="parameters")
_ADAGRAD_OFFLOAD, _MUON_OFFLOAD = (
    partial(_replicated, kind, **OFFLOAD) for kind in (torch.optim.Adagrad, torch.optim.Muon)
)
ROWS = [
    Refusal("ZeRO-1 over FSDP2", _sharded_already, ArgumentError, "use MixedPrecisionOptimizer", 2),
    Refusal("ZeRO-1 over DDP", _reduced_by_ddp, ArgumentError, "modules holds a DistributedDataParallel", 2),
    Refusal("ZeRO-1 of a sparse layer", _sparse_in_backward, GradientError, "build the layer with sparse=False", 2),
    Refusal("no zero_grad() before backward", _backward_without_zero_grad, UsageError, "call zero_grad() before", 2),
    Refusal("8-bit moments of cut groups", _cut_groups_of_codes, ArgumentError, "cut it along dimension 0", 2),
    Refusal("a checkpoint of each rank's expert", _experts_of_one_name, CheckpointError, "is an expert's", 2),
    Refusal("a copy of a scaler with a group", _copied_scaler_of_ranks, UsageError, "state_dict()", 2),
    Refusal("a DTensor over ranks that decide apart", _cut_beyond_the_group, ArgumentError, "grad_stats has only", 2),
    Refusal(
        "FSDP1",
        _FSDP1,
        ArgumentError,
        "torch.distributed.fsdp.fully_shard (FSDP2)",
        2,
    ),
    Refusal(
        "FSDP1, use_orig_params=True",
        _FSDP1_VIEWS,
        ArgumentError,
        "fully_shard (FSDP2)",
        2,
    ),
    Refusal("ZeRO-1 over FSDP1", _fsdp1_zero1, ArgumentError, "fully_shard (FSDP2)", 2),
    Refusal("DDP.join() with uneven batches", _uneven_batches, UsageError, "throw_on_early_termination=True", 2),
    Refusal("an fp16 policy, no scaler", _fp16_policy_without_a_scaler, ArgumentError, "pass a DynamicGradScaler", 2),
    Refusal("fp16 under a bf16 policy", _bf16_policy_over_fp16, ArgumentError, "leave param_dtype out", 2),
    Refusal("a path for a sink", _a_path_for_a_sink, ArgumentTypeError, "[CsvFile(path)]", 2),
    *(
        Refusal(f"{call}({wrong!r}) on one rank", partial(_wrong_on_one_rank, call, wrong, right), kind, words, 2)
        for call, wrong, right, kind, words in (
            ("step", int, None, UsageError, "rank 0: step() takes no closure"),
            ("clip_grad_norm_", "1.0", 1.0, ArgumentTypeError, "rank 0: max_norm must be a number, got str"),
            ("clip_grad_norm_", 0.0, 1.0, ArgumentError, "rank 0: max_norm must be above 0, got 0.0"),
        )
    ),
    Refusal("StepMetrics on one rank", _metrics_on_one_rank, UsageError, "Call it on every rank", 2, True),
    Refusal("an optimizer built before fully_shard", _built_before_fully_shard, UsageError, _LAST, 2),
    Refusal("named_parameters from after fully_shard", _named_after_fully_shard, ArgumentError, _LAST, 2),
    Refusal("an optimizer built before to_empty", _built_before_to_empty, ArgumentError, _LAST),
    Refusal("modules of another model", _modules_of_another_model, ArgumentError, _LAST),
    Refusal("a GradSync of another model", _synced_another_model, ArgumentError, _LAST),
    Refusal("overflow reports of another model", _reports_on_another_model, ArgumentError, _LAST),
    Refusal("rollout_weights on one rank", _rollout_on_one_rank, UsageError, "Call it on every rank", 2, True),
    Refusal("ZeRO-1's state_dict on one rank", _zero1_state_on_one_rank, UsageError, "Call it on every rank", 2, True),
    Refusal("a state dict of fewer positions", _fewer_positions, StateDictError, "in the same param groups"),
    Refusal("a clamp while weights arrive", _clamp_while_weights_arrive, UsageError, "finish_param_gather()", 2),
    Refusal("SOAP or Shampoo under FSDP2", _whole_matrices_under_fsdp2, InnerStepError, "shard='parameters'", 2),
    Refusal("8-bit AdamW of torchao", partial(_replicated, AdamW8bit), ArgumentError, "exp_avg_sq_dtype=torch.uint8"),
    Refusal("LAMB's norm, by parameters", partial(_by_parameters, FusedLAMB), ArgumentError, "pass clip_grad=1.0", 2),
    Refusal("an optimizer that holds another", partial(_replicated, Holding), ArgumentError, "holds a FusedLAMB", 2),
    Refusal("one that holds other groups", partial(_replicated, Delegating), ArgumentError, "groups in `param_groups`"),
    Refusal(
        "Prodigy, by parameters",
        _PRODIGY,
        ArgumentError,
        "use MixedPrecisionOptimizer",
        2,
    ),
    Refusal(
        "offload without kernels",
        _ADAGRAD_OFFLOAD,
        ArgumentError,
        "needs Adam, AdamW, SGD or Lion",
    ),
    Refusal("offload of a subclass", _offload_of_a_subclass, ArgumentError, "by optimizer.offload() and reload()", 2),
    Refusal(
        "offload of Muon",
        _MUON_OFFLOAD,
        ArgumentError,
        "build_optimizer() with optimizer='muon'",
    ),
]


@pytest.mark.parametrize("row", [*ROWS, *ARGUMENTS], ids=[row.mistake for row in [*ROWS, *ARGUMENTS]])
def test_mistake_is_refused(row: Refusal, ranks: RankPool) -> None:
    """A likely mistake is an error of its own class, alike on every rank, whose message names the way out. Nothing has
    changed where the row says what could have.
    """
    before = row.kept()
    every = ranks.run(row.num_ranks, _told, row.call) if row.num_ranks else [_told(row.call)]
    told = [one for one in every if one is not None]
    assert len(told) == (1 if row.of_one_rank else len(every))
    assert len(set(told)) == 1, "each rank raises the same"
    kind, message = told[0]
    assert issubclass(kind, row.error), message
    assert row.words in message
    assert row.kept() == before


def _told(call: Callable[[], Any]) -> tuple[type[Exception], str] | None:
    """Return the class and the message of what ``call`` raises; None if nothing."""
    try:
        call()
    except Exception as error:
        return type(error), str(error)
    return None
