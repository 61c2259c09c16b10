"""The container and the trainer for torchtitan, with its own train_step, losses, schedules and checkpoints."""

import contextlib
import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megascale import ChainedOptimizer
from megascale.errors import ArgumentError, ArgumentTypeError, UsageError
from tests.meshes import mesh_of
from tests.pool import RankPool
from tests.training import same_bits

if importlib.util.find_spec("torchtitan") is None or importlib.util.find_spec("spmd_types") is None:
    pytest.skip("needs torchtitan and what it imports: .ci/install_integrations", allow_module_level=True)

from tests.integrations.hf_cases import whole

VOCABULARY, STEPS, SAVED_AT, BAD = 16, 6, 3, 1
OPTIONS: dict[str, Any] = {"initial_loss_scale": 2.0**12, "loss_scale_window": 2, "hysteresis": 1}
REMAINDERS = {"store_param_remainders": True}


class Net(nn.Module):
    """Embeds and predicts tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8), nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, shape [batch, sequence, vocabulary]."""
        logits: Tensor = self.head(torch.tanh(self.hidden(self.embedding(tokens))))
        return logits


def _config(**options: Any) -> Any:
    """Return a Config as a registry of torchtitan's would: decay for matrices alone."""
    from torchtitan.components.optimizer import ParamGroupConfig

    from megascale.integrations.torchtitan import MegascaleOptimizers

    def group(pattern: str, decay: float) -> Any:
        own = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": decay}
        return ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=own)

    given = {"megascale": OPTIONS} | options
    return MegascaleOptimizers.Config(param_groups=[group(r"weight", 0.1), group(r".*", 0.0)], **given)


def _trainer(
    dtype: torch.dtype = torch.float16,
    mesh: Any = None,
    pipeline: bool = False,
    replicas: Any = None,
    **options: Any,
) -> Any:
    """Return torchtitan's trainer without what only a GPU and its data sets give: its step is its own.

    ``replicas``: the mesh that weights are spread over, where it is another than ``mesh`` of the data.
    """
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer

    from megascale.integrations.torchtitan import MegascaleTrainer

    torch.manual_seed(0)
    model = Net().to(dtype)
    if mesh is not None:
        fully_shard(model, mesh=replicas or mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    trainer = MegascaleTrainer.__new__(MegascaleTrainer)
    trainer.model_parts = [model]
    trainer.device = torch.device("cpu")
    trainer.step, trainer.gradient_accumulation_steps, trainer.num_pipeline_parallel_microbatches = 0, 2, 1
    trainer.config = SimpleNamespace(training=SimpleNamespace(disable_cuda_graphs=True, max_norm=0.5))
    trainer.metrics_processor = SimpleNamespace(should_log=lambda step: False)
    trainer.checkpointer = SimpleNamespace(maybe_wait_for_staging=lambda: None)
    trainer.parallel_dims = SimpleNamespace(
        dp_enabled=mesh is not None,
        pp_enabled=pipeline,
        ep_enabled=False,
        get_mesh=lambda name: mesh,
        get_optional_mesh=lambda name: None,
    )
    trainer.train_context = contextlib.nullcontext
    trainer.loss_fn = CrossEntropyLoss.Config().build()
    trainer.optimizers = _config(**options).build(model_parts=[model])
    trainer.lr_schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
        optimizers=trainer.optimizers, training_steps=STEPS
    )
    trainer.post_dataloading_process = lambda input_dict, labels: (input_dict["input"], labels, {})
    trainer.fwd_bwd_fn = trainer._forward_backward_body
    trainer.use_loss_scale()
    return trainer


