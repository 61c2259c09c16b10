"""What the host may know of the device without waiting for it: values of one step earlier."""

from collections.abc import Mapping

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

    def push(self, values: Mapping[str, Tensor | float]) -> dict[str, float] | None:
        """Start copying ``values`` (one-element tensors or numbers); return what the previous push held, or None."""
        previous, self._pending = self._pending, _Copy(values)
        return previous.read() if previous is not None else None

    def flush(self) -> dict[str, float] | None:
        """Return the last push's values, waiting for them, and forget them."""
        previous, self._pending = self._pending, None
        return previous.read() if previous is not None else None


class _Copy:
    """One copy under way. The buffer lives until it is read."""

    def __init__(self, values: Mapping[str, Tensor | float]) -> None:
        self._numbers = {name: float(value) for name, value in values.items() if not isinstance(value, Tensor)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        self._order = list(values)
        self._names = list(tensors)
        self._event: torch.Event | None = None
        self._buffer: Tensor | None = None
        if not tensors:
            return
        device = next((value.device for value in tensors.values() if value.device.type != "cpu"), torch.device("cpu"))
        exact = torch.float32 if device.type == "mps" else torch.float64
        row = torch.stack(
            [value.detach().reshape(()).to(device, exact, non_blocking=True) for value in tensors.values()]
        )
        if device.type == "cpu":
            self._buffer = row
            return
        self._buffer = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
        self._buffer.copy_(row, non_blocking=True)
        self._event = torch.Event(device)
        self._event.record()

    def read(self) -> dict[str, float]:
        if self._event is not None:
            self._event.synchronize()
        read: list[float] = self._buffer.tolist() if self._buffer is not None else []
        known = self._numbers | dict(zip(self._names, read, strict=True))
        return {name: known[name] for name in self._order}
