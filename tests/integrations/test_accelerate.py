"""MixedPrecisionOptimizer and GradScaler in real Accelerate loops, in one process."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale import (
    ConstantGradScaler,
    DynamicGradScaler,
    MixedPrecisionOptimizer,
    OptimizerConfig,
)
from megascale.amp import GradScaler
from megascale.errors import ArgumentError, ArgumentTypeError, UsageError
from megascale.grad_sync import GradSync
from megascale.schedules import LandedLRScheduler
from tests.counting import OperatorCounter
from tests.training import INNER, Tiny, bits_equal, grad_of, model, same_bits, snapshot, wrap

accelerate = pytest.importorskip("accelerate", reason="tests of the Accelerate integration need accelerate")

from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin  # noqa: E402

from megascale.integrations.accelerate import Accelerator, adopt  # noqa: E402
from tests.integrations.accelerate_cases import (  # noqa: E402
    MICRO_BATCHES,
    OVERFLOW_AT,
    SKIPS,
    STEPS,
    accelerator_of,
    by_hand,
    loss_of,
    reset,
    with_accelerate,
)


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate's state is shared by a whole process."""
    reset()
    yield
    reset()


@pytest.mark.parametrize(
    ("inner", "norm", "value"),
    [
        ("adamw_fused", None, None),
        ("adamw_foreach", 0.1, None),
        ("sgd_momentum_fused", None, 0.01),
        ("adamw_fused", 0.1, 0.01),
    ],
)
def test_a_loop_equals_the_same_loop_by_hand(inner: str, norm: float | None, value: float | None) -> None:
    """Scaling, accumulation, clipping by norm and value, skips and fp16 weights: the bits of the loop by hand."""
    reference, module = model(), model()
    plain = wrap(reference, INNER[inner], clip_grad=norm or 0.0)
    expected = by_hand(reference, plain, value)
    accelerator, optimizer = accelerator_of(), wrap(module, INNER[inner])
    prepared_model, prepared = accelerator.prepare(module, optimizer)
    seen = with_accelerate(accelerator, prepared_model, prepared, norm=norm, value=value)
    assert seen.skips == expected.skips == SKIPS
    if norm is not None:
        assert seen.norms == pytest.approx(expected.norms, rel=0, abs=0, nan_ok=True)
        assert min(seen.norms) > norm  # the clip is at work in every step
    assert {param.dtype for param in prepared_model.parameters()} == {torch.float16}
    assert same_bits(snapshot(optimizer, module), snapshot(plain, reference))
    assert optimizer.get_loss_scale().item() == expected.scales[-1] != 2.0**10


@pytest.mark.parametrize(
    ("own", "asked", "holds"), [(0.0, 0.05, 0.05), (0.02, 0.05, 0.02), (0.05, 0.02, 0.02), (0.05, math.inf, 0.05)]
)
def test_the_smaller_of_two_clipping_norms_holds(own: float, asked: float, holds: float) -> None:
    """A norm asked of the accelerator and the optimizer's own ``clip_grad`` both hold; the latter is not changed."""
    module = model(torch.float32)
    before = {name: param.detach().clone() for name, param in module.named_parameters()}
    sgd = torch.optim.SGD(module.named_parameters(), lr=1.0)
    optimizer = MixedPrecisionOptimizer(sgd, OptimizerConfig(clip_grad=own), ConstantGradScaler(64.0))
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(optimizer)
    accelerator.backward(loss_of(module, 0))
    expected = torch.nn.utils.get_total_norm([grad_of(param) / 64 for param in module.parameters()])
    norm = accelerator.clip_grad_norm_(module.parameters(), asked)
    prepared.step()
    moved = torch.stack([(param - before[name]).norm() for name, param in module.named_parameters()]).norm()
    assert norm is not None
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    assert expected > 0.1
    assert moved.item() == pytest.approx(holds, rel=1e-4)  # clip = max_norm / (norm + 1e-6)
    assert optimizer.clip_grad == own


def test_a_prepared_scheduler_waits_where_the_step_was_skipped() -> None:
    """The LR schedule advances on landed steps only, whether the gradients were clipped or not."""
    for norm in (None, 0.1):
        module = model()
        optimizer = wrap(module)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        accelerator = accelerator_of()
        module, prepared, schedule = accelerator.prepare(module, optimizer, schedule)
        seen = with_accelerate(accelerator, module, prepared, norm=norm, schedule=schedule)
        landed = [sum(not skip for skip in seen.skips[: step + 1]) for step in range(STEPS)]
        assert seen.rates == [1e-2 * 0.5**count for count in landed]
        assert landed[-1] == STEPS - 2


