"""Averages of main params: bitwise torch's AveragedModel of an fp32 model that never saw the skipped steps."""

import contextlib
import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel

from megascale import MixedPrecisionOptimizer
from megascale.averages import AveragedMainParams
from megascale.errors import ArgumentError, ArgumentTypeError, StateDictError, UsageError
from megascale.landed import running_averages
from tests.counting import OperatorCounter
from tests.training import INNER, bits_equal, same_bits, set_grads, snapshot, wrap


def _custom(average: Tensor, current: Tensor, n_averaged: Tensor | int) -> Tensor:
    """An EMA that warms up, in a formula that does not give back an average equal to the current value."""
    decay = (1 + n_averaged) / (10 + n_averaged)
    return decay * average + (1 - decay) * current


RULES: dict[str, dict[str, Any]] = {
    "default": {},
    "ema_multi": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "ema": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
    "swa": {"avg_fn": swa_utils.get_swa_avg_fn()},
    "swa_multi": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
    "custom": {"avg_fn": _custom},
}
SKIPS = st.lists(st.booleans(), min_size=1, max_size=10)
RUN = [True, False, True, True, False, False, True, False]


class Normed(nn.Module):
    """Linear layers, BatchNorm with buffers that are floats and a count, a tied weight and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 4)
        self.tied = nn.Linear(4, 6)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(4, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return shape [batch, 2]."""
        hidden: Tensor = self.second(self.norm(self.first(x)))
        out: Tensor = self.frozen(self.tied(hidden) @ self.tied.weight)
        return out


def _normed(dtype: torch.dtype = torch.float16) -> Normed:
    torch.manual_seed(0)
    return Normed().to(dtype)


def _step(optimizer: MixedPrecisionOptimizer, module: nn.Module, step: int, skip: bool) -> Tensor:
    """Take a step, or skip one, with random gradients, and write the buffers as forward does. Returns success."""
    set_grads(module, step, math.inf if skip else 0.1)
    for name, buffer in module.named_buffers():
        value = torch.randn(buffer.shape, generator=torch.Generator().manual_seed(step + len(name)))
        buffer.copy_(value if buffer.is_floating_point() else torch.tensor(step))
    return optimizer.step().success


def _mean(module: nn.Module) -> Tensor:
    return module.get_buffer("norm.running_mean")


class _Oracle:
    """torch's AveragedModel, on the CPU, of an fp32 copy of the model, told of landed steps only."""

    def __init__(self, module: nn.Module, optimizer: MixedPrecisionOptimizer, **options: Any) -> None:
        self.module, self.optimizer = module, optimizer
        self.shadow = copy.deepcopy(module)
        for name, main in optimizer.main_params():
            self.shadow.get_parameter(name).data = main.detach().clone()
        self.averaged = AveragedModel(self.shadow, **options)

    @torch.no_grad()
    def update(self) -> None:
        for name, main in self.optimizer.main_params():
            self.shadow.get_parameter(name).copy_(main)
        for shadow, buffer in zip(self.shadow.buffers(), self.module.buffers(), strict=True):
            shadow.copy_(buffer)
        self.averaged.update_parameters(self.shadow)

    def assert_equals(self, averages: AveragedMainParams) -> None:
        state = averages.state_dict()
        for name, average in averages.averages():
            assert bits_equal(average, self.averaged.module.get_parameter(name)), name
        for name, buffer in self.averaged.module.named_buffers():
            assert bits_equal(state["buffers"][name], buffer), name
        assert bits_equal(averages.n_averaged, self.averaged.n_averaged)


