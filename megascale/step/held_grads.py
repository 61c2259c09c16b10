"""HeldGrads: the gradients of a step that ``prepare_grads()`` has decided, and whether they are still the same."""

from collections.abc import Callable, Sequence

from torch import Tensor

from megascale.errors import UsageError
from megascale.main_params.main_param import MainParam
from megascale.utils.dtensors import to_local


class HeldGrads:
    """Remembers which tensors hold the measured gradients, and how often torch has written them.

    A gradient that the caller has dropped (``param.grad`` is None) counts as neither replaced nor written: the step
    holds it. Writes through ``grad.data`` are not seen.

    Args:
        params: of the decided step.
        holder_of: returns the tensor that holds a parameter's gradient now, None for none.

    Attributes:
        are_zeroed: whether ``zero_grad()`` was called since.
    """

    def __init__(self, params: Sequence[MainParam], holder_of: Callable[[MainParam], Tensor | None]) -> None:
        self._holder_of = holder_of
        self._measured = [(param, holder_of(param)) for param in params]
        self._versions = self._read_versions()
        self.are_zeroed = False

    def accept_writes(self) -> None:
        """Take the gradients as they are now for those that were measured."""
        self._versions = self._read_versions()

    @property
    def are_there(self) -> bool:
        """Whether a parameter has a gradient."""
        return any(self._holder_of(param) is not None for param, _ in self._measured)

    def require_unchanged(self) -> None:
        """Raise UsageError, naming a parameter whose gradient was replaced or written since it was measured."""
        changed = self.replaced() or self.written()
        if changed is not None:
            raise UsageError(
                f"the gradient of {changed.name!r} has changed since prepare_grads() measured it, and step() would "
                "take the step that was decided for what it was. After a new backward call optimizer.zero_grad() "
                "first; to update from gradients that you have changed, call step_with_ready_grads()"
            )

    def replaced(self) -> MainParam | None:
        """Return a parameter that has another gradient than the one that was measured."""
        for param, grad in self._measured:
            now = self._holder_of(param)
            if now is not None and now is not grad:
                return param
        return None

    def written(self) -> MainParam | None:
        """Return a parameter whose measured gradient was written since."""
        for (param, grad), before, now in zip(self._measured, self._versions, self._read_versions(), strict=True):
            if before != now and self._holder_of(param) is grad:
                return param
        return None

    def _read_versions(self) -> list[int]:
        return [0 if grad is None else to_local(grad)._version for _, grad in self._measured]
