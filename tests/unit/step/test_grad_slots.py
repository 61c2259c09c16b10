"""A bound of the host memory that copies of gradients take: no bit changes, and what is refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale import (
    ChainedOptimizer,
    DynamicGradScaler,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    build_optimizer,
)
from megascale.errors import ArgumentError, ArgumentTypeError, InnerStepError
from megascale.main_params import update_unit
from megascale.main_params.weight_arrivals import WeightArrivals
from megascale.step.compute_choice import STEPS
from megascale.step.host_update import HostUpdate
from tests.cases import cases
from tests.offload_lives import ACTIONS, Life, first_difference, same
from tests.training import INNER, Sign, Tiny, model

WAIT: dict[str, Any] = {"optimizer_cpu_offload": True}
OVERLAP = WAIT | {"overlap_cpu_optimizer_d2h_h2d": True}
BOUND: dict[str, Any] = {"optimizer_offload_grad_bytes": 3 * 512}
COMPACT: dict[str, Any] = {
    "store_param_remainders": True,
    "exp_avg_dtype": torch.int8,
    "exp_avg_sq_dtype": torch.uint8,
}
STORED: dict[str, dict[str, Any]] = {"fp32": {}, "compact": COMPACT}
HOLDERS = ("replicated", "synced", "elements", "parameters")


@pytest.fixture(autouse=True)
def _slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter is a slice of its own."""
    monkeypatch.setattr(update_unit, "SLICE", 1)


def _slots(optimizer: MixedPrecisionOptimizer) -> list[int | None]:
    return [param.twin.slot for param in optimizer._member.main_params if param.twin is not None]


@pytest.mark.parametrize(
    ("held", "name"),
    cases(HOLDERS, STORED, quick=lambda *case: case == ("replicated", "compact"), rest=pytest.mark.slow),
)
def test_no_bit_differs(held: str, name: str, tmp_path: Path) -> None:
    """Of a life with all actions, whose checkpoints and state dicts are loaded, with the overlap and without."""
    stored = STORED[name]
    # Buckets of 24 elements hold two parameters.
    limit = {"optimizer_offload_grad_bytes": (3 if held in ("replicated", "synced") else 5) * 512}
    probe = Life(held, stored | OVERLAP | limit, tmp_path / "probe")
    probe.act("step", 0)
    assert {0, 1} <= set(_slots(probe.optimizer))
    actions = ["step", *ACTIONS]
    assert first_difference(held, stored, [OVERLAP | limit, WAIT | limit], actions, tmp_path) == ""


def _build(options: dict[str, Any], inner: str = "adamw_fused") -> tuple[Tiny, MixedPrecisionOptimizer]:
    module = model(torch.float16)
    config = OptimizerConfig(fp16=True, clip_grad=0.5, **options)
    return module, MixedPrecisionOptimizer(INNER[inner](module), config, DynamicGradScaler(2.0**8, 1.0, 2.0, 0.5, 3, 1))


def _step(module: Tiny, optimizer: MixedPrecisionOptimizer, step: int) -> Any:
    optimizer.zero_grad()
    data = torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).half()
    optimizer.scale_loss(module(data).float().square().mean()).backward()
    return optimizer.step()


def test_state_goes_from_one_bound_to_another() -> None:
    """What is saved with a bound is what is saved without, and loads into a run with another one, or none."""
    lives = [_build(OVERLAP | way) for way in (BOUND, {}, {"optimizer_offload_grad_bytes": 2 * 512})]
    lives.append(_build({}))
    for step in range(2):
        for module, optimizer in lives:
            _step(module, optimizer, step)
    saved = [copy.deepcopy((module.state_dict(), optimizer.state_dict())) for module, optimizer in lives]
    assert all(same(saved[0][at], other[at]) for other in saved[1:] for at in range(2))
    for (module, optimizer), (weights, state) in zip(lives, reversed(saved), strict=True):
        module.load_state_dict(weights)
        optimizer.load_state_dict(state)
        _step(module, optimizer, 2)
    ends = [(optimizer.state_dict(), module.state_dict()) for module, optimizer in lives]
    assert all(same(ends[0][at], other[at]) for other in ends[1:] for at in range(2))


def test_all_fit() -> None:
    """With a bound that suffices nothing is shared, and nobody waits."""
    module, optimizer = _build(OVERLAP | {"optimizer_offload_grad_bytes": 1 << 20})
    with pytest.MonkeyPatch.context() as patched:
        patched.delattr(WeightArrivals, "wait_until_read")
        for step in range(2):
            _step(module, optimizer, step)
    assert set(_slots(optimizer)) == {None}


