"""autocast and the half dtype: no argument is needed, torch's are taken, a decorator follows a later choice."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from megascale.amp import autocast, set_half_dtype
from megascale.amp.autocast import _get_half_dtype
from megascale.errors import ArgumentError, ArgumentTypeError


@pytest.fixture(autouse=True)
def _torchs_default() -> Iterator[None]:
    """Leave no choice behind: it holds for the whole process."""
    set_half_dtype(None)
    yield
    set_half_dtype(None)


LAYER = nn.Linear(4, 4)
INPUT = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("choice", "dtype"),
    [
        ("float16", torch.float16),
        ("bfloat16", torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_half_dtype_is_what_autocast_computes_in(choice: str | torch.dtype, dtype: torch.dtype) -> None:
    """`set_half_dtype` returns the torch dtype; `autocast()` computes in it, and leaves get gradients of their own."""
    assert set_half_dtype(choice) == _get_half_dtype() == _get_half_dtype("cuda") == dtype
    with autocast():
        output = LAYER(INPUT)
        assert torch.is_autocast_enabled("cpu")
    assert output.dtype == dtype
    assert LAYER(INPUT).dtype == torch.float32
    (grad,) = torch.autograd.grad(output.float().sum(), LAYER.weight)
    assert grad.dtype == torch.float32


def test_default_is_torchs_own() -> None:
    """Before any choice, and after None: torch's default of the device, also where torch was told another."""
    assert set_half_dtype(None) == torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert _get_half_dtype("cuda") == torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        with autocast():
            assert LAYER(INPUT).dtype == torch.float16
    finally:
        torch.set_autocast_dtype("cpu", torch.bfloat16)
    set_half_dtype("float16")
    assert set_half_dtype(None) == torch.bfloat16


def test_torchs_arguments() -> None:
    """device_type, dtype, enabled and cache_enabled mean what they mean to torch, by position and by name."""
    set_half_dtype("float16")
    with autocast("cpu", torch.bfloat16, True, False):
        assert LAYER(INPUT).dtype == torch.bfloat16
        assert not torch.is_autocast_cache_enabled()
        with autocast(device_type="cpu", enabled=False):
            assert LAYER(INPUT).dtype == torch.float32
        with autocast(dtype="float16"):
            assert LAYER(INPUT).dtype == torch.float16
        assert LAYER(INPUT).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
    assert isinstance(autocast(), torch.autocast)
    with pytest.warns(UserWarning, match="target dtype is not supported"):
        assert not autocast(dtype=torch.float32)._enabled


class _Decorated(nn.Module):
    """A module whose class body runs long before anybody chooses a dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @autocast()
    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        """Call itself, in regions within regions."""
        out: Tensor = self.layer(x)
        return self.forward(out, depth - 1) if depth else out


def test_decorator_follows_the_choice_at_every_call() -> None:
    """A decorator on ``forward`` runs at import, yet obeys a later set_half_dtype; recursion leaves nothing enabled."""
    module = _Decorated()
    for dtype in (torch.float16, torch.bfloat16, torch.float16):
        set_half_dtype(dtype)
        assert module(INPUT).dtype == dtype
        assert not torch.is_autocast_enabled("cpu")
    assert _Decorated.forward.__name__ == "forward"
    assert "within regions" in (_Decorated.forward.__doc__ or "")


@pytest.mark.default("False")
@pytest.mark.parametrize("decorated", [False, True])
def test_compiled_functions_follow_the_choice(decorated: bool) -> None:
    """Under torch.compile a region takes the dtype of the moment: it is traced anew when that changes.

    It leaves the graph whole; torch 2.11 breaks it there.
    """
    whole = TorchVersion(torch.__version__) >= "2.13"

    def region(x: Tensor) -> Tensor:
        with autocast():
            out: Tensor = LAYER(x)
        return out

    def layer(x: Tensor) -> Tensor:
        out: Tensor = LAYER(x)
        return out

    compiled = torch.compile(autocast()(layer) if decorated else region, backend="eager", fullgraph=whole)
    for dtype in (torch.float16, torch.bfloat16):
        set_half_dtype(dtype)
        assert compiled(INPUT).dtype == dtype


OTHERS = r"half dtype must be 'float16', 'bfloat16', .*, got "
CEREBRAS = r"'cbfloat16' is a format of Cerebras hardware.*no dtype; choose 'bfloat16'"
FIRST = r"device_type must be a string such as 'cuda', got torch.bfloat16; or dtype="


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: set_half_dtype("cbfloat16"), ArgumentError, CEREBRAS),
        (lambda: autocast(dtype="cbfloat16"), ArgumentError, CEREBRAS),
        (lambda: set_half_dtype("half"), ArgumentError, OTHERS),
        (lambda: set_half_dtype(torch.float32), ArgumentError, OTHERS),
        (lambda: set_half_dtype(16), ArgumentTypeError, OTHERS),  # type: ignore[arg-type]
        (lambda: autocast(torch.bfloat16), ArgumentTypeError, FIRST),  # type: ignore[arg-type]
        (lambda: autocast()(3), ArgumentTypeError, "needs a callable, got 3"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_half_dtype_is_refused(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    """Cerebras's own format has no torch dtype, and its autocast takes the dtype first: the error says what to choose,
    and where. The choice stays.
    """
    set_half_dtype("float16")
    with pytest.raises(kind, match=message):
        call()
    assert _get_half_dtype() == torch.float16


def test_an_accelerator_that_is_not_here_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's wheel for CUDA names CUDA its accelerator on machines without a GPU, too: the region is the CPU's."""

    def built_for_cuda(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", built_for_cuda)
    with autocast():
        assert torch.is_autocast_enabled("cpu")
    assert _get_half_dtype() == torch.bfloat16