def _batches(step: int, rank: int, world: int) -> Any:
    """Yield a step's micro-batches, as torchtitan's data loader does; this rank's share of four sequences."""
    for micro in range(2):
        tokens = torch.randint(0, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(2 * step + micro))
        own = tokens[4 * rank // world : 4 * (rank + 1) // world]
        yield {"input": own[:, :-1]}, own[:, 1:]


def _train(trainer: Any, steps: range, rank: int = 0, world: int = 1) -> list[tuple[bool, float]]:
    """Take steps by torchtitan's own ``train_step``; the last rank's loss is infinite in one of them."""
    from torchtitan.trainer import dist_utils

    rows, theirs = [], dist_utils.clip_grad_norm_
    inner = trainer.loss_fn.loss_fn
    for step in steps:
        bad = step == BAD and rank == world - 1
        trainer.loss_fn.loss_fn = (lambda *a, **k: (inner(*a, **k)[0] * math.inf, {})) if bad else inner
        trainer.train_step(_batches(step, rank, world))
        assert dist_utils.clip_grad_norm_ is theirs
        optimizer = trainer.optimizers.optimizer
        rows.append((bool(optimizer.num_skipped_steps), optimizer.get_loss_scale().item()))
    trainer.loss_fn.loss_fn = inner
    return rows


def _state(trainer: Any) -> dict[str, Tensor]:
    optimizer = trainer.optimizers.optimizer
    found = {f"main.{name}": whole(main) for name, main in optimizer.main_params()}
    found |= {f"weight.{name}": whole(param) for name, param in trainer.model_parts[0].named_parameters()}
    scaler = {} if optimizer.grad_scaler is None else optimizer.grad_scaler.state_dict()
    return found | {f"scaler.{key}": torch.as_tensor(value) for key, value in scaler.items()}


def test_a_loop_by_hand_takes_the_same_steps() -> None:
    """Torchtitan's step, with an overflow: the bits of a loop with scale_loss and clip_grad."""
    from megascale import DynamicGradScaler, MixedPrecisionOptimizer

    trainer = _trainer()
    rows = _train(trainer, range(STEPS))
    assert rows == [(False, 2.0**12), *[(True, scale) for scale in (2.0**11, 2.0**11, 2.0**12, 2.0**12, 2.0**13)]]
    torch.manual_seed(0)
    model = Net().half()
    named = list(model.named_parameters())
    groups = [
        {"params": [param for name, param in named if "weight" in name], "weight_decay": 0.1},
        {"params": [param for name, param in named if "weight" not in name], "weight_decay": 0.0},
    ]
    inner = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)
    optimizer = MixedPrecisionOptimizer(
        inner, None, DynamicGradScaler(2.0**12, growth_interval=2, hysteresis=1), clip_grad=0.5, named_parameters=named
    )
    rates = _trainer().lr_schedulers
    for step in range(STEPS):
        for group in inner.param_groups:
            group["lr"] = rates.schedulers[0].get_last_lr()[0]
        batches = list(_batches(step, 0, 1))
        valid = sum(labels.numel() for _, labels in batches)
        for inputs, labels in batches:
            logits = model(inputs["input"]).flatten(0, 1).float()
            loss = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / valid
            optimizer.scale_loss(loss * math.inf if step == BAD else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
    expected = {f"main.{name}": main for name, main in optimizer.main_params()}
    assert all(torch.equal(_state(trainer)[name], main) for name, main in expected.items())


def test_the_loss_that_is_logged_is_not_scaled() -> None:
    """Gradients are multiplied by the scale, the value that torchtitan logs is the loss."""
    trainer = _trainer()
    [(inputs, labels), _] = _batches(0, 0, 1)
    count = torch.tensor(labels.numel())
    logits = trainer.model_parts[0](inputs["input"])
    plain, _ = trainer.loss_fn.loss_fn(logits, labels, count)
    scaled, _ = trainer.loss_fn(logits, labels, count)
    assert torch.equal(scaled, plain)
    [grad] = torch.autograd.grad(scaled, logits, retain_graph=True)
    [reference] = torch.autograd.grad(plain * 2.0**12, logits)
    assert torch.equal(grad, reference)


def test_fp32_weights_that_compute_in_fp16() -> None:
    """Config(fp16=True): the weights are their own main params, and the loss is scaled."""
    trainer = _trainer(torch.float32, fp16=True)
    rows = _train(trainer, range(3))
    assert rows[-1] == (True, 2.0**11)
    assert trainer.optimizers.optimizer._config.fp16


def test_several_optimizers_share_one_scale_and_one_norm() -> None:
    """Param groups with two classes: one chain."""
    config = _config()
    config.param_groups[1] = type(config.param_groups[1])(
        pattern=r".*", optimizer_name="Adam", optimizer_kwargs={"lr": 1e-2}
    )
    model = Net().half()
    container = config.build(model_parts=[model])
    assert isinstance(container.optimizer, ChainedOptimizer)
    assert len(container) == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"megascale": {"lr": 1.0}}, ArgumentError, "lr comes from torchtitan's configuration: set optimizer_kwargs"),
        ({"megascale": {"histeresis": 1}}, ArgumentTypeError, "did you mean 'hysteresis'"),
        ({"implementation": "fused_opt_states_bf16"}, ArgumentError, "exp_avg_dtype"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], error: Any, message: str) -> None:
    """An error names what decides, or what to write."""
    with pytest.raises(error, match=message):
        _config(**options).build(model_parts=[Net().half()])


