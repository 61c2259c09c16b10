"""The apex backend against the reference, on a GPU with NVIDIA apex.

Tolerances: ``amp_C`` is compiled with fast math, and rounds betas to fp32 before it takes 1 - beta. The
latter is 1.3e-5 of a second moment. A fast power is off by up to 4e-7, 4e-4 of the second bias correction of the
first step and changes its update by 2e-4, later updates by less: in all by under 1e-3 of one step of size lr.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

from megascale.errors import UsageError
from megascale.kernels import (
    AdamHyper,
    Backend,
    Decision,
    LionHyper,
    Operands,
    ReferenceBackend,
    SgdHyper,
    TorchBackend,
)
from megascale.kernels.apex_backend import ApexBackend
from megascale.kernels.blocks import BLOCK_ON_DEVICE
from tests.training import bits_equal


def _why_not() -> str:
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    try:
        ApexBackend()
    except UsageError as error:
        return str(error)
    return ""


WHY_NOT = _why_not()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

DEVICE = torch.device("cuda", 0)
SHAPES = [(3,), (0,), (1,), (), (5, 7), (300_000,), (2, 3, 4), (70, 0, 2)]  # an empty one last, and between others
LR = 1e-2
WEIGHT_DECAY = 0.1
ADAM = partial(
    AdamHyper,
    lr=LR,
    beta1=0.9,
    beta2=0.999,
    eps=1e-8,
    weight_decay=WEIGHT_DECAY,
    decoupled=True,
    amsgrad=False,
    maximize=False,
)
HYPERS: dict[str, Callable[[], AdamHyper]] = {
    "adamw": ADAM,
    "adam_l2": partial(ADAM, decoupled=False),
    "no_decay": partial(ADAM, weight_decay=0.0),
    "maximize": partial(ADAM, maximize=True),
    "lr_on_device": lambda: ADAM(lr=torch.tensor(LR, device=DEVICE)),
}
DTYPES = [  # of gradients and model params
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.float16, torch.float32),
]


def _tensors(dtype: torch.dtype, seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def made(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator, device=DEVICE) * scale).to(dtype)

    tensors = [made(*shape) for shape in SHAPES]
    tensors.append(made(6, 8).t())  # not contiguous
    tensors.append(made(4, 9)[:, ::3])  # not dense
    tensors.append(made(4, 3, 5, 5).to(memory_format=torch.channels_last))
    tensors.append(made(1001)[1:])  # not aligned
    return tensors


def _operands(model: torch.dtype, names: list[str], moment: torch.dtype = torch.float32) -> Operands:
    main_dtype = torch.float64 if model == torch.float64 else torch.float32
    mains = [tensor.to(main_dtype) for tensor in _tensors(model, seed=0)]
    return Operands(
        model=mains if model == main_dtype else [main.to(model) for main in mains],
        main=mains,
        state={name: [torch.zeros_like(main, dtype=moment) for main in mains] for name in names},
        step=[torch.zeros((), device=DEVICE) for _ in mains],
    )


def _decision(found_inf: bool = False, coefficient: float = 2.0**-7) -> Decision:
    found, factor = torch.tensor(float(found_inf), device=DEVICE), torch.tensor(coefficient, device=DEVICE)
    return Decision(found, factor, torch.ones_like(found), torch.zeros_like(found))


def _live(operands: Operands) -> list[Tensor]:
    """Everything that an update may write."""
    state = [tensor for tensors in operands.state.values() for tensor in tensors]
    return [*operands.main, *operands.model, *state, *operands.step]


def _train(backend: Backend, operands: Operands, hyper: AdamHyper, grad: torch.dtype, steps: int) -> list[Tensor]:
    """Take steps of Adam, every seventh of which is skipped; returns the flags of each."""
    flags = []
    for step in range(steps):
        operands.grad = _tensors(grad, seed=1 + step, scale=2.0**7)
        flags.append(backend.adam_(operands, hyper, _decision(found_inf=step % 7 == 3)))
    return flags


def _assert_close(ours: Operands, theirs: Operands, cancels: bool = False) -> None:
    """Compare after training with :func:`_train`.

    ``cancels``: weight decay is added to the gradient. Where the two nearly cancel, rounding decides what is left, and
    Adam's first update is that over its own size: of 100,000 elements 5 may differ, by two steps of size lr.
    """
    for one, other in zip(ours.main, theirs.main, strict=True):
        if cancels:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=2 * LR)
            beyond = (one - other).abs() > 1e-6 * other.abs() + 1e-3 * LR
            assert beyond.count_nonzero().item() <= one.numel() * 5e-5
        else:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-3 * LR)
    behind = 2 * LR * WEIGHT_DECAY if cancels else 0.0  # what is added to such an element's later gradients
    for one, other in zip(ours.state["exp_avg"], theirs.state["exp_avg"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 + behind)
    for one, other in zip(ours.state["exp_avg_sq"], theirs.state["exp_avg_sq"], strict=True):
        torch.testing.assert_close(one, other, rtol=5e-5, atol=1e-9 + behind)
    assert all(map(bits_equal, ours.step, theirs.step))


def _assert_rounded(operands: Operands) -> None:
    assert all(
        bits_equal(model, main.to(model.dtype)) for main, model in zip(operands.main, operands.model, strict=True)
    )


@contextmanager
def _no_sync() -> Iterator[None]:
    """Let every implicit synchronisation of the host with the device raise."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_statistics_equal_fp64(dtype: torch.dtype) -> None:
    """Sum of squares to fp32 accuracy, exact counts, for every shape, alignment and emptiness, and beyond one block."""
    grads = [*_tensors(dtype, seed=0), torch.ones(BLOCK_ON_DEVICE + 5, dtype=dtype, device=DEVICE)]
    grads[4][1, 2], grads[4][0, 0], grads[5][123_456], grads[-1][-1] = math.inf, math.nan, -math.inf, math.nan
    grads[6].zero_()
    grads[5][:1000] = 0
    stats = ApexBackend().measure(grads, count_zeros=True)
    assert stats.zeros is not None
    for index, grad in enumerate(grads):
        exact = grad.double()
        assert stats.non_finite[index].item() == (~exact.isfinite()).sum().item()
        assert stats.zeros[index].item() == (exact == 0).sum().item()
        expected = exact.square().sum()
        if expected.isfinite():
            torch.testing.assert_close(stats.sum_squares[index], expected, rtol=2e-6, atol=0)
        else:
            assert not stats.sum_squares[index].isfinite()


