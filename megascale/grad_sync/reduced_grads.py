"""What an optimizer needs of whatever accumulates and reduces gradients for it."""

from typing import Protocol

from torch import Tensor, nn


class ReducedGrads(Protocol):
    """Main grads and their reduction: :class:`megascale.grad_sync.GradSync`, or another library's main grads.

    Do not inherit from it: a method that is left out would return None, which means "no main grad".
    """

    @property
    def compares_replicas(self) -> bool:
        """Whether ranks that hold the same parameter must hold the same reduced gradient, and a step checks that."""

    def main_grad(self, param: nn.Parameter) -> Tensor | None:
        """Return the main grad of ``param``, live, in its shape; None for a parameter that has none here."""

    def local_grad(self, param: nn.Parameter) -> Tensor | None:
        """Return what this rank keeps of the main grad of ``param``, live; None for a parameter that has none here."""

    def finish(self) -> None:
        """Wait until all main grads are reduced."""

    def zero_(self) -> None:
        """Begin a new step."""