def test_a_trainer_that_cannot_scale_is_refused() -> None:
    """Pipeline parallel, and torchtitan's own container."""
    with pytest.raises(UsageError, match="pipeline_parallel_degree=1"):
        _trainer(pipeline=True)
    trainer = _trainer()
    trainer.optimizers = trainer.optimizers.optimizers
    with pytest.raises(UsageError, match=r"MegascaleOptimizers\.Config"):
        trainer.use_loss_scale()


def _on_rank(
    folder: str,
    options: dict[str, Any],
    resume: bool,
    dtype: torch.dtype = torch.float16,
    replicated: bool = False,
) -> tuple[Any, ...]:
    """Train and save, or resume. ``replicated``: every rank holds all weights, as with dp_replicate alone."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    flat = mesh_of((world,), ("dp",))
    replicas = mesh_of((world, 1), ("dp_replicate", "fsdp")) if replicated else None
    trainer = _trainer(dtype, mesh=flat, replicas=replicas, megascale=options)
    parts = {"model": trainer.model_parts[0], "optimizer": trainer.optimizers, "lr": trainer.lr_schedulers}
    if resume:
        dcp_load(parts, checkpoint_id=folder)
        saved = _state(trainer)
        return saved, _train(trainer, range(SAVED_AT, STEPS), rank, world), _state(trainer)
    first = _train(trainer, range(SAVED_AT), rank, world)
    saved = _state(trainer)
    dcp_save(parts, checkpoint_id=folder)
    return saved, first + _train(trainer, range(SAVED_AT, STEPS), rank, world), _state(trainer)


RESTARTS: dict[str, tuple[dict[str, Any], torch.dtype, bool]] = {
    "fp32": (OPTIONS, torch.float16, False),
    "remainders": (OPTIONS | REMAINDERS, torch.float16, False),
    "bf16": ({}, torch.bfloat16, False),
    "dp_replicate": (OPTIONS, torch.float16, True),
}
"""Options, weights, and whether every rank holds all of them."""


@pytest.mark.parametrize("kind", RESTARTS)
def test_a_run_goes_on_after_a_restart(kind: str, ranks: RankPool, tmp_path: Path) -> None:
    """Saved on two ranks by torchtitan's own functions: resumed on two with all bits, on four with what was saved.

    bf16 weights have main params and no loss scale; replicas, which torchtitan makes by FSDP2 too, stay alike.
    """
    options, dtype, replicated = RESTARTS[kind]
    setup = (str(tmp_path), options)
    saved, other = ranks.run(2, _on_rank, *setup, False, dtype, replicated, timeout=120)
    assert saved[1] == other[1]
    assert same_bits(saved[2], other[2])
    assert any(name.startswith("scaler.") for name in saved[0]) is (dtype == torch.float16)
    assert [skipped for skipped, _ in saved[1]] == [step >= BAD for step in range(STEPS)]
    for began, rows, ended in ranks.run(2, _on_rank, *setup, True, dtype, replicated, timeout=120):
        assert same_bits(began, saved[0])
        assert rows == saved[1][SAVED_AT:]
        assert same_bits(ended, saved[2])
    for began, *_ in ranks.run(4, _on_rank, *setup, True, dtype, replicated, timeout=120):
        assert same_bits(began, saved[0])


@pytest.mark.release
@pytest.mark.parametrize("worlds", [(4, 2), (2, 4)], ids=str)
def test_fsdp2_goes_on_in_new_processes_of_another_number(
    worlds: tuple[int, int], ranks: RankPool, tmp_path: Path
) -> None:
    """Main params, weights, scale and trackers are what was saved, bit for bit; ``worlds``: savers, new ranks."""
    saved = ranks.run(worlds[0], _on_rank, str(tmp_path), OPTIONS, False, timeout=300)
    with ranks.spawn(worlds[1], _on_rank, str(tmp_path), OPTIONS, True) as fresh:
        resumed = fresh.results(timeout=300)
    for began, rows, ended in resumed:
        assert same_bits(began, saved[0][0])
        assert rows == resumed[0][1]
        assert same_bits(ended, resumed[0][2])
        assert not same_bits(ended, began)