def test_another_fraction() -> None:
    """What is shared follows the part that is in host memory."""
    module, optimizer = _build(OVERLAP | BOUND)
    _step(module, optimizer, 0)
    assert {0, 1} <= set(_slots(optimizer))
    optimizer.optimizer_offload_fraction = 0.01
    _step(module, optimizer, 1)
    assert _slots(optimizer) == [None]
    optimizer.optimizer_offload_fraction = 1.0
    _step(module, optimizer, 2)
    assert {0, 1} <= set(_slots(optimizer))


@pytest.mark.parametrize("way", [WAIT, OVERLAP], ids=["waits", "overlap"])
def test_an_error_of_the_thread(way: dict[str, Any]) -> None:
    """The caller waits for slots meanwhile: the step ends, and the error is told as without a bound."""
    module, optimizer = _build(way | BOUND)
    update = optimizer._member.update
    assert isinstance(update, HostUpdate)

    def failing(*_: Any) -> Any:
        raise RuntimeError("no such arithmetic")

    inner, update._host.apply = update._host.apply, failing  # type: ignore[method-assign, assignment]
    if "overlap_cpu_optimizer_d2h_h2d" in way:
        _step(module, optimizer, 0)
        update._host.apply = inner  # type: ignore[method-assign]
    with pytest.raises(InnerStepError, match=r"failed in host memory.*no such arithmetic"):
        _step(module, optimizer, 1)
    update._host.apply = inner  # type: ignore[method-assign]
    assert bool(_step(module, optimizer, 2).success)


def test_a_chain() -> None:
    """Each member has a bound of its own; Muon's member, which stays on the device, none."""

    def trained(options: dict[str, Any]) -> tuple[list[Tensor], ChainedOptimizer]:
        torch.manual_seed(0)
        module = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))).bfloat16()
        config = OptimizerConfig(bf16=True, lr=1e-2, optimizer="muon", clip_grad=0.5, **options)
        chain = build_optimizer(config, module, overrides={"*.weight": {"optimizer": "muon"}})
        assert isinstance(chain, ChainedOptimizer)
        for step in range(3):
            chain.zero_grad()
            data = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
            chain.scale_loss(module(data).float().square().mean()).backward()
            chain.step()
        chain.finish_param_gather()
        return [param.detach() for param in module.parameters()], chain

    found, chain = trained(OVERLAP | BOUND)
    slots = [slot for one in chain.optimizers for slot in _slots(one)]
    assert {0, 1} <= set(slots)
    expected, _ = trained({})
    assert same(found, expected)


def test_a_choice_of_who_computes() -> None:
    """The device's way copies no gradient, so that a bound limits nothing there; the host's keeps to it."""
    way = WAIT | BOUND | {"optimizer_offload_compute": "auto"}
    (module, optimizer), (other_module, other) = _build(way), _build({})
    for step in range(2 * STEPS + 2):
        assert same(_step(module, optimizer, step), _step(other_module, other, step))
    assert same(optimizer.state_dict(), other.state_dict())
    module, optimizer = _build(way | {"optimizer_offload_compute": "device", "optimizer_offload_grad_bytes": 1})
    _step(module, optimizer, 0)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (BOUND, ArgumentError, "optimizer_offload_grad_bytes=1536 needs optimizer_cpu_offload=True: no gradient is copied"),
    (
        WAIT | {"optimizer_offload_grad_bytes": 0},
        ArgumentError,
        "optimizer_offload_grad_bytes must be 1 or more, got 0",
    ),
    (WAIT | {"optimizer_offload_grad_bytes": True}, ArgumentTypeError, "optimizer_offload_grad_bytes must be"),
    (WAIT | {"optimizer_offload_grad_bytes": 1e9}, ArgumentTypeError, "optimizer_offload_grad_bytes must be"),
]


@pytest.mark.parametrize(("options", "kind", "message"), REFUSED)
def test_refused(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    """What is no number of bytes, or has nothing to bound."""
    with pytest.raises(kind, match=message):
        OptimizerConfig(fp16=True, **options)


def test_an_own_step_is_refused() -> None:
    """It reads all gradients at once."""
    module = model(torch.float16)
    config = OptimizerConfig(fp16=True, **WAIT, **BOUND)
    message = (
        r"optimizer_offload_grad_bytes=1536 needs .*: the own step\(\) of Sign reads all gradients at once; leave it"
    )
    with pytest.raises(ArgumentError, match=message):
        MixedPrecisionOptimizer(Sign(module.named_parameters()), config, DynamicGradScaler())
