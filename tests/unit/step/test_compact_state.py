"""Optimizers whose moments are 8-bit codes: backends agree, state travels, and what cannot be held is refused."""

import contextlib
import math
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale import Lion, MixedPrecisionOptimizer
from megascale.errors import ArgumentError, MainParamOverflowError, StateDictError, UsageError
from megascale.kernels import ReferenceBackend
from megascale.step.compact_state import require_supported
from tests.counting import OperatorCounter
from tests.training import INNER, Bag, Inner, constant, grad_of, same_bits, set_grads, snapshot, trained

BACKENDS = ["reference", "native", "torch"]
if find_spec("triton") and not torch.accelerator.is_available():
    BACKENDS.append("triton")  # in its interpreter
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
BOTH = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8, "clip_grad": 0.0}
KINDS = [BOTH, {**BOTH, "exp_avg_sq_dtype": torch.float32}, {**BOTH, "exp_avg_dtype": torch.float32}]
ADAM: dict[str, Inner] = {
    "adamw": INNER["adamw_fused"],
    "adam": lambda m: torch.optim.Adam(m.named_parameters(), lr=1e-2, weight_decay=0.1, maximize=True),
    "amsgrad": INNER["adam_amsgrad"],
}


def odd(dtype: torch.dtype, strided: bool = False) -> Bag:
    """Return tensors of 0 to 2,112 elements, with whole and cut groups, and several blocks."""
    torch.manual_seed(0)
    shapes = [(3, 5), (33, 64), (), (0,), (1,), (64,), (1100,)]
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    if strided:
        tensors.append(torch.randn(8, 40).to(dtype).t())
    return Bag(tensors)


HELD = [(0, "adamw"), (0, "adam"), (0, "amsgrad"), (1, "adamw"), (2, "adam")]


@pytest.mark.default("held4-dtype0")
@pytest.mark.native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("held", HELD)
def test_backends_have_the_same_bits(held: tuple[int, str], dtype: torch.dtype) -> None:
    """Codes, scales, main and model params of native and torch are the reference's. Skips change no bit."""
    kind, inner = held
    found = [trained(odd(dtype), ADAM[inner], 5, backend=backend, **KINDS[kind]) for backend in BACKENDS]
    assert {found[0]["state.params.0.exp_avg"].dtype, found[0]["state.params.0.exp_avg_sq"].dtype} >= {
        option for option in KINDS[kind].values() if option in (torch.int8, torch.uint8)
    }
    assert all(same_bits(found[0], other) for other in found[1:])


@pytest.mark.native
@pytest.mark.default("100")
@pytest.mark.parametrize("numel", [64, 100])
def test_a_scale_that_is_nan_spoils_what_it_does_in_the_reference(numel: int) -> None:
    """In a last group that is not whole, too: what fills it up is no element."""

    def spoiled(backend: str) -> dict[str, Tensor]:
        module = Bag([torch.ones(numel).bfloat16()])
        optimizer = constant(module, ADAM["adamw"], 1.0, backend=backend, **BOTH)
        steps(module, optimizer, 0, 2)
        optimizer.state[module.params[0]]["exp_avg_sq_scale"][-1] = math.nan
        for step in (2, 3):
            set_grads(module, step, scale=1.0)
            optimizer.step()
        return {**optimizer.state[module.params[0]], "weights": module.params[0].detach()}

    found = [spoiled(backend) for backend in BACKENDS]
    assert found[0]["weights"].isnan().any() == (numel == 64)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.native
@pytest.mark.parametrize("largest", [1.0, 65504.0])
def test_rare_remainders_beside_codes(largest: float) -> None:
    """In rows of any length, remainders of weights below 2**-16, and of those that would round to inf, which stay what
    they were, have the reference's bits, and so do those beside them.
    """

    def coarse(module: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.named_parameters(), lr=16.0, weight_decay=0.0)

    def moved(backend: str) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        lengths = [*range(1, 70, 3), *torch.randint(500, 1200, (4,), generator=generator).tolist()]
        sizes = torch.tensor([0.0, 2.0**-20, 2.0**-16, 1.0, 1.0, 1.0, largest])
        tensors = [
            torch.randn(n, generator=generator).clamp(-1, 1) * sizes[torch.randint(7, (n,), generator=generator)]
            for n in lengths
        ]
        module = Bag([tensor.half() for tensor in tensors])
        optimizer = constant(module, coarse, 1.0, **BOTH, store_param_remainders=True, backend=backend)
        with contextlib.suppress(MainParamOverflowError):
            for step in range(3):
                set_grads(module, seed=step, scale=100.0)
                for param in module.parameters():
                    grad_of(param).masked_fill_(param.detach().abs() < 2.0**-14, 0.0)
                optimizer.step()
                if largest > 1:
                    break
        main = {f"main.{name}": tensor.clone() for name, tensor in optimizer.main_params()}
        return main | {f"model.{name}": param.detach().clone() for name, param in module.named_parameters()}

    expected = moved("reference")
    assert same_bits(expected, moved("native"))
    assert any(tensor.abs().max() == largest for tensor in expected.values()) == (largest > 1)


