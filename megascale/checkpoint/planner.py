"""Plans a save by torch.distributed.checkpoint, and copies what a background save will write."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from megascale.checkpoint.agreement import gathered, raise_on_all_ranks
from megascale.errors import CheckpointError
from megascale.utils.collectives import broadcast_object, group_rank


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a row-major tensor on the host, without a copy."""
    if not tensor.numel():
        return memoryview(bytearray())
    data: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)


class HostMemory:
    """Host memory for the copies of one rank, kept from one save to the next: fresh pages cost more than a copy."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    @torch.no_grad()
    def copied(self, live: Sequence[Tensor]) -> list[Tensor]:
        """Return copies, valid until the next call: row-major, on the host, pinned where a device copies to it."""
        there = self._tensors[: len(live)] + [torch.empty(0)] * (len(live) - len(self._tensors))
        for index, (copy, tensor) in enumerate(zip(there, live, strict=True)):
            if copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                pin = not tensor.is_cpu
                there[index] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin)
            if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
                # By one thread: torch would copy by all of its own, and wait for the slowest of them with each tensor.
                bytes_of(there[index])[:] = bytes_of(tensor)
            else:
                there[index].copy_(tensor, non_blocking=True)
        self._tensors = there
        for device in {tensor.device for tensor in live if not tensor.is_cpu}:
            torch.accelerator.current_stream(device).synchronize()
        return list(there)


class PlannedSave(DefaultSavePlanner):
    """What this rank writes of whole tensors, DTensors and ParamShards; what all ranks hold is written by the first.

    Attributes:
        plan: this rank's pieces.
    """

    plan: SavePlan

    def __init__(self, tensors: Mapping[str, Tensor], group: ProcessGroup | None) -> None:
        """Plan with the ranks of ``group``, which call it together, each with its own ``tensors`` by key."""
        # The first rank's copy is the one that counts (a buffer may differ between data-parallel ranks, as DDP allows).
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True)
        self._copies: dict[MetadataIndex, Tensor] | None = None
        is_first = group_rank(group) == 0
        self.set_up_planner(dict(tensors), None, is_coordinator=is_first)
        plans = gathered("plan the checkpoint", self.create_local_plan, group)
        with raise_on_all_ranks("plan the checkpoint", group):
            if is_first:
                plans, _ = self.create_global_plan(plans)
        self.plan = self.finish_plan(broadcast_object(plans, group)[group_rank(group)])

    def stage(self, memory: HostMemory) -> None:
        """Copy what this rank writes to host ``memory``, and release the live tensors."""
        copies = memory.copied([self.resolve_data(item) for item in self.plan.items])
        self._copies = dict(zip((item.index for item in self.plan.items), copies, strict=True))
        self.state_dict = {}

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return a piece: its copy where it was copied, else a view of the live tensor."""
        if self._copies is not None:
            return self._copies[write_item.index]
        data = super().resolve_data(write_item)
        if not isinstance(data, Tensor):
            raise CheckpointError(f"{write_item.index.fqn!r} is no tensor")
        return data.detach()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that this rank writes."""
        return sum(self.resolve_data(item).nbytes for item in self.plan.items)
