"""The GradScaler looks at gradients' memory before it reads or writes one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale.amp import GradScaler, optimizer_step
from megascale.errors import GradientError
from tests.training import bits_equal


def _made(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(16).to(dtype)) for _ in range(3)]
    for param in params:
        param.grad = torch.randn(16).to(dtype)
    return params, torch.optim.AdamW(params, lr=0.1, **options)


def _of_inference(param: nn.Parameter) -> None:
    with torch.inference_mode():
        param.grad = torch.ones(16)


BAD: dict[str, Callable[[nn.Parameter], object]] = {
    "freed": lambda p: p.grad.untyped_storage().resize_(0),  # type: ignore[union-attr]
    "cut": lambda p: p.grad.untyped_storage().resize_(8),  # type: ignore[union-attr]
    "smaller": lambda p: setattr(p.grad, "data", p.grad[:3]),  # type: ignore[index]
    "larger": lambda p: setattr(p, "data", torch.zeros(200_000)),
    "negative": lambda p: setattr(p, "grad", torch._neg_view(-p.grad)),  # type: ignore[operator]
    "expanded": lambda p: setattr(p, "grad", torch.ones(1).expand(16)),
    "of inference": _of_inference,
}


@pytest.mark.parametrize("call", ["unscale_", "step", "step_fused"])
@pytest.mark.parametrize("bad", BAD)
def test_gradient_that_cannot_be_read_is_refused(bad: str, call: str) -> None:
    """Freed memory, or another size than the parameter's: a named error, and no other gradient has been written."""
    params, optimizer = _made(fused=call == "step_fused")
    scaler = GradScaler("cpu", 4.0)
    scaler.scale(torch.ones(()))
    before = [param.detach().clone() for param in params[::2]] + [p.grad.clone() for p in params[::2]]  # type: ignore[union-attr]
    BAD[bad](params[1])
    with pytest.raises(GradientError, match="the gradient of parameter 1"):
        scaler.unscale_(optimizer) if call == "unscale_" else scaler.step(optimizer)
    after = [*(param.detach() for param in params[::2]), *(p.grad for p in params[::2])]
    assert all(bits_equal(a, b) for a, b in zip(before, after, strict=True))  # type: ignore[arg-type]


STATES: dict[str, Callable[[dict[str, Any]], object]] = {
    "shared": lambda s: s["exp_avg"].share_memory_(),
    "transposed": lambda s: s.update(exp_avg=torch.stack([s["exp_avg"], s["exp_avg"]], 1)[:, 0]),
}


@pytest.mark.native
@pytest.mark.parametrize("odd", STATES)
def test_odd_state_is_updated_as_torch_updates_it(odd: str) -> None:
    """optimizer_step() hands a fused AdamW's state to our kernels only as far as they can read it."""
    results = []
    for change in (STATES[odd], lambda state: None):
        params, optimizer = _made(fused=True)
        for _ in range(3):
            torch.manual_seed(1)
            loss = sum((param * torch.randn(16)).sum() for param in params)
            optimizer_step(loss, optimizer, GradScaler("cpu", 4.0), max_gradient_norm=0.5)  # type: ignore[arg-type]
            change(optimizer.state[params[1]])
        results.append(params)
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rate", [torch.tensor([0.1]), torch.tensor(0.1).bfloat16(), torch.tensor([[0.1]])])
def test_rates_of_any_shape_and_dtype(rate: Tensor) -> None:
    """Torch takes a learning rate of one element in any shape and floating dtype; so does optimizer_step()."""
    params, optimizer = _made(fused=True)
    optimizer.param_groups[0]["lr"] = rate
    loss = sum((param * 2).sum() for param in params)
    assert bool(optimizer_step(loss, optimizer, None, max_gradient_norm=0.5).success)  # type: ignore[arg-type]