@pytest.mark.native
@pytest.mark.parametrize("kind", [BOTH, {**BOTH, "store_param_remainders": True}], ids=["main params", "remainders"])
def test_one_call_updates_all_codes(kind: dict[str, Any]) -> None:
    """Invariant 8: on native, operators of a step do not grow with parameters that compact.h takes."""
    counts = []
    for number in (1, 4):
        module = Bag([torch.ones(40, 3).half() for _ in range(number)])
        optimizer = constant(module, ADAM["adamw"], 256.0, backend="native", **kind)
        for step in range(2):
            set_grads(module, seed=step, scale=256.0)
            with OperatorCounter() as counter:
                optimizer.step()
        counts.append(sum(counter.counts.values()))
    assert counts[0] == counts[1]


def optimizer_of(module: Bag, **options: Any) -> MixedPrecisionOptimizer:
    """Return a native AdamW."""
    return constant(module, ADAM["adamw"], 256.0, backend="native", **options)


def steps(module: Bag, optimizer: MixedPrecisionOptimizer, first: int, last: int) -> dict[str, Tensor]:
    """Take some steps and return everything."""
    for step in range(first, last):
        set_grads(module, seed=step, scale=256.0)
        optimizer.step()
    return snapshot(optimizer, module)


def loaded(saved: dict[str, Any], source: Bag, **options: Any) -> tuple[Bag, MixedPrecisionOptimizer]:
    """Return a new optimizer that has loaded a state dict."""
    module = odd(torch.float16)
    module.load_state_dict(source.state_dict())
    optimizer = optimizer_of(module, **options)
    optimizer.load_state_dict(saved)
    return module, optimizer


@pytest.mark.native
def test_state_in_fp32_is_encoded_and_codes_become_fp32() -> None:
    """Both ways keep the values: exactly into fp32, and as a step rounds them into codes; other state stays."""
    module = odd(torch.float16)
    optimizer = optimizer_of(module, **BOTH)
    steps(module, optimizer, 0, 3)
    codes = optimizer.state_dict()
    wide, other = loaded(codes, module)
    plain = other.state_dict()
    entry = plain["optimizer"]["state"]["params.1"]
    assert set(entry) == {"step", "exp_avg", "exp_avg_sq"}
    assert {value.dtype for value in entry.values()} == {torch.float32}
    first, second = entry["exp_avg"], entry["exp_avg_sq"]
    assert (first != 0).float().mean() > 0.9
    assert (second > 0).all()
    _, back = loaded(plain, wide, **BOTH)
    _, again = loaded(back.state_dict(), wide)
    returned = again.state_dict()["optimizer"]["state"]["params.1"]
    torch.testing.assert_close(returned["exp_avg_sq"], second, rtol=0.14, atol=0)
    torch.testing.assert_close(returned["exp_avg"], first, rtol=0.14, atol=float(first.abs().max()) / 50)
    assert returned["step"] == 3


def _given(inner: torch.optim.Optimizer, _: object) -> torch.optim.Optimizer:
    return inner


@pytest.mark.native
def test_damaged_state_is_refused() -> None:
    """Codes without their scales, or of another shape, are an error before anything has changed."""
    module = odd(torch.float16)
    optimizer = optimizer_of(module, **BOTH)
    before = steps(module, optimizer, 0, 2)
    for key, value, message in (
        ("exp_avg_scale", None, r"exp_avg of 'params.1' is held as torch.int8 codes and needs exp_avg_scale"),
        ("exp_avg_sq_scale", torch.zeros(3), r"exp_avg_sq of 'params.1' is held as torch.uint8 codes .* of 66 scales"),
        (
            "exp_avg",
            torch.zeros(3, dtype=torch.int8),
            r"exp_avg of 'params.1' has shape \(3,\), the parameter has \(33, 64\)",
        ),
        ("exp_avg", torch.zeros(33, 64, dtype=torch.int32), r"must be a floating point tensor"),
    ):
        saved = optimizer.state_dict()
        saved["optimizer"]["state"]["params.1"] |= {key: value} if value is not None else {}
        if value is None:
            del saved["optimizer"]["state"]["params.1"][key]
        with pytest.raises(StateDictError, match=message):
            optimizer.load_state_dict(saved)
        assert same_bits(before, snapshot(optimizer, module))


