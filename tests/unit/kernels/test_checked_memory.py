"""Memory is looked at before kernels use it: what moved is followed, what does not fit is a named error."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale import DynamicGradScaler, Lion, MixedPrecisionOptimizer, OptimizerConfig
from megascale.errors import ArgumentError, ArgumentTypeError, GradientError, MegascaleError, UsageError
from megascale.kernels.tensors import tensor_reader
from tests.cases import cases
from tests.training import bits_equal

BACKENDS = ["reference", "torch", "native", pytest.param("triton", marks=pytest.mark.slow)]
"""Triton's interpreter takes as long as the others together; odd gradients it reads in the quick tests too."""
SHAPES = [(4, 4), (16,), (3, 8), ()]

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "sgd_momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, dampening=0.3),
    "lion": lambda params: Lion(params, lr=1e-2),
}


@pytest.fixture(autouse=True, params=["python", pytest.param("native", marks=pytest.mark.slow)])
def _reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tensor_reader.ENVIRONMENT_VARIABLE, request.param)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend; triton in its interpreter."""
    if request.param == "triton":
        pytest.importorskip("triton")
        if torch.accelerator.is_available():
            pytest.skip("its kernels run on the accelerator")
    return str(request.param)


class Training:
    """A few parameters that are trained on random gradients, the same for equal seeds."""

    def __init__(self, backend: str, make: Make = MAKERS["adamw"], dtype: torch.dtype = torch.float16) -> None:
        torch.manual_seed(0)
        self.params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
        fp16, bf16 = dtype == torch.float16, dtype == torch.bfloat16
        self.inner = make(self.params)
        self.scaler = DynamicGradScaler(4.0, 1.0, 2.0, 0.5, 2, 1) if fp16 else None
        config = OptimizerConfig(fp16=fp16, bf16=bf16, clip_grad=0.0, backend=backend)
        self.optimizer = MixedPrecisionOptimizer(self.inner, config, self.scaler, grads_are_scaled=True)

    def backward(self) -> None:
        """Make gradients."""
        for param in self.params:
            param.grad = torch.randn(param.shape).to(param.dtype)

    def step(self, times: int = 1) -> None:
        """Take steps."""
        for _ in range(times):
            self.backward()
            self.optimizer.step()

    def everything(self) -> list[Tensor]:
        """Copies of all that a step may change."""
        mains = [main for _, main in self.optimizer.main_params()]
        states = [
            value if isinstance(value, Tensor) else torch.tensor(value)
            for param in self.params
            for _, value in sorted(self.inner.state.get(param, {}).items())
        ]
        scaler = [] if self.scaler is None else [torch.tensor(float(v)) for v in self.scaler.state_dict().values()]
        tensors = [*self.params, *mains, *states, *scaler, self.optimizer.num_skipped_steps]
        return [tensor.detach().clone() for tensor in tensors]

    def refused(self, error: type[MegascaleError], match: str) -> None:
        """Expect that a step raises, and that nothing has changed."""
        scaler = None if self.scaler is None else self.scaler.state_dict()
        states = {id(p): {k: (v, v._version) for k, v in self.inner.state.get(p, {}).items()} for p in self.params}
        skipped = int(self.optimizer.num_skipped_steps)
        with pytest.raises(error, match=match):
            self.optimizer.step()
        assert skipped == int(self.optimizer.num_skipped_steps)
        if self.scaler is not None:
            assert self.scaler.state_dict() == scaler
        for param in self.params:
            for key, (value, version) in states[id(param)].items():
                assert self.inner.state[param][key] is value
                assert value._version == version


def _same(one: Training, other: Training, *, rounding: bool = False) -> bool:
    """Whether all bits are; with ``rounding``, whether all numbers are but for their last bits."""
    pairs = zip(one.everything(), other.everything(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-6) if rounding else bits_equal(a, b) for a, b in pairs)


# What moves


def _share(tensor: Tensor) -> None:
    tensor.share_memory_()


def _pickle(tensor: Tensor) -> None:
    ForkingPickler.dumps(tensor)


def _set(tensor: Tensor) -> None:
    tensor.set_(tensor.clone())  # type: ignore[call-overload]


def _data(tensor: Tensor) -> None:
    tensor.data = tensor.data.clone()


def _grow(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() + (1 << 20))


def _lay_out_otherwise(tensor: Tensor) -> None:
    tensor.data = tensor.data.t().contiguous().t() if tensor.dim() == 2 else tensor.data.clone()


MOVES = {f.__name__.strip("_"): f for f in (_share, _pickle, _set, _data, _grow, _lay_out_otherwise)}


@pytest.mark.parametrize("backend", ["native", *(pytest.param(b, marks=pytest.mark.slow) for b in BACKENDS[:2])])
@pytest.mark.parametrize("what", ["state", "main", "model"])
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_what_moved_is_followed(move: Callable[[Tensor], None], what: str, backend: str) -> None:
    """Invariant 9: state, main and model params that get other memory in place are updated where they lie from then."""
    for make in MAKERS.values():
        moved, left = Training(backend, make), Training(backend, make)
        for training in (moved, left):
            torch.manual_seed(1)
            training.step(2)
            if training is moved:
                with torch.no_grad():
                    for tensor in _tensors(moved, what):
                        move(tensor)
            training.step(2)
        # torch's fused kernels round otherwise than the plain code that takes other layouts.
        assert _same(moved, left, rounding=backend == "torch" and move is _lay_out_otherwise)


def _tensors(training: Training, what: str) -> Iterator[Tensor]:
    if what == "model":
        yield from training.params
    elif what == "main":
        yield from (main for _, main in training.optimizer.main_params())
    else:
        for param in training.params:
            yield from training.inner.state[param].values()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_state_that_a_process_queue_has_taken_is_trained_on(dtype: torch.dtype, backend: str) -> None:
    """`mp.Queue.put(state_dict(copy=False))` moves live state into shared memory; training goes on there."""
    queued, left = Training(backend, dtype=dtype), Training(backend, dtype=dtype)
    for training in (queued, left):
        torch.manual_seed(1)
        training.step(2)
        if training is queued:
            ForkingPickler.dumps(queued.optimizer.state_dict(copy=False))
            assert queued.inner.state[queued.params[0]]["exp_avg"].is_shared()
        training.step(2)
    assert _same(queued, left)


# What becomes something else


def _cut_short(param: nn.Parameter) -> None:
    param.untyped_storage().resize_(param.untyped_storage().nbytes() // 2)


BROKEN: dict[str, tuple[Callable[[nn.Parameter], object], str]] = {
    "larger": (lambda p: setattr(p, "data", torch.zeros(24).to(p.dtype)), r"became \(24,\)"),
    "smaller": (lambda p: setattr(p, "data", p.data[:7]), r"became \(7,\)"),
    "same_size": (lambda p: setattr(p, "data", p.data.view(2, 8)), r"became \(2, 8\)"),
    "fp64": (lambda p: setattr(p, "data", p.data.double()), r"became \(16,\) torch.float64"),
    "bits": (
        lambda p: setattr(p, "data", p.data.view(torch.float16 if p.dtype == torch.bfloat16 else torch.bfloat16)),
        r"became",
    ),
    "freed": (lambda p: p.untyped_storage().resize_(0), r"has lost its memory"),
    "cut_short": (_cut_short, r"has lost its memory"),
    "expanded": (lambda p: setattr(p, "data", torch.zeros(1).to(p.dtype).expand(16)), r"share memory"),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("grads", ["kept", "made_anew"])
def test_parameter_of_another_kind_is_refused(broken: str, dtype: torch.dtype, grads: str) -> None:
    """Another shape, dtype or layout, freed memory: a named error, nothing changes, and mended it goes on."""
    training, left = Training("native", dtype=dtype), Training("native", dtype=dtype)
    for one in (training, left):
        torch.manual_seed(1)
        one.step(2)
        one.backward()
    param = training.params[1]
    held, grad = param.data.clone(), param.grad
    spoil, message = BROKEN[broken]
    if grads == "made_anew":
        param.grad = None
    spoil(param)
    if grads == "made_anew" and "memory" not in message:
        param.grad = torch.zeros_like(param)
    training.refused(UsageError, f"parameter '1'.*{message}")
    param.data, param.grad = held, grad
    _go_on(training, left)


def _go_on(training: Training, left: Training) -> None:
    """Take the step that was refused, and one more; the other one was never disturbed."""
    for one in (training, left):
        one.optimizer.step()
        torch.manual_seed(2)
        one.step()
    assert _same(training, left)


CASTS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float32, torch.float64),
    (torch.bfloat16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float64, torch.float32),
]


@pytest.mark.parametrize(("made", "cast"), CASTS)
def test_model_cast_after_wrapping_is_refused(made: torch.dtype, cast: torch.dtype) -> None:
    """Also where both dtypes are of 16 bits, or none: a bf16 optimizer without a scaler never trains fp16."""
    training = Training("native", dtype=made)
    training.step()
    module = nn.ParameterList(training.params)
    module.to(cast)
    training.backward()
    training.refused(UsageError, rf"parameter '0' became \(4, 4\) {cast}")
    module.to(made)
    training.step()


def test_optimizer_state_of_other_shapes_is_refused() -> None:
    """inner.load_state_dict() checks no shape: state of reordered parameters would reach into the neighbours'."""
    training = Training("native")
    training.step()
    other = torch.optim.AdamW([nn.Parameter(torch.zeros(shape)) for shape in reversed(SHAPES)], lr=1e-2)
    for param in other.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    other.step()
    kept = {param: dict(state) for param, state in training.inner.state.items()}
    training.inner.load_state_dict(other.state_dict())
    training.backward()
    training.refused(UsageError, r"state\['0'\]\['exp_avg'\] is \(\) on cpu, its main param \(4, 4\)")
    training.inner.state.update(kept)
    training.optimizer.step()


