"""StepResult: what a step did. CapturedStep: what a graph keeps of the step that it holds."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, UntypedStorage

from megascale.kernels import GradWeights
from megascale.step.observers import StepRecord
from megascale.step.update import OverflowFlags


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


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """What a graph keeps of the step that it holds: tensors that replays write, and the host reads after each, or read.

    Other steps, eager or of another graph, may come between two replays.

    Attributes:
        record: what observers are told of each replay.
        overflow_flags: which main params did not fit their model params.
        weights: of each member's statistics.
        result: what the step returned.
        settings: by name, numbers and objects that are in the graph as they were.
        layout: where all that the step updates was; see :meth:`StepRecipe.memory_layout`.
        memory: the storages of weights, gradients, main params and state: while the graph holds them, no replay writes
            memory that is another's. Empty once the library has moved what lay in them.
    """

    record: StepRecord
    overflow_flags: list[OverflowFlags]
    weights: list[GradWeights | None]
    result: StepResult | None
    settings: dict[str, Any]
    layout: list[object]
    memory: list[UntypedStorage]
