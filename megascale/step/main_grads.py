"""A wrapped optimizer's methods besides ``step()``, on main params and unscaled gradients: whole, or not at all.

**What goes wrong without it.** Sophia's ``update_hessian()``, SAM's ``first_step()`` and the ``train()`` and ``eval()``
of schedule-free optimizers read the parameters of their param groups and their gradients: 16-bit weights, and gradients
that are scaled. State that they make is 16-bit and in other units than that of ``step()``; what they write into the
weights is rounded away, or taken for loaded weights.

**The loan.** Inside the context the optimizer holds main params and unscaled gradients, as in its ``step()``:
:mod:`megascale.step.lending`. At its end model params become the roundings of main params, on all ranks together.

**All ranks or none.** Before the loan the ranks agree, by the statistics of a step, on whether gradients overflowed and
whether a rank has an error. At its end they agree on whether a rank's body has raised. If gradients overflowed, or a
body raised, all ranks put back what they held before.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megascale.errors import UsageError
from megascale.kernels import Decision
from megascale.step.host_update import HostUpdate
from megascale.step.member import StepMember
from megascale.step.snapshot import Snapshot
from megascale.step.update import OverflowFlags
from megascale.utils.collectives import raising_together

if TYPE_CHECKING:
    from megascale.step.recipe import StepRecipe


class LentGrads(NamedTuple):
    """The gradients that are lent.

    Attributes:
        scaled: this rank's, by id of the main param.
        decision: whose coefficient unscales them.
        overflowed: whether they hold inf or NaN on any rank.
    """

    scaled: Mapping[int, Tensor]
    decision: Decision
    overflowed: bool


class _Loan:
    """What one member lends: its main params, and their gradients.

    Args:
        member: whose optimizer holds them inside :meth:`open`.
        grads: what it sees of them.
    """

    def __init__(self, member: StepMember, grads: LentGrads) -> None:
        self.member = member
        self._decision = grads.decision
        self._params = [param for param in member.main_params if param.is_owned]
        self._before = Snapshot(member.optimizer, self._params)
        with_grads = [param for param in self._params if id(param) in grads.scaled]
        given = [grads.scaled[id(param)] for param in with_grads]
        unscaled = member.update.unscaled(with_grads, given, grads.decision)
        of_params = dict(zip(map(id, with_grads), unscaled, strict=True))
        self._grads = [of_params.get(id(param)) for param in self._params]
        self.has_dropped_grads = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Lend inside the context."""
        for param in self._params:
            param.decode()
        with self.member.update.lend(self._params, self._grads):
            self.member.is_lent = True
            try:
                yield
            finally:
                self.member.is_lent = False
                lent = [param for param, grad in zip(self._params, self._grads, strict=True) if grad is not None]
                self.has_dropped_grads = bool(lent) and all(param.main.grad is None for param in lent)

    def undo(self) -> None:
        """Put back what was written. Model params have not changed."""
        self._before.restore()
        for param in self._params:
            param.release()
            param.record_version()
        self.member.update.release_memory(self.member.main_params.units())

    def settle(self) -> list[OverflowFlags]:
        """Round main params into model params, and gather these. Returns which main params did not fit."""
        flags = self.member.update.round_(self._params, self._decision)
        main_params = self.member.main_params
        for unit in main_params.units():  # as a step does
            main_params.mark_written(unit)
        main_params.end_step()
        self.member.update.release_memory(main_params.units())  # state may lie elsewhere now
        return flags


@contextmanager
def lent_main_params(
    recipe: "StepRecipe", members: Sequence[StepMember], error: UsageError | None, *, with_grads: bool
) -> Iterator[list[StepMember]]:
    """Lend main params to the optimizers of ``members`` inside the context. All ranks enter and leave it together.

    Args:
        recipe: orders the steps of ``members``, and of others where these are some of a ChainedOptimizer's.
        error: what this rank has found already, where gradients are lent; all ranks raise it.
        with_grads: lend unscaled gradients, too, and take back what was written if they overflowed.

    Yields a list, empty at first: at the end it holds members whose optimizer has dropped the gradients it was lent.

    Raises:
        UsageError: on every rank alike, before anything has changed.
        Exception: what the body raises, once all ranks have put back what they held; where there are several, on all of
            them a RankError that names it, or the same MegascaleError.
    """
    for member in members:
        member.require_not_lent("main_grads()")
    with torch.no_grad():
        grads = recipe.grads_to_lend(error) if with_grads else recipe.no_grads_to_lend(members)
    loans, dropped, stack = list[_Loan](), list[StepMember](), ExitStack()
    try:
        with raising_together(recipe.groups.grad_stats):
            try:
                with torch.no_grad():
                    for member in members:
                        loans.append(_Loan(member, grads))
                        stack.enter_context(loans[-1].open())
                yield dropped
            finally:
                with torch.no_grad():
                    stack.close()
    except BaseException:  # of another rank, too; or the program is about to end
        _undo(loans)
        raise
    if grads.overflowed:
        _undo(loans)
        return
    with torch.no_grad():
        recipe.errors.record_overflows([flags for loan in loans for flags in loan.settle()])
    dropped += [loan.member for loan in loans if loan.has_dropped_grads]
    recipe.errors.raise_local()


@torch.no_grad()
def _undo(loans: Sequence[_Loan]) -> None:
    for loan in loans:
        loan.undo()


def require_lendable(member: StepMember, *, with_grads: bool) -> None:
    """Raise UsageError if a member cannot lend its main params now."""
    if member.ready is not None:
        raise UsageError(
            "main_grads(), train() or eval() came between prepare_grads() and the update that it decided: take the "
            "step with step_with_ready_grads() first, or call zero_grad()"
        )
    member.main_params.residence.require_here("main_grads()")
    if isinstance(member.update, HostUpdate):
        raise UsageError(
            "main_grads(), train() and eval() need main params beside the model params, and with "
            "optimizer_cpu_offload=True they are in host memory; build the optimizer without it"
        )
    if with_grads and not member.main_params.are_whole:
        raise UsageError(
            "main_grads() needs whole parameters, and this DistributedOptimizer cuts them at elements; build it with "
            "shard='parameters'"
        )
