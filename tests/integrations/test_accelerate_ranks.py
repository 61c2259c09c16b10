"""Accelerate on two gloo ranks: DistributedDataParallel, FSDP2, and the documented script."""

import gc
import re
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from megascale import DistributedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer
from megascale.errors import UsageError
from tests.jobs import job
from tests.pool import RankPool
from tests.training import INNER, bits_equal, model, same_bits, wrap

accelerate = pytest.importorskip("accelerate", reason="tests of the Accelerate integration need accelerate")

from accelerate.state import AcceleratorState, PartialState  # noqa: E402
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin  # noqa: E402

from megascale.integrations.accelerate import Accelerator  # noqa: E402
from tests.integrations.accelerate_cases import (  # noqa: E402
    SKIPS,
    Seen,
    accelerator_of,
    as_rank,
    by_hand,
    with_accelerate,
)

WORLD, NORM = 2, 0.1


class Ran(Seen):
    """What one rank saw, its main params, and what its model had become."""

    main_params: dict[str, Tensor]
    kind: str
    gathered: list[float]


def _whole(optimizer: MixedPrecisionOptimizer) -> dict[str, Tensor]:
    """Return all main params, whole. All ranks call it together."""
    mains = optimizer.state_dict()["main_params"]
    return {name: main.full_tensor() if isinstance(main, DTensor) else main for name, main in mains.items()}


def _ran(accelerator: Accelerator, module: nn.Module, prepared: Any, optimizer: MixedPrecisionOptimizer) -> Ran:
    seen = with_accelerate(accelerator, module, prepared, norm=NORM)
    ran = Ran(**vars(seen))
    ran.main_params = _whole(optimizer)
    ran.kind = type(module).__name__
    ran.gathered = accelerator.gather(optimizer.get_loss_scale()).tolist()
    return ran


def _check(results: list[Ran], kind: str) -> None:
    """Compare with one process that has all ranks' data. Ranks round fp16 gradients before they are averaged."""
    reference = model()
    optimizer = wrap(reference, clip_grad=NORM)
    expected = by_hand(reference, optimizer, ranks=WORLD)
    for ran in results:
        assert ran.kind == kind
        assert ran.skips == expected.skips == SKIPS
        assert ran.scales == expected.scales
        assert ran.gathered == [expected.scales[-1]] * WORLD
        assert ran.norms == results[0].norms or [*map(str, ran.norms)] == [*map(str, results[0].norms)]
        landed = [
            (ours, theirs) for ours, theirs, skip in zip(ran.norms, expected.norms, SKIPS, strict=True) if not skip
        ]
        for ours, theirs in landed:
            assert ours == pytest.approx(theirs, rel=2e-3)
        for name, main in optimizer.main_params():
            assert bits_equal(ran.main_params[name], results[0].main_params[name])
            torch.testing.assert_close(ran.main_params[name], main, rtol=0, atol=4e-3)


# DistributedDataParallel


def _replicated() -> Ran:
    with as_rank():
        accelerator, module = accelerator_of(), model()
        optimizer = wrap(module)
        prepared_model, prepared = accelerator.prepare(module, optimizer)
        return _ran(accelerator, prepared_model, prepared, optimizer)


def test_an_overflow_on_one_rank_is_skipped_by_all(ranks: RankPool) -> None:
    """Under DDP: one rank's inf skips on both, optimizer_step_was_skipped says so on both, all else equals one rank."""
    _check(ranks.run(WORLD, _replicated), "DistributedDataParallel")


# DistributedOptimizer


def _reduces_itself() -> None:
    with as_rank():
        module = model()
        scaler = DynamicGradScaler(2.0**10, 1.0, 2.0, 0.5, 4, 1)
        optimizer = DistributedOptimizer(INNER["adamw_fused"](module), None, scaler, modules=module)
        with pytest.raises(UsageError, match="reduces gradients itself"):
            Accelerator(cpu=True).prepare(module, optimizer)


def test_a_distributed_optimizer_is_refused(ranks: RankPool) -> None:
    """Prepare would wrap its model in DistributedDataParallel, which reduces a second time."""
    ranks.run(WORLD, _reduces_itself)


# FSDP2


