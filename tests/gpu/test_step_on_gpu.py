"""The step on an accelerator: the same bodies as on the CPU, no host sync, one decision."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.errors import MainParamOverflowError
from megascale.host_view import HostView
from megascale.kernels import select_backend
from tests.gpu import device
from tests.training import INNER, Bag, Tiny, bits_equal, grad_of, model, set_grads

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16]


@contextmanager
def _no_sync() -> Iterator[None]:
    """Let every implicit synchronisation of the host with the device raise."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _on_device(inner: str, dtype: torch.dtype, **options: object) -> tuple[Tiny, MixedPrecisionOptimizer]:
    module = model(dtype).to(device())
    config = OptimizerConfig(fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16, **options)  # type: ignore[arg-type]
    return module, MixedPrecisionOptimizer(
        INNER[inner](module), config, DynamicGradScaler(2.0**10, 1.0, 2.0, 0.5, 4, 1), grads_are_scaled=True
    )


@pytest.mark.parametrize("inner", INNER)
def test_no_sync_in_100_steps(inner: str) -> None:
    """Invariant 5: 100 steps with skips and growth under set_sync_debug_mode("error")."""
    module, optimizer = _on_device(inner, torch.float16, log_num_zeros_in_grad=True)
    set_grads(module, 0)
    optimizer.step()
    clean, poisoned = [grad_of(p).clone() for p in module.parameters()], [grad_of(p) for p in module.parameters()]
    poisoned[0][0, 0] = math.inf
    params = list(module.parameters())
    view = HostView()
    seen = []
    with _no_sync():
        for step in range(100):
            for param, grad in zip(params, poisoned if step % 10 == 3 else clean, strict=True):
                param.grad = grad
            result = optimizer.step()
            seen.append(view.push({"success": result.success, "scale": optimizer.get_loss_scale()}))
    assert optimizer.num_skipped_steps.item() == 10
    assert [values["success"] for values in seen if values] == [float(step % 10 != 3) for step in range(99)]


LARGE = 2**31 + 5
"""Elements of a tensor whose places do not fit 32 bits."""
PIECE = 5000
"""Elements at both ends of a large tensor, and around its 2**31st, that are looked at one by one."""


def _needs_memory(gibibytes: int) -> None:
    if torch.cuda.get_device_properties(device()).total_memory < gibibytes * 2**30:
        pytest.skip(f"needs {gibibytes} GiB of device memory")


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_statistics_of_a_large_tensor(backend: str) -> None:
    """More than 2**31 elements: exact counts, no 32-bit index."""
    _needs_memory(40)
    grad = torch.zeros(LARGE, dtype=torch.float16, device=device())
    grad[-1], grad[0], grad[LARGE // 2] = math.nan, 2.0, math.inf
    stats = select_backend(backend).measure([grad, torch.full((3,), 2.0, device=device())], count_zeros=True)
    assert stats.non_finite.tolist() == [2, 0]
    assert stats.zeros is not None
    assert stats.zeros.tolist() == [LARGE - 3, 0]
    assert stats.sum_squares[1].item() == 12


def _pieces(tensor: Tensor) -> Tensor:
    """Return what is looked at of a tensor."""
    middle = tensor.numel() - 2 * PIECE
    return torch.cat([tensor[:PIECE], tensor[middle : middle + PIECE], tensor[-PIECE:]])


def _put(tensor: Tensor, pieces: Tensor) -> Tensor:
    middle = tensor.numel() - 2 * PIECE
    for start, piece in zip((0, middle, tensor.numel() - PIECE), pieces.split(PIECE), strict=True):
        tensor[start : start + PIECE] = piece
    return tensor


def _after_steps(value: Tensor, grad: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """Return the parameter and its main param after three steps."""
    param = torch.nn.Parameter(value)
    config = OptimizerConfig(fp16=True, backend=backend)
    scaler = DynamicGradScaler(2.0, 1.0, 2.0, 0.5, 100, 1)
    inner = torch.optim.AdamW([param], lr=1e-2)
    optimizer = MixedPrecisionOptimizer(inner, config, scaler, grads_are_scaled=True)
    param.grad = grad
    for _ in range(3):
        assert optimizer.step().success
    [(_, main)] = optimizer.main_params()
    return param.detach(), main


def check_large_step(numel: int, backend: str, device: torch.device) -> None:
    """Take steps of one tensor: its pieces have the bits of a tensor of nothing else, the rest is one value."""
    generator = torch.Generator().manual_seed(0)
    values, grads = (torch.randn(3 * PIECE, generator=generator).half().to(device) for _ in range(2))
    filled, slopes = (torch.full((numel,), fill, dtype=torch.float16, device=device) for fill in (0.5, 0.25))
    param, main = _after_steps(_put(filled, values), _put(slopes, grads), backend)
    expected = _after_steps(values.clone(), grads.clone(), backend)
    assert bits_equal(_pieces(param), expected[0])
    assert bits_equal(_pieces(main), expected[1])
    rest = param[PIECE : numel - 2 * PIECE]
    assert (rest == rest[0]).all()
    assert rest[0] < 0.5


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_step_of_a_large_tensor(backend: str) -> None:
    """A parameter of more than 2**31 elements is updated to its last element, and no element twice."""
    _needs_memory(64)
    check_large_step(LARGE, backend, device())
    torch.cuda.empty_cache()


def test_outgrown_main_param_is_named_one_step_late() -> None:
    """On a device the host hears of it at the next step, without having waited."""
    module = Bag(
        [torch.ones(3, dtype=torch.float16, device=device()), torch.ones(2, dtype=torch.float16, device=device())]
    )
    optimizer = MixedPrecisionOptimizer(
        torch.optim.SGD(module.named_parameters(), lr=70000.0),
        None,
        DynamicGradScaler(1.0, 1.0, 2.0, 0.5, 100, 1),
        grads_are_scaled=True,
    )
    zero: list[Tensor] = [torch.zeros_like(p) for p in module.parameters()]
    module[0].grad, module[1].grad = zero[0] + 1, zero[1]
    optimizer.step()
    module[0].grad = zero[0]
    optimizer.step()  # the ranks hear of it here, the host at the next step
    with pytest.raises(MainParamOverflowError, match=r"main param of 'params.0' is 65520 or more"):
        optimizer.step()
