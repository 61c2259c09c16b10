"""The triton backend against the reference, bit for bit; in Triton's interpreter where there is no accelerator."""

import copy
import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from megascale.errors import ArgumentError, UsageError
from megascale.kernels import Operands, ReferenceBackend, SgdHyper
from megascale.kernels.triton import launch as launch_module
from megascale.kernels.triton.backend import TritonBackend
from megascale.rules import AdamHyper, Hyper, LionHyper
from tests.training import bits_equal
from tests.unit.kernels.triton_cases import (
    BRAIN,
    CHUNK,
    DEVICE,
    HALF,
    HYPERS,
    SINGLE,
    decision_of,
    operands_of,
    same_operands,
    set_grads,
    update,
)

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count launches by kernel."""
    from megascale.kernels.triton import kernels as triton_kernels

    counts: Counter[str] = Counter()
    kind: Any = type(triton_kernels.update_kernel)
    launch = kind.run

    def run(kernel: Any, *args: Any, **options: Any) -> Any:
        counts[kernel.__name__] += 1
        return launch(kernel, *args, **options)

    monkeypatch.setattr(kind, "run", run)
    return counts


LONG = [pytest.param(name, 100, marks=pytest.mark.release) for name in ("adamw", "sgd_nesterov", "lion")]


@pytest.mark.default("adamw-4")
@pytest.mark.parametrize(("name", "steps"), [*((name, 4) for name in HYPERS), *LONG])
def test_update_has_the_bits_of_the_reference(name: str, steps: int) -> None:
    """Invariant 3: main and model params, state and step counts are bitwise the reference's, with skips between.

    Rows of one call differ in length and in every dtype.
    """
    backend, reference = TritonBackend(), ReferenceBackend()
    ours, theirs = operands_of(), operands_of()
    for step in range(steps):
        set_grads(ours, seed=step)
        set_grads(theirs, seed=step)
        decision = decision_of(skip=step % 5 == 2)
        flags = update(backend, ours, HYPERS[name], decision)
        assert torch.equal(flags, update(reference, theirs, HYPERS[name], decision))
    assert same_operands(ours, theirs)


@pytest.mark.default("AdamHyper")
@pytest.mark.parametrize("kind", [AdamHyper, SgdHyper, LionHyper], ids=lambda kind: kind.__name__)
def test_hyperparameters_change_from_step_to_step(kind: type[Hyper]) -> None:
    """Invariant 3: of a kept launch nothing is left where one of them, or the dtype of the rate, has changed."""
    given = [hyper for hyper in HYPERS.values() if type(hyper) is kind]
    changed = [replace(given[0], **{name: getattr(other, name)}) for other in given[1:] for name in vars(other)]
    rates: list[Any] = [
        2e-3,
        *(torch.tensor(3e-3, dtype=dtype, device=DEVICE) for dtype in (SINGLE, torch.float64)),
        4e-3,
    ]
    backend, reference = TritonBackend(), ReferenceBackend()
    ours, theirs = operands_of(), operands_of()
    for step, hyper in enumerate([*given, *changed, *(replace(given[0], lr=rate) for rate in rates), *given]):
        set_grads(ours, seed=step)
        set_grads(theirs, seed=step)
        update(backend, ours, hyper, decision_of())
        update(reference, theirs, hyper, decision_of())
    assert same_operands(ours, theirs)


@pytest.mark.default("lion")
@pytest.mark.parametrize("name", HYPERS)
def test_skipped_step_writes_nothing(name: str) -> None:
    """Invariant 2: NaN and inf gradients leave every bit alone, also in the very first step and beside NaN payloads."""
    backend = TritonBackend()
    operands = operands_of()
    payload = torch.tensor([0x7FC12345, -1], dtype=torch.int32, device=DEVICE).view(torch.float32)
    for step in range(3):
        set_grads(operands, seed=step)
        for grad in operands.grad:
            grad[: step + 1] = (math.nan, math.inf, -math.inf)[step]
        operands.main[3][7:9] = payload
        before = copy.deepcopy(operands)
        update(backend, operands, HYPERS[name], decision_of(skip=True, coefficient=math.nan))
        assert same_operands(before, operands)
        set_grads(operands, seed=10 + step)
        update(backend, operands, HYPERS[name], decision_of())
        assert not same_operands(before, operands)


@pytest.mark.parametrize("model", [HALF, BRAIN])
def test_an_update_rounds_as_torch_does(model: torch.dtype) -> None:
    """Ties go to even, subnormals and infinities are kept, NaN stays NaN, fp16 overflow is flagged per parameter."""
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x00008000, 0x7F7FFFFF, 0x33000000, 0x33000001])
    values = torch.cat([bits.int().view(SINGLE), torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])])
    nan = torch.tensor([0x7F800001, -1, 0x7FFFFFFF], dtype=torch.int32).view(SINGLE)
    below, above = torch.tensor([-65519.996, 1.0]), torch.tensor([1.0, -65520.0])
    far = torch.cat([torch.ones(CHUNK), torch.tensor([math.nan]), torch.ones(CHUNK)])
    mains = [main.to(DEVICE) for main in (values, nan, below, above, far, below[:0])]
    models = [torch.empty_like(main, dtype=model) for main in mains]
    still = SgdHyper(0.0, 0.0, 0.0, 0.0, False, False)
    flags = TritonBackend().sgd_(Operands(models, mains, list(map(torch.zeros_like, mains))), still, decision_of())
    assert flags.dtype == torch.bool
    assert flags.tolist() == [model == HALF and index in (0, 1, 3, 4) for index in range(6)]
    for main, rounded in zip(mains, models, strict=True):
        expected = main.to(model)
        assert torch.equal(rounded.isnan(), expected.isnan())
        assert bits_equal(rounded[~rounded.isnan()], expected[~expected.isnan()])


def test_flag_of_overflow_is_found_in_any_chunk_and_cleared() -> None:
    """An update flags the row whose main param outgrows fp16 in any chunk, until it is small again."""
    operands = operands_of(
        [(numel, dtype, dtype, SINGLE) for numel, dtype in ((4 * CHUNK, HALF), (4 * CHUNK, BRAIN), (9, HALF))]
    )
    backend, hyper = TritonBackend(), SgdHyper(0.0, 0.0, 0.0, 0.0, False, False)
    for at in (0, CHUNK + 1, 4 * CHUNK - 1):
        for main in operands.main[:2]:
            main[at] = 70000.0
        assert backend.sgd_(operands, hyper, decision_of()).tolist() == [True, False, False]
        assert backend.sgd_(operands, hyper, decision_of(skip=True)).tolist() == [True, False, False]
        for main in operands.main[:2]:
            main[at] = 1.0
        assert backend.sgd_(operands, hyper, decision_of()).tolist() == [False, False, False]


def test_launches_do_not_grow_with_tensors(launches: Counter[str]) -> None:
    """Invariant 8: one launch for statistics and one for the update, for 8 and 60 tensors."""
    for runs, count in enumerate((8, 60), start=1):
        operands = operands_of([(1 + index % 3, HALF, HALF, SINGLE) for index in range(count)])
        TritonBackend().measure(operands.grad, False)
        TritonBackend().adam_(operands, HYPERS["adamw"], decision_of())  # type: ignore[arg-type]
        assert launches == {"measure_kernel": runs, "update_kernel": runs}


def test_launches_once_per_combination_of_dtypes(launches: Counter[str]) -> None:
    """Rows of other dtypes are launches of their own, whatever the order; a strided gradient needs none."""
    operands = operands_of([(4, HALF, HALF, SINGLE), (4, BRAIN, BRAIN, SINGLE), (5, HALF, HALF, SINGLE)] * 3)
    operands.grad = [*operands.grad[:8], operands.grad[8].repeat_interleave(2)[::2]]
    TritonBackend().sgd_(operands, HYPERS["sgd"], decision_of())  # type: ignore[arg-type]
    assert launches == {"update_kernel": 2}


def test_tensors_on_several_devices_are_refused() -> None:
    """A raw pointer to another device would be read as if it were on this one."""
    backend, elsewhere = TritonBackend(), [torch.ones(2, device=DEVICE), torch.ones(2, device="meta")]
    for _ in range(2):
        with pytest.raises(ArgumentError, match="put them on one"):
            backend.measure(elsewhere, False)
        backend.measure([torch.ones(2, device=DEVICE) for _ in range(2)], False)


def test_missing_triton_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without triton the backend says what to install, when it is asked for."""
    import megascale.kernels.triton as package
    from megascale.kernels.triton import backend

    backend._import_kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "megascale.kernels.triton.kernels", raising=False)
    monkeypatch.delattr(package, "kernels", raising=False)
    with pytest.raises(UsageError, match="pip install triton"):
        TritonBackend()


