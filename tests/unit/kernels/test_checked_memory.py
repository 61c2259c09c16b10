"""Memory is looked at before kernels use it: what moved is followed, what does not fit is a named error."""

from collections.abc import Callable, Iterator
from itertools import product
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import Tensor, nn

from megascale.errors import ArgumentError, GradientError, UsageError
from tests.training import bits_equal
from tests.unit.kernels.memory_cases import BACKENDS, MAKERS, Make, Training, go_on, same_training

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
    if not tensor.untyped_storage().resizable():  # small tensors share storage, which torch does not resize
        _set(tensor)
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() + (1 << 20))


def _lay_out_otherwise(tensor: Tensor) -> None:
    tensor.data = tensor.data.t().contiguous().t() if tensor.dim() == 2 else tensor.data.clone()


MOVES = {f.__name__.strip("_"): f for f in (_share, _pickle, _set, _data, _grow, _lay_out_otherwise)}


# Of main params and state storages move, with all that lies in them; tensors stay in their places there.
MOVED = [*product(["model"], MOVES), *product(["state", "main"], ["share", "pickle"])]


@pytest.mark.default("main-share-native")
@pytest.mark.parametrize("backend", ["native", *(b for b in BACKENDS[:2])])
@pytest.mark.parametrize(("what", "move"), MOVED)
def test_what_moved_is_followed(what: str, move: str, backend: str) -> None:
    """Invariant 9: state, main and model params that get other memory in place are updated where they lie from then."""
    for make in MAKERS.values():
        moved, left = Training(backend, make), Training(backend, make)
        for training in (moved, left):
            torch.manual_seed(1)
            training.step(2)
            if training is moved:
                with torch.no_grad():
                    for tensor in _tensors(moved, what):
                        MOVES[move](tensor)
            training.step(2)
        # torch's fused kernels round otherwise than the plain code that takes other layouts.
        assert same_training(moved, left, rounding=backend == "torch" and move == "lay_out_otherwise")


@pytest.mark.parametrize("what", ["state", "main"])
@pytest.mark.parametrize("move", [_set, _data])
def test_tensors_of_ours_that_are_pointed_elsewhere_are_not_followed(
    move: Callable[[Tensor], None], what: str, backend: str
) -> None:
    """Invariant 9: the library goes on with its own memory, which nobody else gets; weights are those of a run in which
    nothing was pointed elsewhere.
    """
    moved, left = Training(backend), Training(backend)
    for training in (moved, left):
        torch.manual_seed(1)
        training.step(2)
        for tensor in list(_tensors(training, what)) if training is moved else ():
            move(tensor)
            tensor.fill_(torch.nan)
        training.step(2)
    assert all(bits_equal(one, other) for one, other in zip(moved.params, left.params, strict=True))


def _tensors(training: Training, what: str) -> Iterator[Tensor]:
    if what == "model":
        yield from training.params
    elif what == "main":
        yield from (main for _, main in training.optimizer.main_params())
    else:
        for param in training.params:
            yield from training.inner.state[param].values()


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


@pytest.mark.default("kept-smaller-dtype0", "made_anew-fp64-dtype2", "kept-larger-dtype1", "kept-bits-dtype2")
@pytest.mark.native
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
    go_on(training, left)


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


@pytest.mark.native
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


SPOILED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "freed": (lambda t: t.untyped_storage().resize_(0), "has lost its memory"),
    "cut": (lambda t: setattr(t, "data", t.data[:5]), r"is \(5,\) on cpu"),
    "complex": (lambda t: setattr(t, "data", torch.zeros(16, dtype=torch.complex64)), "dtype torch.complex64"),
    "int": (lambda t: setattr(t, "data", torch.zeros(16, dtype=torch.int32)), "dtype torch.int32"),
    "zeros_without_memory": (lambda t: setattr(t, "data", torch._efficientzerotensor(16)), "without memory of its own"),
}


def _rmsprop(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params)


@pytest.mark.native
@pytest.mark.parametrize(
    ("spoiled", "make", "name"),
    [*((spoiled, MAKERS["adamw"], "exp_avg") for spoiled in SPOILED), ("freed", _rmsprop, "square_avg")],
)
def test_state_that_does_not_fit_is_refused(spoiled: str, make: Make, name: str) -> None:
    """Invariant 9: what was put into the state and cannot be taken in: a named error before a bit changes.

    RMSprop's own step() would read the freed memory, and kill the process.
    """
    training = Training("native", make)
    training.step()
    spoil, message = SPOILED[spoiled]
    state = training.inner.state[training.params[1]]
    good = state[name].clone()
    state[name] = good.clone()
    spoil(state[name])
    training.backward()
    training.refused(UsageError, rf"state\['1'\]\['{name}'\] .*{message}")
    training.inner.state[training.params[1]][name] = good
    training.optimizer.step()


@pytest.mark.parametrize("make", [MAKERS["adamw"], _rmsprop], ids=["adamw", "its own step"])
def test_a_rate_without_memory_is_refused(make: Make) -> None:
    """What lay there was the rate: weights of -3e8, and success, or a dead process. Replaced, it goes on."""
    training = Training("reference", make)
    training.inner.param_groups[0]["lr"] = rate = torch.full((), 0.1)
    training.step()
    rate.untyped_storage().resize_(0)
    training.backward()
    training.refused(ArgumentError, "lr of a param group has lost its memory.*assign a number")
    training.inner.param_groups[0]["lr"] = 0.1
    training.optimizer.step()