def test_a_step_with_clipping_and_a_landed_schedule_reads_nothing_on_the_host() -> None:
    """backward, both clippings, step (which returns its result) and LandedLRScheduler: no host sync."""
    module = model()
    optimizer = wrap(module)
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(optimizer)
    schedule = LandedLRScheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    rates = []
    for index in (0, 7, 1):
        with OperatorCounter() as counter:
            accelerator.backward(loss_of(module, index))
            accelerator.clip_grad_norm_(module.parameters(), 0.1)
            accelerator.clip_grad_value_(module.parameters(), 0.01)
            result = prepared.step()
            schedule.step(result.success)
            prepared.zero_grad()
        assert counter.host_reads == 0
        assert bool(result.success) is (index not in OVERFLOW_AT) is not prepared.step_was_skipped
        rates.append(float(prepared.param_groups[0]["lr"]))
    assert rates == [5e-3, 5e-3, 2.5e-3]


def test_save_state_and_load_state_continue_bit_for_bit(tmp_path: Path) -> None:
    """A new process's worth of objects continues from save_state: main params, moments, scale, trackers, schedule."""

    def start() -> tuple[Accelerator, Tiny, MixedPrecisionOptimizer, Any, Any]:
        reset()
        accelerator, module = accelerator_of(), model()
        optimizer = wrap(module)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return accelerator, module, optimizer, *accelerator.prepare(optimizer, schedule)

    accelerator, module, optimizer, prepared, schedule = start()
    accelerator.prepare(module)
    with_accelerate(accelerator, module, prepared, norm=0.1, schedule=schedule, steps=range(5))
    accelerator.save_state(str(tmp_path))
    saved = torch.load(tmp_path / "optimizer.bin", weights_only=True)
    assert saved["grad_scaler"] == optimizer.grad_scaler.state_dict()  # type: ignore[union-attr]
    rest = with_accelerate(accelerator, module, prepared, norm=0.1, schedule=schedule, steps=range(5, STEPS))
    expected = snapshot(optimizer, module)

    accelerator, module, optimizer, prepared, schedule = start()
    accelerator.prepare(module)
    accelerator.load_state(str(tmp_path))
    again = with_accelerate(accelerator, module, prepared, norm=0.1, schedule=schedule, steps=range(5, STEPS))
    assert (again.rates, again.norms, again.skips) == (rest.rates, rest.norms, rest.skips)
    assert same_bits(snapshot(optimizer, module), expected)


def test_two_optimizers_with_scalers_of_their_own() -> None:
    """backward(loss, optimizer=...) scales by that optimizer's scale; without it the loss belongs to nobody."""
    modules = [model(seed=0), model(seed=1)]
    optimizers = [
        MixedPrecisionOptimizer(INNER["sgd"](module), None, ConstantGradScaler(scale))
        for module, scale in zip(modules, (64.0, 1024.0), strict=True)
    ]
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(*optimizers)
    for module, optimizer, wrapped, scale in zip(modules, optimizers, prepared, (64.0, 1024.0), strict=True):
        for given in (optimizer, wrapped):
            accelerator.backward(loss_of(module, 0), optimizer=given)
            scaled = grad_of(module.head.weight).clone()
            module.zero_grad()
            (loss_of(module, 0) * scale).backward()
            assert bits_equal(scaled, grad_of(module.head.weight))
            module.zero_grad()
    with pytest.raises(UsageError, match="say whose loss"):
        accelerator.backward(loss_of(modules[0], 0))


def test_bf16_without_a_scaler() -> None:
    """bf16 parameters need no scaler: a NaN still skips, and unscale_gradients is the no-op that it says it is."""
    module = model(torch.bfloat16)
    accelerator = accelerator_of(mixed_precision="bf16")
    module, prepared = accelerator.prepare(module, wrap(module, scale=None))
    accelerator.unscale_gradients()
    assert with_accelerate(accelerator, module, prepared, norm=0.1).skips == SKIPS


# Misuse


Call = tuple[Accelerator, Callable[[], object]]


def _refused(accelerator: Accelerator, call: Callable[[], object], error: type[Exception], message: str) -> None:
    """Check that ``call`` raises, and has prepared nothing."""
    count = len(accelerator._optimizers)
    with pytest.raises(error, match=message):
        call()
    assert len(accelerator._optimizers) == count


