"""The bits of twelve lives, as commit 937c72b left them: tests/bits_lives.py says what they are, and why they hold."""

import pytest

from tests.bits_lives import CODES, LIVES, Digests, differences, live, recorded
from tests.fake_device.device import FakeDevice
from tests.fake_device.process import OnDevice
from tests.pool import RankPool

DECIDED = ("scaler", "results")
"""What does not depend on how a backend rounds in an update."""


def _by_torchs_kernels(name: str) -> bool:
    """Return whether the torch backend updates by kernels of torch, which need not round as the reference does."""
    life = LIVES[name]
    return life.inner in ("adamw", "adam", "amsgrad", "nesterov", "muon") and not life.fields.items() >= CODES.items()


@pytest.mark.default("Adam with AMSGrad, ZeRO-1 by parameters, 16 bit-native")
@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("name", LIVES)
def test_lives_have_the_recorded_bits(name: str, backend: str, ranks: RankPool) -> None:
    """Invariant 14, and 1: all ranks' weights, main params, state, counts, scale and results, bit by bit.

    Where a change means to change bits, `python -m tests.bits_lives --write REASON` names it in the file.
    """
    _check(name, ranks.run(LIVES[name].world_size, live, name, backend))


@pytest.mark.slow
@pytest.mark.parametrize("name", LIVES)
def test_lives_on_the_torch_backend(name: str, ranks: RankPool) -> None:
    """All bits but those that torch's fused kernels make, which docs/numerics.md promises within 1e-6 only."""
    found = ranks.run(LIVES[name].world_size, live, name, "torch")
    _check(name, found, DECIDED if _by_torchs_kernels(name) else None)


@pytest.mark.release
@pytest.mark.parametrize("name", LIVES)
def test_lives_on_triton(name: str, ranks: RankPool) -> None:
    """In Triton's interpreter, where there is no accelerator."""
    _check(name, ranks.run(LIVES[name].world_size, live, name, "triton", timeout=240))


def _on_device(_device: FakeDevice, name: str) -> Digests:
    return live(name, "reference", "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("name", LIVES)
def test_lives_on_a_device(name: str, on_device: OnDevice) -> None:
    """On a device, the host learns of each step one step late, and the scaler and all counts live there."""
    if LIVES[name].world_size == 1:
        _check(name, [on_device(_on_device, name)])
    else:
        _check(name, on_device.ranks(LIVES[name].world_size, _on_device, name))


def _check(name: str, found: list[Digests], only: tuple[str, ...] | None = None) -> None:
    expected = recorded()[name]
    if only is not None:
        expected = {steps: {what: own[what] for what in only} for steps, own in expected.items()}
    assert [line for own in found for line in differences(name, own, expected)] == []
