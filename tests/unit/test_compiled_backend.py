"""The compiled backend: the reference's bits at every length, from one compilation for each combination."""

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from megascale.kernels import AdamHyper, Backend, Decision, LionHyper, Operands, ReferenceBackend, SgdHyper
from megascale.kernels import compiled_backend as module
from megascale.kernels.compiled_backend import CompiledBackend
from megascale.kernels.row_compiler import RowCompiler
from tests.counting import OperatorCounter
from tests.training import bits_equal

SIZES = [5, 0, 1, 2, 17, 4096, 33, 12345]
LR = 1e-2
ADAM = AdamHyper(LR, 0.9, 0.999, 1e-8, 0.1, decoupled=True, amsgrad=False, maximize=False)
SGD = SgdHyper(LR, 0.9, 0.3, 0.1, nesterov=True, maximize=False)
LION = LionHyper(LR, 0.9, 0.99, 0.1, maximize=False)
HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Case:
    """A rule with its hyperparameters, and the dtypes of its tensors. ``model`` None: fp32, its own main param."""

    rule: str
    hyper: Any
    states: dict[str, torch.dtype]
    grad: torch.dtype = HALF
    model: torch.dtype | None = HALF

    def update(self, backend: Backend, operands: Operands, decision: Decision, **changed: Any) -> Tensor:
        """Take one step with some hyperparameters changed."""
        flags: Tensor = getattr(backend, self.rule)(operands, replace(self.hyper, **changed), decision)
        return flags

    def operands(self, sizes: list[int], *, flat: bool = False, seed: int = 0) -> Operands:
        """Return operands with random main params and zeros, in flat buffers or each tensor on its own."""
        main = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed)) / 8
        state = {name: torch.zeros_like(main, dtype=dtype) for name, dtype in self.states.items()}

        def cut(tensor: Tensor) -> list[Tensor]:
            return [piece if flat else piece.clone() for piece in tensor.split(sizes)]

        mains = cut(main)
        return Operands(
            model=mains if self.model is None else cut(main.to(self.model)),
            main=mains,
            grad=cut(torch.zeros_like(main, dtype=self.grad)),
            state={name: cut(tensor) for name, tensor in state.items()},
            step=[torch.zeros(()) for _ in sizes],
        )


MOMENTS = {"exp_avg": FP32, "exp_avg_sq": FP32}
CASES = {
    "adamw": Case("adam_", ADAM, MOMENTS),
    "adamw_16_bit_moments": Case("adam_", ADAM, {"exp_avg": BF16, "exp_avg_sq": HALF}, FP32, BF16),
    "adam_l2_amsgrad_fp32": Case(
        "adam_",
        replace(ADAM, decoupled=False, amsgrad=True, maximize=True),
        {**MOMENTS, "max_exp_avg_sq": FP32},
        FP32,
        None,
    ),
    "sgd_momentum": Case("sgd_", SGD, {"momentum_buffer": FP32}),
    "lion": Case("lion_", LION, {"exp_avg": BF16}),
}


def decide(found_inf: bool = False, coefficient: float = 1.0) -> Decision:
    """Return a decision."""
    return Decision(torch.tensor(float(found_inf)), torch.tensor(coefficient), torch.ones(()), torch.zeros(()))


def fill_grads(operands: Operands, seed: int, scale: float = 1.0, bad: bool = False) -> None:
    """Write normal gradients times ``scale``, one of them not finite where ``bad``."""
    generator = torch.Generator().manual_seed(seed)
    for grad in operands.grad:
        grad.copy_(torch.randn(grad.shape, generator=generator) * scale)
    if bad:
        operands.grad[-1].view(-1)[seed % operands.grad[-1].numel()] = (math.nan, math.inf)[seed % 2]


def all_tensors(operands: Operands) -> list[Tensor]:
    """Return copies of everything that an update may write."""
    columns = [operands.model, operands.main, operands.step, *operands.state.values()]
    return [tensor.clone() for column in columns for tensor in column]


def same(left: Operands, right: Operands) -> bool:
    """Whether two operands agree in every bit."""
    return all(map(bits_equal, all_tensors(left), all_tensors(right)))


@pytest.mark.parametrize("flat", [pytest.param(False, marks=pytest.mark.slow), True], ids=["scattered", "flat"])
@pytest.mark.parametrize("name", CASES)
def test_update_is_the_references_bitwise(name: str, flat: bool) -> None:
    """100 steps with skips between, changing lr and scale: the reference's bits and flags, at every length."""
    case, ours, theirs = CASES[name], CompiledBackend(), ReferenceBackend()
    mine, other = case.operands(SIZES, flat=flat), case.operands(SIZES)
    for step in range(100):
        bad, scale = step % 7 == 3, 2.0 ** (step % 5)
        for operands in (mine, other):
            fill_grads(operands, step, scale, bad)
        decision = decide(bad, 0.7 / scale)
        lr: float | Tensor = LR / (step + 1)
        lr = torch.tensor(lr) if step % 3 == 0 else lr
        flags = case.update(ours, mine, decision, lr=lr)
        assert flags.tolist() == case.update(theirs, other, decision, lr=lr).tolist()
    assert same(mine, other)