def test_clipping_that_cannot_be_done_is_refused() -> None:
    """Part of the parameters, other norms, amid accumulation, twice a step: named errors, and the step still lands."""
    module = model()
    accelerator = accelerator_of()
    prepared = accelerator.prepare(wrap(module))
    params = list(module.parameters())
    with accelerator.accumulate(module):
        accelerator.backward(loss_of(module, 0))
        with pytest.raises(UsageError, match="if accelerator"):
            accelerator.clip_grad_norm_(params, 1.0)
        with pytest.raises(UsageError, match="if accelerator"):
            accelerator.clip_grad_value_(params, 1.0)
    accelerator.sync_gradients = True
    for call, error, message in (
        (lambda: accelerator.clip_grad_norm_(params[1:], 1.0), UsageError, "leave out 1 of the optimizer's 7"),
        (lambda: accelerator.clip_grad_norm_(params[0], 1.0), UsageError, "leave out 6"),
        (lambda: accelerator.clip_grad_value_(params[1:], 1.0), UsageError, "leave out 1"),
        (lambda: accelerator.clip_grad_norm_(params, 1.0, norm_type=1), ArgumentError, "norm_type must be 2"),
        (lambda: accelerator.clip_grad_norm_(params, 0.0), ArgumentError, "max_norm"),
        (lambda: accelerator.clip_grad_norm_(params, math.nan), ArgumentError, "max_norm"),
        (lambda: accelerator.clip_grad_value_(params, -1.0), ArgumentError, "clip_value"),
        (accelerator.unscale_gradients, UsageError, "stay scaled"),
        (lambda: accelerator.unscale_gradients(prepared), UsageError, "stay scaled"),
        (lambda: prepared.step(lambda: 0.0), UsageError, "closure"),
    ):
        _refused(accelerator, call, error, message)
    accelerator.clip_grad_norm_(params, 1.0)
    with pytest.raises(UsageError, match="clipped already"):
        accelerator.clip_grad_norm_(params, 1.0)
    assert bool(prepared.step().success)


def _shared_scaler() -> Call:
    accelerator, ours = Accelerator(cpu=True), wrap(model())
    accelerator.prepare(ours)
    shared = MixedPrecisionOptimizer(INNER["sgd"](model()), None, ours.grad_scaler)
    return accelerator, lambda: accelerator.prepare(shared)


def _second(first: str, second: str, **options: Any) -> Call:
    """One optimizer that is prepared, and another that does not go with it. Either: none, plain, or scaled."""
    accelerator = Accelerator(cpu=True, **options)
    kinds: dict[str, Callable[[], Any]] = {
        "plain": lambda: torch.optim.SGD(model(torch.float32).parameters(), lr=0.1),
        "scaled": lambda: wrap(model()),
        "half": lambda: torch.optim.AdamW(torch.nn.Linear(2, 2).half().parameters()),
        "scaled fp32": lambda: wrap(model(torch.float32)),
        "ours without a scaler": lambda: wrap(model(torch.float32), scale=None),
    }
    if first != "none":
        accelerator.prepare(kinds[first]())
    optimizer = kinds[second]()
    return accelerator, lambda: accelerator.prepare(optimizer)


def _one_norm_of_two() -> Call:
    accelerator, modules = Accelerator(cpu=True), [model(), model()]
    accelerator.prepare(*map(wrap, modules))
    params = [param for module in modules for param in module.parameters()]
    return accelerator, lambda: accelerator.clip_grad_norm_(params, 1.0)


def _other_half(precision: str, held: torch.dtype, *, adapters: bool = False) -> Call:
    """An optimizer, or adapters in fp32, over weights in the half that autocast does not compute in."""
    accelerator, base = accelerator_of(mixed_precision=precision), model(held)
    if adapters:  # whose optimizer has fp32 parameters alone
        adapted = torch.nn.Sequential(base.requires_grad_(False), torch.nn.Linear(4, 4))
        assert accelerator.prepare_model(base, evaluation_mode=True) is base
        return accelerator, lambda: accelerator.prepare(adapted)
    ours = wrap(base, scale=2.0**10 if held == torch.float16 else None)
    return accelerator, lambda: accelerator.prepare(ours)


def _grad_sync() -> Call:
    accelerator, module = Accelerator(cpu=True), model()
    sync = GradSync(module.named_parameters())
    synced = MixedPrecisionOptimizer(INNER["sgd"](module), None, ConstantGradScaler(64.0), grad_sync=sync)
    return accelerator, lambda: accelerator.prepare(synced)


