"""Device values that the host reads one step late, so that it need not wait for the device."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class HostView:
    """Carries named device scalars to the host, one step late, through pinned memory and an event.

    ``push`` starts a copy and returns the values of the push before. The host waits for the device only if the device
    is more than one whole step behind. Values that lie in host memory already are snapshots, never read through
    ``item()``.
    """

    def __init__(self) -> None:
        self._pending: _Copy | None = None
        self._read: _Copy | None = None  # whose memory and event the next copy takes

    def push(self, values: Mapping[str, Tensor | float]) -> dict[str, float] | None:
        """Start copying ``values`` (one-element tensors or numbers); return what the previous push held, or None."""
        tensors = [value for value in values.values() if isinstance(value, Tensor)]
        numbers = {name: None if isinstance(value, Tensor) else float(value) for name, value in values.items()}
        return self._push(_Copy(numbers, _row_of(tensors) if tensors else None, self._read))

    def push_vector(self, names: Sequence[str], vector: Tensor) -> dict[str, float] | None:
        """Start copying the elements of ``vector``, shape [len(names)]; return what the previous push held, or None."""
        row = vector.detach().clone() if vector.device.type == "cpu" else vector.detach()
        return self._push(_Copy(dict.fromkeys(names), row, self._read))

    def flush(self) -> dict[str, float] | None:
        """Return the last push's values, waiting for them, and forget them."""
        return self._push(None)

    def _push(self, copy: "_Copy | None") -> dict[str, float] | None:
        previous, self._pending = self._pending, copy
        self._read = previous if copy is not None else None
        return previous.read() if previous is not None else None


def known_values(vector: Tensor, view: HostView, *, late: bool) -> list[float] | None:
    """Return what the host knows of ``vector``, 1-D, without waiting: its elements where they lie in host memory.

    ``late``: they do not. Then they are those of the call before, whose copy ``view`` carries; None at the first call.
    """
    if not late:
        return list(vector.tolist())
    before = view.push_vector(list(map(str, range(len(vector)))), vector)
    return None if before is None else list(before.values())


def _row_of(tensors: list[Tensor]) -> Tensor:
    """Return one-element tensors as one, on the first device that is not the host."""
    device = next((value.device for value in tensors if value.device.type != "cpu"), torch.device("cpu"))
    return torch.stack([value.detach().reshape(()).to(device, torch.float64, non_blocking=True) for value in tensors])


class _Copy:
    """One copy in progress. Its buffer lives until the values are read.

    Args:
        numbers: by name, in the order in which they are returned; None for each element of ``row``.
        row: what is copied.
        read: a copy that was read, whose pinned memory and event serve again: both take the driver's time to make.
    """

    def __init__(self, numbers: dict[str, float | None], row: Tensor | None, read: "_Copy | None") -> None:
        self._numbers = numbers
        self._event: Any = None
        self._buffer = row
        self._form = None if row is None else (row.shape, row.dtype, row.device)
        if row is not None and row.device.type != "cpu":
            if read is not None and read._form == self._form and read._buffer is not None:
                self._buffer, self._event = read._buffer, read._event
            else:
                self._buffer = torch.empty(row.shape, dtype=row.dtype, device="cpu", pin_memory=True)
                # The host sleeps until it: CUDA's other events spin on a core that ranks share.
                self._event = torch.get_device_module(row.device).Event(blocking=True)
            self._buffer.copy_(row, non_blocking=True)
            # Without a stream it would be that of the device that is current.
            self._event.record(torch.get_device_module(row.device).current_stream(row.device))

    def read(self) -> dict[str, float]:
        if self._event is not None:
            self._event.synchronize()
        copied = iter([] if self._buffer is None else self._buffer.tolist())
        return {name: next(copied) if number is None else number for name, number in self._numbers.items()}
