"""Writes tensors to a folder and reads them, with the planners and file format of torch.distributed.checkpoint.

Its planners assign the writes: a tensor that all ranks hold is written once, by the first of them; shards of a DTensor
or a ParamShard each by its own rank. Any rank can read them at any world size. The ranks coordinate here, before a
background thread begins to write.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from megascale.checkpoint.agreement import together
from megascale.checkpoint.manifest import CHUNK_BYTES, FileMark, mark_of
from megascale.checkpoint.marking import Marker
from megascale.checkpoint.metadata import METADATA_NAME
from megascale.errors import CheckpointError
from megascale.utils.collectives import all_gather_object, broadcast_object, group_rank


class _SavePlanner(DefaultSavePlanner):
    """Writes the staged copies of tensors where there are any, else the live tensors."""

    def __init__(self) -> None:
        # The first rank's copy is the one that counts (a buffer may differ between data-parallel ranks, as DDP allows).
        super().__init__(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
        self.staged: dict[MetadataIndex, Tensor] = {}

    def lookup_object(self, index: MetadataIndex) -> Any:
        staged = self.staged.get(index)
        return super().lookup_object(index) if staged is None else staged


class _Writer(FileSystemWriter):
    """Writes torch's format, one tensor after another.

    torch's own writer keeps its copies of views and device tensors until the whole file is written.

    Attributes:
        marks: size and checksum of the files that were written, by name.
    """

    marks: dict[str, FileMark]

    def write_tensors(self, plan: SavePlan, planner: _SavePlanner) -> list[WriteResult]:
        """Write one file, and wait until it is on disk. Its checksum is taken meanwhile."""
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        results: list[WriteResult] = []
        unread = 0  # bytes that the checksum's thread has not been told of: waking it for each small tensor costs more
        path = Path(self.path) / name
        with open(path, "xb") as stream, Marker(path) as marker:
            for item in plan.items:
                tensor = planner.lookup_object(item.index).detach().cpu()
                if tensor.untyped_storage().nbytes() != tensor.nbytes:
                    # torch.save would write the whole storage of a view.
                    tensor = tensor.clone()
                start = stream.tell()
                torch.save(tensor, stream)
                length = stream.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
                del tensor
                unread += length
                if unread >= CHUNK_BYTES:
                    stream.flush()
                    marker.written(start + length)
                    unread = 0
            stream.flush()
            marker.written(stream.tell())
            os.fsync(stream.fileno())
            self.marks = {name: marker.mark()}
        return results


class Staging:
    """Host memory for copies of tensors, kept from one save to the next: fresh pages cost more than the copies."""

    def __init__(self) -> None:
        self._held: dict[MetadataIndex, Tensor] = {}

    def copied(self, live: Mapping[MetadataIndex, Tensor]) -> dict[MetadataIndex, Tensor]:
        """Return copies, valid until the next call. Memory of tensors that are not in ``live`` is freed."""
        held = {index: self._held.get(index) for index in live}
        self._held = {
            index: there
            if there is not None and (there.shape, there.dtype) == (tensor.shape, tensor.dtype)
            else torch.empty(tensor.shape, dtype=tensor.dtype)
            for (index, tensor), there in zip(live.items(), held.values(), strict=True)
        }
        for index, tensor in live.items():
            self._held[index].copy_(tensor)
        return dict(self._held)


@dataclass
class PlannedWrite:
    """One rank's part of a save. It reads live tensors until `write` returns, or until `stage` has copied them."""

    folder: Path
    rank: int
    planner: _SavePlanner
    writer: _Writer
    plan: SavePlan
    metadata: Metadata = field(repr=False)

    def stage(self, memory: Staging) -> None:
        """Copy the tensors that this rank will write to host ``memory``, and release the live ones."""
        live = {item.index: self.planner.lookup_object(item.index).detach() for item in self.plan.items}
        self.planner.staged = memory.copied(live)
        self.planner.state_dict = {}

    def write(self) -> tuple[list[WriteResult], dict[str, FileMark]]:
        """Write this rank's file and wait until it is on disk. Returns the write results and the file's mark."""
        results = self.writer.write_tensors(self.plan, self.planner)
        return results, self.writer.marks

    def write_metadata(self, results: list[list[WriteResult]]) -> dict[str, FileMark]:
        """Write, on the first rank, the index of all files. ``results``: all ranks' write results."""
        self.writer.finish(self.metadata, results)
        return {METADATA_NAME: mark_of(self.folder / METADATA_NAME)}