@pytest.mark.default("custom-True")
@pytest.mark.parametrize(
    ("rule", "use_buffers"),
    # torch's get_swa_multi_avg_fn cannot average a count, such as BatchNorm's
    [
        (rule, use_buffers)
        for rule in RULES
        for use_buffers in (False, True)
        if (rule, use_buffers) != ("swa_multi", True)
    ],
)
@settings(max_examples=8, deadline=None)
@given(skips=SKIPS, tells=st.booleans())
def test_averages_are_those_of_landed_steps(rule: str, use_buffers: bool, skips: list[bool], tells: bool) -> None:
    """After any sequence of skips, averages, buffers and n_averaged are bitwise those of torch over the main params,
    in fp32, of landed steps: an EMA of half weights stands still, one on skipped steps counts weights twice.
    """
    module = _normed()
    optimizer = wrap(module, INNER["sgd_momentum_fused"])
    averages = AveragedMainParams(module, optimizer, use_buffers=use_buffers, **RULES[rule])
    oracle = _Oracle(module, optimizer, use_buffers=use_buffers, **RULES[rule])
    assert [name for name, _ in averages.averages()] == [name for name, _ in optimizer.main_params()]
    for step, skip in enumerate(skips):
        success = _step(optimizer, module, step, skip)
        averages.update_parameters(success=success if tells else None)
        if not skip:
            oracle.update()
        if skip in skips[:step]:
            oracle.assert_equals(averages)
    if False in skips:
        oracle.assert_equals(averages)


@pytest.mark.default("default-False", "ema_multi-True", "swa-False", "custom-False")
@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "swa_multi"])
def test_no_host_read(rule: str, use_buffers: bool) -> None:
    """Updates read nothing on the host, from the first on; once it knows that one has landed, none may be the first."""
    module = _normed()
    optimizer = wrap(module)
    averages = AveragedMainParams(module, optimizer, use_buffers=use_buffers, **RULES[rule])
    with OperatorCounter() as counter:
        for step, skip in enumerate(RUN):
            success = _step(optimizer, module, step, skip)
            averages.update_parameters(success=success)
            _step(optimizer, module, step, skip)
            averages.update_parameters(module)
    assert counter.host_reads == 0
    assert averages.n_averaged.item() == 2 * RUN.count(False)
    success = _step(optimizer, module, 0, False)
    with OperatorCounter() as later:
        averages.update_parameters(success=success)
    assert later.counts[torch.ops.aten.where.self] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    """Averages are fp32, of fp64 parameters fp64; the averaged model has the model's dtype, rounded once."""
    module = _normed(dtype)
    optimizer = wrap(module)
    averages = AveragedMainParams(module, optimizer, **RULES["ema_multi"])
    oracle = _Oracle(module, optimizer, **RULES["ema_multi"])
    for step in range(3):
        averages.update_parameters(success=_step(optimizer, module, step, False))
        oracle.update()
    oracle.assert_equals(averages)
    exported = averages.model_state_dict()
    for name, average in averages.averages():
        assert average.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert bits_equal(exported[name], average.to(dtype))
    with averages.applied():
        applied = module.state_dict()
    assert all(bits_equal(applied[name], value) for name, value in exported.items())
    assert set(applied) - set(exported) == {"tied.weight", "frozen.weight", "frozen.bias"}
    assert bits_equal(applied["tied.weight"], exported["first.weight"])
    fresh = _normed(dtype)
    fresh.load_state_dict(exported, strict=False)
    assert same_bits(dict(fresh.state_dict()), dict(applied))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_evaluation_disturbs_nothing(dtype: torch.dtype) -> None:
    """Training with an evaluation on the averages after every step has the bits of training without: the optimizer
    follows outside writes to model params, so the averages are lent, not written. An error inside changes that not.
    """
    runs = []
    for evaluates in (False, True):
        module = _normed(dtype)
        optimizer = wrap(module, scale=2.0**4)
        averages = AveragedMainParams(module, optimizer, **RULES["ema"])
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
        for _ in range(5):
            optimizer.zero_grad()
            optimizer.scale_loss(module(x).float().square().mean()).backward()
            averages.update_parameters(success=optimizer.step().success)
            if evaluates:
                params, buffers = list(module.parameters()), list(module.buffers())
                before = snapshot(optimizer, module)
                with contextlib.suppress(ZeroDivisionError), averages.applied() as lent:
                    assert lent is module
                    assert not any(p is q for p in module.parameters() for q in params[:-2])
                    swa_utils.update_bn([x], module)
                    module(x)
                    raise ZeroDivisionError
                assert list(map(id, module.parameters())) == list(map(id, params))
                assert list(map(id, module.buffers())) == list(map(id, buffers))
                assert same_bits(snapshot(optimizer, module), before)
                with averages.applied():
                    state = optimizer.state_dict()
                assert all(bits_equal(value, before[f"main.{name}"]) for name, value in state["main_params"].items())
        runs.append(snapshot(optimizer, module) | {f"average.{n}": t.clone() for n, t in averages.averages()})
        runs[-1] |= dict(module.named_buffers())
    assert same_bits(*runs)