def _sharded_by_plugin(folder: str, reduce: torch.dtype | None) -> tuple[Ran, bool, int]:
    with as_rank():
        policy = None if reduce is None else MixedPrecisionPolicy(reduce_dtype=reduce)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=policy)
        accelerator, module = accelerator_of(), model()
        # Accelerate turns the plugin on for accelerators alone (AcceleratorState.__init__). What follows is its own
        # code, which runs on gloo as well.
        for state in (PartialState, AcceleratorState):
            state._shared_state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state["fsdp_plugin"] = plugin
        optimizer = wrap(module)
        whole = [weakref.ref(param) for param in module.parameters()]
        prepared_model, prepared = accelerator.prepare(module, optimizer)
        assert plugin.mixed_precision_policy.reduce_dtype == (reduce or torch.float32)
        ran = _ran(accelerator, prepared_model, prepared, optimizer)
        gc.collect()
        assert [ref() for ref in whole] == [None] * len(whole)  # neither they nor their state stay in memory
        assert len(optimizer._inner.state) == len(whole)
        scale = optimizer.get_loss_scale()
        accelerator.save_state(folder)
        with_accelerate(accelerator, prepared_model, prepared, steps=range(4))
        accelerator.load_state(folder)
        loaded = _whole(optimizer)
        restored = all(bits_equal(loaded[name], main) for name, main in ran.main_params.items())
        owned = sum(main.to_local().numel() for _, main in optimizer.main_params() if isinstance(main, DTensor))
        return ran, restored and bits_equal(scale, optimizer.get_loss_scale()), owned


@pytest.mark.parametrize("reduce", [torch.float32, None], ids=str)
def test_fsdp2_by_accelerates_plugin(ranks: RankPool, tmp_path: Path, reduce: torch.dtype | None) -> None:
    """prepare() shards the model under the optimizer: training, save_state and load_state, all in fp16.

    Gradients are reduced in fp32 also where the plugin names no dtype, as TrainingArguments cannot.
    """
    results = ranks.run(WORLD, _sharded_by_plugin, str(tmp_path), reduce)
    _check([ran for ran, *_ in results], "FSDPTiny")
    assert all(restored for _, restored, _ in results)
    assert sum(owned for *_, owned in results) == sum(param.numel() for param in model().parameters())


def test_a_dtype_of_reduction_that_is_named_stays(ranks: RankPool, tmp_path: Path) -> None:
    """Whoever asks for messages of half the size gets them."""
    ranks.run(WORLD, _sharded_by_plugin, str(tmp_path), torch.float16)


def _saves_or_loads(folder: str, load: bool, kind: str, dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """Return main params, scale and trackers: as they are saved, or as they are loaded.

    Args:
        kind: of FSDP2's state dicts; "ddp": no FSDP2.
    """
    with as_rank():
        accelerator, module = accelerator_of(), model(dtype, seed=int(load))
        if kind != "ddp":
            for state in (PartialState, AcceleratorState):
                state._shared_state["distributed_type"] = DistributedType.FSDP
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
            AcceleratorState._shared_state["fsdp_plugin"] = plugin
        optimizer = wrap(module, scale=2.0 ** (3 if load else 10) if dtype == torch.float16 else None)
        prepared_model, prepared = accelerator.prepare(module, optimizer)
        if load:
            accelerator.load_state(folder)
            found = _whole(optimizer)
        else:
            with_accelerate(accelerator, prepared_model, prepared, norm=NORM)
            found = _whole(optimizer)
            accelerator.save_state(folder)
        if optimizer.grad_scaler is not None:
            found |= {key: torch.as_tensor(value) for key, value in optimizer.grad_scaler.state_dict().items()}
        seen = with_accelerate(accelerator, prepared_model, prepared, steps=range(3))
        assert seen.skips == SKIPS[:3]  # on one rank alone the loss overflows
        return found


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("ddp", torch.float16),
        ("SHARDED_STATE_DICT", torch.float16),
        ("FULL_STATE_DICT", torch.float16),
        ("ddp", torch.bfloat16),
    ],
    ids=["ddp", "fsdp2", "fsdp2 full", "bf16"],
)
def test_a_run_goes_on_in_new_processes(kind: str, dtype: torch.dtype, ranks: RankPool, tmp_path: Path) -> None:
    """Two ranks skip together, and what they save two new processes and four ranks take up."""
    [saved, _] = ranks.run(WORLD, _saves_or_loads, str(tmp_path), False, kind, dtype)
    assert saved["first.weight"].dtype == torch.float32
    with ranks.spawn(WORLD, _saves_or_loads, str(tmp_path), True, kind, dtype) as fresh:
        results = fresh.results(timeout=200)
    for loaded in (*results, *ranks.run(2 * WORLD, _saves_or_loads, str(tmp_path), True, kind, dtype)):
        assert same_bits(loaded, saved)


# The documented script


def test_the_documented_script_on_two_ranks(tmp_path: Path) -> None:
    """``torchrun --nproc-per-node 2`` runs the page's first example: both ranks skip together."""
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
    script = tmp_path / "train.py"
    script.write_text(re.findall(r"```python\n(.*?)```", page.split("\n## Accelerate\n")[1], re.DOTALL)[0])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    with job(command, {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}) as launched:
        output = launched.finish(timeout=100)
    ends = re.findall(r"rank (\d) of 2: loss scale (\d+), (\d+) skipped", output)
    assert sorted(rank for rank, *_ in ends) == ["0", "1"], output
    assert len({tuple(end) for _, *end in ends}) == 1, output