HALF, BRAIN = torch.float16, torch.bfloat16
WITH_SCALER: dict[str, Any] = {"mixed_precision": "fp16", "grad_scaler": GradScaler("cpu")}
WITHOUT: dict[str, Any] = {"mixed_precision": "fp16"}
"""On a CPU Accelerate's "fp16" has no scaler, and computes in fp32."""


@pytest.mark.parametrize(
    ("arrange", "message"),
    [
        (_shared_scaler, "ChainedOptimizer"),
        (_one_norm_of_two, "belong to 2 optimizers"),
        (_grad_sync, "without grad_sync"),
        (partial(_second, "scaled", "plain"), "wrap it"),
        (partial(_second, "plain", "scaled"), "wrap it"),
        (partial(_second, "none", "scaled", **WITH_SCALER), "mixed_precision='no'"),
        (partial(_second, "plain", "plain", **WITH_SCALER), "second optimizer of one grad_scaler"),
        (partial(_second, "none", "half", **WITH_SCALER), "means autocast over fp32 weights"),
        (
            partial(_second, "none", "ours without a scaler", **WITH_SCALER),
            "has no grad_scaler, and would take gradients",
        ),
        (partial(_second, "none", "scaled", **WITHOUT), "use mixed_precision='no'"),
        (partial(_second, "none", "scaled fp32", **WITHOUT), "use mixed_precision='no'"),
        (partial(_other_half, "bf16", HALF), "parameters of the .* are torch.float16: use mixed_precision='no'"),
        (partial(_other_half, "fp16", BRAIN), "parameters of the .* are torch.bfloat16: use mixed_precision='no'"),
        (partial(_other_half, "bf16", HALF, adapters=True), "computes in torch.bfloat16"),
        (partial(_other_half, "fp16", BRAIN, adapters=True), "computes in torch.float16"),
    ],
)
def test_what_does_not_fit_together_is_refused(arrange: Callable[[], Call], message: str) -> None:
    """Optimizers beside each other, a scaler beside autocast, and weights that autocast would round in silence."""
    _refused(*arrange(), UsageError, message)


def test_optimizers_that_do_not_fit_the_accelerator_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device, an engine that owns the step."""
    accelerator, ours = Accelerator(cpu=True), wrap(model())
    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "device", property(lambda _: torch.device("cuda", 0)))
        _refused(accelerator, lambda: accelerator.prepare(ours), UsageError, r"model\.to\(accelerator\.device\)")
    monkeypatch.setitem(AcceleratorState._shared_state, "fsdp_plugin", FullyShardedDataParallelPlugin(fsdp_version=1))
    for kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA, DistributedType.FSDP):
        monkeypatch.setitem(AcceleratorState._shared_state, "distributed_type", kind)
        _refused(accelerator, lambda: accelerator.prepare_optimizer(ours), UsageError, kind.value)


def test_adopt_turns_a_plain_accelerator_into_ours() -> None:
    """The same object, with the new behaviour; not one of another class, nor one that has prepared an optimizer."""
    theirs = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    accelerator = adopt(theirs)
    assert accelerator is theirs
    module, reference = model(), model()
    optimizer, plain = wrap(module), wrap(reference)
    expected = by_hand(reference, plain)
    seen = with_accelerate(accelerator, module, accelerator.prepare(optimizer))
    assert seen.skips == expected.skips
    assert same_bits(snapshot(optimizer, module), snapshot(plain, reference))
    with pytest.raises(UsageError, match="prepared an optimizer already"):
        adopt(theirs)
    reset()
    subclass = type("Custom", (accelerate.Accelerator,), {})
    with pytest.raises(ArgumentTypeError, match="Custom"):
        adopt(subclass(cpu=True))


# GradScaler in the place of torch's: fp32 parameters, autocast


class Typed(Tiny):
    """Notes the dtype in which its first layer computes."""

    seen: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return shape [..., 1]."""
        self.seen = self.first(x).dtype
        return super().forward(x)


