"""Writes tensors to a folder and reads them, with the planners and file format of torch.distributed.checkpoint.

Its planners assign the writes: a tensor that all ranks hold is written once, by the first of them; shards of a DTensor
or a ParamShard each by its own rank. Any rank can read them at any world size. The ranks coordinate here, before a
background thread begins to write.
"""

import os
import secrets
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import find_state_dict_object

from megascale.checkpoint.agreement import gathered, raise_on_all_ranks
from megascale.checkpoint.archive_writing import write_archives, write_by_torch
from megascale.checkpoint.cached_flattener import form_of
from megascale.checkpoint.earlier_index import METADATA_NAME
from megascale.checkpoint.index import index_of
from megascale.checkpoint.manifest import FileMark, Index, mark_of
from megascale.checkpoint.staging import Staging
from megascale.checkpoint.tensor_archive import TensorArchive, archive_of, read_archive
from megascale.errors import CheckpointError
from megascale.utils.collectives import all_gather_object, broadcast_object, group_rank
from megascale.utils.progress import advance


class _SavePlanner(DefaultSavePlanner):
    """Plans the writes of whole tensors, DTensors and ParamShards."""

    def __init__(self) -> None:
        # The first rank's copy is the one that counts (a buffer may differ between data-parallel ranks, as DDP allows).
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True)