SPOILED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "freed": (lambda t: t.untyped_storage().resize_(0), "has lost its memory"),
    "cut": (lambda t: setattr(t, "data", t.data[:5]), r"is \(5,\) on cpu"),
    "complex": (lambda t: setattr(t, "data", torch.zeros(16, dtype=torch.complex64)), "dtype torch.complex64"),
    "int": (lambda t: setattr(t, "data", torch.zeros(16, dtype=torch.int32)), "dtype torch.int32"),
}


@pytest.mark.parametrize("spoiled", SPOILED)
def test_state_that_does_not_fit_is_refused(spoiled: str) -> None:
    """Invariant 9: state changed in place into what no kernel could take: a named error before a bit changes."""
    training = Training("native")
    training.step()
    spoil, message = SPOILED[spoiled]
    state = training.inner.state[training.params[1]]
    good = state["exp_avg"].clone()
    state["exp_avg"] = good.clone()  # of its own: small ones share memory with their neighbours
    spoil(state["exp_avg"])
    training.backward()
    training.refused(UsageError, rf"state\['1'\]\['exp_avg'\] .*{message}")
    training.inner.state[training.params[1]]["exp_avg"] = good
    training.optimizer.step()


MENDED: dict[str, Callable[[Tensor], Tensor]] = {
    "negative": lambda t: torch._neg_view(-t),
    "expanded": lambda t: torch.zeros(1).expand(16),
    "zeros_without_memory": lambda t: torch._efficientzerotensor(16),
    "fp64": lambda t: t.double(),
    "transposed": lambda t: torch.stack([t, t], 1)[:, 0],
}


