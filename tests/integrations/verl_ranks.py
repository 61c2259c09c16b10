"""What ranks run in the tests of the verl engine: verl's real FSDP2 engine over a tiny Llama on a CPU."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import ArgumentError, UsageError
from megascale.optimizer import MixedPrecisionOptimizer
from tests.integrations.accelerate_cases import as_rank
from tests.integrations.hf_cases import llama, tokenizer, whole

STEPS, SAVED_AT, BAD = 6, 3, 1
ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "tests.integrations.verl_cpu",
    "VERL_PLATFORM": "cpu-as-nvidia",
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_ENGINE_VENDOR": "nvidia",
}
"""A CPU that verl takes for an NVIDIA GPU; set before verl is imported."""


def write_model(folder: Path, **options: Any) -> str:
    """Write a tiny model and its tokenizer as a folder that verl loads. ``options``: of its LlamaConfig."""
    llama(torch.float32, **options).save_pretrained(folder)  # type: ignore[operator]
    tokenizer().save_pretrained(folder)
    return str(folder)


def engine_of(
    path: str,
    weights: str,
    computes: str,
    optimizer: dict[str, Any],
    strategy: str = "fsdp2",
    adapters: int = 0,
) -> Any:
    """Return the engine that verl's registry gives for an NVIDIA GPU, on this CPU, ready to train.

    ``adapters``: the rank of LoRA's adapters, over a frozen base; 0: none.
    """
    os.environ |= ENVIRONMENT
    from verl.models.transformers import monkey_patch
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.base import EngineRegistry

    # What verl 0.9.1 asks of trl, the trl of today lacks; it asks only where trl is there.
    monkey_patch.is_trl_available = lambda: False
    model = HFModelConfig(
        path=path,
        override_config={"attn_implementation": "eager"},
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        lora_rank=adapters,
        lora_alpha=2 * adapters,
    )
    engine = EngineRegistry.new(
        "language_model",
        strategy,
        model_config=model,
        engine_config=FSDPEngineConfig(
            strategy=strategy,
            model_dtype=weights,
            mixed_precision={"param_dtype": computes, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            use_torch_compile=False,
        ),
        optimizer_config=FSDPOptimizerConfig(
            lr=1e-3, total_training_steps=20, lr_warmup_steps=0, lr_scheduler_type="cosine", clip_grad=0.5, **optimizer
        ),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def batch_of(step: int) -> Any:
    """Return this rank's share of a step's four sequences, as verl's workers make it."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.utils.dataset.dataset_utils import DatasetPadMode

    rank, world = dist.get_rank(), dist.get_world_size()
    ids = torch.randint(0, 60, (4, 8), generator=torch.Generator().manual_seed(step))
    own = ids[4 * rank // world : 4 * (rank + 1) // world]
    lengths = [8] * len(own)
    nested = torch.nested.nested_tensor(list(own), layout=torch.jagged)
    positions = torch.nested.nested_tensor([torch.arange(length) for length in lengths], layout=torch.jagged)
    mask = torch.nested.nested_tensor([torch.ones(length) for length in lengths], layout=torch.jagged)
    data = TensorDict({"input_ids": nested, "position_ids": positions, "loss_mask": mask}, batch_size=[len(own)])
    tu.assign_non_tensor(
        data,
        use_remove_padding=False,
        pad_mode=DatasetPadMode.NO_PADDING,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=1,
        temperature=1.0,
        max_response_len=8,
        max_response_length=8,
    )
    return data


class Loss:
    """The mean of log-probabilities, infinite in one step on the last rank."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None, **_: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss of a micro-batch, and its metrics."""
        loss = -model_output["log_probs"].values().float().mean()
        last = dist.get_rank() == dist.get_world_size() - 1
        return (loss * math.inf if last and self.step == BAD else loss), {}


def state_of(engine: Any) -> dict[str, Tensor]:
    """Return main params, weights, scale and trackers, whole on every rank."""
    found = {f"weight.{name}": whole(param) for name, param in engine.module.named_parameters()}
    optimizer = engine.optimizer
    if isinstance(optimizer, MixedPrecisionOptimizer):
        found |= {f"main.{name}": whole(main) for name, main in optimizer.main_params()}
        scaler = {} if optimizer.grad_scaler is None else optimizer.grad_scaler.state_dict()
    else:
        scaler = {} if engine.scaler is None else engine.scaler.state_dict()
    found |= {f"scaler.{name}": torch.as_tensor(value).clone() for name, value in scaler.items() if value is not None}
    found["lr"] = torch.tensor(engine.lr_scheduler.get_last_lr()[0], dtype=torch.float64)
    return found


def _train(engine: Any, steps: range, folder: str | None) -> dict[str, Any]:
    loss, norms, scales, at_save = Loss(), [], [], {}
    for step in steps:
        loss.step = step
        with engine.train_mode():
            output = engine.train_batch(batch_of(step), loss)
        engine.lr_scheduler_step()
        norms.append(output["metrics"]["grad_norm"])
        scales.append({name: value for name, value in state_of(engine).items() if name.startswith("scaler.")})
        if folder is not None and step == SAVED_AT - 1:
            at_save = state_of(engine)
            engine.save_checkpoint(folder, global_step=step)
    kinds = {"kind": type(engine).__name__, "optimizer": type(engine.optimizer).__name__}
    return {"norms": norms, "scales": scales, "at_save": at_save, "at_end": state_of(engine), **kinds}


def train_on_rank(path: str, folder: str, *setup: Any) -> dict[str, Any]:
    """Train to the end, saved on the way."""
    with as_rank():
        return _train(engine_of(path, *setup), range(STEPS), folder)


def resume_on_rank(path: str, folder: str, *setup: Any) -> dict[str, Any]:
    """Take up what :func:`train_on_rank` has saved, on any number of ranks."""
    with as_rank():
        engine = engine_of(path, *setup)
        engine.load_checkpoint(folder)
        started = state_of(engine)
        return _train(engine, range(SAVED_AT, STEPS), None) | {"at_save": started}


def refused_on_rank(path: str, message: str, *setup: Any) -> None:
    """Expect an error of ours when the engine is made."""
    with as_rank(), pytest.raises((UsageError, ArgumentError), match=message):
        engine_of(path, *setup)


def offload_on_rank(path: str, folder: str, *setup: Any) -> dict[str, Any]:
    """Train with the optimizer in host memory between steps, as verl does around rollouts; return where things were.

    verl takes "cpu" for the device itself here: what it moves to is told by another name.
    """
    with as_rank(), pytest.MonkeyPatch.context() as patch:
        engine = engine_of(path, *setup)
        loss, away = Loss(), []
        for step in range(STEPS):
            loss.step = step
            with engine.train_mode():
                engine.train_batch(batch_of(step), loss)
            engine.lr_scheduler_step()
            with patch.context() as gpu:
                gpu.setattr("megascale.integrations.verl.get_device_name", lambda: "cuda")
                engine.to("cpu", model=False, optimizer=True, grad=False)
            try:
                engine.optimizer.step()
            except UsageError as error:
                away.append("reload()" in str(error))
            if step == SAVED_AT - 1:
                engine.save_checkpoint(folder, global_step=step)
            engine.to("cpu", model=False, optimizer=True, grad=False)
        at_end = state_of(engine)
        engine.load_checkpoint(folder)
        return {"away": away, "at_end": at_end, "loaded": state_of(engine)}
