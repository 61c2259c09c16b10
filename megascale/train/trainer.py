"""The training loop: data, model, MixedPrecisionOptimizer, checkpoints, metrics, and a clean stop."""

import json
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from megascale.checkpoint import Checkpointer
from megascale.checkpoint.agreement import raise_on_all_ranks
from megascale.checkpoint.manifest import Manifest
from megascale.checkpoint.nest import unflatten
from megascale.debug import report_overflows, watch
from megascale.errors import ArgumentError, CheckpointError
from megascale.host_view import HostView
from megascale.train.build import DTYPES, build_schedule, build_task, build_wrapped_optimizer
from megascale.train.config import FREE_ON_RESUME, TrainConfig, as_dict, flat, save_yaml
from megascale.train.rows import (
    GRAD_NORM,
    LR,
    OVERFLOWS,
    SCALE,
    SKIPPED,
    STEP,
    SUCCESS,
    ZERO_FRACTION,
    ZEROS,
    row_of,
)
from megascale.train.run_log import (
    BATCH_ACCURACY,
    HELDOUT_LOSS,
    LOSS,
    SAMPLES_PER_SECOND,
    TOTAL_ACCURACY,
    RunLog,
    keep_overflows_before,
    rewrite_last_row,
)
from megascale.train.runtime import Runtime
from megascale.train.tasks import Batch
from megascale.utils.collectives import all_reduce_sum_, broadcast_object

STOP = "stop"
"""Number of ranks that were told to stop; travels with the row."""


@dataclass
class Progress:
    """The progress of a run, over all interruptions."""

    step: int = 0
    skipped: int = 0
    zero_grad_fractions: float = 0.0
    """Sum over steps."""
    seconds: float = 0.0
    total_accuracy: float = math.nan
    """Of the last evaluation, of all held-out data; NaN before the first."""
    heldout_loss: float = math.nan
    """Likewise."""
    evaluated_at: int = -1
    """Number of steps at the last evaluation."""

    def evaluation(self) -> dict[str, float]:
        """Return what the last evaluation adds to a row."""
        return {TOTAL_ACCURACY: self.total_accuracy, HELDOUT_LOSS: self.heldout_loss}

    @property
    def landed(self) -> int:
        """Number of steps that were not skipped, as far as the host knows."""
        return self.step - self.skipped