def test_the_model_computes_with_the_averages() -> None:
    """Inside the context forward gives what torch's averaged model gives, and update_bn refreshes its statistics."""
    module = _normed(torch.float32)
    optimizer = wrap(module, scale=None)
    averages = AveragedMainParams(module, optimizer)
    oracle = _Oracle(module, optimizer)
    data = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(1))
    for step in range(4):
        averages.update_parameters(success=_step(optimizer, module, step, False))
        oracle.update()
    live = _mean(module).clone()
    expected = oracle.averaged.train()
    swa_utils.update_bn(data, expected)
    with averages.applied():
        assert not any(param.requires_grad for param in module.parameters())
        swa_utils.update_bn(data, module)
    module.eval(), expected.eval()
    with averages.applied(), torch.no_grad():
        assert bits_equal(module(data[0]), expected(data[0]))
    assert bits_equal(_mean(module), live)
    assert bits_equal(averages.model_state_dict()["norm.running_mean"], _mean(expected.module))


@pytest.mark.default("2-False", "0-True", "4-False")
@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("cut", [0, 1, 2, 4])
def test_resume_is_bitwise(cut: int, use_buffers: bool, tmp_path: Any) -> None:
    """State saved after any update, also before the first that landed, continues to the same bits."""
    module = _normed()
    optimizer = wrap(module)
    averages = AveragedMainParams(module, optimizer, use_buffers=use_buffers, **RULES["custom"])
    oracle = _Oracle(module, optimizer, use_buffers=use_buffers, **RULES["custom"])
    for step, skip in enumerate(RUN):
        if step == cut:
            state = [averages.state_dict(), optimizer.state_dict(), module.state_dict()]
            torch.save(state, tmp_path / "state.pt")
            [of_averages, of_optimizer, of_module] = torch.load(tmp_path / "state.pt", weights_only=True)
            module = _normed()
            module.load_state_dict(of_module)
            optimizer = wrap(module)
            optimizer.load_state_dict(of_optimizer)
            averages = AveragedMainParams(module, optimizer, use_buffers=use_buffers, **RULES["custom"])
            averages.load_state_dict(of_averages)
            oracle.module, oracle.optimizer = module, optimizer
        averages.update_parameters(success=_step(optimizer, module, step, skip))
        if not skip:
            oracle.update()
    oracle.assert_equals(averages)


def test_state_dict_does_not_alias() -> None:
    """What a state dict holds stays as it was; with copy=False it is live."""
    module = _normed()
    optimizer = wrap(module)
    averages = AveragedMainParams(module, optimizer)
    saved, live = averages.state_dict(), averages.state_dict(copy=False)
    before = copy.deepcopy(saved)
    averages.update_parameters(success=_step(optimizer, module, 0, False))
    for part in ("averages", "buffers"):
        assert same_bits(saved[part], before[part])
        assert not same_bits(live[part], before[part])
    assert (saved["n_averaged"].item(), live["n_averaged"].item()) == (0, 1)


def test_model_state_dict_is_a_copy() -> None:
    """Of an fp32 model, too, whose averages have its dtype already."""
    module = _normed().float()
    averages = AveragedMainParams(module, wrap(module))
    copied = averages.model_state_dict()
    live = dict(averages.averages())
    for name, average in live.items():
        assert copied[name].data_ptr() != average.data_ptr()


