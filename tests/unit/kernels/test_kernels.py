"""Every backend against the reference, the reference against torch.optim, and the skip on all of them."""

import importlib.util
import math
from functools import cache

import pytest
import torch
from torch import Tensor

from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig, kernels
from megascale.errors import ArgumentError, MainParamOverflowError, UsageError
from megascale.kernels import Backend, Decision, select_backend
from megascale.lion import Lion
from tests.counting import OperatorCounter
from tests.training import INNER, Bag, Inner, bits_equal, constant, grad_of, model, same_bits, set_grads, snapshot

BACKENDS = ["reference", "torch", "native"]
# Triton's interpreter takes minutes over these.
ALL = [*BACKENDS, pytest.param("triton", marks=pytest.mark.slow)]
SHAPES = [(3,), (0,), (1,), (), (5, 7), (2, 3, 4), (300_000,), (70, 0, 2)]


def _backend(name: str) -> Backend:
    return select_backend(name)


def _tensors(dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    made.append(torch.randn(6, 8, generator=generator).to(dtype).t())  # not contiguous
    made.append(torch.randn(4, 9, generator=generator).to(dtype)[:, ::3])  # not dense
    return made


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_statistics_equal_fp64(name: str, dtype: torch.dtype) -> None:
    """Sum of squares to fp32 accuracy, exact counts, for every shape, alignment and emptiness."""
    grads = _tensors(dtype)
    grads[4][1, 2], grads[4][0, 0], grads[6][123_456] = math.inf, math.nan, -math.inf
    grads[5].zero_()
    grads[6][:1000] = 0
    stats = _backend(name).measure(grads, count_zeros=True)
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


@pytest.mark.parametrize("name", ["reference", "native", "torch"])
def test_fp64_is_measured_in_fp64(name: str) -> None:
    """Numbers beyond fp32 are finite, and so are their squares; those below it are no zeros."""
    grads = [torch.full((4,), value, dtype=torch.float64) for value in (1e60, 1e-60)]
    stats = _backend(name).measure(grads, count_zeros=True)
    assert stats.non_finite.tolist() == [0, 0]
    assert stats.zeros is not None
    assert stats.zeros.tolist() == [0, 0]
    torch.testing.assert_close(
        stats.sum_squares, torch.tensor([4e120, 4e-120], dtype=torch.float64), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("name", ALL)
def test_fp8_is_measured(name: str) -> None:
    """Any floating dtype is; of this one torch itself cannot tell which elements are finite."""
    grads = [torch.tensor([3.0, -1.0, 0.0]), torch.tensor([math.nan, 1.0, 2.0])]
    stats = _backend(name).measure([grad.to(torch.float8_e4m3fn) for grad in grads], count_zeros=True)
    assert stats.sum_squares[0].item() == 10
    assert stats.non_finite.tolist() == [0, 1]
    assert stats.zeros is not None
    assert stats.zeros.tolist() == [1, 0]


@pytest.mark.parametrize("name", ALL)
def test_fp16_norm_does_not_overflow(name: str) -> None:
    """fp16 squares overflow at 256; the statistics accumulate wider."""
    stats = _backend(name).measure([torch.full((1000,), 60000.0, dtype=torch.float16)], count_zeros=False)
    torch.testing.assert_close(stats.sum_squares[0].item(), 1000 * 59999.0**2 * (60000 / 59999) ** 2, rtol=1e-3, atol=0)
    assert stats.non_finite[0].item() == 0
    assert stats.zeros is None


@pytest.mark.default("adamw_fused-dtype0", "sgd-dtype5")
@pytest.mark.parametrize(
    ("inner", "dtype"), [*((inner, torch.float16) for inner in INNER), ("adamw_fused", torch.bfloat16)]
)
def test_update_follows_torch_optim_on_fp32(inner: str, dtype: torch.dtype) -> None:
    """50 steps equal torch's own optimizer on fp32 masters fed the same gradients, to a few fp32 ulps.

    A few, because torch's single tensor, foreach and fused forms differ among themselves in the order of operations.
    Other backends are compared with the reference below.
    """
    module = model(dtype)
    masters = model(torch.float32)
    with torch.no_grad():
        for master, param in zip(masters.parameters(), module.parameters(), strict=True):
            master.copy_(param)
    optimizer = constant(module, INNER[inner], 2.0**7, backend="reference")
    theirs = INNER[inner](masters)
    for step in range(50):
        set_grads(module, seed=step, scale=2.0**7)
        for master, param in zip(masters.parameters(), module.parameters(), strict=True):
            master.grad = grad_of(param).float() / 2.0**7
        optimizer.step()
        theirs.step()
    for (_, main), master, param in zip(
        optimizer.main_params(), masters.parameters(), module.parameters(), strict=True
    ):
        torch.testing.assert_close(main, master.detach(), rtol=3e-6, atol=3e-7)
        assert bits_equal(param, main.to(dtype))


@cache
def _trained_with_skips(backend: str, inner: str) -> tuple[list[bool], dict[str, Tensor], dict[str, Tensor]]:
    """Take 50 steps; return which landed, the main params, and all that a step may change."""
    module = model()
    # One clip coefficient for all: statistics are summed in another order on each.
    optimizer = constant(module, INNER[inner], 256.0, backend=backend)
    landed = []
    for step in range(50):
        set_grads(module, seed=step, scale=64.0)
        if step % 7 == 3:
            grad_of(module.first.weight)[0, 0] = math.nan
        landed.append(bool(optimizer.step().success))
    return landed, dict(optimizer.main_params()), snapshot(optimizer, module)


@pytest.mark.default("adam_amsgrad-torch", "lion-native")
@pytest.mark.parametrize("name", ALL[1:])
@pytest.mark.parametrize("inner", INNER)
def test_backend_equals_reference(inner: str, name: str) -> None:
    """Invariant 3: 50 steps with skips between; skips and step counts the same, main params too.

    native and triton fix the order of operations: bitwise. torch's kernels have another one: within 1e-6.
    """
    landed, mains, everything = _trained_with_skips("reference", inner)
    our_landed, our_mains, our_everything = _trained_with_skips(name, inner)
    assert landed == our_landed
    for key, main in mains.items():
        if name == "torch":
            torch.testing.assert_close(our_mains[key], main, rtol=1e-6, atol=2e-7)
        else:
            assert bits_equal(our_mains[key], main)
    if name != "torch":
        assert same_bits(everything, our_everything)


@pytest.mark.parametrize("momentum", [0.9, 1.0])
@pytest.mark.parametrize("dampening", [0.0, 0.3, 1.0])
def test_torchs_kernel_runs_momentum_without_dampening(dampening: float, momentum: float) -> None:
    """With dampening the first step is another one, which torch's fused kernel would not know."""
    mains = []
    for backend in ("reference", "torch"):
        module = Bag([torch.linspace(-1, 1, 40)])
        inner = torch.optim.SGD(module.named_parameters(), lr=0.1, momentum=momentum, dampening=dampening)
        optimizer = MixedPrecisionOptimizer(inner, OptimizerConfig(backend=backend))
        for step in range(3):
            set_grads(module, seed=step)
            with OperatorCounter() as counter:
                optimizer.step()
        mains.append([main.clone() for _, main in optimizer.main_params()])
        is_fused = any("_fused_sgd" in str(operator) for operator in counter.counts)
        assert is_fused == (backend == "torch" and dampening == 0)
    torch.testing.assert_close(*mains, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ALL)
def test_no_host_read_with_everything_on(name: str) -> None:
    """Invariant 5: dynamic scale, hysteresis 2, clipping, zeros counted, skips and growth: the host reads nothing."""
    module = model()
    config = OptimizerConfig(fp16=True, clip_grad=1.0, log_num_zeros_in_grad=True, backend=name)
    inner = torch.optim.AdamW(module.named_parameters(), lr=1e-3)
    optimizer = MixedPrecisionOptimizer(
        inner, config, DynamicGradScaler(2.0**10, 1.0, 2.0, 0.5, 2, 2), grads_are_scaled=True
    )
    for step in range(8):
        set_grads(module, step)
        if step in (3, 4):
            grad_of(module.head.weight)[0, 0] = math.inf
        with OperatorCounter() as counter:
            optimizer.step()
        assert counter.host_reads == 0
    assert optimizer.num_skipped_steps.item() == 2


@pytest.mark.parametrize("name", ALL)
def test_autograd_sees_that_weights_have_changed(name: str) -> None:
    """Backward through a graph that saved the old weights is an error, also where a kernel writes raw memory."""
    module = model(torch.bfloat16)
    optimizer = constant(module, INNER["adamw_fused"], 1.0, backend=name)
    loss = module(torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)).sum()
    set_grads(module, 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("inner", ["adamw_fused", "sgd_momentum_fused"])
def test_update_takes_any_shape_and_stride(name: str, inner: str) -> None:
    """0-element, 0-d, transposed, sliced, channels-last and block-sized params, and gradients of other strides.

    torch's own fused CPU kernels walk raw memory and are wrong where a gradient's strides differ from its parameter's.
    """
    shaped = [*_tensors(torch.float16), torch.randn(4, 3, 5, 5).half().to(memory_format=torch.channels_last)]
    module = Bag(shaped)
    twin = Bag(tensor.detach().clone().contiguous().float() for tensor in shaped)
    optimizer, theirs = constant(module, INNER[inner], 4.0, backend=name), INNER[inner](twin)
    for step in range(3):
        set_grads(module, seed=step, scale=4.0)
        channels_last = module[-1]
        if step != 1:  # the gradient's strides differ from the parameter's in step 1 only
            channels_last.grad = grad_of(channels_last).to(memory_format=torch.channels_last)
        for ours, other in zip(module.parameters(), twin.parameters(), strict=True):
            other.grad = grad_of(ours).float().contiguous() / 4.0
        assert optimizer.step().success
        theirs.step()
    for (_, main), other in zip(optimizer.main_params(), twin.parameters(), strict=True):
        torch.testing.assert_close(main, other.detach(), rtol=3e-6, atol=3e-7)


@pytest.mark.parametrize("name", ALL)
def test_overflow_flags_where_rounding_is_not_finite(name: str) -> None:
    """65520 is the first fp32 number that rounds to inf in fp16; NaN counts; bf16 and fp32 model params never do."""
    below = torch.tensor([1.0, -65519.996])
    mains = [
        below,
        torch.tensor([65520.0]),
        torch.tensor([-1e9]),
        torch.tensor([math.nan]),
        torch.tensor([1e9]),
        below[:0],
        torch.tensor([-65520.0]),
    ]
    models = [main.half() for main in mains[:4]] + [mains[4].bfloat16(), mains[5].half(), mains[6].half()]
    flags = _backend(name).write_back_(kernels.Operands(models, mains))
    assert flags.tolist() == [False, True, True, True, False, False, True]
    assert [bool(m.isfinite().all()) for m in models] == [not flag for flag in flags.tolist()]
    assert _backend(name).write_back_(kernels.Operands([torch.empty(1).half()], [mains[1]])).tolist() == [True]


RULES = {
    "adamw": kernels.AdamHyper(1e-2, 0.9, 0.99, 1e-8, 0.1, True, False, False),
    "codes": kernels.AdamHyper(1e-2, 0.9, 0.99, 1e-8, 0.1, True, False, False),
    "sgd": kernels.SgdHyper(1e-2, 0.9, 0.3, 0.1, False, False),
    "lion": kernels.LionHyper(1e-2, 0.9, 0.99, 0.1, False),
}
GRADS = {40: torch.float32, 3: torch.float16, 0: torch.float16, 70: torch.bfloat16, 33: torch.float16}
"""A gradient's dtype, by its number of elements."""


def _rows(rule: str, held: bool) -> kernels.Operands:
    """Return fp16 model params, of which the second and the last do not fit, with fp32 main params or remainders."""
    generator = torch.Generator().manual_seed(0)
    models = [torch.randn(numel, generator=generator).half() for numel in GRADS]
    mains = [model.float() for model in models]
    for index in (1, 4):
        models[index][0], mains[index][0] = math.inf, 1e6
    moments = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8} if rule == "codes" else {"exp_avg": torch.float32}
    if rule == "adamw":
        moments["exp_avg_sq"] = torch.float32
    if rule == "sgd":
        moments = {"momentum_buffer": torch.bfloat16}
    state = {name: [torch.zeros(numel, dtype=dtype) for numel in GRADS] for name, dtype in moments.items()}
    if rule == "codes":
        state |= {f"{name}_scale": [torch.zeros(-(-numel // 32)) for numel in GRADS] for name in moments}
    return kernels.Operands(
        models,
        mains,
        [torch.randn(numel, generator=generator).to(dtype) for numel, dtype in GRADS.items()],
        state,
        [] if rule == "lion" else [torch.tensor(2.0) for _ in GRADS],
        remainder=[torch.full_like(model, -32768, dtype=torch.int16) for model in models] if held else [],
    )


def _columns(operands: kernels.Operands) -> list[list[Tensor]]:
    mains = operands.remainder or operands.main
    return [operands.model, mains, *operands.state.values(), *filter(None, [operands.step])]


@pytest.mark.parametrize(("odd", "missing"), [(False, [0, 1]), (True, [1, 2, 3])], ids=["dense", "strided"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("name", "held"), [*((name, False) for name in (*BACKENDS, "triton")), ("native", True), ("triton", True)]
)
def test_a_missing_gradient_leaves_its_row_alone(
    name: str, held: bool, rule: str, odd: bool, missing: list[int]
) -> None:
    """Nothing of the row is written, not even its count or a version of its weight, and it sets no flag, in a landed
    step and in a skipped one. The others have the bits of a call without it. An empty gradient is there: it is counted.
    Also where plain tensor code updates what is not dense.
    """
    backend, hyper = _backend(name), RULES[rule]
    some, alone = _rows(rule, held), _rows(rule, held)
    if odd:
        for operands in (some, alone):
            operands.grad = [torch.stack([grad, grad], 1)[:, 0] for grad in operands.grad]
    there = [index for index in range(len(GRADS)) if index not in missing]
    some.grad = [None if index in missing else grad for index, grad in enumerate(some.grad)]
    alone = alone.pick(there)
    before = [[tensor.clone() for tensor in column] for column in _columns(some)]
    versions = [model._version for model in some.model]
    step = {kernels.AdamHyper: "adam_", kernels.SgdHyper: "sgd_", kernels.LionHyper: "lion_"}[type(hyper)]
    for found_inf in (1.0, 0.0):
        scalars = Decision(*torch.tensor([found_inf, 0.5, 1.0, 0.0]).unbind())
        flags, of_others = (getattr(backend, step)(operands, hyper, scalars) for operands in (some, alone))
        assert flags[missing].tolist() == [False] * len(missing)
        assert bits_equal(flags[there], of_others)
    for column, old, others in zip(_columns(some), before, _columns(alone), strict=True):
        assert all(bits_equal(column[index], old[index]) for index in missing)
        assert all(bits_equal(column[index], other) for index, other in zip(there, others, strict=True))
    assert [some.model[index]._version for index in missing] == [versions[index] for index in missing]
    assert all(some.model[index]._version > versions[index] for index in there if some.model[index].numel())
    assert not some.step or [float(count) for count in some.step] == [2.0 + (index in there) for index in range(5)]
    measured, measured_alone = (backend.measure(operands.grad, count_zeros=True) for operands in (some, alone))
    for of_all, of_some in zip(measured, measured_alone, strict=True):
        assert of_all is not None
        assert of_some is not None
        assert not of_all[missing].any()
        assert bits_equal(of_all[there], of_some)


@pytest.mark.parametrize("name", ALL)
def test_update_never_writes_gradients(name: str) -> None:
    """Gradients stay as backward left them: scaled, for diagnosis and accumulation."""
    module = model()
    optimizer = constant(module, INNER["adamw_fused"], 256.0, backend=name)
    set_grads(module, seed=0)
    before = [grad_of(p).clone() for p in module.parameters()]
    optimizer.step()
    assert all(bits_equal(b, grad_of(p)) for b, p in zip(before, module.parameters(), strict=True))


@pytest.mark.native
def test_reference_bias_correction_is_exact_at_the_first_steps() -> None:
    """1 - 0.999 in fp32 is off by 5e-5: the correction is taken in fp64."""
    main, grad = torch.zeros(1), torch.full((1,), 0.5)
    state = {"exp_avg": [torch.zeros(1)], "exp_avg_sq": [torch.zeros(1)]}
    operands = kernels.Operands(model=[main], main=[main], grad=[grad], state=state, step=[torch.zeros(())])
    hyper = kernels.AdamHyper(1e-3, 0.9, 0.999, 0.0, 0.0, True, False, False)
    one = torch.ones(())
    for name in BACKENDS:
        main.zero_()
        operands.step[0].zero_()
        for tensors in state.values():
            tensors[0].zero_()
        _backend(name).adam_(operands, hyper, Decision(torch.zeros(()), one, one, one))
        torch.testing.assert_close(main.item(), -1e-3, rtol=3e-7, atol=0)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gradients_are_unscaled_in_fp32(name: str, dtype: torch.dtype) -> None:
    """A coefficient that is no power of two is not rounded to the gradient's dtype, nor is the product."""
    grad = torch.linspace(1, 3, 50).to(dtype)
    third = torch.tensor(1.0) / 3
    main = torch.zeros(50)
    zero = torch.zeros(())
    _backend(name).sgd_(
        kernels.Operands([main], [main], [grad]),
        kernels.SgdHyper(-1.0, 0.0, 0.0, 0.0, False, False),
        Decision(zero, third, zero, zero),
    )
    assert bits_equal(main, grad.float() * third)


@pytest.mark.native
def test_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    """One function selects: the name, else the environment, else what is fast. Unknown names are refused."""
    monkeypatch.delenv("MEGASCALE_BACKEND", raising=False)
    assert select_backend().name == "native"
    assert select_backend(device=torch.device("meta")).name == "torch"
    monkeypatch.setenv("MEGASCALE_BACKEND", "reference")
    assert select_backend().name == "reference"
    assert select_backend("torch").name == "torch"
    monkeypatch.setenv("MEGASCALE_BACKEND", "cuda")
    with pytest.raises(ArgumentError, match=r"MEGASCALE_BACKEND must be one of .* got 'cuda'"):
        select_backend()
    with pytest.raises(ArgumentError, match=r"backend must be one of .* got 'fast'"):
        select_backend("fast")
    if importlib.util.find_spec("amp_C") is None:
        with pytest.raises(UsageError, match="apex"):
            select_backend("apex")


@pytest.mark.default("dampening-native", "adamw-torch", "lion-reference", "sgd-torch")
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "inner",
    [
        lambda bag: torch.optim.AdamW(bag.named_parameters(), lr=100.0, weight_decay=0.0),
        lambda bag: torch.optim.SGD(bag.named_parameters(), lr=100.0),
        lambda bag: torch.optim.SGD(bag.named_parameters(), lr=100.0, momentum=0.9),
        lambda bag: torch.optim.SGD(bag.named_parameters(), lr=100.0, momentum=0.9, dampening=0.5),
        lambda bag: Lion(bag.named_parameters(), lr=100.0),
    ],
    ids=["adamw", "sgd", "momentum", "dampening", "lion"],
)
def test_update_tells_which_main_param_outgrows_fp16(name: str, inner: Inner) -> None:
    """Each rule on each backend: the second of three tensors, and none before it moves."""
    module = Bag([torch.zeros(3, 3).half(), torch.full((5,), 65504.0).half(), torch.zeros(7).half()])
    optimizer = constant(module, inner, 4.0, backend=name)
    for param in module.parameters():
        param.grad = torch.full_like(param, -4.0)
    with pytest.raises(MainParamOverflowError, match=r"main param of 'params\.1' is 65520 or more"):
        optimizer.step()
