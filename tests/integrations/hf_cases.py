"""A tiny Llama, a tokenizer of its own, and Trainers of transformers and TRL on them, for tests here and on ranks."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer

from megascale import MixedPrecisionOptimizer
from megascale.integrations.transformers import MegascaleTrainer

VOCABULARY = 64
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def llama(dtype: torch.dtype = torch.float32, *, seed: int = 0, **options: Any) -> nn.Module:
    """Return two layers, of width 32 if not told otherwise, always the same, parameters in ``dtype``."""
    torch.manual_seed(seed)
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**{"vocab_size": VOCABULARY} | SIZES | options))
    for param in model.parameters():
        param.data = param.data.to(dtype)
    return model


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random tokens."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCABULARY, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class Overflowing:
    """A mixin: the loss is infinite in the micro-batches ``bad`` on the last rank."""

    bad: tuple[int, ...] = ()
    micro = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Return the trainer's loss, or inf."""
        loss: Any = super().compute_loss(*args, **kwargs)  # type: ignore[misc]
        trainer: Any = self
        last = trainer.args.process_index == trainer.args.world_size - 1
        self.micro += 1
        return loss * math.inf if last and self.micro - 1 in self.bad else loss


class HalfTrainer(Overflowing, MegascaleTrainer, Trainer):
    """A Trainer that trains in 16 bits, and overflows where it is told to."""


def arguments(kind: Any, folder: Any, **options: Any) -> Any:
    """Return TrainingArguments of a class, for a few steps on a CPU."""
    given = {"max_steps": 6, "save_strategy": "no", "learning_rate": 1e-3, "logging_steps": 1} | options
    given = {"per_device_train_batch_size": 2, "lr_scheduler_type": "linear"} | given
    return kind(output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **given)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 64 words: "0" to "61", padding and the end."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {str(number): number for number in range(VOCABULARY - 2)} | {"<pad>": 62, "<eos>": 63}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def optimizer_of(trainer: Any) -> MixedPrecisionOptimizer:
    """Return the optimizer inside of Accelerate's wrapper."""
    optimizer: MixedPrecisionOptimizer = trainer.optimizer.optimizer
    return optimizer


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor, or a DTensor's whole one, on its own memory."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def state_of(trainer: Any) -> dict[str, Tensor]:
    """Return main params, scale, trackers and counts by name, whole on every rank."""
    optimizer = optimizer_of(trainer)
    found = {f"main.{name}": whole(main) for name, main in optimizer.main_params()}
    found |= {f"weight.{name}": whole(param) for name, param in trainer.model.named_parameters()}
    if optimizer.grad_scaler is not None:
        saved: Mapping[str, Any] = optimizer.grad_scaler.state_dict()
        found |= {f"scaler.{name}": torch.as_tensor(value).clone() for name, value in saved.items()}
    found["landed"], found["skipped"] = optimizer.num_landed_steps.clone(), optimizer.num_skipped_steps.clone()
    return found


def logged(trainer: Any, key: str) -> list[float]:
    """Return what was logged of every step."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]


@contextlib.contextmanager
def fsdp2_on_cpu(**options: Any) -> Iterator[None]:
    """Let every AcceleratorState made meanwhile run FSDP2, which Accelerate turns on for accelerators alone.

    What follows is Accelerate's and the Trainer's own code, which runs on gloo as well.
    """
    original = AcceleratorState.__init__

    def opened(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if "fsdp_plugin" not in AcceleratorState._shared_state or AcceleratorState._shared_state["fsdp_plugin"] is None:
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
            if self._mixed_precision != "no":
                plugin.set_mixed_precision(self._mixed_precision)
            AcceleratorState._shared_state["fsdp_plugin"] = plugin
        for state in (PartialState, AcceleratorState):
            state._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = opened
    try:
        yield
    finally:
        AcceleratorState.__init__ = original
