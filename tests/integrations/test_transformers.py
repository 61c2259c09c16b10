"""transformers.Trainer with a tiny Llama in fp16, made here, and our optimizer through the Trainer's own hooks."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig, build_optimizer
from megascale.errors import UsageError
from tests.pool import RankPool
from tests.training import bits_equal, same_bits, snapshot

transformers = pytest.importorskip("transformers", reason="tests of the Trainer need transformers and accelerate")
pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

from megascale.integrations.accelerate import adopt  # noqa: E402
from tests.integrations.accelerate_cases import as_rank, reset  # noqa: E402

STEPS, MICRO_BATCHES, RATE = 8, 2, 1e-3
OVERFLOW_AT = (5, 12)  # micro-batches: of steps 2 and 6
CONFIG = OptimizerConfig(fp16=True, lr=RATE, initial_loss_scale=2.0**12, loss_scale_window=3, hysteresis=1)


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate's state is shared by a whole process."""
    reset()
    yield
    reset()


def _llama() -> nn.Module:
    """Return two layers of width 32 in fp16, always the same."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model: nn.Module = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=16, **sizes)).half()
    return model


def _optimizer(model: nn.Module, clip_grad: float = 0.0) -> MixedPrecisionOptimizer:
    config = OptimizerConfig(fp16=True, clip_grad=clip_grad)
    scaler = DynamicGradScaler(2.0**12, 1.0, 2.0, 0.5, 3, 1)
    return MixedPrecisionOptimizer(torch.optim.AdamW(model.named_parameters(), lr=RATE), config, scaler)


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random tokens."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class Overflowing(Trainer):
    """A Trainer whose loss is infinite at OVERFLOW_AT on the last rank, and which keeps the batches that it collates.

    ``hook`` says how it gets its optimizer and its accelerator.
    """

    def __init__(self, hook: str, folder: Path, scaled: bool = True, **options: Any) -> None:
        self.batches: list[Tensor] = []
        self.hook, self.micro = hook, 0
        given: dict[str, Any] = {"max_grad_norm": 0.5, "save_strategy": "no", "max_steps": STEPS} | options
        arguments = TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=MICRO_BATCHES,
            learning_rate=RATE,
            lr_scheduler_type="linear",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            **given,
        )
        model = _llama()
        chosen: dict[str, Any] = {}
        if hook == "optimizers":
            chosen = {"optimizers": (_optimizer(model), None)}
        elif hook == "optimizer_cls_and_kwargs":
            chosen = {"optimizer_cls_and_kwargs": (lambda: partial(build_optimizer, CONFIG), {})}
        super().__init__(model=model, args=arguments, train_dataset=Samples(), data_collator=self._collate, **chosen)
        if hook != "subclass" and scaled:
            adopt(self.accelerator)

    def create_accelerator_and_postprocess(self) -> None:
        """Adopt the accelerator wherever the Trainer makes one."""
        super().create_accelerator_and_postprocess()
        if self.hook == "subclass":
            adopt(self.accelerator)

    def create_optimizer(self, model: Any = None) -> Any:
        """Make our optimizer, if none was passed."""
        if self.hook == "subclass" and getattr(self, "optimizer", None) is None:
            self.optimizer: Any = _optimizer(self.module)
        return super().create_optimizer(model)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's loss, or inf."""
        loss: Any = super().compute_loss(*args, **kwargs)
        last = self.args.process_index == self.args.world_size - 1
        self.micro += 1
        return loss * math.inf if last and self.micro - 1 in OVERFLOW_AT else loss

    def _collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        ids = torch.stack([sample["input_ids"] for sample in samples])
        self.batches.append(ids)
        return {"input_ids": ids, "labels": ids.clone()}

    @property
    def ours(self) -> MixedPrecisionOptimizer:
        """The optimizer inside of Accelerate's wrapper."""
        prepared: Any = self.optimizer
        optimizer: MixedPrecisionOptimizer = prepared.optimizer
        return optimizer

    @property
    def module(self) -> nn.Module:
        """The model, unwrapped."""
        model: Any = self.model
        module: nn.Module = model
        return module

    def logged(self, key: str) -> list[float]:
        """What was logged of every step."""
        return [entry[key] for entry in self.state.log_history if key in entry]