def _autocast_by_hand(module: Typed, inner: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> list[bool]:
    """The documented loop: autocast, accumulate, unscale, clip, step, update."""
    skips = []
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(module, MICRO_BATCHES * step + micro)
            scaler.scale(loss / MICRO_BATCHES).backward()
        scaler.unscale_(inner)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        before = scaler.get_scale()
        scaler.step(inner)
        scaler.update()
        skips.append(scaler.get_scale() < before)
        inner.zero_grad()
    return skips


@pytest.mark.parametrize("inner", ["adamw_fused", "adamw_foreach"])
def test_grad_scaler_and_autocast_equal_torchs_own_loop(inner: str, tmp_path: Path) -> None:
    """mixed_precision="fp16" with ``grad_scaler=`` trains in fp16 autocast on a CPU: bits, skips, scale, scaler.pt."""
    torch.manual_seed(0)
    reference = Typed()
    module = Typed()
    module.load_state_dict(reference.state_dict())
    options = {"init_scale": 2.0**10, "growth_interval": 4}
    theirs = torch.amp.GradScaler("cpu", **options)  # type: ignore[arg-type]
    expected = _autocast_by_hand(reference, INNER[inner](reference), theirs)
    scaler = GradScaler("cpu", **options)  # type: ignore[arg-type]
    accelerator = accelerator_of(mixed_precision="fp16", grad_scaler=scaler)
    prepared_model, prepared = accelerator.prepare(module, INNER[inner](module))
    seen = with_accelerate(accelerator, prepared_model, prepared, norm=0.1)
    assert seen.skips == expected == SKIPS
    assert module.seen == torch.float16
    assert scaler.get_scale() == theirs.get_scale()
    assert all(bits_equal(ours, their) for ours, their in zip(module.parameters(), reference.parameters(), strict=True))
    accelerator.save_state(str(tmp_path))
    saved = scaler.state_dict()
    scaler.load_state_dict(GradScaler("cpu").state_dict())
    accelerator.load_state(str(tmp_path))
    assert scaler.state_dict() == saved


def test_a_second_training_with_one_accelerator() -> None:
    """It is refused until the accelerator has let go of the first one's optimizer, as the error says."""
    accelerator = accelerator_of(mixed_precision="fp16", grad_scaler=GradScaler("cpu", init_scale=2.0**10))

    def train() -> None:
        module = model(torch.float32)
        prepared_model, prepared = accelerator.prepare(module, INNER["sgd"](module))
        assert with_accelerate(accelerator, prepared_model, prepared, norm=0.1).skips == SKIPS

    train()
    _refused(accelerator, train, UsageError, r"call accelerator\.free_memory\(\) first")
    accelerator.free_memory()
    train()


def test_a_grad_scaler_that_does_not_fit_is_refused() -> None:
    """A scaler of torch's own, or one without fp16 autocast."""
    with pytest.raises(ArgumentTypeError, match=r"megascale\.amp\.GradScaler"):
        Accelerator(cpu=True, mixed_precision="fp16", grad_scaler=torch.amp.GradScaler("cpu"))  # type: ignore[arg-type]
    reset()
    with pytest.raises(ArgumentError, match="mixed_precision='fp16'"):
        Accelerator(cpu=True, grad_scaler=GradScaler("cpu"))


def test_adapters_and_8_bit_moments() -> None:
    """LoRA of peft's over a frozen fp16 base, moments as codes: the bits of the loop by hand; adapters alone move."""
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    codes: dict[str, Any] = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}

    def build() -> tuple[Any, MixedPrecisionOptimizer]:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["first", "second"], init_lora_weights=False)
        adapted = peft.get_peft_model(model(), config, autocast_adapter_dtype=False)
        trained = [(name, param) for name, param in adapted.named_parameters() if param.requires_grad]
        scaler = DynamicGradScaler(2.0**10, 1.0, 2.0, 0.5, 4, 1)
        inner = torch.optim.AdamW(trained, lr=1e-2)
        return adapted, MixedPrecisionOptimizer(inner, OptimizerConfig(fp16=True, clip_grad=0.1, **codes), scaler)

    reference, plain = build()
    before = {name: param.detach().clone() for name, param in reference.named_parameters()}
    expected = by_hand(reference, plain)
    module, optimizer = build()
    optimizer.clip_grad = 0.0
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    prepared_model, prepared = accelerator.prepare(module, optimizer)
    seen = with_accelerate(accelerator, prepared_model, prepared, norm=0.1)
    assert (seen.skips, seen.scales) == (expected.skips, expected.scales)
    assert same_bits(snapshot(optimizer, module), snapshot(plain, reference))
    for entries in optimizer._inner.state.values():
        assert (entries["exp_avg"].dtype, entries["exp_avg_sq"].dtype) == (torch.int8, torch.uint8)
    moved = {name for name, param in module.named_parameters() if not bits_equal(param, before[name])}
    assert moved == {name for name in before if "lora" in name}
