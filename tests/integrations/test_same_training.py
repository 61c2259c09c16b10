"""One tiny fp16 training in plain torch, Accelerate, Transformers and Lightning: the same steps, to the bit."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from megascale import DynamicGradScaler, MixedPrecisionOptimizer
from tests.training import Tiny, same_bits, snapshot

STEPS, MICRO_BATCHES, NORM = 15, 2, 0.5
OVERFLOW_AT = (5, 8, 9, 22)  # micro-batches, of steps 2, 4 and 11


class Regression(nn.Module):
    """A Tiny network in fp16. Its loss is infinite at the micro-batches OVERFLOW_AT."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Tiny().half()

    def forward(self, x: Tensor, index: int) -> dict[str, Tensor]:
        """Return the loss for a batch of shape [4, 4]."""
        loss: Tensor = (self.net(x).float() - 1).square().mean()
        return {"loss": loss * math.inf if index in OVERFLOW_AT else loss}


class MicroBatches(Dataset[dict[str, Any]]):
    """Whole micro-batches, in order."""

    def __len__(self) -> int:
        return STEPS * MICRO_BATCHES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(index)).half(), "index": index}


def _loader() -> DataLoader[dict[str, Any]]:
    return DataLoader(MicroBatches(), batch_size=1, collate_fn=_only)


def _only(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return samples[0]


@dataclass
class Training:
    """A model, its optimizer, and what becomes of them. A hook notes every step, whoever takes it."""

    model: Regression = field(default_factory=Regression)
    skips: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        inner = torch.optim.AdamW(self.model.named_parameters(), lr=1e-2)
        self.optimizer = MixedPrecisionOptimizer(inner, None, DynamicGradScaler(2.0**10, 1.0, 2.0, 0.5, 4, 1))
        self.optimizer.register_step_post_hook(self._note)

    def _note(self, *_: Any) -> None:
        self.skips.append(int(self.optimizer.num_skipped_steps) > sum(self.skips))
        self.scales.append(self.optimizer.get_loss_scale().item())

    def final_loss(self) -> float:
        """Return the mean loss over all data, infinite ones aside."""
        with torch.no_grad():
            losses = [self.model(sample["x"], -1)["loss"] for sample in map(MicroBatches().__getitem__, range(8))]
        return torch.stack(losses).mean().item()


def _plain(folder: Path) -> Training:
    training = Training()
    optimizer = training.optimizer
    optimizer.clip_grad = NORM
    for sample in _loader():
        loss = training.model(**sample)["loss"]
        optimizer.scale_loss(loss / MICRO_BATCHES).backward()
        if (sample["index"] + 1) % MICRO_BATCHES == 0:
            optimizer.step()
            optimizer.zero_grad()
    return training


def _accelerate(folder: Path) -> Training:
    from megascale.integrations.accelerate import Accelerator

    training = Training()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    model, optimizer, loader = accelerator.prepare(training.model, training.optimizer, _loader())
    for sample in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**sample)["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
            optimizer.zero_grad()
    return training


def _transformers(folder: Path) -> Training:
    from transformers import Trainer, TrainingArguments

    from megascale.integrations.accelerate import adopt

    training = Training()
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=MICRO_BATCHES,
        max_grad_norm=NORM,
        num_train_epochs=1,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=training.model,
        args=arguments,
        train_dataset=MicroBatches(),
        data_collator=_only,
        optimizers=(training.optimizer, None),
    )
    adopt(trainer.accelerator)
    trainer.train()
    return training


def _lightning(folder: Path) -> Training:
    import lightning.pytorch as pl

    from megascale.integrations.lightning import MegascalePrecision

    training = Training()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model

        def training_step(self, batch: dict[str, Any]) -> Tensor:
            loss: Tensor = self.model(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> Any:
            return training.optimizer

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=MICRO_BATCHES,
        gradient_clip_val=NORM,
        plugins=[MegascalePrecision("16-true")],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Module(), _loader())
    return training


LOOPS: dict[str, Callable[[Path], Training]] = {
    "accelerate": _accelerate,
    "transformers": _transformers,
    "lightning": _lightning,
}


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate's state is shared by a whole process, and left behind by a Trainer."""
    yield
    try:
        from tests.integrations.accelerate_cases import reset
    except ImportError:
        return
    reset()


def test_the_plain_loop_skips_grows_and_learns(tmp_path: Path) -> None:
    """What the others are compared with is worth it: three skips, growth and backoff, and a falling loss."""
    before, training = Training().final_loss(), _plain(tmp_path)
    assert training.skips == [step in (2, 4, 11) for step in range(STEPS)]
    assert (
        training.scales == [1024.0, 1024.0, 512.0, 512.0, 256.0, 256.0, 256.0, 256.0, 512.0, 512.0, 512.0] + [256.0] * 4
    )
    assert training.final_loss() < 0.8 * before


@pytest.mark.parametrize("library", LOOPS)
def test_the_same_training(library: str, tmp_path: Path) -> None:
    """Skips, scales, and every bit of parameters, main params and moments equal the plain loop's."""
    pytest.importorskip(library, reason=f"the same training needs {library}")
    plain, training = _plain(tmp_path), LOOPS[library](tmp_path)
    assert training.skips == plain.skips
    assert training.scales == plain.scales
    assert same_bits(snapshot(training.optimizer, training.model), snapshot(plain.optimizer, plain.model))