@pytest.mark.parametrize("odd", MENDED)
def test_state_is_read_as_torch_reads_it(odd: str, backend: str) -> None:
    """A negative bit, elements that share memory, zeros without memory, gaps between elements: values are torch's."""
    results = []
    for make_odd in (MENDED[odd], None):
        training = Training(backend)
        training.step()
        state = training.inner.state[training.params[1]]
        made = MENDED[odd](state["exp_avg"])
        plain = torch.zeros(16) if odd in ("expanded", "zeros_without_memory") else made.resolve_neg().float().clone()
        state["exp_avg"] = made if make_odd is not None else plain
        torch.manual_seed(2)
        training.step(2)
        results.append(training)
    # torch's fused kernels round otherwise than the plain code that takes other layouts.
    assert _same(*results, rounding=backend == "torch")


@pytest.mark.parametrize("steps", ["number", "float64", "int64", "one_dimension", "float16"])
def test_step_counts_are_read_as_numbers_of_any_type(steps: str, backend: str) -> None:
    """Older torch kept numbers, inner.load_state_dict() keeps any dtype: their bits are not taken for fp32's."""
    change: dict[str, Callable[[Tensor], Any]] = {
        "number": float,
        "float64": Tensor.double,
        "int64": Tensor.long,
        "one_dimension": lambda t: t.reshape(1),
        "float16": Tensor.half,
    }
    changed, left = Training(backend), Training(backend)
    for training in (changed, left):
        torch.manual_seed(1)
        training.step(3)
        if training is changed:
            for state in changed.inner.state.values():
                state["step"] = change[steps](state["step"])
        training.step(2)
    assert _same(changed, left)
    assert all(bits_equal(s["step"], torch.tensor(5.0)) for s in changed.inner.state.values())