@pytest.mark.parametrize("name", CASES)
def test_skip_changes_no_bit(name: str) -> None:
    """Non-finite gradients, and NaNs, infinities and negative zeros in moments: a skip leaves every bit alone."""
    case, backend = CASES[name], CompiledBackend()
    for flat in (False, True):
        operands = case.operands(SIZES, flat=flat)
        for state in operands.state.values():
            bits = state[-1].view({2: torch.int16, 4: torch.int32}[state[-1].element_size()])
            bits.random_(torch.iinfo(bits.dtype).min, torch.iinfo(bits.dtype).max)
            state[-1][:3] = torch.tensor([math.nan, -math.inf, -0.0])
        for grad in operands.grad:
            grad.fill_(math.nan)
        before = all_tensors(operands)
        case.update(backend, operands, decide(found_inf=True))
        assert all(map(bits_equal, before, all_tensors(operands)))
        fill_grads(operands, seed=0)
        case.update(backend, operands, decide())
        assert not all(map(bits_equal, before, all_tensors(operands)))


def test_one_compilation_serves_all_lengths_and_numbers() -> None:
    """Nothing is compiled anew as lengths, lr, betas, scale, steps, merging or memory change."""
    case, backend = CASES["adamw"], CompiledBackend()
    case.update(backend, case.operands([3]), decide())
    backend.measure([torch.ones(3, dtype=HALF)], count_zeros=False)
    assert backend.compile_seconds > 0
    before = (dict(counters["stats"]), backend.compile_seconds)
    for index, numel in enumerate([1, 2, 3, 15, 16, 17, 1000, 4095, 4096, 4097, 1 << 20, (1 << 20) + 1]):
        operands = case.operands([numel, index + 2], flat=index % 2 == 0)
        changed = {"lr": LR / (index + 1), "beta1": 0.8 + index / 100, "eps": 1e-8 * (index + 1), "weight_decay": index}
        case.update(backend, operands, decide(index % 3 == 1, 1.0 / (index + 1)), **changed)
        backend.measure(operands.grad, count_zeros=False)
    assert (dict(counters["stats"]), backend.compile_seconds) == before


def test_rows_of_unlike_step_counts_keep_their_own_bias_correction() -> None:
    """In one flat buffer, a parameter that has landed fewer steps than its neighbours is corrected by its own count."""
    case, ours, theirs = CASES["adamw"], CompiledBackend(), ReferenceBackend()
    mine, other = case.operands([9, 30, 4, 5], flat=True), case.operands([9, 30, 4, 5])
    for operands in (mine, other):
        operands.step[1].fill_(12)
        fill_grads(operands, seed=1)
    for _ in range(3):
        case.update(ours, mine, decide())
        case.update(theirs, other, decide())
    assert same(mine, other)


@pytest.mark.parametrize("flat", [False, True], ids=["scattered", "flat"])
def test_flags_name_the_row_that_overflowed(flat: bool) -> None:
    """In a merged run, too, exactly the rows whose rounding is not finite are flagged; a skip flags what is there."""
    case, backend = CASES["adamw"], CompiledBackend()
    sizes = [7, 1, 40, 0, 6]
    for found_inf in (False, True):
        operands = case.operands(sizes, flat=flat)
        operands.main[2][39], operands.main[4][0] = 1e6, -1e6
        assert case.update(backend, operands, decide(found_inf)).tolist() == [False, False, True, False, True]
        operands.main[2][39] = operands.main[4][0] = 65519.0
        assert case.update(backend, operands, decide(found_inf), lr=0.0).tolist() == [False] * 5


def test_rows_of_every_layout() -> None:
    """0-d, transposed, sliced, channels-last and fp64 params, and gradients of other strides, in one call."""
    generator = torch.Generator().manual_seed(0)

    def make() -> list[Tensor]:
        plain = [
            torch.randn(shape, generator=generator) for shape in [(), (5, 7), (6, 8), (4, 9), (2, 3, 5, 5), (3, 3)]
        ]
        plain[2], plain[3] = plain[2].t(), plain[3][:, ::3]
        plain[4], plain[5] = plain[4].to(memory_format=torch.channels_last), plain[5].double()
        return plain

    main = make()
    states = {name: [torch.zeros_like(tensor) for tensor in main] for name in MOMENTS}
    model = [main[index] if tensor.dtype == torch.float64 else tensor.half() for index, tensor in enumerate(main)]
    mine = Operands(model, main, [], states, [torch.zeros(()) for _ in main])
    other = Operands(
        [tensor.clone() for tensor in model],
        [tensor.clone() for tensor in main],
        [],
        {name: [tensor.clone() for tensor in column] for name, column in states.items()},
        [torch.zeros(()) for _ in main],
    )
    other.model[5] = other.main[5]
    for step in range(4):
        grads = [tensor.half() for tensor in make()]
        if step == 1:
            grads[4] = grads[4].contiguous()
        mine.grad, other.grad = grads, grads
        flags = CASES["adamw"].update(CompiledBackend(), mine, decide())
        assert flags.tolist() == CASES["adamw"].update(ReferenceBackend(), other, decide()).tolist()
    assert same(mine, other)


