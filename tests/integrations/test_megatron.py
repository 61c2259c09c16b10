"""Megatron-Core, from its wheel: our scalers in its optimizers, our optimizer in its place, its config."""

import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers import megatron_on_cpu
from megascale import (
    ConstantGradScaler,
    DistributedOptimizer,
    DynamicGradScaler,
    MegatronGradScaler,
    OptimizerConfig,
    build_optimizer,
)
from megascale.errors import ArgumentError, UsageError
from megascale.integrations import megatron as ours
from megascale.integrations import megatron_config
from megascale.integrations.megatron_config import from_megatron_config
from tests.pool import RankPool
from tests.training import bits_equal, model

megatron_on_cpu.install()
pytest.importorskip("megatron.core", reason="needs megatron-core: pip install --no-deps megatron-core pydantic einops")

from tests.integrations import megatron_runs as runs  # noqa: E402

FUSED = mock.patch.dict(os.environ, {"MEGASCALE_BACKEND": "torch"})
"""With torch's fused AdamW on both sides the arithmetic has one order, and results have the same bits."""


Record = Callable[[str, object], None]
"""pytest's ``record_property``."""


def differences(left: list[Any], right: list[Any]) -> tuple[list[Any], float]:
    """Return the logs that differ, but for their norms, and the largest difference of a model param or norm."""
    logs, largest = [], 0.0
    for (a, params_a), (b, params_b) in zip(left, right, strict=True):
        if (a[0], *a[2:]) != (b[0], *b[2:]) or (a[1] is None) != (b[1] is None):
            logs.append((a, b))
        if a[1] is not None:
            largest = max(largest, abs(a[1] - b[1]))
        pairs = zip(params_a, params_b, strict=True)
        largest = max(largest, *((p.double() - q.double()).abs().max().item() for p, q in pairs))
    return logs, largest


def same_params(left: list[Any], right: list[Any]) -> bool:
    """Whether the model params are the same bits after every step."""
    return all(bits_equal(p, q) for (_, a), (_, b) in zip(left, right, strict=True) for p, q in zip(a, b, strict=True))


# Our scalers in Megatron's optimizers


def _with_scalers(kind: str, make: Any) -> list[Any]:
    with runs.model_parallel():
        sharded, expert = kind == "distributed", kind == "chained"
        loss_scale = 512.0 if make is _constant else None
        theirs, mixed = (runs.start("theirs", sharded=sharded, expert=expert, loss_scale=loss_scale) for _ in range(2))
        for optimizer in mixed.optimizer.chained_optimizers:
            optimizer.grad_scaler = make()
        first = [runs.train(run, range(12)) for run in (theirs, mixed)]
        # Each continues with the other's state.
        for mine, other in zip(theirs.optimizer.chained_optimizers, mixed.optimizer.chained_optimizers, strict=True):
            saved = mine.grad_scaler.state_dict(), other.grad_scaler.state_dict()
            mine.grad_scaler.load_state_dict(saved[1])
            other.grad_scaler.load_state_dict(saved[0])
        second = [runs.train(run, range(12, 20)) for run in (theirs, mixed)]
    return [first[0] + second[0], first[1] + second[1]]


def _dynamic() -> DynamicGradScaler:
    return DynamicGradScaler(2.0**10, 1.0, 2.0, 0.5, 3, 2)


def _constant() -> ConstantGradScaler:
    return ConstantGradScaler(512.0)


@pytest.mark.parametrize(
    ("kind", "make"),
    [("float16", _dynamic), ("distributed", _dynamic), ("chained", _dynamic), ("float16", _constant)],
)
def test_scalers_stand_in_for_megatrons(ranks: RankPool, kind: str, make: Any) -> None:
    """In its Float16, Distributed and Chained optimizers ours train, skip and scale as its own: every bit, every step.

    Halfway each loads the state dict of the other, which of a constant one is ``{}``. Nothing of Megatron has to be
    changed for that.
    """
    [(theirs, mixed)] = ranks.run(1, _with_scalers, kind, make)
    assert [step for step, (log, _) in enumerate(theirs) if not log[0]] == list(runs.OVERFLOWS)
    assert (len({log[3] for log, _ in theirs}) > 3) == (make is _dynamic)
    assert [log for log, _ in mixed] == [log for log, _ in theirs]
    assert same_params(theirs, mixed)