# Gradients


def _freed() -> Tensor:
    grad = torch.zeros(20)[4:]
    grad.untyped_storage().resize_(0)
    return grad


ODD_GRADS: dict[str, Callable[[Tensor], Tensor]] = {
    "negative": lambda g: torch._neg_view(-g),
    "zeros_without_memory": lambda g: torch._efficientzerotensor(16, dtype=g.dtype),
    "expanded": lambda g: torch.ones(1).to(g.dtype).expand(16),
    "with_gaps": lambda g: torch.stack([g, g], 1)[:, 1],
    "backwards": lambda g: g.flip(0),
}
QUICK_ODD = [("adamw", torch.float16), ("sgd_momentum", torch.float32)]


@pytest.mark.parametrize(
    ("make", "dtype", "backend"),
    cases(
        MAKERS,
        [torch.float16, torch.float32],
        ["reference", "torch", "native", "triton"],
        quick=lambda make, dtype, backend: (make, dtype) in QUICK_ODD and (backend, dtype) != ("triton", torch.float32),
    ),
    indirect=["backend"],
)
@pytest.mark.parametrize("odd", ODD_GRADS)
def test_odd_gradients_are_read_as_torch_reads_them(odd: str, dtype: torch.dtype, make: str, backend: str) -> None:
    """With torch's negative bit the values are the opposite of the bytes; zeros may have no memory at all."""
    results = []
    for resolved in (False, True):
        training = Training(backend, MAKERS[make], dtype)
        torch.manual_seed(1)
        training.step()
        training.backward()
        param = training.params[1]
        assert param.grad is not None
        grad = ODD_GRADS[odd](param.grad)
        param.grad = (torch.zeros_like(param) + grad) if resolved else grad
        training.optimizer.step()
        results.append(training)
    assert _same(*results, rounding=backend == "torch")


def test_negative_gradient_of_a_complex_number_descends(backend: str) -> None:
    """What autograd leaves after `x.conj()` has torch's negative bit; the step goes down all the same."""
    real, imaginary = (nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(2))
    optimizer = MixedPrecisionOptimizer(
        torch.optim.SGD([real, imaginary], lr=0.1), OptimizerConfig(clip_grad=0.0, backend=backend)
    )

    def loss() -> Tensor:
        return torch.view_as_real(torch.complex(real, imaginary).conj().resolve_conj()).square().sum()

    before = loss()
    before.backward()
    assert imaginary.grad is not None
    grad = imaginary.grad.detach()
    imaginary.grad = torch.complex(grad, -grad).conj().imag
    assert imaginary.grad.is_neg()
    optimizer.step()
    assert loss() < before


def _traced(param: Tensor) -> Tensor:
    return torch._to_functional_tensor(torch.zeros_like(param))