COMPILE_ALL = """
import re
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megascale.errors import UsageError
from megascale.kernels.triton import kernels
from megascale.kernels.triton import launch as launch_module
from megascale.kernels.triton.backend import TritonBackend

try:
    TritonBackend().measure([torch.ones(3)], False)
except UsageError as error:
    print(error)

TYPES = {"flags": "*u8", "lrs": "*fp64", "weight_decays": "*fp64", "log_beta1": "fp64", "log_beta2": "fp64"}
TYPES |= dict.fromkeys(("rows", "chunk_rows", "grads", "counters", "arrivals"), "*i64")
TYPES |= dict.fromkeys(("found_inf", "coefficient", "scale", "numbers"), "*fp32")
TYPES |= dict.fromkeys(("partials", "stats", "sum_squares", "non_finite", "zeros", "errors"), "*fp64")
TYPES |= dict.fromkeys(("shares", "contrasts"), "*fp64") | {"scaled": "fp64"}
TYPES |= dict.fromkeys(("vector", "num_zeros"), "*fp64") | dict.fromkeys(("stride", "num_tensors"), "i64")
TYPES |= dict.fromkeys(("growth_tracker", "hysteresis_tracker"), "*i64")
TYPES |= dict.fromkeys(("growth_factor", "backoff_factor"), "fp64")
TYPES |= dict.fromkeys(("clip_grad", "epsilon", "most_norm"), "fp64") | {"success": "*i1"}
TYPES |= {"growth_interval": "i64", "hysteresis": "i64"}
DTYPES = {"MODEL_DTYPE": tl.float16, "GRAD_DTYPE": tl.bfloat16}
FLAGS = {"COUNT_ZEROS": True, "COUNTS": True, "NESTEROV": True, "DECOUPLED": True, "L2": True, "MAXIMIZE": True}
FLAGS |= {"HELD": False, "CODES": False, "SCALED": True, "CLIPS": True, "COMPARES": True, "EACH_CLEAN_STEP": False}
FLAGS |= {"ENCODE": True}
NAMES = "update adam", "update sgd", "update lion", "hold", "measure", "total", "decide", "rescale", "rescale fp64"
for name in NAMES:
    kernel = getattr(kernels, f"{name.split()[0]}_kernel")
    known = {"COLUMNS": 12, "CHUNK": 1 << 14, "BLOCK": 1 << 10, "FAN": 256} | DTYPES | FLAGS
    known |= {"FP64_PRODUCTS": name.endswith("fp64"), "RULE": name.split()[-1]}
    constants = {p: known.get(p, tl.float32) for p in kernel.arg_names if p.isupper()}
    signature = {p: "constexpr" if p in constants else TYPES.get(p, "fp32") for p in kernel.arg_names}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(p),): value for p, value in constants.items()})
    options = {"num_warps": 4, "enable_fp_fusion": False}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    # An update's powers in fp64 are made of fused operations.
    mixed = r"fma\\.rn\\.f(?:32|64)" if name in ("total", "decide") else r"fma\\.rn\\.f32"
    fused, wide = len(re.findall(mixed, ptx)), len(re.findall(r"ld\\.global\\.v[24]", ptx))
    approximate = len(re.findall(r"(?:div|sqrt)\\.(?:approx|full)", ptx))
    print(name, "fused", fused, "approximate", approximate, "wide" if wide else "narrow")
"""