# Our optimizer in place of Megatron's


def _side_by_side(fused: bool, overflows: tuple[int, ...], groups: dict[str, int], options: dict[str, Any]) -> Any:
    with runs.model_parallel(**groups), FUSED if fused else mock.patch.dict(os.environ):
        started = [runs.start(maker, fused=fused, **options) for maker in ("theirs", "ours")]
        return [runs.train(run, range(20), overflows) for run in started]


VARIANTS: list[tuple[int, dict[str, int], dict[str, Any]]] = [
    (1, {}, {}),
    (1, {}, {"dtype": torch.bfloat16}),
    (1, {}, {"dtype": torch.bfloat16, "loss_scale": 256.0}),
    (1, {}, {"fp32_norm": True, "frozen": True, "clip_grad": 0.0}),
    (1, {}, {"optimizer": "sgd", "clip_grad": 0.05}),
    (1, {}, {"decoupled_weight_decay": False}),
    (2, {}, {}),
    (2, {"expert_model_parallel_size": 2}, {"expert": True}),
]


@pytest.mark.parametrize(("world", "groups", "options"), VARIANTS)
def test_drop_in_trains_as_megatron(
    ranks: RankPool, world: int, groups: dict[str, int], options: dict[str, Any]
) -> None:
    """get_megatron_optimizer, ours, driven by Megatron's schedule: the same skips, scales, zeros, rates and decays.

    Params and norms agree to one rounding step of the 16-bit type at 1, as our default kernels take sums and products
    in another order. :func:`test_drop_in_is_bitwise` shows that nothing else differs.
    """
    scaled = options.get("dtype") != torch.bfloat16 or "loss_scale" in options
    overflows = runs.OVERFLOWS if scaled else ()
    step = torch.finfo(options.get("dtype", torch.float16)).eps
    for theirs, mine in ranks.run(world, _side_by_side, False, overflows, groups, options):
        logs, largest = differences(theirs, mine)
        assert not logs
        assert largest <= step
        assert [step for step, (log, _) in enumerate(mine) if log[0] is not True] == list(overflows)
        assert len({log[3] for log, _ in mine}) > (3 if options.get("dtype") is None else 0)
        assert mine[-1][0][5] == [pytest.approx(0.118, abs=0.003), 0.0] * (2 if "expert" in options else 1)


@pytest.mark.parametrize("world", [1, 2])
def test_drop_in_is_bitwise(ranks: RankPool, world: int) -> None:
    """With torch's fused AdamW on both sides and no clipping, all model params have Megatron's bits at every step."""
    for theirs, mine in ranks.run(world, _side_by_side, True, runs.OVERFLOWS, {}, {"clip_grad": 0.0}):
        assert not differences(theirs, mine)[0]
        assert same_params(theirs, mine)
        assert not bits_equal(mine[0][1][0], mine[-1][1][0])


def test_non_finite_bf16_gradients_are_skipped(ranks: RankPool, record_property: Record) -> None:
    """bf16 without a scaler and an inf loss: Megatron steps and its model is NaN; ours skips and trains on."""
    [(theirs, mine)] = ranks.run(1, _side_by_side, False, (3,), {}, {"dtype": torch.bfloat16})
    steps_on = theirs[3][0][0] is True and theirs[-1][1][0].isnan().all().item()
    skips = theirs[3][0][0] is False and all(param.isfinite().all() for param in theirs[-1][1])
    runs.check_defect("bf16 steps on NaN gradients", steps_on, skips, record_property)
    assert [step for step, (log, _) in enumerate(mine) if log[0] is not True] == [3]
    assert all(param.isfinite().all() for param in mine[-1][1])


def _mark_tensor_parallel(module: Any) -> None:
    module.first.weight.tensor_model_parallel = True
    module.head.weight.shared = True


def _mark_experts(module: Any) -> None:
    module.first.weight.allreduce = False


LAYOUTS: dict[str, tuple[Any, dict[str, int]]] = {
    "tensor": (_mark_tensor_parallel, {"tensor_model_parallel_size": 2}),
    "whole_experts": (
        _mark_experts,
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    ),
}