def test_calls_are_cut_at_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows longer than one call may be take several: the same bits, statistics and flags."""
    monkeypatch.setattr(module, "LONGEST_CALL", 8192)
    case, ours, theirs = CASES["adamw"], CompiledBackend(), ReferenceBackend()
    mine, other = case.operands([30_000, 5]), case.operands([30_000, 5])
    for operands in (mine, other):
        fill_grads(operands, seed=1)
        operands.main[0][20_000] = 1e6
    assert case.update(ours, mine, decide()).tolist() == case.update(theirs, other, decide()).tolist() == [True, False]
    assert same(mine, other)
    mine.grad[0][29_999] = math.inf
    assert ours.measure(mine.grad, count_zeros=False).non_finite.tolist() == [1, 0]


def test_statistics_equal_fp64() -> None:
    """Sums of squares to 5e-7, exact counts, around the width of a sum, in every dtype and layout; the same twice."""
    backend = CompiledBackend()
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(), (0,), (1,), (3, 5), (4095,), (4096,), (4097,), (700_001,)]
    grads = [torch.randn(shape, generator=generator).half() for shape in shapes]
    grads += [grads[3].t(), torch.zeros(9).half()[::3], torch.randn(10).double()]
    grads.append(torch.randn(1_000_003, generator=generator).half())
    grads[4][7:9], grads[5][0], grads[7][-1], grads[7][:1000] = math.nan, math.inf, -math.inf, 0
    grads[7] = torch.cat([grads[7][:-1], torch.full((1,), 60_000.0).half()])
    stats = backend.measure(grads, count_zeros=True)
    assert stats.zeros is not None
    exact = ReferenceBackend().measure(grads, count_zeros=True)
    assert exact.zeros is not None
    assert stats.non_finite.tolist() == exact.non_finite.tolist()
    assert stats.zeros.tolist() == exact.zeros.tolist()
    finite = exact.sum_squares.isfinite()
    # In fp32, sums over a whole row of a million elements are off by 2.5e-6.
    torch.testing.assert_close(stats.sum_squares[finite], exact.sum_squares[finite], rtol=5e-7, atol=0)
    assert not stats.sum_squares[~finite].isfinite().any()
    assert all(map(bits_equal, stats[:2], backend.measure(grads, count_zeros=True)[:2]))


def test_update_reads_nothing_and_tells_autograd() -> None:
    """No value goes to the host, and a model param's version grows: autograd must see that saved weights changed."""
    case, backend = CASES["adamw"], CompiledBackend()
    for flat in (False, True):
        operands = case.operands(SIZES, flat=flat)
        versions = [tensor._version for tensor in operands.model]
        with OperatorCounter() as counter:
            case.update(backend, operands, decide())
            backend.measure(operands.grad, count_zeros=False)
        assert counter.host_reads == 0
        changed = [tensor._version > version for tensor, version in zip(operands.model, versions, strict=True)]
        assert [grew for grew, size in zip(changed, SIZES, strict=True) if size] == [True] * (len(SIZES) - 1)


def _doubled(row: Tensor) -> Tensor:
    return row.add_(row).sum()


def test_compiling_is_unaffected_by_its_surroundings() -> None:
    """Inside a dispatch mode, under another stance, and beyond Dynamo's limit of compilations of one function."""
    compiler = RowCompiler()
    with (
        OperatorCounter(),
        torch.compiler.set_stance("force_eager"),
        torch._dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=1),
    ):
        for dtype in (FP32, torch.float64, torch.int64):
            row = torch.ones(3, dtype=dtype)
            assert compiler.compiled(_doubled, [row])(row).tolist() == 6
            assert row.tolist() == [2, 2, 2]
    spent = compiler.seconds
    assert spent > 0
    compiler.compiled(_doubled, [torch.ones(9)])
    assert compiler.seconds == spent


