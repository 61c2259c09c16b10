"""What the native backend takes into its tables, what it leaves to torch, and what it tells of its writes."""

import pytest
import torch
from torch import Tensor

from megascale.kernels import AdamHyper, Decision, LionHyper, NativeBackend, Operands
from tests.training import bits_equal

LANDS = Decision(torch.tensor(0.0), torch.tensor(1.0), torch.tensor(1.0), torch.tensor(0.0))
LION = LionHyper(0.5, 0.9, 0.5, 0.0, False)
ADAM = AdamHyper(0.5, 0.9, 0.5, 1e-8, 0.0, True, False, False)
NUMELS = {40: torch.float32, 3: torch.float16, 70: torch.bfloat16}


def _strided(tensor: Tensor) -> Tensor:
    """Return the same numbers in every second element of other memory."""
    return torch.stack([tensor, torch.full_like(tensor, 7)], 1)[:, 0]


def _operands(kind: str) -> Operands:
    """Return fp16 model params with fp32 main params, with 8-bit codes, or with remainders; gradients of all dtypes."""
    generator = torch.Generator().manual_seed(0)
    models = [torch.randn(numel, generator=generator).half() for numel in NUMELS]
    moments = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8} if "codes" in kind else {"exp_avg": torch.float32}
    state = {name: [torch.zeros(numel, dtype=dtype) for numel in NUMELS] for name, dtype in moments.items()}
    if "codes" in kind:
        state |= {f"{name}_scale": [torch.zeros(-(-numel // 32)) for numel in NUMELS] for name in moments}
    held = "remainders" in kind
    return Operands(
        model=models,
        main=[torch.empty_like(model, device="meta") if held else model.float() for model in models],
        grad=[torch.randn(numel, generator=generator).to(dtype) for numel, dtype in NUMELS.items()],
        state=state,
        step=[torch.zeros(()) for _ in NUMELS] if "codes" in kind else [],
        remainder=[torch.zeros_like(model, dtype=torch.int16) for model in models] if held else [],
    )


def _update(operands: Operands, native: NativeBackend) -> None:
    """Update by AdamW what has codes, else by Lion."""
    if operands.has_codes:
        native.adam_(operands, ADAM, LANDS)
    else:
        native.lion_(operands, LION, LANDS)


KINDS = ["main params", "codes", "remainders", "codes, remainders"]


@pytest.mark.native
@pytest.mark.parametrize("odd", ["gradient", "moment"])
@pytest.mark.parametrize("kind", KINDS)
def test_strided_tensors_are_read_as_their_values(kind: str, odd: str) -> None:
    """A gradient or a moment with gaps: the bits of a dense one."""
    dense, gaps = _operands(kind), _operands(kind)
    if odd == "gradient":
        gaps.grad = [_strided(gaps.grad[0]), *gaps.grad[1:]]
    else:
        gaps.state["exp_avg"][0] = _strided(gaps.state["exp_avg"][0])
    for operands in (dense, gaps):
        native = NativeBackend()
        for _ in range(2):
            _update(operands, native)
    for name in ("model", "remainder"):
        assert all(map(bits_equal, getattr(dense, name), getattr(gaps, name)))
    moments = [one.contiguous() for one in gaps.state["exp_avg"]]
    assert all(map(bits_equal, dense.state["exp_avg"], moments))


@pytest.mark.native
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a strided one"])
def test_a_16_bit_main_param_is_not_read_as_fp32(beside: bool) -> None:
    """It is updated in its own dtype, and nothing behind it is touched."""
    memory = torch.ones(80).half()
    mains = [memory[:32], *([torch.ones(64)[::2]] if beside else [])]
    operands = Operands(mains, mains, [torch.ones(32) for _ in mains])
    operands.state = {"exp_avg": [torch.zeros(32) for _ in mains]}
    NativeBackend().lion_(operands, LION, LANDS)
    assert [main.tolist() for main in mains] == [[0.5] * 32 for _ in mains]
    assert (memory[32:] == 1).all()


@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_strided_gradients_are_measured_as_dense_ones(dtype: torch.dtype) -> None:
    """The same bits, whatever lies between their elements."""
    grad = torch.randn(5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    dense, gaps = (NativeBackend().measure([one], count_zeros=True) for one in (grad, _strided(grad)))
    assert bits_equal(dense.sum_squares, gaps.sum_squares)
