"""MegascalePrecision under Lightning's ddp and FSDP2 strategies, on gloo ranks with the real Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megascale import MixedPrecisionOptimizer
from megascale.errors import UsageError
from megascale.grad_sync import GradSync
from megascale.utils.dtensors import to_local
from tests.pool import RankPool

pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy

from megascale.integrations.lightning import LossScaleMonitor, MegascalePrecision
from tests.integrations.lightning_cases import (
    Regression,
    adamw,
    assert_same,
    batches,
    loader,
    loss_of,
    scaler,
    trainer,
)

OVERFLOWS = {2: 1, 5: 0}  # batch: rank


class Pool(ClusterEnvironment):
    """Tells Lightning that the ranks of tests/pool.py are there already."""

    creates_processes_externally = True
    main_address = "localhost"
    main_port = 0

    @staticmethod
    def detect() -> bool:
        return True

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0


class Sharded(Regression):
    """A Regression that FSDP2 shards."""

    def __init__(self, policy: MixedPrecisionPolicy, overflows: Any = ()) -> None:
        super().__init__(overflows)
        self.policy = policy

    def configure_model(self) -> None:
        """Shard once."""
        if not isinstance(self.net.first.weight, DTensor):
            mesh: Any = self.device_mesh
            shard(self.net, mesh["data_parallel"], self.policy)


def shard(net: Any, mesh: Any, policy: MixedPrecisionPolicy) -> None:
    """Shard each layer, and what is left."""
    for layer in net.children():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)


def policy_of(precision: str) -> MixedPrecisionPolicy:
    """Return the policy that makes FSDP2 compute in fp16, and reduce in fp32."""
    compute = torch.float16 if precision == "32-true" else None
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)


def on_ranks(strategy: Any, precision: str, **options: Any) -> Any:
    """Return a Trainer on all ranks of this world."""
    return trainer(
        [Pool(), MegascalePrecision(precision, grad_scaler=scaler())],
        strategy=strategy,
        devices=dist.get_world_size(),
        use_distributed_sampler=False,
        **options,
    )


def model_parallel(distributed: bool = True) -> ModelParallelStrategy:
    """Return the FSDP2 strategy, without tensor parallelism."""
    world = dist.get_world_size()
    return ModelParallelStrategy(
        data_parallel_size=world, tensor_parallel_size=1, save_distributed_checkpoint=distributed
    )


def overflows_here() -> list[int]:
    """Return the batches at which this rank's loss is inf."""
    return [batch for batch, rank in OVERFLOWS.items() if rank == dist.get_rank()]


def plain_loop(module: Regression, net: Any, precision: str, accumulate: int = 1) -> Any:
    """Train ``net``, a parallel version of ``module``'s, in a loop of our own; return optimizer and rows."""
    optimizer = MixedPrecisionOptimizer(adamw(module), None, scaler(), named_parameters=module.named_parameters())
    optimizer.clip_grad = 0.05
    rows = []
    for index, batch in enumerate(batches(dist.get_rank())):
        last = (index + 1) % accumulate == 0
        if isinstance(net, DistributedDataParallel):
            net.require_backward_grad_sync = last
        else:
            net.set_requires_gradient_sync(last)
        loss = loss_of(net, batch.half() if precision == "16-true" else batch, index in module.overflows)
        optimizer.scale_loss(loss / accumulate).backward()
        if last:
            rows.append((bool(optimizer.step().success), optimizer.get_loss_scale().item()))
            optimizer.zero_grad()
    return optimizer, rows


