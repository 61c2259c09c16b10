"""Errors of one rank that every rank must raise: they travel in the statistics vector, so that no collective is added.

Three kinds: what cannot be used on one rank, found before the decision; a main param whose rounding into fp16 is not
finite; and any other error after the decision. The last two travel with the next step. The host raises an agreed error
as soon as it can without waiting: at once where statistics lie in host memory, one step late on an accelerator.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from megascale.errors import MainParamOverflowError, NonFiniteParamError, listed
from megascale.host_view import HostView, known_values
from megascale.kernels import Statistic
from megascale.main_params.main_param import MainParam
from megascale.parallel import ParallelGroups
from megascale.step.consensus import Consensus, StepFacts
from megascale.step.update import OverflowFlags
from megascale.utils.dtensors import to_local
from megascale.utils.transfer import to_device_async


class DeferredErrors:
    """Collects this rank's errors, and raises them on all ranks of ``grad_stats`` at the same step.

    Args:
        groups: of the optimizer.
        device: of the statistics.

    Attributes:
        consensus: votes, and names what differs between ranks.
        times_replaced: how often main params were loaded, or reloaded from the model: all ranks must do that.
        on_host: whether statistics lie in host memory, where it reads them at once.
        no_errors: what :meth:`as_statistic` returns for none, and where another has counted them.
        view: carries statistics to the host, which learns of them one step late.
        flags: the roundings of this step and the one before, as the host learns of an overflow one step late.
    """

    def __init__(self, groups: ParallelGroups, device: torch.device) -> None:
        self.consensus = Consensus(groups)
        self.times_replaced = 0
        self.on_host = device.type == "cpu"
        self._device = device
        self.view = HostView()
        self._error: Exception | None = None
        self.flags: deque[list[OverflowFlags]] = deque(maxlen=2)
        # Updated in place: captured graphs hold these addresses.
        self._num_overflowed = torch.zeros((), dtype=torch.float64, device=device)
        self.no_errors = torch.zeros_like(self._num_overflowed)

    def clear(self) -> None:
        """Forget all errors."""
        self._error = None
        self.flags.clear()
        self._num_overflowed.zero_()
        self.view.flush()

    def as_statistic(self, error: Exception | None, facts: StepFacts | None) -> Tensor:
        """Return this rank's number of errors, 0-d, for the statistics vector: not 0 in sum if a rank has one.

        Args:
            error: found in this step.
            facts: what ranks must do alike; None with an error: this rank then does nothing that others could do alike.
        """
        if error is not None and self.consensus.is_alone:
            raise error
        self._error = self._error or error
        count = (self._error is not None) + (0 if self.consensus.is_alone else self.consensus.vote(facts))
        return self._num_overflowed + count if count else self._num_overflowed

    def raise_agreed(self, vector: Tensor) -> list[float] | None:
        """Raise on every rank alike if any had an error, as soon as the host can know. ``vector``: agreed statistics.

        Returns the statistics that the host can know without waiting: of this step, or of the one before, or None.
        While a graph is captured nothing can be known: it is called after each replay.
        """
        known = vector.tolist() if self.on_host else known_values(vector, self.view, late=True)
        if known is not None:
            self.raise_counted(known)
        return known

    def raise_counted(self, agreed: Sequence[float]) -> None:
        """Raise on every rank alike if agreed statistics, on the host, count an error."""
        if agreed[Statistic.ERRORS] != 0:
            self._raise_together()

    def record(self, error: Exception) -> None:
        """Record an error of this rank after the decision: :meth:`raise_local` or the next step raises it."""
        self._error = self._error or error

    def record_overflows(self, overflow_flags: list[OverflowFlags]) -> None:
        """Record, on the device, which main params did not fit their model params."""
        self.flags.append(overflow_flags)
        if flags := [to_device_async(flagged.overflowed, self._device) for flagged in overflow_flags]:
            together = flags[0] if len(flags) == 1 else torch.cat(flags)
            torch.sum(together, 0, dtype=self._num_overflowed.dtype, out=self._num_overflowed)

    def raise_local(self) -> None:
        """Raise at once where this rank is alone, as far as the host knows without waiting."""
        if not self.consensus.is_alone:
            return
        if self._error is not None or (self.on_host and self._num_overflowed.reshape(1).tolist() != [0.0]):
            self._raise_together()

    def _raise_together(self) -> None:
        error, outgrown = self._error, dict[str, MainParam]()
        for flagged in chain.from_iterable(self.flags) if error is None else ():
            there = zip(flagged.params, flagged.overflowed.tolist(), strict=True)
            outgrown |= {param.name: param for param, overflowed in there if overflowed}
        if outgrown:
            error = non_finite_params(outgrown.values()) or MainParamOverflowError(
                f"main param of {listed(outgrown)} is 65520 or more, which rounds to inf in fp16; the step has landed, "
                "and the main param is intact: go on in bf16, or from an earlier checkpoint with a lower learning rate"
            )
        self.clear()
        self.consensus.explain(error)


def non_finite_params(params: Iterable[MainParam]) -> NonFiniteParamError | None:
    """Return the error that names main params which hold inf or NaN; None if there are none. Reads the device."""
    names = [param.name for param in params if not bool(torch.isfinite(to_local(param.value())).all())]
    if not names:
        return None
    return NonFiniteParamError(
        f"main param of {listed(names)} holds inf or NaN, and with it every loss and gradient from now on: load a "
        "checkpoint from before; then look for what wrote it (a learning rate that is NaN or far too large, weights "
        "that were loaded so)"
    )
