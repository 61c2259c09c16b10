"""The training loop: data, model, MixedPrecisionOptimizer, checkpoints, metrics, and a clean stop."""

import json
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megascale.checkpoint import Checkpointer
from megascale.checkpoint.agreement import raise_on_all_ranks
from megascale.checkpoint.manifest import Manifest
from megascale.checkpoint.nest import unflatten
from megascale.debug import report_overflows, watch
from megascale.errors import ArgumentError, CheckpointError
from megascale.host_view import HostView
from megascale.train.build import DTYPES, build_schedule, build_task, build_wrapped_optimizer
from megascale.train.config import FREE_ON_RESUME, TrainConfig, as_dict, flat
from megascale.train.run_log import RunLog, keep_overflows_before
from megascale.train.runtime import Runtime
from megascale.train.tasks import Batch
from megascale.utils.collectives import all_gather_object, all_reduce_sum_


@dataclass
class Progress:
    """The progress of a run, over all interruptions."""

    step: int = 0
    skipped: int = 0
    zero_grad_fractions: float = 0.0
    """Sum over steps."""
    seconds: float = 0.0
    total_accuracy: float = math.nan
    """Of the last evaluation, of all held-out data; NaN before the first. So is the next."""
    heldout_loss: float = math.nan
    evaluated_at: int = -1
    """Number of steps at the last evaluation."""