def _tensor_parallel_grad(step: int, index: int, shape: torch.Size, rank: int) -> Tensor:
    """Return a scaled gradient whose first row is zeros: of the first parameter, another one on each rank."""
    seed = 1000 * step + index + (500 * rank if index == 0 else 0)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2.0**10
    grad[0] = 0
    return grad


def _tensor_parallel(layout: str) -> list[Any]:
    rank = dist.get_rank()
    logs: list[Any] = [[], []]
    mark, sizes = LAYOUTS[layout]
    with runs.model_parallel(**sizes):
        for log, maker in zip(logs, ("theirs", "ours"), strict=True):
            run = runs.start(maker, mark=mark)
            wrapped: Any = run.wrapped
            for step in range(12):
                wrapped.zero_grad_buffer()
                for index, param in enumerate(run.module.parameters()):
                    grad = _tensor_parallel_grad(step, index, param.shape, rank)
                    if step in (4, 5) and rank == 1 and index == 0:
                        grad[1] = torch.inf
                    param.main_grad.copy_(grad)  # type: ignore[attr-defined]
                run.optimizer.get_loss_scale()  # by which the gradients are taken to be scaled
                log.append((*run.optimizer.step(), run.optimizer.get_loss_scale().item()))
    return logs


def test_tensor_parallel_norm_zeros_and_skips(ranks: RankPool) -> None:
    """Under tensor parallelism shards add up, replicas count once and shared copies never: Megatron's norm and zeros.

    An overflow in one rank's shard skips on both.
    """
    results = ranks.run(2, _tensor_parallel, "tensor")
    assert results[0][1] == results[1][1]
    for theirs, mine in results:
        assert [step for step, log in enumerate(mine) if not log[0]] == [4, 5]
        for a, b in zip(theirs, mine, strict=True):
            assert (a[0], *a[2:]) == (b[0], *b[2:])
            assert a[1] == (None if b[1] is None else pytest.approx(b[1], rel=1e-6))
        assert mine[0][2] > 0


def test_whole_experts_count_on_every_rank(ranks: RankPool, record_property: Record) -> None:
    """Where dense layers are split and experts are not, each rank's expert counts, in the norm and in the zeros.

    Megatron-Core 0.16.1 asks the dense layers' group, and takes the second rank's expert for a copy of the first's;
    0.19.2 counts it, as here.
    """
    module = runs.Net(torch.float16, fp32_norm=False, frozen=False, expert=False)
    shapes = [param.shape for param in module.parameters()]
    kept = [_tensor_parallel_grad(0, index, shape, 0)[1:] for index, shape in enumerate(shapes)]
    second = _tensor_parallel_grad(0, 0, shapes[0], 1)[1:]  # the first layer's weight is the expert
    squares = sum((grad / 2.0**10).square().sum().item() for grad in kept)
    zeros = sum(shape[1:].numel() for shape in shapes)
    both = squares + (second / 2.0**10).square().sum().item()
    one_counts = (pytest.approx(squares**0.5, rel=1e-6), zeros)
    all_count = (pytest.approx(both**0.5, rel=1e-6), zeros + shapes[0][1:].numel())
    for theirs, mine in ranks.run(2, _tensor_parallel, "whole_experts"):
        assert mine[0][1:3] == all_count
        given = theirs[0][1:3]
        runs.check_defect(
            "whole experts of one rank alone count", given == one_counts, given == all_count, record_property
        )


def _surface() -> dict[str, Any]:
    with runs.model_parallel():
        run = runs.start("ours")
        surface = run.optimizer
        run.step(0, False)
        seen: dict[str, Any] = {"step": surface.step(), "shape": surface.get_loss_scale().shape}
        seen["prepared"] = surface.prepare_grads(), surface.step_with_ready_grads()
        run.module.head.bias.main_grad[0] = torch.inf  # type: ignore[attr-defined]
        surface.get_loss_scale()
        skipped = surface.step()
        surface.get_loss_scale()
        seen["skipped"] = skipped, surface.prepare_grads(), surface.step_with_ready_grads()
        run.module.first.weight.data.fill_(0.5)
        surface.reload_model_params()
        seen["reloaded"] = dict(surface.optimizer.main_params())["first.weight"].unique().tolist()
        seen["parameters"] = len(surface.get_parameters()), len(list(run.module.parameters()))
        seen["state"] = len(surface.state)
        for name, call in (
            ("reload", lambda: surface.reload_model_params(state_dict={})),
            ("sharded", lambda: surface.sharded_state_dict({}, is_loading=True)),
        ):
            with pytest.raises((ArgumentError, UsageError)) as error:
                call()
            seen[name] = str(error.value)
    return seen


