"""MegascalePrecision in the real Trainer, on one CPU: the same bits as the same training in a plain loop."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megascale import ConstantGradScaler, DynamicGradScaler, OptimizerConfig
from megascale.errors import ArgumentError, ArgumentTypeError, UsageError
from tests.counting import OperatorCounter
from tests.training import bits_equal, grad_of

pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

import lightning.pytorch as pl

from megascale.integrations.lightning import LossScaleMonitor, MegascalePrecision
from tests.integrations.lightning_cases import (
    BATCHES,
    Regression,
    assert_same,
    batches,
    fitted,
    loader,
    loss_of,
    plain_loop,
    scaler,
    trainer,
)

FP16 = ("16-true", "16-mixed")


def _given_scaler(precision: str) -> DynamicGradScaler | None:
    return scaler() if precision in FP16 else None


@pytest.mark.parametrize(
    ("precision", "options", "loop"),
    [
        ("16-true", {}, {}),
        ("bf16-true", {"gradient_clip_val": 0.05}, {"norm": 0.05}),
        ("16-true", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {"value": 0.01}),
        ("16-true", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}, {"accumulate": 2, "norm": 0.05}),
        ("16-mixed", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}, {"accumulate": 2, "norm": 0.05}),
        ("bf16-mixed", {"gradient_clip_val": 0.05}, {"norm": 0.05}),
    ],
    ids=["plain", "norm", "value", "accumulated", "autocast", "autocast in bf16"],
)
def test_trains_as_a_plain_loop(precision: str, options: dict[str, Any], loop: dict[str, Any]) -> None:
    """Skips, scales, parameters, main params and moments equal the same training without Lightning, bit for bit."""
    overflows = (2, 5)
    module = Regression(overflows)
    run = fitted(module, MegascalePrecision(precision, grad_scaler=_given_scaler(precision)), **options)
    expected, optimizer, rows = plain_loop(precision, overflows, grad_scaler=_given_scaler(precision), **loop)
    assert module.rows == rows
    assert [landed for landed, _ in rows].count(False) == 2
    assert_same(module.state_dict(), expected.state_dict())
    assert_same(run.optimizers[0].state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("precision", ["16-true", "bf16-true", "32-true"])
def test_a_checkpoint_of_a_run_without_the_plugin_goes_on(precision: str, tmp_path: Path) -> None:
    """Weights are main params, moments a torch optimizer's. It was refused, with the advice to start without them."""
    plain = Regression(seed=1)
    saved = pl.Trainer(
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        accelerator="cpu", devices=1, max_epochs=1,
    )  # fmt: skip
    saved.fit(plain, loader())
    saved.save_checkpoint(tmp_path / "plain")

    class Noting(Regression):
        def on_train_start(self) -> None:
            optimizer = cast(Any, self.trainer.optimizers[0])
            self.found = dict(optimizer.state_dict()["optimizer"]["state"])
            self.mains = {name: main.clone() for name, main in optimizer.main_params()}

    module = Noting()
    run = trainer(MegascalePrecision(precision), max_epochs=2)
    run.fit(module, loader(), ckpt_path=tmp_path / "plain")
    dtype = {"16-true": torch.float16, "bf16-true": torch.bfloat16}.get(precision, torch.float32)
    for (name, param), other in zip(plain.named_parameters(), module.found.values(), strict=True):
        assert bits_equal(module.mains[name], param.detach().to(dtype).float())
        for key, value in cast(Any, saved.optimizers[0]).state[param].items():
            assert bits_equal(other[key], value)
    assert len(module.rows) == len(loader())


def test_resumes_bit_for_bit(tmp_path: Path) -> None:
    """A run, saved in its middle and resumed by a new Trainer, ends in the bits of the whole run, scaler included."""

    class Module(Regression):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            # Lightning does not wind the data forward when it resumes in the middle of an epoch.
            return super().training_step([batches()[batch_idx].half()], batch_idx)

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint(tmp_path / "half")

    overflows = (1, 5)
    whole, rest = Module(overflows), Module(overflows, seed=1)
    expected = fitted(whole, MegascalePrecision("16-true", grad_scaler=scaler()), callbacks=[Save()])
    run = trainer(MegascalePrecision("16-true", grad_scaler=scaler(2.0**3)))
    run.fit(rest, loader(), ckpt_path=tmp_path / "half")
    assert rest.rows == whole.rows[4:]
    assert_same(rest.state_dict(), whole.state_dict())
    assert_same(run.optimizers[0].state_dict(), expected.optimizers[0].state_dict())


