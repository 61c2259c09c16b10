"""Detects a loss scale that can fall no further: gradients overflow while it is at its minimum.

The scale is on the device. The host looks at it only after an overflow, and never waits: on a CPU it reads the scale at
once, on an accelerator it starts a copy and has it one step later, when it learns of the next overflow.
"""

from torch import Tensor

from megascale.grad_scaler import MegatronGradScaler
from megascale.host_view import HostView

ROUNDING = 1 + 1e-6
"""The scale is fp32, its minimum is not."""


class ScaleFloor:
    """Counts overflows in a row at the smallest scale. Every rank counts the same, as all have the same scale."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin the count anew."""
        self._count = 0
        self._unknown = 0  # overflows just before, for which the scale is not known yet
        self._view: HostView | None = None

    def observe(self, overflowed: bool, scaler: MegatronGradScaler | None) -> int:
        """Count one step, before its loss scale changes. Returns the count.

        Args:
            overflowed: whether the host knows of an overflow, in this step or the one before.
            scaler: None, and one whose scale never falls, count nothing.
        """
        lowest = None if scaler is None else scaler.lowest_scale
        if not overflowed or scaler is None or lowest is None:
            self.clear()
            return 0
        scale = self._read(scaler.live_scale)
        if scale is None:
            self._unknown += 1
        elif scale <= lowest * ROUNDING:
            # An overflow whose scale came too late has left it at the minimum.
            self._count, self._unknown = self._count + 1 + self._unknown, 0
        else:
            self._count = self._unknown = 0
        return self._count

    def _read(self, scale: Tensor) -> float | None:
        """Return the scale, shape [1], as far as it is known without waiting."""
        if scale.device.type == "cpu":
            return float(scale.tolist()[0])
        self._view = self._view or HostView()
        late = self._view.push_vector(["scale"], scale)
        return None if late is None else late["scale"]