class Trainer:
    """One run on one rank. Its data depends only on seed and step, so it may be interrupted at any step.

    Args:
        config: the options.
        runtime: the ranks.
        command: the line that was typed, which `config.yaml` shows; empty: unknown.
    """

    def __init__(self, config: TrainConfig, runtime: Runtime, command: str = "") -> None:
        if config.batch_size % runtime.world_size:
            raise ArgumentError(
                f"batch_size={config.batch_size} must be a multiple of the {runtime.world_size} ranks that share it"
            )
        self.config = config
        self.command = command
        self.runtime = runtime
        self.dtype = DTYPES[config.precision]
        self.task = build_task(config)
        torch.manual_seed(config.seed)
        self.model = self.task.model().to(runtime.device, self.dtype)
        self.optimizer = build_wrapped_optimizer(config, self.model)
        # A DistributedOptimizer reduces gradients itself.
        wrapped = runtime.under_torchrun and not config.optimizer.sharded
        self.network: nn.Module = DistributedDataParallel(self.model) if wrapped else self.model
        self.num_params = sum(param.numel() for param in self.model.parameters())
        self.checkpointer = Checkpointer(
            config.run_folder / "checkpoints",
            keep_last=config.checkpoint.keep_last,
            async_save=config.checkpoint.async_save,
        )
        self.progress = Progress()
        self.view = HostView()
        self.log: RunLog | None = None
        self._stop_seen = False
        self._begun = time.perf_counter()

    def run(self) -> int:
        """Train to the last step, or until a signal. Returns the exit status."""
        self.start()
        try:
            return self._train()
        finally:
            if self.log is not None:
                self.log.close()

    def _train(self) -> int:
        started, stopped = self.progress.step, False
        while self.progress.step < self.config.steps and not stopped:
            self._step(self.progress.step)
            stopped = self._evaluate_and_save_if_due(self.progress.step)
        if self.progress.step > started or self.checkpointer.latest() is None:
            if not stopped:
                self._measure_accuracy()
            self._observe(self.view.flush())
            self._save()
        elif self.progress.evaluated_at != self.progress.step:
            self._complete_last_row()
        self.checkpointer.wait()
        self._summarise(stopped)
        return 128 + (self.runtime.stop_signal or 2) if stopped else 0

    def start(self) -> None:
        """Resume from the run folder's latest checkpoint, or start anew."""
        self._restart_if_asked()
        self._resume()
        self.schedule = build_schedule(self.config, self.optimizer, self.progress.landed)
        self._open_log()
        overflows = self.config.run_folder / OVERFLOWS
        self.reporter = report_overflows(self.optimizer, model=self.network, path=overflows)
        bare = self.network.module if isinstance(self.network, DistributedDataParallel) else self.network
        self.module_watch = watch(bare) if self.config.watch else None
        self._begun = time.perf_counter()

    # One step

    def _step(self, step: int) -> None:
        started = time.perf_counter()
        loss, correct, places = self._loss(self.network, self._own_part(step))
        self.optimizer.zero_grad()
        self.optimizer.scale_loss(loss).backward()
        scale, [lr, *_] = self.optimizer.get_loss_scale(), self.schedule.get_last_lr()
        result = self.optimizer.step()
        self.schedule.step(result.success)
        stop = torch.full_like(loss, bool(self.runtime.stop_signal), dtype=torch.float64, requires_grad=False)
        shared = torch.stack([loss.detach().double(), correct.double() / places, stop])
        all_reduce_sum_(shared, self.runtime.group)
        seen = self.view.push(
            {
                STEP: step,
                LOSS: shared[0] / self.runtime.world_size,
                BATCH_ACCURACY: shared[1] / self.runtime.world_size,
                STOP: shared[2],
                GRAD_NORM: result.grad_norm,
                SCALE: scale,
                SUCCESS: result.success,
                ZEROS: result.num_zeros_in_grad,
                LR: lr,
                SAMPLES_PER_SECOND: self.config.batch_size / (time.perf_counter() - started),
            }
        )
        self._observe(seen)
        self.progress.step = step + 1

    def _evaluate_and_save_if_due(self, done: int) -> bool:
        """Evaluate and save if due. Returns whether the ranks have agreed to stop."""
        if done % self.config.evaluate_every == 0 and done < self.config.steps:
            self._measure_accuracy()
        every = self.config.checkpoint.every
        if every and done % every == 0 and done < self.config.steps and not self._stop_seen:
            self._observe(self.view.flush())
            if not self._stop_seen:  # after a stop run() saves
                self._save()
        return self._stop_seen

    def _observe(self, seen: dict[str, float] | None) -> None:
        """Process the values of an earlier step, which are the same on all ranks."""
        if seen is None:
            return
        row = row_of(seen, self.num_params)
        self._stop_seen = row.pop(STOP) > 0 or self._stop_seen
        self.progress.skipped += int(row[SKIPPED])
        self.progress.zero_grad_fractions += row[ZERO_FRACTION]
        if self.log is not None:
            self.log.write(row | self.progress.evaluation())

    def _own_part(self, step: int) -> Batch:
        share = self.config.batch_size // self.runtime.world_size
        return self.task.batch(step, self.runtime.rank * share, (self.runtime.rank + 1) * share)

    def _loss(self, network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, int]:
        """Return the mean loss in fp32, the number of places labelled right, and the number of places."""
        inputs = batch.inputs.to(self.runtime.device)
        if inputs.is_floating_point():
            inputs = inputs.to(self.dtype)
        targets = batch.targets.to(self.runtime.device)
        logits: Tensor = network(inputs).float()
        # max: argmax is eight times slower on CPUs.
        right = logits.detach().max(1).indices == targets
        return self.task.loss(logits, targets), right.sum(), targets.numel()

    def _measure_accuracy(self) -> None:
        self.progress.total_accuracy, self.progress.heldout_loss = self.evaluate()
        self.progress.evaluated_at = self.progress.step

    def _complete_last_row(self) -> None:
        """Run the last evaluation of a run that was stopped just before it."""
        self._measure_accuracy()
        if self.runtime.is_first:
            rewrite_last_row(self.config, self.progress.step, self.progress.evaluation())

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """Return the fraction of held-out places labelled right, and the mean loss over them; ranks divide the work."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.runtime.device)
        share = max(1, self.config.batch_size // self.runtime.world_size)
        firsts = range(self.runtime.rank * share, self.task.num_heldout, self.runtime.world_size * share)
        for first in firsts:
            batch = self.task.heldout(first, min(first + share, self.task.num_heldout))
            loss, correct, places = self._loss(self.model, batch)
            sums += torch.stack([correct.double(), loss.double() * places, correct.new_tensor(places).double()])
        num_correct, losses, num_places = all_reduce_sum_(sums, self.runtime.group).tolist()
        return num_correct / num_places, losses / num_places

    # Checkpoints

    def _save(self) -> None:
        now = time.perf_counter()
        self.progress.seconds += now - self._begun
        self._begun = now
        state = {"progress": vars(self.progress), "config": as_dict(self.config)}
        self.checkpointer.save(
            self.progress.step,
            self.model,
            self.optimizer,
            user_state=broadcast_object(state, self.runtime.group),
            rank_state={"rng": torch.get_rng_state()},
        )

    def _resume(self) -> None:
        latest = self.checkpointer.latest()
        if latest is None:
            return
        # First, as loading another task's parameters would raise a less helpful error.
        self._refuse_other_config(latest)
        loaded = self.checkpointer.load(self.model, self.optimizer)
        self.progress = Progress(**loaded.user_state["progress"])
        if loaded.rank_state is not None:
            torch.set_rng_state(loaded.rank_state["rng"])
        if self.runtime.is_first:
            print(f"resumed at step {loaded.step} from {loaded.path}", flush=True)

    def _refuse_other_config(self, checkpoint: Path) -> None:
        """Raise ArgumentError, naming the keys, if the run was started with other options that define it."""
        mine, theirs = flat(as_dict(self.config)), flat(_saved_config(checkpoint, self.runtime.group))
        keys = [
            key
            for key in sorted(mine.keys() | theirs.keys())
            if key not in FREE_ON_RESUME and key.split(".")[0] not in FREE_ON_RESUME
        ]
        changed = [
            f"{key}={theirs.get(key)} there, {mine.get(key)} here" for key in keys if mine.get(key) != theirs.get(key)
        ]
        if changed:
            raise ArgumentError(
                f"{self.config.run_folder} holds a run with other options: {'; '.join(changed)}. Give another "
                "wandb_name or output_dir, or checkpoint.resume=restart to remove that run"
            )

    def _restart_if_asked(self) -> None:
        with raise_on_all_ranks("remove the run", self.runtime.group):
            folder = self.config.run_folder
            try:
                if self.config.checkpoint.resume == "restart" and self.runtime.is_first and folder.exists():
                    shutil.rmtree(folder)
            except OSError as error:
                raise ArgumentError(f"checkpoint.resume=restart cannot remove {folder}: {error}") from None

    # Log and summary

    def _open_log(self) -> None:
        with raise_on_all_ranks("open the log", self.runtime.group):
            if not self.runtime.is_first or self.progress.step >= self.config.steps:
                return
            try:
                self.log = RunLog(self.config, self.progress.step)
                keep_overflows_before(self.config.run_folder / OVERFLOWS, self.progress.step)
                save_yaml(self.config, self.config.run_folder / "config.yaml", self.command)
            except OSError as error:
                raise ArgumentError(f"output_dir={self.config.output_dir} cannot be written: {error}") from None

    def _summarise(self, stopped: bool) -> None:
        """Print a one-line summary of the run, and write it to summary.json."""
        path, scale = self.checkpointer.latest(), self.optimizer.get_loss_scale().item()
        if not self.runtime.is_first:
            return
        progress = self.progress
        summary = {
            "run": self.config.run_name,
            "step": progress.step,
            "steps": self.config.steps,
            "total_accuracy": _or_none(progress.total_accuracy),
            "heldout_loss": _or_none(progress.heldout_loss),
            "skipped": progress.skipped,
            "scale": scale,
            "zero_grad_fraction": progress.zero_grad_fractions / max(1, progress.step),
            "seconds": progress.seconds,
            "ranks": self.runtime.world_size,
            "checkpoint": str(path),
        }
        text = json.dumps(summary, indent=2, allow_nan=False)
        (self.config.run_folder / "summary.json").write_text(text + "\n", encoding="utf-8")
        state = "stopped by a signal; run the same command to go on" if stopped else "done"
        print(
            f"{state}: step {progress.step} of {self.config.steps}, "
            f"{self.task.told(progress.total_accuracy, progress.heldout_loss)}, "
            f"{progress.skipped} skipped, scale {scale:g}, zero gradients {summary['zero_grad_fraction']:.1%}, "
            f"{progress.seconds:.0f} s, {path}",
            flush=True,
        )


def _or_none(number: float) -> float | None:
    """Return a number that JSON has."""
    return number if math.isfinite(number) else None


def _saved_config(checkpoint: Path, group: ProcessGroup | None) -> dict[str, Any]:
    """Return the options of the run that saved ``checkpoint``. Raises CheckpointError, on all ranks alike."""
    with raise_on_all_ranks("read the options of the run", group):
        user_state = unflatten(Manifest.read(checkpoint).trees.get("user"), {})
        if not isinstance(user_state, dict) or not isinstance(user_state.get("config"), dict):
            raise CheckpointError(
                f"{checkpoint} was not saved by megascale.train: it does not say with which options; give another "
                "wandb_name or output_dir"
            )
    saved: dict[str, Any] = user_state["config"]
    return saved