@pytest.mark.gpu
def test_saves_after_training_on_an_accelerator(tmp_path: Path) -> None:
    """Lightning moves the module to the CPU when training ends; a checkpoint saved then holds what was trained."""
    trained: list[Any] = []

    class Module(Regression):
        def on_train_end(self) -> None:
            trained.append(cast(Any, self.trainer.optimizers[0]).state_dict())

    module = Module((2,))
    run = fitted(module, MegascalePrecision("16-true", grad_scaler=scaler()), accelerator="auto")
    run.save_checkpoint(tmp_path / "checkpoint")
    assert {param.device.type for param in module.parameters()} == {"cpu"}
    loaded = torch.load(tmp_path / "checkpoint", weights_only=True)
    assert_same({key: loaded["optimizer_states"][0][key] for key in trained[0]}, trained[0])


def test_a_second_fit_starts_anew_on_the_same_plugin() -> None:
    """A Trainer may fit twice, validate and predict: optimizers are wrapped once each time, inputs cast every time."""
    seen: list[torch.dtype] = []

    class Module(Regression):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            seen.append(self.net(batch[0]).dtype)

        def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            out: Tensor = self.net(batch[0])
            return out

    module, run = Module(), trainer(MegascalePrecision("bf16-true"))
    run.fit(module, loader(), loader(1))
    run.fit_loop.max_epochs = 2
    run.fit(module, loader(), loader(1))
    run.validate(module, loader(1), verbose=False)
    [first, *_] = run.predict(module, loader(1))
    assert first.dtype == torch.bfloat16
    assert set(seen) == {torch.bfloat16}
    assert type(run.optimizers[0]._inner) is torch.optim.AdamW


def test_a_training_step_that_returns_none_leaves_out_the_step() -> None:
    """training_step may return None in a single process: nothing is stepped, the scaler hears of nothing."""

    class Module(Regression):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            return None if batch_idx in (0, 3) else super().training_step(batch, batch_idx)

    module = Module((5,))
    fitted(module, MegascalePrecision("16-true", grad_scaler=scaler()))
    assert len(module.rows) == BATCHES - 2
    assert [landed for landed, _ in module.rows].count(False) == 1


def test_gradients_in_hooks_are_scaled_and_can_be_had_unscaled() -> None:
    """on_before_optimizer_step sees gradients times the scale; unscaled_grads() yields them over it, in fp32."""
    norms: list[float] = []

    class Module(Regression):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            plugin: Any = self.trainer.precision_plugin
            unscaled = dict(plugin.unscaled_grads(self))
            for name, param in self.named_parameters():
                assert unscaled[name].dtype == torch.float32
                assert unscaled[name].equal(grad_of(param).float() / 2.0**8)
            norms.append(torch.stack([grad.square().sum() for grad in unscaled.values()]).sum().sqrt().item())

    run = fitted(Module(), MegascalePrecision("16-true", grad_scaler=ConstantGradScaler(2.0**8)))
    result = run.precision_plugin.last_result(run.optimizers[0])
    assert result.grad_norm.item() == pytest.approx(norms[-1], rel=1e-6)


def test_clipping_scaled_gradients_by_hand_is_refused() -> None:
    """configure_gradient_clipping that clips with torch's function would clip scaled gradients: an error says so."""

    class ByHand(Regression):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)

    with pytest.raises(UsageError, match="still multiplied by the loss scale"):
        fitted(ByHand(), MegascalePrecision("16-true"))
    fitted(ByHand(), MegascalePrecision("bf16-true"))  # nothing is scaled there


def test_norm_after_value_is_refused() -> None:
    """One pass clips by norm, then by value; the other order is no pass of ours, and is not done silently."""

    class Module(Regression):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.clip_gradients(optimizer, 0.01, "value")
            self.clip_gradients(optimizer, 0.05, "norm")

    with pytest.raises(UsageError, match="clip by norm first"):
        fitted(Module(), MegascalePrecision("16-true"))


def test_the_config_clips_where_the_trainer_does_not() -> None:
    """config.clip_grad holds without gradient_clip_val, which replaces it."""
    config = OptimizerConfig(clip_grad=0.05)
    by_config = fitted(Regression(), MegascalePrecision("bf16-true", config=config))
    by_trainer = fitted(Regression(), MegascalePrecision("bf16-true"), gradient_clip_val=0.05)
    replaced = fitted(
        Regression(), MegascalePrecision("bf16-true", config=OptimizerConfig(clip_grad=9.0)), gradient_clip_val=0.05
    )
    states = [run.optimizers[0].state_dict() for run in (by_config, by_trainer, replaced)]
    assert_same(states[0], states[1])
    assert_same(states[0], states[2])


