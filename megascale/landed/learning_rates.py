"""GroupRates: the learning rates of param groups, as numbers on the host and tensors on the device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megascale.base_optimizer import MegascaleOptimizer
from megascale.errors import ArgumentError, UsageError
from megascale.step.arguments import device_of
from megascale.utils.transfer import to_device_async


class GroupRates:
    """The learning rates of an optimizer's param groups: numbers on the host, and what ``group["lr"]`` holds.

    Attributes:
        numbers: per group, the rate that the schedule has computed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.numbers: list[float] = [number_of(group["lr"]) for group in optimizer.param_groups]
        self._written: list[tuple[Tensor, int] | None] = [None] * len(self.numbers)
        self._device = device_of(optimizer)
        # torch's fused kernels read fp32 only
        self._dtype = torch.float64 if isinstance(optimizer, MegascaleOptimizer) else torch.float32

    def require_same_groups(self) -> None:
        """Raise UsageError if groups were added or removed."""
        if len(self.numbers) != len(self._optimizer.param_groups):
            raise UsageError(
                f"there were {len(self.numbers)} param groups when the schedule was built, now there are "
                f"{len(self._optimizer.param_groups)}; add groups first; or set group['lr'] of each to what "
                "it was at the start, build the schedule anew, and call its step(True) schedule.last_epoch times"
            )

    def pull(self) -> None:
        """Take over rates that others put into the groups. A tensor that they wrote is read on the host.

        A number whose rounding the tensor still is keeps all its bits.
        """
        for index, group in enumerate(self._optimizer.param_groups):
            lr = group["lr"]
            if not isinstance(lr, Tensor):
                self.numbers[index] = lr
            elif (
                (written := self._written[index]) is None or written[0] is not lr or written[1] != lr._version
            ):  # by others
                value = number_of(lr)
                if value != number_of(torch.tensor(self.numbers[index], dtype=lr.dtype, device="cpu")):
                    self.numbers[index] = value
                self._written[index] = (lr, lr._version)

    def set_expected(self, numbers: list[Any]) -> None:
        """Assume that the groups hold ``numbers``, until :meth:`pull` finds otherwise."""
        if len(numbers) != len(self._optimizer.param_groups):
            raise ArgumentError(
                f"there are {len(numbers)} rates for {len(self._optimizer.param_groups)} param groups; build the same "
                "groups"
            )
        self.numbers = list(map(number_of, numbers))
        self._written = [None] * len(numbers)

    @contextmanager
    def as_numbers(self) -> Iterator[None]:
        """Return a context in which the groups hold numbers; at its end, take over the numbers that they hold."""
        groups = self._optimizer.param_groups
        held = [group["lr"] for group in groups]
        try:
            for group, number in zip(groups, self.numbers, strict=True):
                group["lr"] = number
            yield
            self.numbers = [number_of(group["lr"]) for group in groups]
        finally:
            for group, lr in zip(groups, held, strict=True):
                group["lr"] = lr

    @torch.no_grad()
    def push(self) -> None:
        """Write the numbers into the groups, as numbers or tensors, whichever they hold."""
        for index, (group, number) in enumerate(zip(self._optimizer.param_groups, self.numbers, strict=True)):
            lr = group["lr"]
            if isinstance(lr, Tensor):
                lr.fill_(number)
                self._written[index] = (lr, lr._version)
            else:
                group["lr"] = number

    @torch.no_grad()
    def select(self, landed: Tensor, before: list[float]) -> None:
        """Write the numbers into the groups if ``landed``, else ``before``: chosen on the device, without a sync."""
        landed = to_device_async(landed, self._device)
        for index, (group, old, new) in enumerate(zip(self._optimizer.param_groups, before, self.numbers, strict=True)):
            if old == new:
                continue
            lr = group["lr"]
            if not isinstance(lr, Tensor) or lr.device != self._device:
                lr = group["lr"] = torch.full((), old, dtype=self._dtype, device=self._device)
            # In place: a captured graph may read it there.
            lr.masked_fill_(landed, new)
            self._written[index] = (lr, lr._version)


def takes_rates_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's next step can read learning rates from tensors without a host sync."""
    if isinstance(optimizer, MegascaleOptimizer):
        # This asks about the update alone, not about the gather after it.
        return all(member.update.why_not_capturable() is None for member in optimizer._recipe.members)
    return all(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)


def number_of(value: Any) -> float:
    """Return a rate as Python's number: itself, or what a number of numpy or a tensor holds, which the host reads."""
    return value if type(value) in (int, float) else float(value)