PROGRAM = """
import json, sys, warnings
import torch
from torch._dynamo.utils import counters
from megascale.kernels import AdamHyper, Decision, Operands, TorchBackend
from megascale.kernels.compiled_backend import CompiledBackend

def updated(backend):
    main = torch.linspace(-1, 1, 50)
    operands = Operands([main.half()], [main], [main.half()], {n: [torch.zeros(50)] for n in ("exp_avg", "exp_avg_sq")},
                        [torch.zeros(())])
    hyper = AdamHyper(0.1, 0.9, 0.999, 1e-8, 0.1, True, False, False)
    backend.adam_(operands, hyper, Decision(torch.zeros(()), torch.ones(()), torch.ones(()), torch.zeros(())))
    return main

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    first, second = updated(CompiledBackend()), updated(CompiledBackend())
    stats = CompiledBackend().measure([first], count_zeros=False)
print(json.dumps({
    "warnings": [str(w.message) for w in caught if w.category is RuntimeWarning],
    "as_torch": bool(torch.equal(first, updated(TorchBackend())) and torch.equal(first, second)),
    "sum_squares": stats.sum_squares.item(),
    "exact": first.double().square().sum().item(),
    "hits": counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"],
    "seconds": CompiledBackend().compile_seconds,
}))
"""


def _in_a_process(cache: Path, **environment: str) -> dict[str, Any]:
    variables = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), **environment}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=variables, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
def test_without_a_compiler_torch_takes_over_with_one_warning(tmp_path: Path) -> None:
    """CXX points nowhere: every backend object of the process works, in torch's arithmetic, and one warning says so."""
    result = _in_a_process(tmp_path, CXX=str(tmp_path / "no_compiler"))
    [message] = result["warnings"]
    assert "'compiled' falls back to 'torch'" in message
    assert "no_compiler" in message
    assert result["as_torch"]
    assert result["sum_squares"] == pytest.approx(result["exact"], rel=1e-6)


@pytest.mark.slow
def test_where_torch_compile_is_disabled_torch_takes_over(tmp_path: Path) -> None:
    """Who turns torch.compile off to look for an error elsewhere can still train."""
    result = _in_a_process(tmp_path, TORCHDYNAMO_DISABLE="1")
    [message] = result["warnings"]
    assert "torch.compile is disabled" in message
    assert result["as_torch"]


@pytest.mark.slow
def test_a_compiler_that_fails_is_none(tmp_path: Path) -> None:
    """A compiler that states its version and then fails counts as missing."""
    broken = tmp_path / "g++"
    broken.write_text('#!/bin/sh\ncase "$*" in *--version*) echo "g++ (GCC) 13.3.0";; *) exit 1;; esac\n')
    broken.chmod(0o755)
    result = _in_a_process(tmp_path / "cache", CXX=str(broken))
    assert len(result["warnings"]) == 1
    assert result["as_torch"]


@pytest.mark.slow
def test_what_was_compiled_is_found_by_the_next_process(tmp_path: Path) -> None:
    """Inductor's cache on disk serves a second process: it has hits, and it does not warn."""
    first, second = _in_a_process(tmp_path), _in_a_process(tmp_path)
    assert first["hits"] == 0
    assert second["hits"] >= 2
    assert second["seconds"] < first["seconds"]
    assert first["warnings"] == second["warnings"] == []


def _combinations() -> list[Case]:
    found = []
    for grad, model in ((HALF, HALF), (FP32, HALF), (BF16, BF16), (FP32, None)):
        for state in (FP32, HALF, BF16):
            for decoupled in (True, False):
                adam = replace(ADAM, decoupled=decoupled, amsgrad=not decoupled)
                names = ["exp_avg", "exp_avg_sq"] + ([] if decoupled else ["max_exp_avg_sq"])
                found.append(Case("adam_", adam, dict.fromkeys(names, state), grad, model))
            found.append(Case("sgd_", SGD, {"momentum_buffer": state}, grad, model))
            found.append(Case("lion_", replace(LION, maximize=True), {"exp_avg": state}, grad, model))
        found.append(Case("sgd_", SgdHyper(LR, 0.0, 0.0, 0.0, nesterov=False, maximize=True), {}, grad, model))
        plain = SgdHyper(LR, 0.9, 0.0, 0.0, nesterov=False, maximize=False)
        found.append(Case("sgd_", plain, {"momentum_buffer": FP32}, grad, model))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", _combinations(), ids=str)
def test_every_combination_is_the_references_bitwise(case: Case) -> None:
    """Rules, options and dtypes, crossed: 20 steps with skips give the reference's bits."""
    ours, theirs = CompiledBackend(), ReferenceBackend()
    mine, other = case.operands(SIZES, flat=True), case.operands(SIZES)
    for step in range(20):
        for operands in (mine, other):
            fill_grads(operands, step, bad=step % 7 == 3)
        decision = decide(step % 7 == 3, 0.5)
        flags = case.update(ours, mine, decision)
        assert flags.tolist() == case.update(theirs, other, decision).tolist()
    assert same(mine, other)