def test_no_host_sync() -> None:
    """A run of more steps reads no more values on the host: neither plugin nor monitor waits for the device."""
    reads = []
    for count in (4, 12):
        module = Regression()
        module.on_train_batch_end = lambda *_: None  # type: ignore[method-assign]
        run = trainer(
            MegascalePrecision("16-true"), callbacks=[LossScaleMonitor()], max_steps=count, gradient_clip_val=0.1
        )
        with OperatorCounter() as counter:
            run.fit(module, loader(0, 12))
        reads.append(counter.host_reads)
    assert reads[0] == reads[1]


def test_the_monitor_logs_every_step(tmp_path: Path) -> None:
    """Scale, skips and norm of every step reach the logger under their step, the last one when training ends."""
    module = Regression((2, 5))
    logger = pl.loggers.CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    run = fitted(
        module,
        MegascalePrecision("16-true", grad_scaler=scaler()),
        logger=logger,
        log_every_n_steps=1,
        callbacks=[LossScaleMonitor()],
    )
    logged = logger.experiment.metrics
    assert logged == []  # all flushed to the file
    lines = Path(logger.experiment.metrics_file_path).read_text().splitlines()
    columns = lines[0].split(",")
    rows = [dict(zip(columns, line.split(","), strict=True)) for line in lines[1:]]
    assert [int(row["step"]) for row in rows] == list(range(1, BATCHES + 1))
    assert [float(row["loss_scale"]) for row in rows] == [scale for _, scale in module.rows]
    assert [float(row["num_skipped_steps"]) for row in rows] == [0, 0, 1, 1, 1, 2, 2, 2]
    assert run.callback_metrics["loss_scale"].item() == module.rows[-1][1]
    assert run.callback_metrics["num_skipped_steps"].item() == 2


def test_the_monitor_needs_the_plugin() -> None:
    """Without MegascalePrecision there is no scale to log: an error says what to pass."""
    with pytest.raises(UsageError, match="MegascalePrecision"):
        fitted(Regression(), [], callbacks=[LossScaleMonitor()])


def test_main_params_follow_swa() -> None:
    """Lightning's SWA writes its average into the model at the end; main params hold what the model holds."""
    module = Regression()
    averaging: Any = pl.callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)
    run = trainer(MegascalePrecision("16-true", grad_scaler=scaler()), callbacks=[averaging], max_epochs=3)
    run.fit(module, loader())
    average = dict(averaging._average_model.named_parameters())
    main_params = run.optimizers[0].state_dict()["main_params"]
    for name, param in module.named_parameters():
        assert param.equal(average[name].half())  # averaged in fp32
        assert main_params[name].half().equal(param)


def test_the_other_package_name() -> None:
    """``import pytorch_lightning`` has classes of its own; the plugin trains the same bits there."""
    pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")
    import pytorch_lightning as other

    from megascale.integrations import pytorch_lightning as ours

    class Module(other.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Regression().net

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            return loss_of(self.net, batch[0], batch_idx == 2)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module, expected = Module(), Regression((2,))
    run = other.Trainer(
        plugins=[ours.MegascalePrecision("16-true", grad_scaler=scaler())],
        callbacks=[ours.LossScaleMonitor()],
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        accelerator="cpu",
        max_epochs=1,
    )
    run.fit(module, loader())
    fitted(expected, MegascalePrecision("16-true", grad_scaler=scaler()))
    assert_same(module.state_dict(), expected.state_dict())
    assert run.callback_metrics["num_skipped_steps"].item() == 1


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (
            ArgumentError,
            "'16-true', 'bf16-true', '16-mixed', 'bf16-mixed', '32-true', got 'fp16'",
            {"precision": "fp16"},
        ),
        (ArgumentError, "got torch.float16", {"precision": torch.float16}),
        (ArgumentTypeError, "grad_scaler is a torch.amp.GradScaler", {"grad_scaler": torch.amp.GradScaler("cpu")}),
        (ArgumentTypeError, "config must be an OptimizerConfig", {"config": {"fp16": True}}),
        (ArgumentError, "contradicts config.fp16=False, config.bf16=True", {"config": OptimizerConfig(bf16=True)}),
        (ArgumentError, "use_distributed_optimizer", {"config": OptimizerConfig(use_distributed_optimizer=True)}),
    ],
)
def test_arguments_are_checked(error: type[Exception], match: str, arguments: dict[str, Any]) -> None:
    """A wrong argument is named with its value, when the plugin is made."""
    with pytest.raises(error, match=match):
        MegascalePrecision(**arguments)


def test_arguments_of_step_are_refused() -> None:
    """Arguments of optimizer.step() have no meaning for ours, and are not swallowed."""

    class Module(Regression):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step(optimizer_closure, extra=1)

    with pytest.raises(UsageError, match="was given extra"):
        fitted(Module(), MegascalePrecision("16-true"))