BAD_GRADS: dict[str, tuple[Callable[[nn.Parameter], object], str]] = {
    "freed": (lambda p: p.grad.untyped_storage().resize_(0), "has lost its memory"),  # type: ignore[union-attr]
    "cut": (lambda p: p.grad.untyped_storage().resize_(8), "has lost its memory"),  # type: ignore[union-attr]
    "freed_view": (lambda p: setattr(p.grad, "data", _freed()), "has lost its memory"),
    "smaller": (lambda p: setattr(p.grad, "data", p.grad[:3]), r"is \(3,\) on cpu, the parameter \(16,\)"),  # type: ignore[index]
    "larger": (lambda p: setattr(p.grad, "data", torch.zeros(99)), r"is \(99,\) on cpu"),
    "reshaped": (lambda p: setattr(p.grad, "data", p.grad.view(4, 4)), r"is \(4, 4\) on cpu"),  # type: ignore[union-attr]
    "traced": (lambda p: setattr(p, "grad", _traced(p)), "without memory of its own"),
    "integer": (lambda p: setattr(p.grad, "data", torch.zeros(16, dtype=torch.int64)), "dtype torch.int64"),
    "complex": (lambda p: setattr(p.grad, "data", torch.zeros(16, dtype=torch.complex64)), "dtype torch.complex64"),
}


@pytest.mark.parametrize("bad", BAD_GRADS)
def test_gradient_that_cannot_be_read_is_refused(bad: str) -> None:
    """Freed memory, another size, shape, device or kind of number: named, and nothing has changed."""
    training, left = Training("native"), Training("native")
    for one in (training, left):
        torch.manual_seed(1)
        one.step()
        one.backward()
    param = training.params[1]
    assert param.grad is not None
    good = param.grad.clone()
    spoil, message = BAD_GRADS[bad]
    spoil(param)
    training.refused(GradientError, f"the gradient of '1' .*{message}")
    param.grad = good
    _go_on(training, left)


# Between the halves of a step


def test_what_moves_between_the_halves_of_a_step_is_followed(backend: str) -> None:
    """prepare_grads() returns to the caller, who may move parameters, state and gradients before the second half."""
    moved, left = Training(backend), Training(backend)
    for training in (moved, left):
        torch.manual_seed(1)
        training.step()
        training.backward()
        training.optimizer.prepare_grads()
        if training is moved:
            for what in ("state", "main", "model"):
                for tensor in list(_tensors(moved, what)):
                    tensor.data = tensor.data.clone()
            for param in moved.params:
                assert param.grad is not None
                param.grad.data = param.grad.data.clone()
            moved.optimizer.zero_grad()
        training.optimizer.step_with_ready_grads()
        training.step()
    assert _same(moved, left)


@pytest.mark.parametrize("what", ["gradient", "parameter", "state"])
def test_what_breaks_between_the_halves_of_a_step_is_refused(what: str) -> None:
    """Memory that is gone before the second half: a named error, and no kernel has run."""
    training = Training("native")
    training.step()
    training.backward()
    training.optimizer.prepare_grads()
    param = training.params[1]
    weights = [p.detach().clone() for p in training.params]
    assert param.grad is not None
    if what == "gradient":
        param.grad.untyped_storage().resize_(0)
    elif what == "parameter":
        param.data = torch.zeros(99).half()
    else:
        training.inner.state[param]["exp_avg"].data = torch.zeros(3)
    with pytest.raises((GradientError, UsageError), match="'1'"):
        training.optimizer.step_with_ready_grads()
    others = [0, 2, 3]
    assert all(bits_equal(training.params[i], weights[i]) for i in others)


# State that lacks, options that change


def _trained_by_torch(make: Make, change: Callable[[torch.optim.Optimizer], None], after: int) -> list[Tensor]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    inner = make(params)
    torch.manual_seed(1)
    for index in range(after + 3):
        if index == after:
            change(inner)
        for param in params:
            param.grad = torch.randn(param.shape)
        inner.step()
    return params  # type: ignore[return-value]


def _set_option(name: str, value: Any) -> Callable[[torch.optim.Optimizer], None]:
    def change(inner: torch.optim.Optimizer) -> None:
        for group in inner.param_groups:
            group[name] = value

    return change


def _replace_state(inner: torch.optim.Optimizer) -> None:
    inner.state = defaultdict(dict)