class Trainer:
    """One run on one rank. Its data depends only on seed and step, so it may be interrupted at any step."""

    def __init__(self, config: TrainConfig, runtime: Runtime) -> None:
        if config.batch_size % runtime.world_size:
            raise ArgumentError(
                f"batch_size={config.batch_size} must be a multiple of the {runtime.world_size} ranks that share it"
            )
        self.config = config
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
        folder, saving = config.run_folder / "checkpoints", config.checkpoint
        self.checkpointer = Checkpointer(folder, keep_last=saving.keep_last, async_save=saving.async_save)
        self.progress = Progress()
        self.view = HostView()
        self.log: RunLog | None = None
        self._stop_seen = False

    def run(self) -> int:
        """Train to the last step, or until a signal. Returns the exit status."""
        self.start()
        progress, started = self.progress, self.progress.step
        try:
            while progress.step < self.config.steps and not self._stop_seen:
                self._step(progress.step)
                if progress.step < self.config.steps:
                    self._evaluate_and_save_if_due()
            finished = progress.step >= self.config.steps
            if finished and progress.evaluated_at != progress.step:
                self._measure_accuracy()
            if progress.step > started or self.checkpointer.latest() is None:
                self._observe(self.view.flush())
                self._save()
            self.checkpointer.wait()
        finally:
            if self.log is not None:
                self.log.close()
        self._summarise("done" if finished else "stopped by a signal; run the same command to go on")
        return 0 if finished else 128 + (self.runtime.stop_signal or 2)

    def start(self) -> None:
        """Resume from the run folder's latest checkpoint, or start anew, and open the log."""
        folder, is_first = self.config.run_folder, self.runtime.is_first
        with raise_on_all_ranks("remove the run", self.runtime.group):
            try:
                if self.config.checkpoint.resume == "restart" and is_first and folder.exists():
                    shutil.rmtree(folder)
            except OSError as error:
                raise ArgumentError(f"checkpoint.resume=restart cannot remove {folder}: {error}") from None
        self._resume()
        self.schedule = build_schedule(self.config, self.optimizer, self.progress.step - self.progress.skipped)
        overflows = folder / "overflows.jsonl"
        with raise_on_all_ranks("open the log", self.runtime.group):
            try:
                if is_first and self.progress.step < self.config.steps:
                    self.log = RunLog(self.config, self.progress.step)
                    keep_overflows_before(overflows, self.progress.step)
                    OmegaConf.save(OmegaConf.structured(self.config), folder / "config.yaml")  # which config= reads
            except OSError as error:
                raise ArgumentError(f"output_dir={self.config.output_dir} cannot be written: {error}") from None
        self.reporter = report_overflows(self.optimizer, model=self.network, path=overflows)
        self.module_watch = watch(self.model) if self.config.watch else None
        self._begun = time.perf_counter()

    def _step(self, step: int) -> None:
        started = time.perf_counter()
        loss, correct, places = self._loss(self.network, self._batch(step))
        self.optimizer.zero_grad()
        self.optimizer.scale_loss(loss).backward()
        scale, [lr, *_] = self.optimizer.get_loss_scale(), self.schedule.get_last_lr()
        result = self.optimizer.step()
        self.schedule.step(result.success)
        # The number of ranks that were told to stop travels with the row: all of them stop at the same step.
        stop = torch.full_like(loss, bool(self.runtime.stop_signal), dtype=torch.float64, requires_grad=False)
        shared = torch.stack([loss.detach().double(), correct.double() / places, stop])
        all_reduce_sum_(shared, self.runtime.group)
        row: dict[str, Tensor | float] = {
            "step": step,
            "loss": shared[0] / self.runtime.world_size,
            "batch_accuracy": shared[1] / self.runtime.world_size,
            "grad_norm": result.grad_norm,
            "scale": scale,
            "skipped": result.success.logical_not(),
            "zero_grad_fraction": result.num_zeros_in_grad / self.num_params,
            "lr": lr,
            "samples_per_second": self.config.batch_size / (time.perf_counter() - started),
            "stop": shared[2],
        }
        self._observe(self.view.push(row))
        self.progress.step = step + 1

    def _evaluate_and_save_if_due(self) -> None:
        if self.progress.step % self.config.evaluate_every == 0:
            self._measure_accuracy()
        every = self.config.checkpoint.every
        if every and self.progress.step % every == 0 and not self._stop_seen:
            self._observe(self.view.flush())
            if not self._stop_seen:  # after a stop run() saves
                self._save()

    def _observe(self, row: dict[str, float] | None) -> None:
        """Process the numbers of an earlier step, which are the same on all ranks."""
        if row is None:
            return
        self._stop_seen = row.pop("stop") > 0 or self._stop_seen
        row |= {"step": int(row["step"]), "skipped": int(row["skipped"])}
        self.progress.skipped += int(row["skipped"])
        self.progress.zero_grad_fractions += row["zero_grad_fraction"]
        if self.log is not None:
            evaluation = {name: getattr(self.progress, name) for name in ("total_accuracy", "heldout_loss")}
            self.log.write(row | evaluation)

    def _batch(self, step: int) -> Batch:
        """Return this rank's samples of a step."""
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

    @torch.no_grad()
    def _measure_accuracy(self) -> None:
        """Measure the fraction of held-out places labelled right, and the mean loss; ranks divide the work."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.runtime.device)
        share = max(1, self.config.batch_size // self.runtime.world_size)
        for first in range(self.runtime.rank * share, self.task.num_heldout, self.runtime.world_size * share):
            batch = self.task.heldout(first, min(first + share, self.task.num_heldout))
            loss, correct, places = self._loss(self.model, batch)
            sums += torch.stack([correct.double(), loss.double() * places, correct.new_tensor(places).double()])
        num_correct, losses, num_places = all_reduce_sum_(sums, self.runtime.group).tolist()
        self.progress.total_accuracy, self.progress.heldout_loss = num_correct / num_places, losses / num_places
        self.progress.evaluated_at = self.progress.step

    def _save(self) -> None:
        now = time.perf_counter()
        self.progress.seconds, self._begun = self.progress.seconds + now - self._begun, now
        state = {"progress": vars(self.progress), "config": as_dict(self.config)}
        self.checkpointer.save(
            self.progress.step,
            self.model,
            self.optimizer,
            user_state=all_gather_object(state, self.runtime.group)[0],
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
        with raise_on_all_ranks("read the options of the run", self.runtime.group):
            user: Any = unflatten(Manifest.read(checkpoint).trees.get("user"), {})
            if not isinstance(user, dict) or not isinstance(user.get("config"), dict):
                raise CheckpointError(
                    f"{checkpoint} was not saved by megascale.train: it does not say with which options; give another "
                    "wandb_name or output_dir"
                )
        mine, theirs = flat(as_dict(self.config)), flat(user["config"])
        changed = [
            f"{key}={theirs.get(key)} there, {mine.get(key)} here"
            for key in sorted(mine.keys() | theirs.keys())
            if {key, key.partition(".")[0]}.isdisjoint(FREE_ON_RESUME) and mine.get(key) != theirs.get(key)
        ]
        if changed:
            raise ArgumentError(
                f"{self.config.run_folder} holds a run with other options: {'; '.join(changed)}. Give another "
                "wandb_name or output_dir, or checkpoint.resume=restart to remove that run"
            )

    def _summarise(self, state: str) -> None:
        """Print a one-line summary of the run, and write it to summary.json."""
        path, scale, progress = self.checkpointer.latest(), self.optimizer.get_loss_scale().item(), self.progress
        if not self.runtime.is_first:
            return
        zeros = progress.zero_grad_fractions / max(1, progress.step)
        summary = {name: value if math.isfinite(value) else None for name, value in vars(progress).items()}
        summary |= {"run": self.config.run_name, "steps": self.config.steps, "scale": scale}
        summary |= {"zero_grad_fraction": zeros, "ranks": self.runtime.world_size, "checkpoint": str(path)}
        text = json.dumps(summary, indent=2, allow_nan=False)
        (self.config.run_folder / "summary.json").write_text(text + "\n", encoding="utf-8")
        print(
            f"{state}: step {progress.step} of {self.config.steps}, "
            f"{self.task.told(progress.total_accuracy, progress.heldout_loss)}, "
            f"{progress.skipped} skipped, scale {scale:g}, zero gradients {zeros:.1%}, {progress.seconds:.0f} s, "
            f"{path}",
            flush=True,
        )
