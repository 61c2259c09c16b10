"""What the checkpoint tests share: a small model under MixedPrecisionOptimizer, and bitwise comparison."""

import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megascale import DynamicGradScaler, MixedPrecisionOptimizer


def build(seed: int, dtype: torch.dtype = torch.float16) -> tuple[nn.Module, MixedPrecisionOptimizer]:
    """Two linear layers and a buffer, AdamW, and a scaler that changes often."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).to(dtype)
    inner = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    return model, MixedPrecisionOptimizer(inner, grad_scaler=DynamicGradScaler(64.0, 1.0, 2.0, 0.5, 2, 1))


def train(model: nn.Module, optimizer: MixedPrecisionOptimizer, first: int, last: int, rank: int = 0) -> None:
    """Steps ``first`` to ``last - 1`` on data that depends on the step and the rank only."""
    dtype = next(model.parameters()).dtype
    for step in range(first, last):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * rank + step)).to(dtype)
        optimizer.zero_grad()
        optimizer.scale_loss(model(inputs).float().square().mean()).backward()
        optimizer.step()


def state_of(model: nn.Module, optimizer: MixedPrecisionOptimizer) -> dict[str, Any]:
    """A copy of everything that a checkpoint restores."""
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return {"model": weights, "optimizer": dict(optimizer.state_dict())}


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Where two nests differ in type (all kinds of dict are one), key order, dtype, shape or bits."""
    if type(left) is not type(right) and not (isinstance(left, dict) and isinstance(right, dict)):
        return [f"{path}: {type(left).__name__} against {type(right).__name__}"]
    if isinstance(left, Tensor):
        return [] if _same_bits(left, right) else [f"{path}: {left} against {right}"]
    if isinstance(left, Mapping):
        if list(left) != list(right):
            return [f"{path}: keys {list(left)} against {list(right)}"]
        return [line for key in left for line in differences(left[key], right[key], f"{path}/{key}")]
    if isinstance(left, (list, tuple)):
        if len(left) != len(right):
            return [f"{path}: {len(left)} items against {len(right)}"]
        return [
            line for i, pair in enumerate(zip(left, right, strict=True)) for line in differences(*pair, f"{path}/{i}")
        ]
    return [] if repr(left) == repr(right) else [f"{path}: {left!r} against {right!r}"]


def message_of(kind: type[Exception], function: Callable[[], Any]) -> str:
    """The message of the error that ``function`` must raise, of exactly that class."""
    try:
        function()
    except Exception as error:
        if type(error) is not kind:
            raise
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return bits_of(left) == bits_of(right)


def bits_of(tensor: Tensor) -> bytes:
    """The bytes of a tensor's elements, row-major."""
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def reloaded(value: Any) -> Any:
    """Return what torch saves of ``value`` and reads again, of plain values only."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
