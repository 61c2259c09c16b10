"""The whole step in a CUDA graph: captured once, replayed without Python, launches or host work.

What is decided on the device is decided anew in every replay: skips, growth and backoff of the scale, clipping. The
graph holds the memory of all that it reads and writes. So the host looks for little before a replay: learning rates,
weights that were loaded into the model, the gradients' addresses. While the device works it compares the rest with what
it was at the capture: where weights and state are, and settings that a graph cannot read anew.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megascale.errors import ArgumentTypeError, UsageError
from megascale.optimizer import MixedPrecisionOptimizer, StepResult
from megascale.utils import validate
from megascale.utils.calls import methods_outside_of_graphs
from megascale.utils.collectives import runs_on_streams
from megascale.utils.transfer import held_for_graph, is_capturing, to_device_async


@methods_outside_of_graphs
class StepGraph:
    """One training step of ``optimizer`` as a graph, alone or after forward and backward.

        graph = StepGraph(optimizer, lambda: optimizer.scale_loss(loss_fn(model(inputs), targets)).backward())
        for batch in data:
            inputs.copy_(batch[0]), targets.copy_(batch[1])
            result = graph.replay()

    Construction runs ``forward_backward`` ``warmup`` times, each followed by a step that changes nothing, and once more
    while it captures. Gradients stay at their addresses and are zeroed inside the graph. Write new inputs into the
    tensors that ``forward_backward`` reads. Learning rates become fp64 tensors of their param groups, which torch's LR
    schedulers write into; a number put into a param group is copied there by the next replay.

    Args:
        optimizer: on one accelerator; Adam, AdamW, SGD, Lion or Muon, whose updates read the decision on the device.
        forward_backward: forward and backward, through ``optimizer.scale_loss``. None: the graph holds the step alone;
            before each replay, write gradients into the tensors that were ``.grad`` at construction.
        warmup: runs before capture, at least 1: they compile kernels and make buffers. Eleven, as torch asks for where
            DistributedDataParallel is in forward, which times its first ten by events that no capture may hold.

    Attributes:
        output: what ``forward_backward`` returned while captured. Its tensors hold the values of the latest replay.

    Raises:
        ArgumentError, ArgumentTypeError: naming the argument.
        UsageError: for what cannot be captured, with the reason. Nothing has been trained.
    """

    def __init__(
        self,
        optimizer: MixedPrecisionOptimizer,
        forward_backward: Callable[[], Any] | None = None,
        *,
        warmup: int = 11,
    ) -> None:
        validate.integer("warmup", warmup, minimum=1)
        check_capturable(optimizer)
        if forward_backward is None and optimizer._reduces_in_backward:
            raise UsageError(
                "the step alone cannot be captured into a graph: its gradients are reduced by hooks in backward; give "
                "forward_backward"
            )
        self._optimizer = optimizer
        self._forward_backward = forward_backward
        device = optimizer._device
        optimizer._recipe.discard_prepared()  # of prepare_grads(): the graph holds a whole step
        module = torch.get_device_module(device)
        # An fp64 tensor of its own on the device for each group, as kernels read it.
        self._rates = [torch.empty((), dtype=torch.float64, device=device) for _ in optimizer.param_groups]
        self._place_rates()
        with torch.accelerator.device_index(device.index):  # streams and graphs are those of the current device
            stream = module.Stream(device)
            stream.wait_stream(module.current_stream(device))
            with module.stream(stream):
                for _ in range(warmup):
                    self._run_forward_backward()
                    optimizer._recipe.rehearse()
            module.current_stream(device).wait_stream(stream)
            self._grads = self._grad_pointers()
            if forward_backward is None:
                optimizer.get_loss_scale()  # the caller writes gradients that are scaled already
            self._graph = module.CUDAGraph()
            # Only this thread is restricted: a DataLoader's thread may allocate pinned memory during the capture.
            with module.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                self.output: Any = self._run_forward_backward()
                self._result = optimizer.step()
            self._captured, self._held = optimizer._recipe.captured(), held_for_graph()

    def replay(self) -> StepResult:
        """Run the step. Returns the same tensors each time, with the values of this replay.

        Raises:
            UsageError: gradients are not where they were when the graph was captured, or state was loaded or offloaded
                since; nothing has run. Also, when this replay has run as it was captured, for parameters or state that
                a program has moved, and for a setting that has changed.
            MainParamOverflowError: one step late, as :meth:`MixedPrecisionOptimizer.step` raises it.
        """
        self._place_rates()
        have_moved = self._grad_pointers() != self._grads
        self._optimizer._recipe.before_replay(self._captured, all_of_it=have_moved)
        if have_moved:
            raise UsageError(
                "gradients have moved since the graph was captured; keep them in place: zero_grad(set_to_none=False)"
            )
        self._graph.replay()
        self._optimizer._recipe.after_replay(self._captured)
        return self._result

    def _place_rates(self) -> None:
        """Write learning rates, with all their bits, where the graph reads them. The host does not wait."""
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=False):
            lr = group["lr"]
            if lr is not rate:  # set since as a number, or as another tensor
                if isinstance(lr, Tensor):
                    rate.copy_(to_device_async(lr.detach(), rate.device), non_blocking=True)
                else:
                    rate.fill_(lr)
                group["lr"] = rate

    def _run_forward_backward(self) -> Any:
        if self._forward_backward is None:
            return None
        self._optimizer.zero_grad(set_to_none=False)
        return self._forward_backward()

    def _grad_pointers(self) -> list[int | None]:
        grads = [param.grad for group in self._optimizer.param_groups for param in group["params"]]
        return [None if grad is None else grad.data_ptr() for grad in grads]


def check_capturable(optimizer: Any) -> None:
    """Raise UsageError, with the reason, for an optimizer whose step cannot be captured into a graph."""
    if not isinstance(optimizer, MixedPrecisionOptimizer):
        raise ArgumentTypeError(
            f"optimizer must be a MixedPrecisionOptimizer or a DistributedOptimizer, got {type(optimizer).__name__}"
        )
    reason = optimizer._member.why_not_capturable()
    device = optimizer._device
    if reason is None and not hasattr(torch.get_device_module(device), "CUDAGraph"):
        reason = f"its parameters are on {device}, which has no graphs: move the model to a GPU"
    if reason is None and not runs_on_streams(optimizer._groups.grad_stats, device):
        reason = "its process group's backend runs on the host: use NCCL"
    if reason is None and is_capturing(device):
        reason = "another capture is under way"
    if reason is not None:
        raise UsageError(f"the step cannot be captured into a graph: {reason}")