def test_surface_of_the_training_loop(ranks: RankPool) -> None:
    """The methods Megatron's loop calls: host values and None as it wants them; what is not done says so.

    Its loop asks ``update_successful is True``, and every step would count as skipped if that were a tensor.
    """
    [seen] = ranks.run(1, _surface)
    success, norm, zeros = seen["step"]
    assert success is True
    assert isinstance(norm, float)
    assert type(zeros) is int
    assert seen["shape"] == (1,)
    assert seen["skipped"] == ((False, None, None), True, False)
    assert seen["prepared"] == (False, True)
    assert seen["reloaded"] == [0.5]
    assert seen["parameters"] == (8, 8)
    assert seen["state"] == 8
    assert "not a state_dict" in seen["reload"]
    assert "--ckpt-format torch" in seen["sharded"]


def _refused(case: str) -> str:
    with runs.model_parallel():
        module = runs.Net(torch.float16, fp32_norm=False, frozen=False, expert=False)
        settings = runs.config(use_distributed_optimizer=case in ("sharded config", "sharded buffers"))
        options: dict[str, Any] = {}
        chunk: Any = runs.wrap(module, use_distributed_optimizer=case == "sharded buffers")
        if case == "frozen":
            chunk = module.requires_grad_(False)
        if case == "unreduced":
            chunk = module
        if case == "fsdp":
            chunk.ddp_config.use_megatron_fsdp = True
        if case == "dump":
            options["dump_param_to_param_group_map"] = "map"
        with pytest.raises(ArgumentError) as error:
            ours.get_megatron_optimizer(settings, [chunk], **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("unreduced", "no wrapper that reduces gradients over the 2 data-parallel ranks"),
        ("sharded config", "reduce every gradient a second time; leave the model unwrapped"),
        ("sharded buffers", "ddp_config.use_distributed_optimizer is True"),
        ("fsdp", "wrapped in Megatron's FSDP"),
        ("frozen", "no trainable parameter"),
        ("dump", "dump_param_to_param_group_map is not done"),
    ],
)
def test_what_the_drop_in_refuses(ranks: RankPool, case: str, message: str) -> None:
    """Whatever would train otherwise than Megatron says is refused by name, before anything is built."""
    for said in ranks.run(2, _refused, case):
        assert message in said


# Its config


def test_every_field_is_accounted_for() -> None:
    """Each field of a release's OptimizerConfig is mapped, refused unless it is off, or known to do nothing.

    A version that nobody has read yet may have new ones. It is accepted as it comes, and is our config, but for the
    defaults that differ: the first scale and Lion's betas.
    """
    declared = {field.name for field in fields(runs.OptimizerConfig)}
    assert declared.issuperset(megatron_config.REQUIRED)
    if runs.VERSION in runs.RELEASES:
        assert declared <= megatron_config.KNOWN
    lion: dict[str, Any] = {"lion_beta1": 0.95, "lion_beta2": 0.98} if "lion_beta1" in declared else {}
    assert from_megatron_config(runs.OptimizerConfig()) == OptimizerConfig(
        initial_loss_scale=2.0**32, clip_grad=1.0, **lion
    )


def test_build_optimizer_takes_megatrons_config() -> None:
    """One call from Megatron's config: scaler, decay exemptions and sharding as it says."""
    optimizer = build_optimizer(runs.config(use_distributed_optimizer=True), model())
    assert isinstance(optimizer, DistributedOptimizer)
    scaler: MegatronGradScaler | None = optimizer.grad_scaler
    assert isinstance(scaler, DynamicGradScaler)
    assert (scaler.initial_scale, scaler.growth_interval) == (2.0**10, 3)
    assert sorted(group["weight_decay"] for group in optimizer.param_groups) == [0.0, 0.1]