class _Writer(FileSystemWriter):
    """Writes the index. It names no folder and no save, so that equal plans have equal indexes."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


@dataclass
class WritePlan:
    """What this rank writes of tensors of given names, shapes, dtypes and placements. It holds no tensors.

    Attributes:
        token: the same on all ranks that planned together.
        plan: this rank's pieces, in the order of its file; empty after :meth:`reduce`.
        metadata: torch's index of all pieces, without their places in the files; empty on all but the first rank.
        places: where every rank's pieces lie, by rank; on the first rank.
        index: says so, for the manifest; on the first rank.
        torch_index: the bytes of `.metadata`, which say so to torch's own functions.
        is_indexed: whether the first rank has been told where this rank's pieces lie.
    """

    token: str
    plan: SavePlan = field(repr=False)
    metadata: Metadata = field(repr=False)
    places: dict[int, list[WriteResult]] = field(default_factory=dict, repr=False)
    index: Index | None = field(default=None, repr=False)
    torch_index: bytes | None = field(default=None, repr=False)
    is_indexed: bool = False

    @cached_property
    def wanted(self) -> list[str | MetadataIndex]:
        """Each piece's tensor: the key of a whole one, torch's index of a part."""
        kinds = [(item.index, item.type is WriteItemType.TENSOR) for item in self.plan.items]
        return [index.fqn if is_whole else index for index, is_whole in kinds]

    @cached_property
    def archives(self) -> list[TensorArchive] | None:
        """Each piece's archive; None if torch writes one that is not known."""
        pieces = [item.tensor_data for item in self.plan.items if item.tensor_data is not None]
        found = [archive_of(piece.properties.dtype, piece.chunk.sizes) for piece in pieces]
        known = [archive for archive in found if archive is not None]
        return known if len(known) == len(found) else None

    @property
    def file_name(self) -> str:
        """The name of this rank's file."""
        return f"{self.plan.storage_data.prefix}0{DEFAULT_SUFFIX}"

    def live(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the live pieces of ``tensors``, in the order of the file."""
        state = dict(tensors)
        return [
            state[piece] if isinstance(piece, str) else find_state_dict_object(state, piece).detach()
            for piece in self.wanted
        ]

    def reduce(self, *, index_is_kept: bool) -> None:
        """Keep what the next save needs, once the first rank knows where this rank's pieces lie.

        The rest is a dozen objects for each tensor, which Python's garbage collector would visit again and again.
        ``index_is_kept``: no rank told the first one anew where its pieces lie.
        """
        self.is_indexed = True
        if self.archives is not None and len(self.wanted) == len(self.archives):
            self.plan = replace(self.plan, items=[])
        if index_is_kept:
            self.metadata = Metadata({})
            self.places.clear()


@dataclass
class PlannedWrite:
    """One rank's part of a save. It reads live tensors until `write` returns, or until `stage` has copied them."""

    folder: Path
    rank: int
    pieces: WritePlan
    tensors: Sequence[Tensor] = field(repr=False)

    def stage(self, memory: Staging) -> None:
        """Copy the tensors that this rank will write to host ``memory``, and release the live ones."""
        self.tensors = memory.copied(self.tensors, self.pieces.token)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that this rank writes."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def write(self) -> tuple[list[WriteResult] | None, dict[str, FileMark]]:
        """Write this rank's file and wait until it is on disk.

        Returns:
            Where its pieces lie, None if the first rank knows; and the file's mark by its name.
        """
        path = self.folder / self.pieces.file_name
        archives = self.pieces.archives
        if archives is None:
            lengths, mark = write_by_torch(path, map(_on_host, self.tensors))
        else:
            lengths = [archive.length for archive in archives]
            mark = write_archives(path, zip(archives, map(_on_host, self.tensors), strict=True))
        places = None if self.pieces.is_indexed and archives is not None else self._places(lengths)
        return places, {path.name: mark}

    def write_metadata(self, places: Sequence[list[WriteResult] | None]) -> dict[str, FileMark]:
        """Write, on the first rank, torch's index of all files, and make ours. ``places``: from `write`, by rank."""
        pieces, path = self.pieces, self.folder / METADATA_NAME
        pieces.places.update({rank: of_rank for rank, of_rank in enumerate(places) if of_rank is not None})
        if pieces.torch_index is None or any(of_rank is not None for of_rank in places):
            by_rank = [pieces.places[rank] for rank in range(len(places))]
            pieces.index = index_of(pieces.metadata, chain.from_iterable(by_rank))
            writer = _Writer(self.folder, sync_files=True, overwrite=False)
            writer.set_up_storage_writer(True)
            writer.finish(pieces.metadata, by_rank)
            pieces.torch_index = path.read_bytes()
        else:
            with open(path, "xb") as stream:
                stream.write(pieces.torch_index)
                stream.flush()
                os.fsync(stream.fileno())
        return {METADATA_NAME: mark_of(path)}

    def _places(self, lengths: Sequence[int]) -> list[WriteResult]:
        starts = accumulate(lengths, initial=0)
        name = self.pieces.file_name
        return [
            WriteResult(item.index, length, _StorageInfo(name, start, length))
            for item, length, start in zip(self.pieces.plan.items, lengths, starts, strict=False)
        ]


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.cpu().resolve_conj().resolve_neg().contiguous()


class Planning:
    """Plans saves, and keeps the plan for the next one while no rank's names, shapes, dtypes and placements change."""

    def __init__(self) -> None:
        self._signature: list[Any] = []
        self._revision: Any = None
        self._kept: WritePlan | None = None

    def forget(self) -> None:
        """Plan anew the next time, on all ranks: what the others know may be less than what they were told."""
        self._kept = None

    def plan(
        self, tensors: Mapping[str, Tensor], folder: Path, group: ProcessGroup | None, revision: Any = None
    ) -> PlannedWrite:
        """Plan the writes with the ranks of ``group``; every rank calls it with its own tensors.

        ``revision``: not None, and equal to that of the call before, where what the plan depends on is the same.
        """
        signature = self._signature

        def own_token() -> str | None:
            nonlocal signature
            if self._kept is None or revision is None or revision != self._revision:
                signature = [(key, form_of(tensor)) for key, tensor in tensors.items()]
            return self._kept.token if self._kept is not None and signature == self._signature else None

        tokens = set(gathered("plan the checkpoint", own_token, group))
        if self._kept is None or tokens != {self._kept.token}:
            self._kept = None
            self._kept, self._signature = _planned(tensors, folder, group), signature
        self._revision = revision
        pieces = self._kept
        live: list[Tensor] = []
        with raise_on_all_ranks("plan the checkpoint", group):
            live = pieces.live(tensors)
        return PlannedWrite(folder, group_rank(group), pieces, live)


def _planned(tensors: Mapping[str, Tensor], folder: Path, group: ProcessGroup | None) -> WritePlan:
    rank = group_rank(group)
    planner = _SavePlanner()
    writer = _Writer(folder, sync_files=True, overwrite=False)
    local: SavePlan | None = None
    with raise_on_all_ranks("plan the checkpoint", group):
        writer.set_up_storage_writer(rank == 0)
        planner.set_up_planner(dict(tensors), writer.storage_meta(), is_coordinator=rank == 0)
        local = writer.prepare_local_plan(planner.create_local_plan())
    locals_ = all_gather_object(local, group)
    agreed: tuple[list[SavePlan], str] | None = None
    metadata = Metadata({})
    with raise_on_all_ranks("plan the checkpoint", group):
        if rank == 0:
            plans, metadata = planner.create_global_plan([plan for plan in locals_ if plan is not None])
            agreed = writer.prepare_global_plan(plans), secrets.token_hex(8)
    agreed = broadcast_object(agreed, group)
    if agreed is None:
        raise CheckpointError("cannot plan the checkpoint: the first rank sent no plan")
    plans, token = agreed
    return WritePlan(token, planner.finish_plan(plans[rank]), metadata)


@dataclass
class PlannedRead:
    """One rank's reads, checked to exist in the right shape and dtype.

    Each saved piece is read once, in the order of the file; torch's own reader reads a piece again for every box that
    needs a part of it, and unpickles it.
    """

    folder: Path
    metadata: Metadata
    planner: DefaultLoadPlanner
    items: Sequence[ReadItem]

    @property
    def nbytes(self) -> int:
        """Bytes that `read` reads from files."""
        return sum(self._place(index).length for index in {item.storage_index for item in self.items})

    def read(self) -> None:
        """Fill the templates in place, one saved piece after another. Communicates nothing."""

        def place(item: ReadItem) -> tuple[str, int, str]:
            info = self._place(item.storage_index)
            return info.relative_path, info.offset, item.storage_index.fqn

        for _, items in groupby(sorted(self.items, key=place), place):
            self._read_piece(list(items))

    def _place(self, index: MetadataIndex) -> _StorageInfo:
        place: _StorageInfo = (self.metadata.storage_data or {})[index]
        return place

    def _read_piece(self, items: list[ReadItem]) -> None:
        """Read one saved piece and copy the parts of it that ``items`` need; then it is freed."""
        index = items[0].storage_index
        place = self._place(index)
        stored: Any = self.metadata.state_dict_metadata[index.fqn]
        sizes = next(piece.sizes for piece in stored.chunks if piece.offsets == index.offset)
        saved = torch.empty(sizes, dtype=stored.properties.dtype, device="cpu")
        try:
            with open(self.folder / place.relative_path, "rb") as stream:
                read_archive(stream, place.offset, place.length, saved)
        except (zipfile.BadZipFile, ValueError) as error:
            raise CheckpointError(
                f"{self.folder / place.relative_path} holds no {saved.dtype} {tuple(sizes)} of {index.fqn!r} where the "
                f"index says ({error}); load an earlier checkpoint"
            ) from error
        for item in items:
            wanted = self.planner.resolve_tensor(item).detach()
            found = saved
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                found = found.narrow(dim, offset, length)
            if found.shape != wanted.shape:
                raise CheckpointError(
                    f"{place.relative_path} holds {tuple(found.shape)} of {item.dest_index.fqn!r}, expected "
                    f"{tuple(wanted.shape)}"
                )
            wanted.copy_(found)
        advance(place.length)


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
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(filled), metadata, is_coordinator=True)
    plan = planner.finish_plan(planner.create_local_plan())
    return PlannedRead(folder, metadata, planner, plan.items)
