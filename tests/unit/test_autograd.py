"""Decorators that switch autograd off."""

import torch

from megascale.utils.autograd import without_grad


def test_a_function_runs_without_grad() -> None:
    """Whoever calls it, in whichever mode, which is the caller's again afterwards, also after an error."""

    @without_grad
    def seen(fails: bool = False) -> bool:
        if fails:
            raise ZeroDivisionError
        return torch.is_grad_enabled()

    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            assert not seen()
            assert torch.is_grad_enabled() == mode
            try:
                seen(fails=True)
            except ZeroDivisionError:
                assert torch.is_grad_enabled() == mode


def test_no_grad_is_entered_only_where_it_is_needed() -> None:
    """A step is under it already: to enter it once more costs the host as much as an operator."""
    entered = []

    class Counting(torch.no_grad):
        def __enter__(self) -> None:
            entered.append(True)
            super().__enter__()

    @without_grad
    def nothing() -> None:
        """Do nothing."""

    kept, torch.no_grad = torch.no_grad, Counting  # type: ignore[misc]
    try:
        nothing()
        with torch.set_grad_enabled(False):
            nothing()
    finally:
        torch.no_grad = kept  # type: ignore[misc]
    assert len(entered) == 1
