"""StepObserver: learns on the host what a step did, without standing in its way. StepRecord: what it is told of one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from megascale.grad_scaler import MegatronGradScaler
from megascale.main_params.main_param import MainParam
from megascale.step.misuse import Statistics
from megascale.step.non_finite_module import ModuleEvents
from megascale.step.overflow_report import Entries

SeenGrads = Callable[[], Entries]
"""Returns which of a step's gradients held inf or NaN in backward, before any reduction. Waits for the device."""


class BetweenSteps(NamedTuple):
    """What was seen between two steps.

    Attributes:
        grads: by the listener; None without one.
        modules: by each watch of the model's modules.
        losses: that were scaled; None: unknown.
        micro_batch: 0 if there was one backward; None: unknown.
    """

    grads: SeenGrads | None
    modules: list[ModuleEvents]
    losses: list[Tensor] | None
    micro_batch: int | None


@dataclass(frozen=True)
class StepRecord:
    """What is kept of one step: references to what it has computed anyway.

    Attributes:
        step: its number. None for a step in a graph: the number of the last replay.
        params: of each member those whose gradients were measured on this rank.
        num_grads: how many of these had a gradient.
        counts: non-finite elements of each of these gradients, shape [params of all members]; None without gradients.
        sum_squares: of each member, the sums of squares of its gradients, shape [its params]; None without gradients.
        vector: the agreed statistics.
        found_inf: the decision's, fp32, 0-d: not 0 where the step was skipped, for an overflow or a spike.
        scaler: of the loss; None: it was not scaled.
        scale: the loss scale, a number or of shape [1]; None: not kept.
        seen: before it, since the step before.
    """

    step: int | None
    params: list[list[MainParam]]
    num_grads: int
    counts: Tensor | None
    sum_squares: tuple[Tensor | None, ...]
    vector: Tensor
    found_inf: Tensor
    scaler: MegatronGradScaler | None
    scale: Tensor | float | None
    seen: BetweenSteps


class StepObserver:
    """Listens to the steps of a recipe, as one of :attr:`megascale.step.recipe.StepRecipe.observers`.

    All ranks are told alike, so that it may communicate after what is rare, such as a skip. A clean step must cost no
    message, and wait for no device.
    """

    def on_step(self, agreed: Statistics | None, record: StepRecord) -> None:
        """Learn of a step that was decided on, before its loss scale changes and anything is updated; of each replay.

        What it raises ends the step.

        Args:
            agreed: what the host knows without waiting: this step's statistics where they lie in host memory, else
                those of the step before, or None.
            record: of this step. A replay's is the one of its capture, whose tensors hold the newest replay's values.
        """

    def reset(self) -> None:
        """Learn that other weights were loaded. A report of before may stay."""
