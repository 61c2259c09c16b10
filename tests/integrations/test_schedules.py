"""Real trainers drive LandedLRScheduler: they call step() with nothing, and the rate follows landed steps only."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.schedules import LandedLRScheduler

SKIPPED = (1, 4)
STEPS = 7
RATES = [0.5 ** sum(other not in SKIPPED for other in range(step)) for step in range(STEPS)]


def test_lightning(tmp_path: Path) -> None:
    """A Trainer with an interval of steps; the optimizer comes from configure_optimizers. fp16, two overflows."""
    pl = pytest.importorskip("lightning.pytorch", reason="needs lightning")
    from megascale.integrations.lightning import MegascalePrecision

    class Regression(pl.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 1)
            self.rates: list[float] = []

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            self.rates.append(float(self.trainer.optimizers[0].param_groups[0]["lr"]))
            loss: Tensor = self.net(batch[0]).float().square().mean()
            return loss * math.inf if index in SKIPPED else loss

        def configure_optimizers(self) -> Any:
            config = OptimizerConfig(fp16=True)
            scaler = DynamicGradScaler(16.0, 1.0, 2.0, 0.5, 4, 1)
            optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(self.net.parameters(), lr=1.0), config, scaler)
            schedule = LandedLRScheduler(ExponentialLR(optimizer, 0.5))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    module = Regression()
    trainer = pl.Trainer(
        plugins=[MegascalePrecision("16-true")],
        default_root_dir=tmp_path,
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(STEPS, 8))))
    assert module.rates == RATES


def test_transformers(tmp_path: Path) -> None:
    """A Trainer that is given optimizer and schedule, logs the rates, and saves checkpoints. bf16, two NaN losses."""
    transformers = pytest.importorskip("transformers", reason="needs transformers and accelerate")

    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            out = self.net(x.bfloat16())
            return {"loss": (out.float() - labels).square().mean() * x.max(), "logits": out}

    class InOrder(transformers.Trainer):  # type: ignore[name-defined]
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    values = [math.nan if step in SKIPPED else 1.0 for step in range(STEPS)]
    data = [{"x": torch.full((4,), value), "labels": torch.ones(1)} for value in values]
    module = Regression().bfloat16()
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(module.parameters(), lr=1.0))
    schedule = LandedLRScheduler(ExponentialLR(optimizer, 0.5))
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=1,
        num_train_epochs=1,
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        save_steps=3,
        max_grad_norm=0.0,
        disable_tqdm=True,
    )
    trainer = InOrder(model=module, args=arguments, train_dataset=data, optimizers=(optimizer, schedule))
    trainer.train()
    logged = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert logged == RATES
    saved = torch.load(tmp_path / "checkpoint-3" / "scheduler.pt", weights_only=True)
    assert saved["last_epoch"] == 2
