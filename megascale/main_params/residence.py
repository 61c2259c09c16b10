"""Residence: where what an optimizer keeps lives. Beside its parameters, or away in host memory.

Tensors stay the same objects: whoever holds one finds its values, in host memory while they are away. What shares
memory shares it there too, and again after the return.
"""

from collections.abc import Iterable
from weakref import ref

import torch
from torch import Tensor

from megascale.errors import UsageError
from megascale.kernels import memory_fault
from megascale.utils.dtensors import held
from megascale.utils.host_memory import fixed, host_copies, in_storage, storage_bytes


class Residence:
    """Where tensors of one optimizer live, and their way there and back. Both ways keep every bit.

    Attributes:
        is_away: whether they are in host memory, between :meth:`leave` and :meth:`come_back`.
    """

    def __init__(self) -> None:
        self.is_away = False
        # Of each storage that is in host memory now: its tensors, its bytes there, and the device that they came from.
        # Weakly, as of tensors that are gone meanwhile nothing comes back.
        self._away: list[tuple[list[ref[Tensor]], Tensor, torch.device]] = []

    def require_here(self, call: str) -> None:
        """Raise UsageError if tensors are away. ``call``: what cannot be done then."""
        if self.is_away:
            raise UsageError(
                f"{call} needs the optimizer's main params, state and main grads, which offload() has moved to host "
                "memory; call optimizer.reload() before it"
            )

    @torch.no_grad()
    def leave(self, tensors: Iterable[Tensor], *, pin: bool) -> None:
        """Move tensors to host memory. Of a DTensor its local tensor goes. Device memory is free on return.

        Raises UsageError, with nothing moved, if there is no such host memory.
        """
        # Storage by storage, so that what shares memory here shares it there.
        groups: dict[tuple[torch.device, int], dict[int, Tensor]] = {}
        for tensor in map(held, tensors):
            if tensor.numel() > 0 and memory_fault(tensor) is None:
                storage = tensor.device, tensor.untyped_storage().data_ptr()
                groups.setdefault(storage, {})[id(tensor)] = tensor
        # All copies are made before the first tensor moves: the host may have too little memory.
        sources = [storage_bytes(next(iter(group.values()))) for group in groups.values()]
        copies = host_copies(sources, pin=pin)
        for (device, _), group, host in zip(groups, groups.values(), copies, strict=True):
            for tensor in group.values():
                tensor.data = in_storage(host, tensor)
            self._away.append(([ref(tensor) for tensor in group.values()], host, device))
        self.is_away = True

    @torch.no_grad()
    def come_back(self) -> None:
        """Move the tensors back to their devices. The host does not wait for copies from pinned memory.

        A tensor that others have moved stays where it is. If the device has too little memory the error is torch's;
        what has not come back yet is away still, and a later call goes on.
        """
        while self._away:
            tensors, host, device = self._away[-1]
            there = (tensor for tensor in (one() for one in tensors) if tensor is not None)
            address = host.untyped_storage().data_ptr()
            waiting = [one for one in there if one.device.type == "cpu" and one.untyped_storage().data_ptr() == address]
            if waiting:
                back = torch.empty_like(host, device=device, pin_memory=False)
                back.copy_(host, non_blocking=host.is_pinned())
                back = fixed(back)
                for tensor in waiting:  # into one storage again
                    tensor.data = in_storage(back, tensor, -host.storage_offset())
            self._away.pop()
        self.is_away = False