@pytest.mark.native
@pytest.mark.parametrize("options", [BOTH, {}], ids=["codes", "fp32"])
def test_codes_that_torch_has_cast_are_refused(options: dict[str, Any]) -> None:
    """``load_state_dict`` of an optimizer that is not wrapped yet casts codes: they would count as moments."""
    for dtype in (torch.float16, torch.float32):
        source, target = odd(dtype), odd(dtype)
        compact, bare = optimizer_of(source, **BOTH), INNER["adamw_fused"](target)
        steps(source, compact, 0, 1)
        bare.load_state_dict(compact._inner.state_dict())
        with pytest.raises(UsageError, match=r"beside exp_avg_scale: codes of torch.int8, which load_state_dict"):
            constant(target, partial(_given, bare), 256.0, **options)


SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": lambda scales: torch.stack([scales, scales + 1], -1)[..., 0],
    "fp64": Tensor.double,
}


@pytest.mark.default("native-strided")
@pytest.mark.parametrize(("backend", "kind"), [(backend, kind) for backend in BACKENDS for kind in SCALES])
def test_scales_of_another_form_are_read_as_their_values(backend: str, kind: str) -> None:
    """What the user puts into the state is taken by value: the same bits as from a dense fp32 copy of it."""
    found = []
    for change in (
        SCALES[kind],
        lambda scales: SCALES[kind](scales).float().clone(memory_format=torch.contiguous_format),
    ):
        module = odd(torch.bfloat16)
        optimizer = constant(module, INNER["adamw_fused"], 256.0, backend=backend, **BOTH)
        for step in range(3):
            set_grads(module, seed=step, scale=256.0)
            if step == 1:
                for state in optimizer._inner.state.values():
                    state.update(
                        {name: change(v) for name, v in list(state.items()) if name.endswith("_scale") and len(v)}
                    )
            optimizer.step()
        found.append(snapshot(optimizer, module))
    assert same_bits(*found)


def _momentum(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), momentum=0.9)


def _lion(module: torch.nn.Module) -> torch.optim.Optimizer:
    return Lion(module.parameters())


def _with_apex(module: Bag) -> None:
    apex = ReferenceBackend()
    apex.name = "apex"
    require_supported({"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}, ADAM["adamw"](module), apex)


def _by_its_own_step(module: Bag) -> None:
    optimizer = optimizer_of(module, **BOTH)
    optimizer._inner.register_step_pre_hook(lambda *_: None)
    set_grads(module, 0, 256.0)
    optimizer.step()


HELD_BY = r"exp_avg_dtype=torch.int8 needs Adam or AdamW, not {}, .*: give torch.bfloat16, or leave it at"
NOT_HELD: list[tuple[Callable[[Bag], object], type[Exception], str]] = [
    (lambda m: constant(m, _momentum, 1.0, exp_avg_dtype=torch.int8), ArgumentError, HELD_BY.format("SGD")),
    (lambda m: constant(m, _lion, 1.0, exp_avg_dtype=torch.int8), ArgumentError, HELD_BY.format("Lion")),
    (lambda m: constant(m, _lion, 1.0, exp_avg_sq_dtype=torch.uint8), ArgumentError, "the Lion has no such option"),
    (_with_apex, ArgumentError, "exp_avg_dtype=torch.int8 needs one of the backends .*, not apex"),
    (
        lambda m: constant(m.double(), ADAM["adamw"], 1.0, **BOTH),
        ArgumentError,
        "has dtype torch.float64, and 8-bit",
    ),
    (_by_its_own_step, UsageError, r"its own step\(\) must run, which cannot compute with exp_avg=torch.int8"),
]


@pytest.mark.native
@pytest.mark.parametrize(("hold", "error", "words"), NOT_HELD)
def test_what_cannot_be_held_is_refused(hold: Callable[[Bag], object], error: type[Exception], words: str) -> None:
    """Other optimizers, backends without these kernels, fp64 parameters, and the optimizer's own step()."""
    with pytest.raises(error, match=words):
        hold(odd(torch.float16))
