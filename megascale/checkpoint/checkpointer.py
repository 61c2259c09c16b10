"""Checkpointer: saves model, optimizer with scaler, user state and each rank's own state as one atomic folder."""

import contextlib
import gc
import os
import shutil
import threading
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from megascale.base_optimizer import MegascaleOptimizer
from megascale.checkpoint import directory as folders
from megascale.checkpoint.agreement import gathered, named, raise_on_all_ranks
from megascale.checkpoint.contents import Contents, check_types, collect, require_one_kind
from megascale.checkpoint.files import write_file
from megascale.checkpoint.loading import Groups, LoadedCheckpoint, load
from megascale.checkpoint.manifest import Manifest
from megascale.checkpoint.nest import Tree
from megascale.checkpoint.pieces import HostMemory, Place, on_host, pieces_of
from megascale.errors import CheckpointError, MegascaleError, listed
from megascale.main_params.replica_check import digests
from megascale.parallel import ParallelGroups
from megascale.utils import call_site, validate
from megascale.utils.collectives import group_rank, group_size, host_group, raising_together, twin_group
from megascale.utils.consensus import differing, explained
from megascale.utils.unraised import UnraisedError


class Checkpointer(contextlib.AbstractContextManager["Checkpointer"]):
    """Saves into, and loads from, one directory that all ranks share.

    Every method is called by all ranks together, and so is the constructor: it makes a gloo group for a background
    thread, and where the ranks' own group has no backend for the host (NCCL alone), so that a rank with a slow disk
    does not run into NCCL's timeout. A save that is killed at any moment does not change earlier checkpoints.

    Args:
        directory: holds the checkpoints, `step_00000040` and so on; created at the first save.
        keep_last: how many complete checkpoints to keep, 1 or more; None keeps all. A removal that was killed half-way
            is finished by the next `save`.
        async_save: copy what this rank writes to host memory, then write it in a background thread. That memory is
            kept for the next save. An error of the write is raised by the next `save` or `wait`. Call `wait` (or leave
            the ``with`` block) before torch.distributed is destroyed.
        check_replicas: before each save, compare checksums of tensors that every rank holds whole (parameters, main
            params, optimizer state), and raise if ranks differ, as only the first rank's are saved. Costs one pass over
            them; only checksums are communicated. False: save the first rank's.
        groups: the ranks that save together; None is the whole world, or this process alone without torch.distributed.
            They must include every rank that holds a part of a DTensor.

    Raises:
        ArgumentError, ArgumentTypeError: on every rank alike, naming the argument.
        RankError: gloo cannot connect the ranks.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        async_save: bool = False,
        check_replicas: bool = True,
        groups: Groups = None,
    ) -> None:
        given = ParallelGroups.of(groups)
        with raising_together(given.grad_stats):  # before a group is made, for which all ranks must be there
            self.directory = validate.path("directory", directory)
            self.keep_last = None if keep_last is None else validate.integer("keep_last", keep_last, minimum=1)
            self.async_save = validate.flag("async_save", async_save)
            self.check_replicas = validate.flag("check_replicas", check_replicas)
        # A thread has a group of its own, as its messages must not interleave with those of training.
        self._group = twin_group(given.grad_stats) if self.async_save else host_group(given.grad_stats)
        self._groups = replace(given, grad_stats=self._group)
        self._background = _Background()
        self._memory = HostMemory()

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: MegascaleOptimizer | None = None,
        *,
        user_state: Any = None,
        rank_state: Any = None,
    ) -> Path:
        """Save everything as the checkpoint of ``step``; returns its path.

        Args:
            step: 0 or more; names the folder.
            model: its ``state_dict()`` is saved, every tensor in its own dtype.
            optimizer: a MixedPrecisionOptimizer, whose grad scaler is part of its state; a DistributedOptimizer (or
                ChainedOptimizer of them): every rank writes its own shard of main params, state and weights.
            user_state: any nest of dicts, lists, tuples, tensors, bytes, numbers, strings, dtypes and devices, the same
                on every rank.
            rank_state: such a nest of this rank's own, such as its random number generators and data position. It is
                loaded only at the same number of ranks, each its own; at another number ``load`` returns None for it on
                every rank. So put what must survive that (samples seen, epoch) into ``user_state``, and seed each rank
                anew if ``rank_state`` is None.

        Raises:
            ArgumentError: an argument cannot be saved.
            CheckpointError: the checkpoint exists already, cannot be written, or the ranks' states do not fit together;
                or an earlier background save failed. On all ranks alike.
        """
        self.wait()
        with named("save the checkpoint"):
            manifest, pieces = self._agreed_contents(step, model, optimizer, user_state, rank_state)
            folder = self._begin(step)
            with self._removed_on_error(folder):
                if not self.async_save:
                    return self._finish(pieces, map(on_host, pieces.values()), manifest, folder)
                with raise_on_all_ranks("copy the checkpoint to host memory", self._group):
                    copies = self._memory.copied([*pieces.values()])

        def finish() -> None:
            with named("save the checkpoint in the background"), self._removed_on_error(folder):
                self._finish(pieces, copies, manifest, folder)

        self._background.start(finish)
        return folders.path_of(self.directory, step)

    def wait(self) -> None:
        """Wait for a running background save. Raises its error, on all ranks alike."""
        self._background.join()

    def load(
        self,
        model: nn.Module,
        optimizer: MegascaleOptimizer | None = None,
        *,
        step: int | None = None,
        strict: bool = True,
    ) -> LoadedCheckpoint:
        """Load the latest checkpoint, or the one of ``step``; see :func:`load`."""
        self.wait()
        return load(self.directory, model, optimizer, step=step, strict=strict, groups=self._groups)

    def latest(self) -> Path | None:
        """Return the complete checkpoint of the highest step, the same on all ranks; None if there is none."""
        self.wait()

        def look() -> Path | None:
            return folders.latest(self.directory) if group_rank(self._group) == 0 else None

        return gathered("look for checkpoints", look, self._group)[0]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        else:
            # The block's own error is raised, not this one.
            with contextlib.suppress(MegascaleError):
                self.wait()

    def _agreed_contents(
        self, step: int, model: nn.Module, optimizer: MegascaleOptimizer | None, user_state: Any, rank_state: Any
    ) -> tuple[Manifest, dict[Place, Tensor]]:
        """Return the manifest, still without files, and what this rank writes. Raises on all ranks alike.

        That is, if what they hold does not fit together.
        """
        with raise_on_all_ranks("collect the state", self._group) as kinds:
            validate.integer("step", step, minimum=0)
            kinds.append(check_types(model, optimizer))
            lives = [] if optimizer is None else optimizer._live_states()
        require_one_kind(kinds)
        for live in lives:
            live.share_forms()
        collected: list[tuple[Contents, dict[Place, Tensor]]] = []
        rank = group_rank(self._group)

        @_collector_paused()
        def look() -> tuple[dict[str, int], Tree, dict[str, Any], list[Place]]:
            contents = collect(model, optimizer, user_state, rank_state, rank, self._groups)
            pieces = pieces_of(contents.tensors, rank)
            collected.append((contents, pieces))
            if group_size(self._group) == 1:
                return {}, contents.rank_tree, {}, []
            replicas = digests(contents.replicated(model)) if self.check_replicas else {}
            return {"step": step, **contents.digest()}, contents.rank_tree, replicas, list(pieces)

        seen = gathered("collect the state", look, self._group)
        if difference := explained(dict(enumerate(digest for digest, _, _, _ in seen))):
            raise CheckpointError(
                f"ranks save different contents: {difference} (checksums of names, shapes, dtypes and plain values); "
                "pass the same on every rank, and what differs by design as rank_state"
            )
        if parted := differing(dict(enumerate(replicas for _, _, replicas, _ in seen))):
            raise CheckpointError(
                f"ranks hold other values of {listed(parted)}: the replicas have diverged, and a checkpoint stores "
                "only one of them; reduce their gradients (DistributedDataParallel, or a GradSync), or pass "
                "check_replicas=False to save the first rank's"
            )
        [(contents, pieces)] = collected
        for _, _, _, places in seen[:rank]:
            for place in places:
                pieces.pop(place, None)
        return Manifest(step, group_size(self._group), contents.trees, [tree for _, tree, _, _ in seen]), pieces

    def _begin(self, step: int) -> Path:
        def create() -> Path | None:
            return folders.begin(self.directory, step) if group_rank(self._group) == 0 else None

        folder = gathered(f"create a folder in {self.directory}", create, self._group)[0]
        with raise_on_all_ranks(f"see the folder {folder}", self._group):
            if folder is None or not folder.is_dir():
                raise CheckpointError(
                    f"{folder}, made by the first rank, is not visible here; choose a directory on a file system that "
                    "all ranks share"
                )
        return folder

    def _finish(
        self, pieces: Mapping[Place, Tensor], data: Iterable[memoryview], manifest: Manifest, folder: Path
    ) -> Path:
        """Write this rank's file; once every rank has, write the manifest and give the folder its final name."""
        group = self._group
        is_first = group_rank(group) == 0
        path = folder / f"rank_{group_rank(group):05d}.safetensors"
        files = gathered(f"write {folder}", lambda: write_file(path, pieces, data), group)
        with raise_on_all_ranks(f"complete {folder}", group):
            if is_first:
                replace(manifest, files=dict(ChainMap(*files))).write(folder)
                folders.commit(folder, self.directory, manifest.step)
        with raise_on_all_ranks("remove old checkpoints", group):
            if is_first and self.keep_last is not None:
                folders.prune(self.directory, self.keep_last, manifest.step)
        return folders.path_of(self.directory, manifest.step)

    @contextlib.contextmanager
    def _removed_on_error(self, folder: Path) -> Iterator[None]:
        try:
            yield
        except Exception:
            if group_rank(self._group) == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise


def save(
    directory: str | os.PathLike[str],
    step: int,
    model: nn.Module,
    optimizer: MegascaleOptimizer | None = None,
    *,
    user_state: Any = None,
    rank_state: Any = None,
    keep_last: int | None = None,
    check_replicas: bool = True,
    groups: Groups = None,
) -> Path:
    """Save one checkpoint and wait until it is on disk; see :meth:`Checkpointer.save`."""
    checkpointer = Checkpointer(directory, keep_last=keep_last, check_replicas=check_replicas, groups=groups)
    return checkpointer.save(step, model, optimizer, user_state=user_state, rank_state=rank_state)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Run a decorated function without Python's garbage collector: of many new containers it finds none dead.

    It would visit all objects of the program again and again, which takes longer than to make these.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Background:
    """At most one background save, and its error until it is raised, or warned of at the end."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure = UnraisedError(_warn_of_failure)

    def start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except Exception as error:
                self._failure.note(error, str(error))

        # Not a daemon: a process that ends normally finishes its save.
        self._thread = threading.Thread(target=run, name="megascale checkpoint")
        self._thread.start()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if (error := self._failure.take()) is not None:
            raise error


def _warn_of_failure(message: str) -> None:
    """Warn of a save's error that no save() or wait() has raised."""
    call_site.warn(
        f"{message}; this background save failed, and no save() or wait() followed that could raise it: leave a "
        "with block, or call wait(), before the Checkpointer is dropped",
        RuntimeWarning,
    )