def test_chunks_hold_as_much_as_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of exactly CHUNK_NUMEL elements together share a chunk, and a larger one has its own."""
    monkeypatch.setattr(running_averages, "CHUNK_NUMEL", 8)
    tensors = [torch.zeros(n) for n in (3, 5, 8, 1, 9, 4, 4)]
    assert list(running_averages._chunked(tensors)) == [[0, 1], [2], [3], [4], [5, 6]]


def test_updates_now_and_then() -> None:
    """Called once for several steps, as SWA does, it averages if any of them landed; a bool may say so."""
    module = _normed()
    optimizer = wrap(module)
    averages = AveragedMainParams(module, optimizer)
    counts = []
    for skips in ([True, False, True], [True, True], [False, False]):
        for step, skip in enumerate(skips):
            _step(optimizer, module, step, skip)
        averages.update_parameters()
        counts.append(averages.n_averaged.item())
    averages.update_parameters(success=True)
    averages.update_parameters(success=False)
    assert [*counts, averages.n_averaged.item()] == [1, 1, 2, 3]


def test_torch_optimizer() -> None:
    """Around a plain torch optimizer of fp32 parameters it follows the flag it is given."""
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    averages = AveragedMainParams(module, optimizer)
    oracle = AveragedModel(module)
    for step, skip in enumerate(RUN):
        set_grads(module, step)
        if not skip:
            optimizer.step()
            oracle.update_parameters(module)
        averages.update_parameters(success=torch.tensor(not skip))
    assert all(bits_equal(average, oracle.module.get_parameter(name)) for name, average in averages.averages())
    again = AveragedMainParams(module, optimizer)
    again.load_state_dict(averages.state_dict())
    assert same_bits(dict(again.averages()), dict(averages.averages()))
    with pytest.raises(UsageError, match="pass success"):
        averages.update_parameters()


Mistake = Callable[[Normed, MixedPrecisionOptimizer, AveragedMainParams], object]
BUILD: Callable[..., AveragedMainParams] = AveragedMainParams


def _loads(**changes: Any) -> Mistake:
    return lambda module, optimizer, averages: averages.load_state_dict(averages.state_dict() | changes)


def _with_another_bias(module: Normed, optimizer: MixedPrecisionOptimizer, averages: AveragedMainParams) -> None:
    state = averages.state_dict()
    averages.load_state_dict(state | {"averages": state["averages"] | {"first.bias": torch.zeros(5)}})


def _with_a_buffer_of_another_shape(module: Normed, optimizer: Any, averages: AveragedMainParams) -> None:
    module.norm.running_mean = torch.zeros(3)
    averages.update_parameters(success=True)


MISTAKES: list[tuple[Mistake, type[Exception], str]] = [
    (lambda m, o, _: BUILD(m, o, avg_fn=_custom, **RULES["ema_multi"]), ArgumentError, "give one"),
    (lambda m, o, _: BUILD(o, m), ArgumentTypeError, "got MixedPrecisionOptimizer"),
    (lambda m, o, _: BUILD(m, m), ArgumentTypeError, "got Normed"),
    (lambda m, o, _: BUILD(m, INNER["sgd"](m)), ArgumentError, "wrap it in a MixedPrecisionOptimizer"),
    (
        lambda m, o, _: BUILD(nn.ModuleDict({"all": m, "extra": nn.Linear(1, 1)}), o),
        ArgumentError,
        r"does not train parameter 'extra\.weight'",
    ),
    (lambda m, o, averages: averages.update_parameters(), UsageError, "no step"),
    (lambda m, o, averages: averages.update_parameters(_normed(), success=True), ArgumentError, "not the one"),
    (lambda m, o, averages: averages.update_parameters(success=torch.zeros(())), ArgumentTypeError, "opposite"),
    (lambda m, o, averages: averages.load_state_dict({}), StateDictError, "must hold 'averages'"),
    (_loads(n_averaged=3), StateDictError, "n_averaged"),
    (_loads(averages={}), StateDictError, "'averages' must be of .*, got nothing"),
    (_loads(buffers=3), StateDictError, "'buffers' must be of"),
    (_with_another_bias, StateDictError, r"shape \(6,\), got \(5,\)"),
    (_with_a_buffer_of_another_shape, UsageError, r"'norm\.running_mean' has changed its shape"),
    (
        lambda m, o, averages: [m.frozen.requires_grad_(True), _step(o, m, 0, False), averages.update_parameters()],
        UsageError,
        "main params have been added",
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), MISTAKES)
def test_misuse(call: Mistake, error: type[Exception], words: str) -> None:
    """Every misuse has an error that names it and the way out; nothing changes."""
    module = _normed()
    optimizer = wrap(module)
    averages = AveragedMainParams(module, optimizer)
    before = averages.state_dict()
    with pytest.raises(error, match=words):
        call(module, optimizer, averages)
    assert same_bits(averages.state_dict()["averages"], before["averages"])
