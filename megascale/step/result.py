"""StepResult: what a step did. CapturedStep: what a graph keeps of the step that it holds."""

from typing import NamedTuple

from torch import Tensor

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


class CapturedStep(NamedTuple):
    """What a graph keeps of the step that it holds: tensors that replays write, and the host reads after each, or read.

    Other steps, eager or of another graph, may come between two replays.

    Attributes:
        record: what observers are told of each replay.
        overflow_flags: which main params did not fit their model params.
        weights: of each member's statistics.
        result: what the step returned.
    """

    record: StepRecord
    overflow_flags: list[OverflowFlags]
    weights: list[GradWeights | None]
    result: StepResult | None