class Expected(NamedTuple):
    """What a loop without a Trainer logs, and where it ends."""

    norms: list[float]
    rates: list[float]
    skips: list[bool]
    state: dict[str, Tensor]
    scale: float


def _by_hand(batches: list[list[Tensor]], clip_grad: float, optimizer: Any = None, model: Any = None) -> Expected:
    """Train on recorded batches, ``batches[rank][micro-batch]``, of all ranks in one process."""
    model = _llama() if model is None else model
    optimizer = _optimizer(model, clip_grad) if optimizer is None else optimizer
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda landed: 1 - landed / STEPS)
    norms, rates, skips = [], [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        micros = range(MICRO_BATCHES * step, MICRO_BATCHES * (step + 1))
        tokens = sum(ids[:, 1:].numel() for of_rank in batches for ids in of_rank[micros.start : micros.stop])
        for micro in micros:
            for rank, of_rank in enumerate(batches):
                ids = of_rank[micro]
                loss = model(input_ids=ids, labels=ids, num_items_in_batch=tokens).loss
                overflows = micro in OVERFLOW_AT and rank == len(batches) - 1
                optimizer.scale_loss(loss * math.inf if overflows else loss).backward()
        success, norm, _ = optimizer.step()
        norms.append(norm.item())
        rates.append(float(schedule.get_last_lr()[0]))
        skips.append(not success)
        if success:
            schedule.step()
    return Expected(norms, rates, skips, snapshot(optimizer, model), optimizer.get_loss_scale().item())


@pytest.mark.parametrize(("hook", "max_grad_norm"), [("optimizers", 0.5), ("optimizers", 0.0), ("subclass", 0.5)])
def test_a_trainer_equals_a_loop_by_hand(tmp_path: Path, hook: str, max_grad_norm: float) -> None:
    """fp16 parameters, loss scaling, accumulation, clipping, logged norms, skips and schedule: the bits of a loop."""
    trainer = Overflowing(hook, tmp_path, max_grad_norm=max_grad_norm)
    trainer.train()
    expected = _by_hand([trainer.batches], max_grad_norm)
    assert expected.skips == [step in (2, 6) for step in range(STEPS)]
    assert trainer.logged("grad_norm") == pytest.approx(expected.norms, rel=0, abs=0, nan_ok=True)
    assert min(expected.norms) > 0.5  # clipping is at work
    assert trainer.logged("learning_rate") == expected.rates
    assert trainer.ours.num_skipped_steps.item() == 2
    assert trainer.ours.get_loss_scale().item() == expected.scale != 2.0**12
    assert {param.dtype for param in trainer.module.parameters()} == {torch.float16}
    assert same_bits(snapshot(trainer.ours, trainer.module), expected.state)


def test_build_optimizer_through_optimizer_cls_and_kwargs(tmp_path: Path) -> None:
    """The Trainer calls a factory with the model, on its device: build_optimizer with its own weight decay groups."""
    trainer = Overflowing("optimizer_cls_and_kwargs", tmp_path)
    trainer.train()
    model = _llama()
    optimizer = build_optimizer(CONFIG, model)
    optimizer.clip_grad = 0.5
    expected = _by_hand([trainer.batches], 0.5, optimizer, model)
    assert trainer.logged("grad_norm") == pytest.approx(expected.norms, rel=0, abs=0, nan_ok=True)
    assert same_bits(snapshot(trainer.ours, trainer.module), expected.state)


def test_a_checkpoint_resumes_bit_for_bit(tmp_path: Path) -> None:
    """optimizer.pt holds main params, moments and scaler, loads with weights_only, and training goes on as it was."""
    whole = Overflowing("optimizers", tmp_path, save_strategy="steps", save_steps=4)
    whole.train()
    saved = torch.load(tmp_path / "checkpoint-4" / "optimizer.pt", weights_only=True)
    assert {"main_params", "grad_scaler"} <= saved.keys()
    reset()
    resumed = Overflowing("optimizers", tmp_path)
    resumed.micro = 4 * MICRO_BATCHES
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    for key in ("grad_norm", "learning_rate", "loss"):
        assert resumed.logged(key) == pytest.approx(whole.logged(key), rel=0, abs=0, nan_ok=True)
    assert same_bits(snapshot(resumed.ours, resumed.module), snapshot(whole.ours, whole.module))
    assert resumed.ours.get_loss_scale().item() == whole.ours.get_loss_scale().item()


def test_without_adopt_the_loss_is_not_scaled(tmp_path: Path) -> None:
    """Why adopt() is needed: a Trainer alone calls loss.backward(). The first step refuses those gradients."""
    alone = Overflowing("optimizers", tmp_path, scaled=False, max_steps=1)
    with pytest.raises(UsageError, match="the loss was not scaled: neither"):
        alone.train()


@pytest.mark.parametrize("hook", ["optimizers", "subclass"])
def test_autocast_to_bf16_is_refused_beside_fp16_weights(hook: str, tmp_path: Path) -> None:
    """TRL's configs set bf16=True by themselves: fp16 weights would be rounded to bf16 in every forward, in silence."""
    trainer = Overflowing(hook, tmp_path, bf16=True, max_steps=1)
    before = {name: value.clone() for name, value in trainer.module.state_dict().items()}
    with pytest.raises(UsageError, match=r"computes in torch\.bfloat16.*bf16=False and fp16=False"):
        trainer.train()
    assert all(bits_equal(value, before[name]) for name, value in trainer.module.state_dict().items())


def _on_rank(folder: str) -> tuple[list[float], list[float], dict[str, Tensor], float, list[Tensor], bool]:
    with as_rank():
        trainer = Overflowing("optimizers", Path(folder), save_strategy="steps", save_steps=4)
        trainer.train()
        after = snapshot(trainer.ours, trainer.module)
        reset()
        resumed = Overflowing("optimizers", Path(folder))
        resumed.micro = 4 * MICRO_BATCHES
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
        same = same_bits(after, snapshot(resumed.ours, resumed.module))
        scale = trainer.ours.get_loss_scale().item()
        return trainer.logged("grad_norm"), trainer.logged("learning_rate"), after, scale, trainer.batches, same


def test_two_ranks_skip_together_and_resume(ranks: RankPool, tmp_path: Path) -> None:
    """DDP, one rank's overflow: both skip, both hold the same bits, equal one process in all but fp16 rounding."""
    results = ranks.run(2, _on_rank, str(tmp_path))
    expected = _by_hand([batches for *_, batches, _ in results], 0.5)
    # Rank 0 logs alone.
    for norm, reference, skipped in zip(results[0][0], expected.norms, expected.skips, strict=True):
        assert math.isfinite(norm) is not skipped
        assert skipped or norm == pytest.approx(reference, rel=2e-3)
    assert results[0][1] == expected.rates
    for _, _, state, scale, _, resumed_alike in results:
        assert scale == expected.scale
        assert all(bits_equal(state[name], results[0][2][name]) for name in state)
        for name in (name for name in state if name.startswith("main.")):
            # AdamW moves each element by at most RATE a step; where a gradient is near 0, its sign is rounding.
            torch.testing.assert_close(state[name], expected.state[name], rtol=0, atol=RATE * STEPS)
            assert (state[name] - expected.state[name]).abs().mean() < 0.02 * RATE
        assert resumed_alike