@pytest.mark.slow
def test_kernels_compile_for_a_gpu(tmp_path: Any) -> None:
    """Outside the interpreter CPU tensors are refused, and every kernel compiles for a GPU that need not be there.

    What the interpreter cannot show: no fp32 multiplication is fused with an addition and no division is approximate,
    which would change bits, and aligned tensors are read in vectors.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE_ALL], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert "set TRITON_INTERPRET=1 before Python starts" in first
    updates = ("update adam", "update sgd", "update lion")
    kernels = (*updates, "hold", "measure", "total", "decide", "rescale", "rescale fp64")
    wide = ["wide" if name in kernels[:5] else "narrow" for name in kernels]
    assert lines == [f"{name} fused 0 approximate 0 {width}" for name, width in zip(kernels, wide, strict=True)]


def test_code_is_looked_up_once_per_kept_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles a kind of launch once; whoever keeps a launch has its code at hand from the second one on."""
    seen: list[tuple[Any, ...]] = []

    class Code:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments: seen.append(("launched", *grid, *arguments[1:]))

    class Kernel:
        fn = object()
        arg_names = ("tensor", "number", "BLOCK")

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def compiled(*arguments: Any, **_: Any) -> Code:
                seen.append(("compiled", *grid, *arguments[1:]))
                return Code()

            return compiled

    monkeypatch.setattr(launch_module, "_COMPILED", {})
    kernel, tensor, kept = Kernel(), torch.ones(1), list[Any]()
    for number in (1.0, 2.0, 3.0):
        launch_module.launch(kernel, 4, (tensor, number), {"BLOCK": 8}, {"num_warps": 4}, kept)
    assert seen == [("compiled", 4, 1.0), ("launched", 4, 1, 1, 2.0, 8), ("launched", 4, 1, 1, 3.0, 8)]
    assert len(kept) == 1
    launch_module.launch(kernel, 4, (tensor.double(), 4.0), {"BLOCK": 8}, {"num_warps": 4})  # of another dtype
    launch_module.launch(kernel, 4, (tensor, 5.0), {"BLOCK": 8}, {"num_warps": 4})
    assert seen[3:] == [("compiled", 4, 4.0), ("launched", 4, 1, 1, 5.0, 8)]
