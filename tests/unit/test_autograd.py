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