CHANGES: dict[str, tuple[Make, Callable[[torch.optim.Optimizer], None]]] = {
    "momentum": (lambda ps: torch.optim.SGD(ps, lr=0.1), _set_option("momentum", 0.9)),
    "momentum_dampened": (lambda ps: torch.optim.SGD(ps, lr=0.1, dampening=0.5), _set_option("momentum", 0.9)),
    "dampening": (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), _set_option("dampening", 0.5)),
    "cleared_adamw": (lambda ps: torch.optim.AdamW(ps, lr=0.1), lambda inner: inner.state.clear()),
    "cleared_sgd": (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), lambda inner: inner.state.clear()),
    "replaced_adamw": (lambda ps: torch.optim.AdamW(ps, lr=0.1), _replace_state),
    "replaced_lion": (lambda ps: Lion(ps, lr=0.1), _replace_state),
    "rate_of_shape_1": (lambda ps: torch.optim.AdamW(ps, lr=0.1), _set_option("lr", torch.tensor([0.5]))),
    "bf16_rate": (lambda ps: torch.optim.SGD(ps, lr=0.1), _set_option("lr", torch.tensor(0.5).bfloat16())),
    "rate_of_shape_1_1": (lambda ps: torch.optim.SGD(ps, lr=0.1), _set_option("lr", torch.tensor([[0.5]]))),
    "integer_rate": (lambda ps: torch.optim.SGD(ps, lr=0.1), _set_option("lr", torch.tensor(1))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_options_and_state_change_as_with_torch(change: str, backend: str) -> None:
    """Momentum raised from 0, state cleared or replaced, any kind of rate: the next step is torch's next step."""
    make, apply = CHANGES[change]
    theirs = _trained_by_torch(make, apply, after=2)
    ours = Training(backend, make, torch.float32)
    torch.manual_seed(1)
    ours.step(2)
    apply(ours.optimizer)
    ours.step(3)
    for mine, their in zip(ours.params, theirs, strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-5, atol=1e-6)


def test_amsgrad_is_switched_on() -> None:
    """Torch's own step then raises KeyError; here the largest second moment starts at the next step."""
    training = Training("native")
    training.step(2)
    training.inner.param_groups[0]["amsgrad"] = True
    training.step(2)
    for param in training.params:
        assert torch.equal(
            training.inner.state[param]["max_exp_avg_sq"] >= training.inner.state[param]["exp_avg_sq"],
            torch.ones(param.shape, dtype=torch.bool),
        )


@pytest.mark.parametrize("policy", ["OneCycleLR", "CyclicLR"])
def test_schedules_that_move_momentum_run(policy: str) -> None:
    """Both raise SGD's momentum from 0 by default, after the optimizer was wrapped."""
    training = Training("native", lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.0))
    training.inner.defaults["momentum"] = 0.0
    if policy == "OneCycleLR":
        schedule: Any = torch.optim.lr_scheduler.OneCycleLR(training.inner, max_lr=0.1, total_steps=10)
    else:
        schedule = torch.optim.lr_scheduler.CyclicLR(training.inner, base_lr=0.01, max_lr=0.1)
    for _ in range(3):
        training.step()
        schedule.step()
    assert all("momentum_buffer" in training.inner.state[param] for param in training.params)


BAD_OPTIONS: dict[str, tuple[str, Any]] = {
    "rate_of_two": ("lr", torch.tensor([0.1, 0.2])),
    "complex_rate": ("lr", torch.tensor(1j)),
    "rate_without_memory": ("lr", torch.tensor(0.1, device="meta")),
    "sparse_rate": ("lr", torch.tensor([0.1]).to_sparse()),
    "text_rate": ("lr", "0.1"),
    "no_rate": ("lr", None),
    "text_decay": ("weight_decay", "0.1"),
    "one_beta": ("betas", (0.9,)),
    "text_betas": ("betas", "ab"),
    "no_eps": ("eps", None),
}