def plan_write(tensors: Mapping[str, Tensor], folder: Path, group: ProcessGroup | None) -> PlannedWrite:
    """Plan the writes with the ranks of ``group``; every rank calls it with its own tensors."""
    rank = group_rank(group)
    planner = _SavePlanner()
    writer = _Writer(folder, sync_files=True, overwrite=False)
    local: SavePlan | None = None
    with together("plan the checkpoint", group):
        writer.set_up_storage_writer(rank == 0)
        planner.set_up_planner(dict(tensors), writer.storage_meta(), is_coordinator=rank == 0)
        local = writer.prepare_local_plan(planner.create_local_plan())
    locals_ = all_gather_object(local, group)
    agreed: tuple[list[SavePlan], Metadata] | None = None
    with together("plan the checkpoint", group):
        if rank == 0:
            plans, metadata = planner.create_global_plan([plan for plan in locals_ if plan is not None])
            agreed = writer.prepare_global_plan(plans), metadata
    agreed = broadcast_object(agreed, group)
    if agreed is None:
        raise CheckpointError("cannot plan the checkpoint: the first rank sent no plan")
    plans, metadata = agreed
    return PlannedWrite(folder, rank, planner, writer, planner.finish_plan(plans[rank]), metadata)


@dataclass
class PlannedRead:
    """One rank's reads, checked to exist in the right shape and dtype."""

    reader: "_Reader"
    planner: DefaultLoadPlanner
    plan: LoadPlan

    def read(self) -> None:
        """Fill the templates in place, one saved piece after another. Communicates nothing."""
        self.reader.read_tensors(self.plan, self.planner)


def plan_read(folder: Path, metadata: Metadata, templates: Mapping[str, Tensor]) -> PlannedRead:
    """Plan to fill ``templates``: whole tensors, DTensors or ParamShards. Communicates nothing.

    Raises:
        CheckpointError: a tensor is not in the data files, or with another shape or dtype than its template.
    """
    filled: dict[str, Tensor] = {}
    for key, template in templates.items():
        stored = metadata.state_dict_metadata.get(key)
        if stored is None and template.numel() == 0:
            # Empty tensors have no shards in files.
            continue
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(f"{folder} holds no tensor {key!r}")
        if (stored.size, stored.properties.dtype) != (template.size(), template.dtype):
            raise CheckpointError(
                f"{folder} holds {key!r} as {stored.properties.dtype} {tuple(stored.size)}, "
                f"expected {template.dtype} {tuple(template.size())}"
            )
        filled[key] = template
    reader = _Reader(folder)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(filled), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    return PlannedRead(reader, planner, plan)


class _Reader(FileSystemReader):
    """Reads torch's format, each saved piece once, in the order of the file.

    torch's own reader reads a piece again for every box that needs a part of it.
    """

    def read_tensors(self, plan: LoadPlan, planner: DefaultLoadPlanner) -> None:
        """Read the items of ``plan`` into the planner's tensors."""

        def place(item: ReadItem) -> tuple[str, int]:
            info = self.storage_data[item.storage_index]
            return info.relative_path, info.offset

        for _, items in groupby(sorted(plan.items, key=place), place):
            self._read_piece(list(items), planner)

    def _read_piece(self, items: list[ReadItem], planner: DefaultLoadPlanner) -> None:
        """Read one saved piece and copy the parts of it that ``items`` need; then it is freed."""
        info = self.storage_data[items[0].storage_index]
        with open(Path(self.path) / info.relative_path, "rb") as stream:
            saved = torch.load(self._slice_file(stream, info), map_location="cpu", weights_only=True)
        for item in items:
            wanted = planner.resolve_tensor(item).detach()
            found = narrow_tensor_by_index(saved, item.storage_offsets, item.lengths)
            if found.shape != wanted.shape:
                raise CheckpointError(
                    f"{info.relative_path} holds {tuple(found.shape)} of {item.dest_index.fqn!r}, expected "
                    f"{tuple(wanted.shape)}"
                )
            wanted.copy_(found)