@pytest.mark.parametrize("hyper", HYPERS)
@pytest.mark.parametrize(("grad", "model"), DTYPES)
def test_update_follows_reference(grad: torch.dtype, model: torch.dtype, hyper: str) -> None:
    """50 steps with skips between: main params, moments and counts of the reference, model params main's rounding."""
    names = ["exp_avg", "exp_avg_sq"]
    ours, theirs = _operands(model, names), _operands(model, names)
    flags = _train(ApexBackend(), ours, HYPERS[hyper](), grad, steps=50)
    _train(ReferenceBackend(), theirs, HYPERS[hyper](), grad, steps=50)
    _assert_close(ours, theirs, cancels=hyper == "adam_l2")
    _assert_rounded(ours)
    assert not torch.stack(flags).any()


@pytest.mark.parametrize(("grad", "model"), DTYPES)
def test_skipped_step_changes_no_bit(grad: torch.dtype, model: torch.dtype) -> None:
    """Invariant 2: a skipped step changes no main param, model param, moment or step count, also as the very first."""
    backend, operands = ApexBackend(), _operands(model, ["exp_avg", "exp_avg_sq"])
    for step in range(4):
        operands.grad = _tensors(grad, seed=step)
        operands.grad[step][...] = (math.inf, math.nan, -math.inf, math.nan)[step]
        before = [tensor.clone() for tensor in _live(operands)]
        backend.adam_(operands, ADAM(), _decision(found_inf=True, coefficient=math.nan))
        assert all(map(bits_equal, before, _live(operands)))
        operands.grad = _tensors(grad, seed=100 + step)
        backend.adam_(operands, ADAM(), _decision())
        assert not all(map(bits_equal, before, _live(operands)))