@pytest.mark.parametrize("bad", BAD_OPTIONS)
def test_option_of_a_wrong_type_is_refused(bad: str) -> None:
    """In the second of two groups: the error names the option, and neither group nor the scale has changed."""
    name, value = BAD_OPTIONS[bad]
    training = Training("native", lambda ps: torch.optim.AdamW([{"params": ps[:2]}, {"params": ps[2:]}], lr=0.1))
    training.step()
    before = training.inner.param_groups[1][name]
    training.inner.param_groups[1][name] = value
    training.backward()
    training.refused(ArgumentError, name)
    training.inner.param_groups[1][name] = before
    training.optimizer.step()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (torch.optim.AdamW, "lr"),
        (torch.optim.AdamW, "eps"),
        (torch.optim.AdamW, "amsgrad"),
        (torch.optim.SGD, "momentum"),
        (torch.optim.SGD, "nesterov"),
        (Lion, "maximize"),
    ],
)
def test_option_that_lacks_is_refused(kind: type[torch.optim.Optimizer], name: str) -> None:
    """Taken out of a group, or not in one that was appended to the list: named, and neither group has changed."""
    training = Training("native", lambda ps: kind([{"params": ps[:2]}, {"params": ps[2:]}], lr=0.1))  # type: ignore[call-arg]
    training.step()
    before = training.inner.param_groups[1].pop(name)
    training.backward()
    training.refused(ArgumentError, f"a param group lacks '{name}'; set them, or add the group by add_param_group")
    training.inner.param_groups[1][name] = before
    training.optimizer.step()


@pytest.mark.parametrize("kind", [tuple, iter])
def test_params_of_a_group_may_be_any_sequence(kind: Callable[[list[Any]], Any]) -> None:
    """Torch steps a tuple; the library that reads many at once reads lists, and would read past the end of others."""
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(params, lr=0.5))
    optimizer.step()
    optimizer.param_groups[0]["params"] = kind(params)
    for param in params:
        param.grad = torch.ones(2)
    optimizer.step()
    assert all(torch.equal(param, torch.full((2,), 0.5)) for param in params)


@pytest.mark.parametrize(("params", "message"), [(None, "got a NoneType"), (["a"], "holds a str")])
def test_params_of_a_group_that_are_none_are_refused(params: Any, message: str) -> None:
    """Named, before a bit changes."""
    training = Training("native")
    training.step()
    before = training.inner.param_groups[0]["params"]
    training.inner.param_groups[0]["params"] = params
    training.refused(ArgumentTypeError, f"params of a param group .*{message}")
    training.inner.param_groups[0]["params"] = before
    training.step()


def test_expanded_parameter_is_refused() -> None:
    """At construction: an update would write an element several times."""
    param = nn.Parameter(torch.ones(1).half().expand(4))
    with pytest.raises(UsageError, match="several elements of parameter '0'"):
        MixedPrecisionOptimizer(torch.optim.SGD([param], lr=0.1), grad_scaler=DynamicGradScaler())


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("entry", [None, []])
def test_state_that_is_no_dict_is_refused(kind: type[torch.optim.Optimizer], entry: Any) -> None:
    """Also of an optimizer that runs its own step: the parameter is named, and nothing has changed."""
    training = Training("native", lambda params: kind(params, lr=0.01))  # type: ignore[call-arg]
    training.step()
    kept = training.inner.state[training.params[1]]
    training.inner.state[training.params[1]] = entry
    training.backward()
    before = [param.detach().clone() for param in training.params]
    with pytest.raises(UsageError, match=f"state of '1' is a {type(entry).__name__}, not a dict"):
        training.optimizer.step()
    assert all(map(torch.equal, training.params, before))
    training.inner.state[training.params[1]] = kept
    training.optimizer.step()


def test_a_step_count_for_all_parameters_becomes_one_for_each(backend: str) -> None:
    """Loaded state may hold one tensor for all: counted once for each, it would run ahead."""
    training, left = Training(backend), Training(backend)
    for one, is_shared in ((training, True), (left, False)):
        torch.manual_seed(1)
        one.step(2)
        count = torch.tensor(2.0)
        for param in one.params:
            one.inner.state[param]["step"] = count if is_shared else count.clone()
        one.step(2)
    assert _same(training, left)


def test_state_that_is_not_whole_is_refused() -> None:
    """Of Adam's moments one was deleted: torch raises KeyError, here the error names the parameter."""
    training = Training("native")
    training.step()
    del training.inner.state[training.params[1]]["exp_avg_sq"]
    training.backward()
    training.refused(UsageError, r"state of '1' has \['exp_avg', 'step'\] and lacks \['exp_avg_sq'\]")
    training.inner.state[training.params[1]] = {}
    training.optimizer.step()
