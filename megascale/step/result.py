"""What a step leaves behind: its result, its count, the record that its observers are told of, what a graph keeps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from megascale.errors import StateDictError
from megascale.grad_scaler import MegatronGradScaler
from megascale.kernels import GradWeights
from megascale.main_params.main_param import MainParam
from megascale.step.misuse import Statistics
from megascale.step.overflow_report import Entries, NonFiniteModule
from megascale.step.update import OverflowFlags

SeenGrads = Callable[[], Entries]
"""Returns which of a step's gradients held inf or NaN in backward, before any reduction. Waits for the device."""


COUNT_KEYS = ("landed", "skipped")


class StepResult(NamedTuple):
    """What a step did: 0-d tensors on the parameters' device.

    Reading one on the host, as ``bool(result.success)`` does, waits for the device.

    Attributes:
        success: bool, False where the step was skipped.
        grad_norm: fp32, global L2 norm of the unscaled, unclipped gradients. Non-finite where they were.
        num_zeros_in_grad: fp64, zero elements of the gradients; NaN unless ``config.log_num_zeros_in_grad``.
    """

    success: Tensor
    grad_norm: Tensor
    num_zeros_in_grad: Tensor


SeenModule = Callable[[], NonFiniteModule | None]
"""Returns where a watch saw inf or NaN first between two steps, or None. Waits for the device."""


class BetweenSteps(NamedTuple):
    """What was seen between two steps.

    Attributes:
        grads: by the listener; None without one.
        modules: by each watch of the model's modules.
        losses: that were scaled; None: unknown.
        micro_batch: 0 if there was one backward; None: unknown.
    """

    grads: SeenGrads | None
    modules: list[SeenModule]
    losses: list[Tensor] | None
    micro_batch: int | None


@dataclass(frozen=True)
class StepRecord:
    """What is kept of one step: references to what it has computed anyway.

    Attributes:
        step: its number. None for a step in a graph: the number of the last replay.
        params: of each member those whose gradients were measured on this rank.
        weights: of each member's statistics, which a graph reads.
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
    weights: list[GradWeights]
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

    def on_step(self, agreed: Statistics | None, record: StepRecord, *, overflowed: bool) -> None:
        """Learn of a step that was decided on, before its loss scale changes and anything is updated; of each replay.

        What it raises ends the step.

        Args:
            agreed: what the host knows without waiting: this step's statistics where they lie in host memory, else
                those of the step before, or None.
            record: of this step. A replay's is the one of its capture, whose tensors hold the newest replay's values.
            overflowed: whether ``agreed`` tell of an overflow.
        """

    def reset(self) -> None:
        """Learn that other weights were loaded. A report of before may stay."""


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """What a graph keeps of the step that it holds: tensors that replays write, and the host reads after each, or read.

    Other steps, eager or of another graph, may come between two replays.

    Attributes:
        record: what observers are told of each replay.
        overflow_flags: which main params did not fit their model params.
        result: what the step returned.
        settings: by name, numbers and objects that are in the graph as they were.
        times_arranged: how often each member's main params were put into units: once more when a parameter has moved.
        memory: the storages of weights, gradients, main params and state: while the graph holds them, no replay writes
            memory that is another's. Empty once the library has moved what lay in them.
    """

    record: StepRecord
    overflow_flags: list[OverflowFlags]
    result: StepResult | None
    settings: dict[str, Any]
    times_arranged: list[int]
    memory: list[UntypedStorage]


class StepCounter:
    """Counts the steps of one optimizer, and continues from saved counts.

    Attributes:
        steps: taken since construction, landed or not.
        landings: how many of ``steps`` have landed: int64, 0-d, on the device. Updated in place: captured graphs hold
            this address.
    """

    def __init__(self, device: torch.device) -> None:
        self.steps = 0
        self.landings = torch.zeros((), dtype=torch.int64, device=device)
        self._taken_before = 0
        self._landed_before: int | Tensor = 0

    def count(self, success: Tensor, *, on_host: bool) -> None:
        """Count a step. ``success``: bool, 0-d, whether it lands. ``on_host``: count it among ``steps``, too."""
        self.landings.add_(success)
        self.steps += on_host

    @property
    def taken(self) -> int:
        """All steps, landed or not, those before a load too."""
        return self.steps + self._taken_before

    @property
    def landed(self) -> Tensor:
        """All steps that landed, those before a load too: int64, 0-d, on the device."""
        return self.landings + self._landed_before

    @property
    def skipped(self) -> Tensor:
        """All steps that were skipped, those before a load too: int64, 0-d, on the device."""
        return self.taken - self.landed

    def state_dict(self) -> dict[str, int]:
        """Return both counts. Waits for the device."""
        return {"landed": int(self.landed), "skipped": int(self.skipped)}

    def load_state_dict(self, counts: Mapping[str, int]) -> None:
        """Continue from counts that :func:`parse_counts` returned."""
        self._taken_before = counts["landed"] + counts["skipped"] - self.steps
        self._landed_before = counts["landed"] - self.landings


def parse_counts(given: Any) -> dict[str, int]:
    """Return saved counts, checked. Raises StateDictError."""
    counts = [given.get(key) for key in COUNT_KEYS] if isinstance(given, Mapping) else [None]
    if not all(type(count) is int and count >= 0 for count in counts):
        raise StateDictError(
            f"state dict's 'step_counts' must hold {' and '.join(map(repr, COUNT_KEYS))}, numbers from 0, got {given!r}"
        )
    return {key: given[key] for key in COUNT_KEYS}