def whole_state(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's state with no DTensor in it."""
    packed = optimizer.state_dict()
    states = {name: dict(state) for name, state in packed["optimizer"]["state"].items()}
    states["main_params"] = dict(packed["main_params"])
    for state in states.values():
        for key, value in state.items():
            state[key] = value.full_tensor() if isinstance(value, DTensor) else value
    return {"states": states, "grad_scaler": packed["grad_scaler"]}


def _ddp(accumulate: int) -> Any:
    module, expected = Regression(overflows_here()), Regression(overflows_here()).half()
    run = on_ranks("ddp", "16-true", gradient_clip_val=0.05, accumulate_grad_batches=accumulate)
    run.fit(module, loader(dist.get_rank()))
    optimizer, rows = plain_loop(expected, DistributedDataParallel(expected.net), "16-true", accumulate)
    assert module.rows == rows
    assert_same(run.optimizers[0].state_dict(), optimizer.state_dict())
    return module.rows, run.optimizers[0].state_dict()["main_params"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ddp_trains_as_a_plain_loop(ranks: RankPool, accumulate: int) -> None:
    """Inf on one rank skips the step on both; skips, scales and main params are those of plain DDP, bit for bit."""
    (rows, main_params), (other_rows, other_main_params) = ranks.run(2, _ddp, accumulate)
    skipped = [step for step, (landed, _) in enumerate(rows) if not landed]
    assert skipped == [batch // accumulate for batch in OVERFLOWS]
    assert rows == other_rows
    assert_same(main_params, other_main_params)


def _save_with_ddp(path: str) -> Any:
    module = Regression(overflows_here())
    run = on_ranks("ddp", "16-true")
    run.fit(module, loader(dist.get_rank()))
    run.save_checkpoint(path)
    return whole_state(run.optimizers[0])


def test_ddp_checkpoint_loads_on_one_rank(ranks: RankPool, tmp_path: Path) -> None:
    """A checkpoint of two ranks resumes in one process: state and scaler are those saved, and training goes on."""
    path = tmp_path / "checkpoint"
    saved, _ = ranks.run(2, _save_with_ddp, str(path))
    run = trainer(MegascalePrecision("16-true", grad_scaler=scaler(2.0)))
    run.fit(Regression(seed=1), loader(), ckpt_path=path)  # its one epoch is over: nothing is trained
    assert_same(whole_state(run.optimizers[0]), saved)
    module = Regression(seed=1)
    run = trainer(MegascalePrecision("16-true", grad_scaler=scaler(2.0)), max_epochs=2)
    run.fit(module, loader(), ckpt_path=path)
    assert len(module.rows) == len(batches())
    assert run.optimizers[0].state_dict()["optimizer"]["state"]["net.head.weight"]["step"] == 2 * 8 - len(OVERFLOWS)


def _synced_twice() -> str:
    def synced(module: Any) -> MixedPrecisionOptimizer:
        sync = GradSync(module.named_parameters())
        return MixedPrecisionOptimizer(torch.optim.AdamW(module.parameters()), None, scaler(), grad_sync=sync)

    with pytest.raises(UsageError) as raised:
        on_ranks("ddp", "16-true").fit(Regression(inner=synced), loader())
    return str(raised.value)


def test_reducing_gradients_twice_is_refused(ranks: RankPool) -> None:
    """An optimizer that reduces gradients itself does not go with DDP: every rank says so."""
    assert all("the ddp strategy does so too" in message for message in ranks.run(2, _synced_twice))


def _fsdp2(precision: str) -> Any:
    policy = policy_of(precision)
    module, expected = Sharded(policy, overflows_here()), Regression(overflows_here())
    run = on_ranks(model_parallel(), precision, gradient_clip_val=0.05)
    run.fit(module, loader(dist.get_rank()))
    shard(expected.net, init_device_mesh("cpu", (dist.get_world_size(),)), policy)
    if precision == "16-true":
        expected.half()
    optimizer, rows = plain_loop(expected, expected.net, precision)
    assert module.rows == rows
    for (name, main), (_, other) in zip(run.optimizers[0].main_params(), optimizer.main_params(), strict=True):
        assert isinstance(main, DTensor), name
        assert to_local(main.detach()).equal(to_local(other.detach())), name
    return module.rows


@pytest.mark.parametrize("precision", ["16-true", "32-true"])
def test_fsdp2_trains_as_a_plain_loop(ranks: RankPool, precision: str) -> None:
    """fp16 under ModelParallelStrategy, fp16 or fp32 parameters: skips, scales and shards of a plain FSDP2 loop."""
    rows, other_rows = ranks.run(2, _fsdp2, precision)
    assert [step for step, (landed, _) in enumerate(rows) if not landed] == list(OVERFLOWS)
    assert rows == other_rows


def _save_sharded(path: str, precision: str, distributed: bool) -> Any:
    run = on_ranks(model_parallel(distributed), precision)
    run.fit(Sharded(policy_of(precision), overflows_here()), loader(dist.get_rank()))
    run.save_checkpoint(path)
    return whole_state(run.optimizers[0])


def _load_sharded(path: str, precision: str, distributed: bool) -> Any:
    run = on_ranks(model_parallel(distributed), precision)
    run.fit(Sharded(policy_of(precision)), loader(), ckpt_path=path)  # its one epoch is over: nothing is trained
    return whole_state(run.optimizers[0])


@pytest.mark.parametrize("distributed", [True, False], ids=["sharded", "one_file"])
@pytest.mark.parametrize("precision", ["16-true", "32-true"])
def test_fsdp2_checkpoint_loads_on_other_ranks(
    ranks: RankPool, tmp_path: Path, precision: str, distributed: bool
) -> None:
    """Saved on two ranks, loaded on two and on one: main params, moments and scaler are those saved, bit for bit."""
    path = str(tmp_path / "checkpoint")
    saved, _ = ranks.run(2, _save_sharded, path, precision, distributed)
    for world in (2, 1):
        for loaded in ranks.run(world, _load_sharded, path, precision, distributed):
            assert_same(loaded, saved)


@pytest.mark.slow
def test_lightning_may_start_the_ranks() -> None:
    """strategy="ddp_spawn": plugin and monitor travel to ranks that Lightning starts; weights and logs come back."""
    plugin = MegascalePrecision("16-true", grad_scaler=scaler())
    run = trainer(plugin, strategy="ddp_spawn", devices=2, callbacks=[LossScaleMonitor()])
    module = Regression((1,))
    before = {name: value.half() for name, value in module.state_dict().items()}
    run.fit(module, loader())
    assert run.callback_metrics["num_skipped_steps"].item() == 1
    assert not any(value.half().equal(before[name]) for name, value in module.state_dict().items())
