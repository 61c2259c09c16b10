"""Arguments and results of an update, for our kernels and for the optimizer's own ``step()``."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megascale.kernels import (
    Decision,
    Operands,
    TensorList,
)
from megascale.main_params.main_param import MainParam
from megascale.main_params.update_unit import UpdateUnit
from megascale.rules import Hyper


@dataclass(frozen=True)
class PendingUpdate:
    """A unit with its param group's options, and its local gradients, of which one is there, or is elsewhere.

    Attributes:
        call: made by :meth:`InnerUpdate.prepare`.
    """

    options: dict[str, Any]
    unit: UpdateUnit
    grads: TensorList
    call: "KernelCall | None" = None

    @property
    def params(self) -> Sequence[MainParam]:
        """The main params that have a gradient."""
        return self.grads.beside(self.unit.params)

    def trained(self) -> Iterator[MainParam]:
        """Yield the main params that have a gradient, and the empty pieces of those that have one elsewhere."""
        return chain(self.params, self.unit.counted)

    def pairs(self) -> Iterator[tuple[MainParam, Tensor]]:
        """Yield the main params that have a gradient, each with it."""
        for param, grad in zip(self.unit.params, self.grads, strict=True):
            if grad is not None:
                yield param, grad


@dataclass(frozen=True)
class OverflowFlags:
    """Main params of one device and, shape [len(params)], whether the rounding of each into fp16 was not finite."""

    params: list[MainParam]
    overflowed: Tensor


class KernelCall(NamedTuple):
    """What updates a unit: one call of a kernel. It is kept from step to step.

    Attributes:
        values: of the options, of which ``hyper`` and ``names`` were made.
        hyper: hyperparameters.
        names: of the state.
        operands: have gradients in an update only.
        counts: fp32, 1-D: the step counts of parameters that are trained, and whose elements other ranks own.
        rounds_to_fp16: whether a main param may grow too large for its model param.
        storages: of main params and state.
        addresses: of these.
    """

    values: list[Any]
    hyper: Hyper
    names: list[str]
    operands: Operands
    counts: list[Tensor]
    rounds_to_fp16: bool
    storages: list[torch.UntypedStorage]
    addresses: list[int]


MarkWritten = Callable[[UpdateUnit], None]
"""Takes a unit whose model params were written."""


class InnerUpdate(Protocol):
    """Applies one decision to all updates."""

    def create_states(self, options: dict[str, Any], params: Sequence[MainParam]) -> None:
        """Make the state of parameters of one group that have none."""

    def take_in_state(self) -> bool:
        """Copy what a program has put into the optimizer's state into its place; of an own ``step()`` it has none.

        Returns whether there was something. Raises UsageError, with nothing changed.
        """
        return False

    def required_state(self, options: dict[str, Any]) -> list[str]:
        """Return the keys without which a saved state of a parameter is not whole; none of an own ``step()`` is."""
        return []

    def check_options(self, options: dict[str, Any]) -> None:
        """Raise an error for options of a param group that :meth:`prepare` could not use."""

    def check_state(self, name: str, state: Mapping[str, Any]) -> None:
        """Raise StateDictError for a saved state of the parameter ``name`` that no step could read."""
        return

    def load_state(self, param: MainParam, state: dict[str, Any]) -> dict[str, Any]:
        """Return a loaded state, which was checked, as the optimizer's state is to show it: in its place, if any.

        :meth:`create_states` converts the rest.
        """
        return state

    def update_signature(self) -> str:
        """Return what decides how an update rounds, besides its options: the same on ranks whose bits are the same."""

    def why_not_capturable(self) -> str | None:
        """Return why updates cannot be part of a device's graph; None where they can."""

    def release_memory(self) -> None:
        """Let go of the memory of main params and state: it is read anew in the next step."""
        return

    def raise_failure(self) -> None:
        """Raise, once, what the update before has raised in another thread, where main params may be changed in part.

        Raises InnerStepError, GradientError.
        """
        return

    def forget_failure(self) -> None:
        """Warn of what :meth:`raise_failure` would raise, and forget it: all that it may have changed was replaced."""
        return

    def prepare(self, updates: Sequence[PendingUpdate]) -> list[PendingUpdate]:
        """Return the updates ready for :meth:`apply`, which must follow before their tensors can change.

        Checks all that the update reads or writes except gradients and model params. Raises a
        MegascaleError for what cannot be updated, naming it: no value has changed.
        """

    def apply(
        self, updates: Sequence[PendingUpdate], decision: Decision, mark_written: MarkWritten
    ) -> list[OverflowFlags]:
        """Update main params and model params where the step lands; change nothing where it is skipped.

        ``updates`` are what :meth:`prepare` returned.
        ``mark_written`` is called with the main params of each unit once their model params are written, or left alone.
        """