def test_each_parameter_has_its_own_step_count() -> None:
    """A kernel call has one step count. Parameters with unequal ones, also written in place between, get their own."""
    ours, theirs = (_operands(torch.float16, ["exp_avg", "exp_avg_sq"]) for _ in range(2))
    backend = ApexBackend()
    for start in (0.0, 40.0):
        for operands in (ours, theirs):
            for index, step in enumerate(operands.step):
                step.fill_(start + index % 3)
        _train(backend, ours, ADAM(), torch.float16, steps=5)
        _train(ReferenceBackend(), theirs, ADAM(), torch.float16, steps=5)
        _assert_close(ours, theirs)


def test_overflow_flags_where_rounding_is_not_finite() -> None:
    """65520 is the first fp32 number that rounds to inf in fp16; NaN counts; bf16 and fp32 model params never do."""
    below = torch.tensor([1.0, -65519.996], device=DEVICE)
    mains = [
        below,
        torch.tensor([65520.0], device=DEVICE),
        torch.tensor([-1e9], device=DEVICE),
        torch.tensor([math.nan], device=DEVICE),
        torch.tensor([1e9], device=DEVICE),
        below[:0],
        torch.tensor([1e9], device=DEVICE),
    ]
    for grad in (torch.float16, torch.float32):
        models = [main.half() for main in mains[:4]] + [mains[4].bfloat16(), mains[5].half(), mains[6]]
        zeros = {name: [torch.zeros_like(main) for main in mains] for name in ("exp_avg", "exp_avg_sq")}
        grads = [torch.zeros_like(main, dtype=grad) for main in mains]
        operands = Operands(models, mains, grads, zeros, [torch.zeros((), device=DEVICE) for _ in mains])
        flags = ApexBackend().adam_(operands, ADAM(weight_decay=0.0), _decision())
        assert flags.tolist() == [False, True, True, True, False, False, False]
        assert [bool(m.isfinite().all()) for m in models] == [not flag for flag in flags.tolist()]


def test_what_the_kernels_lack_is_the_torch_backends() -> None:
    """amsgrad, fp64, 16-bit moments, SGD, Lion and unscaling, all on the GPU, have TorchBackend's bits."""

    def adam(backend: Backend, model: torch.dtype, moment: torch.dtype, amsgrad: bool) -> list[Tensor]:
        names = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"][: 3 if amsgrad else 2]
        operands = _operands(model, names, moment)
        _train(backend, operands, ADAM(amsgrad=amsgrad), torch.float16, steps=5)
        return _live(operands)

    def other(backend: Backend, name: str) -> list[Tensor]:
        operands = _operands(torch.float16, ["momentum_buffer" if name == "sgd" else "exp_avg"])
        for step in range(5):
            operands.grad = _tensors(torch.float16, seed=step)
            if name == "sgd":
                backend.sgd_(operands, SgdHyper(LR, 0.9, 0.0, 0.1, False, False), _decision())
            else:
                backend.lion_(operands, LionHyper(LR, 0.9, 0.99, 0.1, False), _decision())
        return _live(operands)

    def unscaled(backend: Backend) -> list[Tensor]:
        grads = _tensors(torch.float16, seed=1)
        return backend.unscale(grads, [grad.float() for grad in grads], torch.tensor(2.0**-7, device=DEVICE))

    cases: dict[str, Callable[[Backend], list[Tensor]]] = {
        "amsgrad": partial(adam, model=torch.float16, moment=torch.float32, amsgrad=True),
        "fp64": partial(adam, model=torch.float64, moment=torch.float64, amsgrad=False),
        "moments": partial(adam, model=torch.float16, moment=torch.bfloat16, amsgrad=False),
        "sgd": partial(other, name="sgd"),
        "lion": partial(other, name="lion"),
        "unscale": unscaled,
    }
    for name, case in cases.items():
        assert all(map(bits_equal, case(ApexBackend()), case(TorchBackend()))), name


def test_no_host_sync() -> None:
    """Invariant 5: statistics and update, skips between, under set_sync_debug_mode("error"), from the first step on."""
    backend, operands = ApexBackend(), _operands(torch.float16, ["exp_avg", "exp_avg_sq"])
    grads = [_tensors(torch.float16, seed=step) for step in range(5)]
    decisions = [_decision(found_inf=step == 2) for step in range(5)]
    torch.cuda.synchronize()
    with _no_sync():
        for operands.grad, decision in zip(grads, decisions, strict=True):
            backend.measure(operands.grad, count_zeros=True)
            backend.adam_(operands, ADAM(), decision)
