"""Every backend lives the reference's life: the same bits, or the same named error, never a third thing.

The lives run in programs of their own: one that dies of a bad address is a failure that tells its seed and its end.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.errors import UsageError

ROOT = Path(__file__).parents[3]


def _live(trace: Path, *arguments: object) -> dict[str, int]:
    """Run tests.backend_machine; returns its counts."""
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.backend_machine", "--trace", str(trace)]
    command += map(str, arguments)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=1700)
    last = "\n".join(trace.read_text().splitlines()[-30:]) if trace.exists() else ""
    told = (
        f"{' '.join(command)} ended with {done.returncode}\n{done.stdout[-8000:]}{done.stderr[-8000:]}\nlast:\n{last}"
    )
    assert done.returncode == 0, told
    counts: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return counts


@pytest.mark.slow
@pytest.mark.native
def test_backends_live_alike(tmp_path: Path) -> None:
    """Invariants 3, 9 and 10: steps, skips, odd gradients, moved and broken parameters and state, groups, options,
    state dicts, in any order: the torch and the native backend do what the reference does.
    """
    counts = _live(tmp_path / "trace", "torch", "native", "--examples", 4, "--steps", 10)
    assert counts["examples"] >= 4


LIVES = {
    "torch, native": (["torch", "native"], 150, 15),
    "native columns": (["native", "native columns"], 150, 15),
    "triton": (["triton"], 15, 10),
}


@pytest.mark.release
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("backends", "examples", "steps"), LIVES.values(), ids=LIVES.keys())
def test_backends_live_alike_for_long(
    backends: list[str], examples: int, steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More and longer lives, also in Triton's interpreter, and with forms compared part by part; it prints how
    many there were.
    """
    if "triton" in backends:
        pytest.importorskip("triton")
        if torch.accelerator.is_available():
            pytest.skip("its kernels run on the accelerator")
    counts = _live(tmp_path / "trace", *backends, "--examples", examples, "--steps", steps, "--seed", 1)
    with capsys.disabled():
        print(f"\n{', '.join(backends)}: {json.dumps(counts)}")
    assert counts["examples"] >= examples
    assert counts["errors"] > 0


def _wrap(inner: torch.optim.Optimizer) -> MixedPrecisionOptimizer:
    config = OptimizerConfig(fp16=True, backend="native")
    return MixedPrecisionOptimizer(inner, config, DynamicGradScaler(4.0, 1.0, 2.0, 0.5, 9, 1))


@pytest.mark.native
def test_gradients_dropped_between_the_halves_of_a_step_are_held_for_every_dtype() -> None:
    """Of an fp64 parameter the dropped gradient was read as None: AttributeError in the middle of an update."""
    params = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float16, torch.float64)]
    optimizer = _wrap(torch.optim.SGD(params, lr=0.5))
    for param in params:
        param.grad = torch.ones_like(param) * optimizer.get_loss_scale().item()
    optimizer.prepare_grads()
    for param in params:
        param.grad = None
    optimizer.step_with_ready_grads()
    assert [param.tolist() for param in params] == [[0.5] * 3, [0.5] * 3]


@pytest.mark.native
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize(("dtype", "other"), [(torch.float16, torch.float32), (torch.float32, torch.float16)])
def test_gradients_of_another_dtype_stay_through_an_optimizer_of_its_own_step(
    dtype: torch.dtype, other: torch.dtype, told: bool
) -> None:
    """It cannot be assigned, so that putting it back after RMSprop's step raised, with half of the others lost."""
    params = [nn.Parameter(torch.ones(3, dtype=torch.float16)), nn.Parameter(torch.ones(3, dtype=dtype))]
    optimizer = _wrap(torch.optim.RMSprop(params, lr=0.5))
    odd = params[1]
    for param in params:
        param.grad = torch.ones_like(param) * optimizer.get_loss_scale().item()
    grad = odd.grad
    assert grad is not None
    if told:
        odd.grad = None
        odd.grad_dtype = other
        odd.grad = grad = grad.to(other)
    else:
        grad.data = grad.data.to(other)
    optimizer.step()
    assert odd.grad is grad
    assert torch.equal(params[0], odd.half())
    assert float(odd[0].detach()) < 0


@pytest.mark.native
def test_freed_state_of_an_optimizer_of_its_own_step_is_refused() -> None:
    """RMSprop's own step would read the freed memory, and kill the process."""
    param = nn.Parameter(torch.ones(3, dtype=torch.float16))
    inner = torch.optim.RMSprop([param])
    optimizer = _wrap(inner)
    for _ in range(2):
        param.grad = torch.ones_like(param) * optimizer.get_loss_scale().item()
        before = param.detach().clone()
        if inner.state:
            inner.state[param]["square_avg"].untyped_storage().resize_(0)
            with pytest.raises(UsageError, match=r"state\['0'\]\['square_avg'\] has lost its memory"):
                optimizer.step()
            assert torch.equal(param, before)
        else:
            optimizer.step()