MENDED: dict[str, Callable[[Tensor], Tensor]] = {
    "fp64": lambda t: t.double(),
    "transposed": lambda t: torch.stack([t, t], 1)[:, 0],
}


@pytest.mark.default("native-transposed", "reference-fp64")
@pytest.mark.parametrize("odd", MENDED)
def test_state_is_read_as_torch_reads_it(odd: str, backend: str) -> None:
    """Another dtype, or gaps between elements: values are torch's."""
    results = []
    for make_odd in (MENDED[odd], None):
        training = Training(backend)
        training.step()
        state = training.inner.state[training.params[1]]
        made = MENDED[odd](state["exp_avg"])
        state["exp_avg"] = made if make_odd is not None else made.float().clone()
        torch.manual_seed(2)
        training.step(2)
        results.append(training)
    # torch's fused kernels round otherwise than the plain code that takes other layouts.
    assert same_training(*results, rounding=backend == "torch")


# Gradients


def _freed() -> Tensor:
    grad = torch.zeros(20)[4:]
    grad.untyped_storage().resize_(0)
    return grad


ODD_GRADS: dict[str, Callable[[Tensor], Tensor]] = {
    "with_gaps": lambda g: torch.stack([g, g], 1)[:, 1],
    "backwards": lambda g: g.flip(0),
    "a_parameter": lambda g: nn.Parameter(g),
}


@pytest.mark.default(
    "backwards-sgd_momentum-dtype12-reference",
    "with_gaps-adamw-dtype3-triton",
    "a_parameter-sgd_momentum-dtype13-torch",
    "with_gaps-adamw-dtype2-native",
)
@pytest.mark.parametrize(
    ("make", "dtype", "backend"),
    list(product(MAKERS, [torch.float16, torch.float32], ["reference", "torch", "native", "triton"])),
    indirect=["backend"],
)
@pytest.mark.parametrize("odd", ODD_GRADS)
def test_odd_gradients_are_read_as_torch_reads_them(odd: str, dtype: torch.dtype, make: str, backend: str) -> None:
    """With gaps between elements, or of a subclass."""
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
    assert same_training(*results, rounding=backend == "torch")


def _traced(param: Tensor) -> Tensor:
    return torch._to_functional_tensor(torch.zeros_like(param))


def _give_of_inference(param: nn.Parameter) -> None:
    with torch.inference_mode():
        param.grad = torch.ones(16).to(param.dtype)


BAD_GRADS: dict[str, tuple[Callable[[nn.Parameter], object], str]] = {
    "freed": (lambda p: p.grad.untyped_storage().resize_(0), "has lost its memory"),  # type: ignore[union-attr]
    "cut": (lambda p: p.grad.untyped_storage().resize_(8), "has lost its memory"),  # type: ignore[union-attr]
    "freed_view": (lambda p: setattr(p.grad, "data", _freed()), "has lost its memory"),
    "smaller": (lambda p: setattr(p.grad, "data", p.grad[:3]), r"is \(3,\) on cpu, the parameter \(16,\)"),  # type: ignore[index]
    "larger": (lambda p: setattr(p.grad, "data", torch.zeros(99)), r"is \(99,\) on cpu"),
    "reshaped": (lambda p: setattr(p.grad, "data", p.grad.view(4, 4)), r"is \(4, 4\) on cpu"),  # type: ignore[union-attr]
    "traced": (lambda p: setattr(p, "grad", _traced(p)), "without memory of its own"),
    "negative": (lambda p: setattr(p, "grad", torch._neg_view(p.data.clone())), "has torch's negative bit set"),
    "expanded": (lambda p: setattr(p, "grad", torch.ones(1).to(p.dtype).expand(16)), "has elements that share memory"),
    "zeros_without_memory": (
        lambda p: setattr(p, "grad", torch._efficientzerotensor(16, dtype=p.dtype)),
        "without memory of its own",
    ),
    "of_inference": (lambda p: _give_of_inference(p), r"was made in torch.inference_mode\(\)"),
    "integer": (lambda p: setattr(p.grad, "data", torch.zeros(16, dtype=torch.int64)), "dtype torch.int64"),
    "complex": (lambda p: setattr(p.grad, "data", torch.zeros(16, dtype=torch.complex64)), "dtype torch.complex64"),
}


@pytest.mark.default("freed_view", "freed", "larger", "complex")
@pytest.mark.native
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
    go_on(training, left)


# Between the halves of a step


def test_what_moves_between_the_halves_of_a_step_is_followed(backend: str) -> None:
    """prepare_grads() returns to the caller, who may move parameters and gradients, and assign state, before the second
    half.
    """
    moved, left = Training(backend), Training(backend)
    for training in (moved, left):
        torch.manual_seed(1)
        training.step()
        training.backward()
        training.optimizer.prepare_grads()
        if training is moved:
            for param in moved.params:
                param.data = param.data.clone()
                for name, value in moved.inner.state[param].items():
                    moved.inner.state[param][name] = value.clone()
                assert param.grad is not None
                param.grad.data = param.grad.data.clone()
        training.optimizer.step_with_ready_grads()
        training.step()
    assert same_training(moved, left)


@pytest.mark.native
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
        training.inner.state[param]["exp_avg"] = torch.zeros(3)
    with pytest.raises((GradientError, UsageError), match="'1'"):
        training.optimizer.step_with_ready_grads()
    others = [0, 2, 3]
    assert all(bits_equal(training.params[i], weights[i]) for i in others)


# State that lacks, options that change
