"""Rows of the table of refusals that need no ranks: arguments, states and calls, each with one bad value.

Of a check that several arguments share, one argument has every kind of bad value, and each other one has one.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler

from megascale import (
    ChainedOptimizer,
    ConstantGradScaler,
    DistributedOptimizer,
    DynamicGradScaler,
    Lion,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    StepGraph,
    amp,
    build_optimizer,
    cast_model,
)
from megascale.averages import AveragedMainParams
from megascale.debug import UnderflowMeter, report_overflows
from megascale.errors import ArgumentError, ArgumentTypeError, GradientError, StateDictError, UsageError
from megascale.grad_sync import GradSync
from megascale.metrics import StepMetrics
from megascale.schedules import LandedLRScheduler
from tests.training import INNER, Sign, Tiny, constant, model, snapshot


class Refusal(NamedTuple):
    """A row of the table.

    Attributes:
        mistake: what the caller does, in words: the test's id.
        call: does it, and raises.
        error: its class.
        words: of the message: they name the way out.
        num_ranks: on how many ranks ``call`` is made, each of which raises the same error; 0: in this process.
        of_one_rank: only one rank makes the mistake, and raises; the others wait for it, and learn of nothing.
        kept: what the refusal must leave as it was is read by it, as text.
    """

    mistake: str
    call: Callable[[], Any]
    error: type[Exception]
    words: str
    num_ranks: int = 0
    of_one_rank: bool = False
    kept: Callable[[], str] = str


def _of(make: Callable[..., Any], error: type[Exception], usual: dict[str, Any], rows: Any) -> list[Refusal]:
    """Return a row for each pair of arguments, which replace the usual ones, and words."""
    name = make.__name__
    return [
        Refusal(f"{name}: {words}", partial(make, **(usual | arguments)), error, words) for arguments, words in rows
    ]


SCALE = {"initial_scale": 1024.0, "min_scale": 1.0, "growth_factor": 2.0, "backoff_factor": 0.5}
SCALER = SCALE | {"growth_interval": 10, "hysteresis": 2}
NUMBERS = (True, None, math.nan, math.inf, 0.0, -1.0, "2", 10**400, 1e39)
INTEGERS = (True, None, math.nan, 0, -1, 2.5, "3")
SCALERS = _of(
    DynamicGradScaler,
    ArgumentError,
    SCALER,
    [
        *(({"initial_scale": value}, "initial_scale must be") for value in NUMBERS if value is not None),
        *(({name: 0.0}, f"{name} must be") for name in ("min_scale", "max_scale", "growth_factor", "backoff_factor")),
        *(({"growth_interval": value}, "growth_interval must be") for value in INTEGERS),
        ({"hysteresis": 0}, "hysteresis must be"),
        ({"initial_scale": 0.5}, "min_scale <= initial_scale <= max_scale must hold, got 1.0 <= 0.5"),
        ({"max_scale": 512.0}, "must hold, got 1.0 <= 1024.0 <= 512.0"),
        ({"initial_scale": 1e39}, "initial_scale must be between 2**-126 and 2**127"),
        ({"growth_factor": 1.0}, "growth_factor must be above 1, got 1.0"),
        ({"backoff_factor": 1.0}, "backoff_factor must be below 1, got 1.0"),
        ({"hysteresis_reset": "never"}, "hysteresis_reset must be one of 'growth', 'clean_step', got 'never'"),
    ],
)


def _loads(scaler: DynamicGradScaler, state: Any, words: str) -> Refusal:
    return Refusal(
        f"state of a scaler: {words}",
        lambda: scaler.load_state_dict(state),
        StateDictError,
        words,
        kept=lambda: str(scaler.state_dict()),
    )


GOOD = {"scale": torch.tensor([256.0]), "growth_tracker": 1, "hysteresis_tracker": 1}
USED = DynamicGradScaler(1024.0, 1.0, 2.0, 0.5, 10, 3, max_scale=2.0**24)
STATES = [
    _loads(USED, state, words)
    for state, words in (
        (GOOD | {"scale": torch.tensor([math.nan])}, "'scale' must be finite, got nan"),
        (GOOD | {"scale": math.inf}, "'scale' must be finite, got inf"),
        (GOOD | {"scale": 0.0}, "'scale' must be above 0, got 0.0"),
        (GOOD | {"scale": -2.0}, "'scale' must be above 0, got -2.0"),
        (GOOD | {"scale": 2.0**-130}, "'scale' must be between 2**-126 and 2**127"),
        (GOOD | {"scale": "256"}, "'scale' must be a number, got '256' of type str"),
        (GOOD | {"scale": True}, "'scale' must be a number, got True of type bool"),
        (GOOD | {"scale": torch.ones(2)}, "'scale' must have one element"),
        (GOOD | {"scale": 0.5}, "outside [min_scale=1.0"),
        (GOOD | {"scale": 2.0**30}, "outside [min_scale=1.0, max_scale=16777216.0]; construct the scaler with bounds"),
        (GOOD | {"growth_tracker": -1}, "'growth_tracker' must be 0 or more, got -1"),
        (GOOD | {"growth_tracker": 1.5}, "'growth_tracker' must be an integer"),
        (GOOD | {"growth_tracker": 2**70}, "'growth_tracker' must be 4611686018427387904 or less"),
        (GOOD | {"hysteresis_tracker": None}, "'hysteresis_tracker' must be an integer, got None"),
        ({"scale": 256.0, "growth_tracker": 1}, "lacks 'hysteresis_tracker'; it has ['growth_tracker', 'scale']"),
        ({"growth_tracker": 1, "hysteresis_tracker": 1}, "lacks 'scale'"),
        ({}, "lacks 'hysteresis_tracker'; it has no keys"),
        ({"_growth_tracker": 1}, "lacks 'scale'"),
        ({"scale": 4.0, "_growth_tracker": "x"}, "'_growth_tracker' must be an integer"),
        ([("scale", 1.0)], "grad scaler state must be a dict, got list"),
        (None, "grad scaler state must be a dict, got NoneType"),
    )
]

OFFLOAD: dict[str, Any] = {"optimizer_cpu_offload": True}
CONFIGS = _of(
    OptimizerConfig,
    ArgumentError,
    {},
    [
        ({"fp16": 1}, "fp16 must be True or False"),
        *(({one.name: 1}, f"{one.name} must be True or False") for one in fields(OptimizerConfig) if one.type is bool),
        ({"fp16": True, "bf16": True}, "fp16 and bf16 are both True; choose one"),
        *(({"loss_scale": value}, "loss_scale must be") for value in (False, -1.0, math.nan, math.inf, "8", 1e-40)),
        *(({name: 0}, f"{name} must be") for name in ("initial_loss_scale", "min_loss_scale", "max_loss_scale")),
        *(({name: 0}, f"{name} must be") for name in ("loss_scale_window", "hysteresis")),
        ({"min_loss_scale": 2.0**17}, "must hold, got 131072.0 <= 65536.0"),
        ({"max_loss_scale": 2.0}, "must hold, got 1.0 <= 65536.0 <= 2.0"),
        ({"hysteresis_reset": "step"}, "hysteresis_reset must be one of 'growth', 'clean_step'"),
        ({"loss_scale_growth_factor": 1.0}, "loss_scale_growth_factor must be above 1"),
        ({"loss_scale_growth_factor": math.inf}, "loss_scale_growth_factor must be finite"),
        ({"loss_scale_backoff_factor": 1.0}, "loss_scale_backoff_factor must be below 1"),
        *(({"clip_grad": value}, "clip_grad must be") for value in (-1.0, math.nan, math.inf, None, True)),
        (
            {"backend": "fast"},
            "backend must be one of 'auto', 'reference', 'torch',",
        ),
        ({"compact_state": True, "exp_avg_dtype": torch.bfloat16}, "compact_state=True sets exp_avg_dtype=torch.int8"),
        (
            {"optimizer": "adamw", "decoupled_weight_decay": False},
            "optimizer must be one of 'adam', 'sgd', 'lion', 'muon', got 'adamw'",
        ),
        *(
            ({name: -1.0}, f"{name} must be 0 or more")
            for name in ("lr", "weight_decay", "sgd_momentum", "muon_momentum", "muon_adam_lr")
        ),
        *(
            ({name: value}, f"{name} must be in")
            for name in ("adam_beta1", "adam_beta2", "lion_beta1", "lion_beta2")
            for value in (1.0, -0.1)
        ),
        *(({name: 0.0}, f"{name} must be above 0") for name in ("adam_eps", "grad_norm_skip_threshold")),
        *(({name: 0}, f"{name} must be 1 or more") for name in ("max_consecutive_skips", "max_overflows_at_min_scale")),
        *(({"grad_norm_skip_threshold": value}, "grad_norm_skip_threshold") for value in (math.nan, -math.inf)),
        ({"muon_num_ns_steps": 0}, "muon_num_ns_steps must be 1 or more"),
        ({"muon_num_ns_steps": 100}, "muon_num_ns_steps must be 99 or less"),
        ({"muon_coefficient_type": "cubic"}, "muon_coefficient_type must be one of 'quintic', 'polar_express', got"),
        ({"muon_adjust_lr_fn": "none"}, "muon_adjust_lr_fn must be one of 'original', 'match_rms_adamw', got"),
        ({"muon_ns_dtype": torch.float16}, "muon_ns_dtype must be torch.bfloat16, torch.float32 or None, got torch.f"),
        ({"exp_avg_dtype": torch.uint8}, "got torch.uint8"),
        ({"exp_avg_sq_dtype": torch.int8}, "got torch.int8"),
        (
            {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.float16},
            "give exp_avg_sq_dtype=torch.uint8, torch.bf",
        ),
        ({"overlap_param_gather": True}, "overlap_param_gather=True needs use_distributed_optimizer=True"),
        (
            {"overlap_cpu_optimizer_d2h_h2d": True},
            "d2h_h2d=True needs optimizer_cpu_offload=True",
        ),
        ({"optimizer_offload_fraction": 0.5}, "needs optimizer_cpu_offload=True"),
        (OFFLOAD | {"optimizer_offload_fraction": 0}, "optimizer_cpu_offload=False keeps all"),
        (OFFLOAD | {"optimizer_offload_fraction": "auto"}, "must be a number, got 'auto'"),
    ],
)


def _built(**arguments: Any) -> None:
    usual: dict[str, Any] = {"config": OptimizerConfig(lr=0.1), "modules": nn.Linear(2, 2)}
    build_optimizer(**(usual | arguments))


BUILT = _of(
    _built,
    ArgumentError,
    {},
    [
        ({"config": OptimizerConfig()}, "config.lr is None; give the learning rate"),
        ({"config": {"lr": 0.1}}, "config must be an OptimizerConfig, got dict"),
        (
            {"config": type("OptimizerConfig", (), {"lr": 0.1})()},
            "config must be an OptimizerConfig, got OptimizerConfig",
        ),
        ({"modules": []}, "modules must be a module or a list of modules, got []"),
        ({"modules": [nn.Linear(2, 2), "b", "c"]}, "got [Linear, str, str]"),
        ({"modules": torch.ones(2)}, "got [Tensor, Tensor]"),
        ({"modules": nn.ReLU()}, "modules have no parameters"),
        (
            {"overrides": {"*wieght": {"lr": 0.1}}},
            "overrides pattern '*wieght' matches no parameter; names look like 'weight'",
        ),
        ({"overrides": {"*": {"learning_rate": 0.1}}}, "got 'learning_rate'"),
        ({"overrides": {"*": {"lr": math.nan}}}, "must be finite, got nan"),
        ({"overrides": {"*": {"betas": (0.9, 1.0)}}}, "must be in [0, 1), got 1.0"),
        ({"overrides": {"*": {"betas": 0.9}}}, "must be two numbers"),
        ({"overrides": {"*": 3}}, "must be a dict of options, got 3"),
        ({"overrides": {"*": {"momentum": 0.5}}}, "must be one of 'lr', 'lr_mult', 'weight_decay', 'betas', 'eps'"),
        ({"overrides": [{"lr": 0.1}]}, "overrides must be a dict of name patterns to options"),
    ],
)
LIONS = _of(
    Lion,
    ArgumentError,
    {"params": [nn.Parameter(torch.ones(2))]},
    [
        ({"lr": -0.1}, "lr must be"),
        ({"betas": (0.9, 1.0)}, "betas[1] must be"),
        ({"betas": (-0.1, 0.9)}, "betas[0] must be"),
        ({"betas": 0.9}, "betas must be two numbers in [0, 1), got 0.9"),
        ({"weight_decay": -1.0}, "weight_decay must be"),
        ({"maximize": "yes"}, "maximize must be True or False"),
    ],
)


def _sgd(dtype: torch.dtype = torch.float16, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model(dtype).parameters(), lr=0.1, **options)


def _two_of_a_name() -> None:
    module = model(torch.float32)
    named = [("w", param) for param in module.parameters()]
    MixedPrecisionOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), named_parameters=named)


def _halves(**fields: Any) -> ChainedOptimizer:
    """Chain two optimizers, the second of which has more fields."""
    named, scaler = list(model().named_parameters()), DynamicGradScaler()
    configs = OptimizerConfig(fp16=True), OptimizerConfig(fp16=True, **fields)
    pairs = zip((named[:3], named[3:]), configs, strict=True)
    return ChainedOptimizer(
        [MixedPrecisionOptimizer(torch.optim.AdamW(part), config, scaler) for part, config in pairs]
    )


def _adds_to_a_chain(*, of_the_other: bool) -> None:
    chain = _halves()
    first, second = chain._optimizers
    param = second.param_groups[0]["params"][0]
    for part, added in ((first, param if of_the_other else _half()), (second, _half())):
        part.add_param_group({"params": [("added", added)]})
    chain.state_dict()


def _half() -> nn.Parameter:
    return nn.Parameter(torch.ones(2, dtype=torch.float16))


def _copies_averages() -> None:
    module = model()
    copy.deepcopy(AveragedMainParams(module, constant(module, INNER["sgd"], 1.0)))


def _overlaps() -> None:
    module = model(torch.float32)
    config = OptimizerConfig(use_distributed_optimizer=True, overlap_param_gather=True)
    DistributedOptimizer(torch.optim.AdamW(module.parameters()), config, modules=module)


def _wraps(inner: Any, *arguments: Any, **options: Any) -> Callable[[], Any]:
    return lambda: MixedPrecisionOptimizer(inner() if callable(inner) else inner, *arguments, **options)


ONE = ConstantGradScaler(1.0)
FP32 = partial(_sgd, torch.float32)
WRAPPED = [
    Refusal(words, call, error, words)
    for call, error, words in (
        (_wraps("sgd"), ArgumentTypeError, "optimizer must be a torch.optim.Optimizer, got str"),
        (_wraps(_sgd), ArgumentError, "grad_scaler is None, but fp16 gradients need one"),
        (
            _wraps(_sgd, OptimizerConfig(bf16=True), ONE),
            ArgumentError,
            "config.fp16 is False, but the",
        ),
        (_wraps(partial(_sgd, torch.bfloat16), OptimizerConfig()), ArgumentError, "config.bf16 is False, but the"),
        (_wraps(_sgd, {"fp16": True}, ONE), ArgumentTypeError, "config must be an OptimizerConfig or None, got dict"),
        (_wraps(_sgd, ONE), ArgumentTypeError, "got ConstantGradScaler; pass a scaler by its name, grad_scaler="),
        (
            _wraps(_sgd, None, torch.amp.GradScaler("cpu")),
            ArgumentTypeError,
            "grad_scaler is a torch.amp.GradScaler",
        ),
        (
            _wraps(FP32, groups=3),
            ArgumentTypeError,
            "groups must be None, a ParallelGroups, ",
        ),
        (
            _wraps(lambda: MixedPrecisionOptimizer(FP32())),
            ArgumentTypeError,
            "is a MixedPrecisionOptimizer already",
        ),
        (_wraps(lambda: torch.optim.LBFGS(model(torch.float32).parameters())), ArgumentError, "LBFGS needs a closure"),
        (
            _wraps(lambda: torch.optim.SparseAdam(model(torch.float32).parameters())),
            ArgumentError,
            "optimizer SparseAdam works on sparse gradients only",
        ),
        (_wraps(partial(FP32, differentiable=True)), ArgumentError, "param group 0 has differentiable=True"),
        (
            _wraps(lambda: torch.optim.SGD([nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=0.1)),
            ArgumentTypeError,
            "parameter '0' has dtype torch.complex64",
        ),
        (_wraps(_halves), ArgumentTypeError, "optimizer is a ChainedOptimizer already"),
        (
            _wraps(lambda: torch.optim.SGD([nn.Parameter(torch.ones(2)), torch.ones(2, device="meta")])),
            ArgumentError,
            "parameter 1 (of 2) is on the meta device and has no values",
        ),
        (
            _wraps(FP32, OptimizerConfig(exp_avg_sq_dtype=torch.bfloat16)),
            ArgumentError,
            "exp_avg_sq_dtype=torch.bfloat16 has no effect: the SGD has no such",
        ),
        (
            _wraps(partial(_sgd, torch.bfloat16), OptimizerConfig(bf16=True, loss_scale=8.0)),
            ArgumentError,
            "loss_scale=8.0 has no effect: an optimizer without a grad_scaler has no",
        ),
        (_overlaps, ArgumentError, "overlap_param_gather=True has no effect"),
        (lambda: _halves(grad_norm_skip_threshold=3.0), ArgumentError, "config.grad_norm_skip_threshold=3.0"),
        (lambda: _halves(clip_grad=2.0), ArgumentError, "clip_grad=2.0"),
        (lambda: setattr(_halves(), "param_groups", []), UsageError, "change those of its optimizers"),
        (lambda: setattr(_halves(), "state", {}), UsageError, "cannot be replaced; use load_state_dict()"),
        (lambda: _halves().add_param_group({}), UsageError, "to one of the optimizers that you have chained"),
        (
            lambda: [UnderflowMeter(chain._optimizers[0]) for chain in [_halves()]],
            UsageError,
            "is a member of a ChainedOptimizer",
        ),
        (lambda: _adds_to_a_chain(of_the_other=True), ArgumentError, "another optimizer of the chain holds"),
        (lambda: _adds_to_a_chain(of_the_other=False), ArgumentError, "have a parameter called 'added'"),
        (
            lambda: MixedPrecisionOptimizer(FP32(), named_parameters=model().parameters()),  # type: ignore[arg-type]
            ArgumentTypeError,
            "must be pairs of name and parameter, as model.named_parameters() gives",
        ),
        (
            lambda: MixedPrecisionOptimizer(FP32(), grad_sync=model()),  # type: ignore[arg-type]
            ArgumentTypeError,
            "grad_sync must be a GradSync, as GradSync(model.named_parameters()), got a Tiny",
        ),
        (
            lambda: cast_model(model(), torch.float16, keep=None),  # type: ignore[arg-type]
            ArgumentTypeError,
            "keep must be a pattern, a type, a module",
        ),
        (
            lambda: AveragedMainParams(model(), FP32(), avg_fn=0.9),  # type: ignore[arg-type]
            ArgumentTypeError,
            "torch.optim.swa_utils.get_ema_avg_fn(decay) makes one",
        ),
        (lambda: GradSync(model()), ArgumentTypeError, "as model.named_parameters() gives, got a Tiny"),  # type: ignore[arg-type]
        (lambda: GradSync(model().parameters()), ArgumentTypeError, "must be pairs of name and parameter"),  # type: ignore[arg-type]
        (
            lambda: GradSync(model().named_parameters(), grad_dtype="fp32"),  # type: ignore[arg-type]
            ArgumentError,
            "must be floating point, got fp32",
        ),
        (lambda: ChainedOptimizer(torch.nn.Linear(1, 1)), ArgumentTypeError, "optimizers[0] must be a MixedPrecision"),  # type: ignore[arg-type]
        (
            lambda: DistributedOptimizer(INNER["sgd"](model()), None, DynamicGradScaler(), modules=None),  # type: ignore[arg-type]
            ArgumentTypeError,
            "modules must be a module or a list of modules, got [NoneType]",
        ),
        (
            lambda: constant(model(), INNER["sgd"], 1.0).add_param_group(
                {"params": [("added", _half())], "lr": "1e-3"}
            ),
            ArgumentTypeError,
            "lr of a param group must be a number",
        ),
        (
            _wraps(
                lambda: torch.optim.RMSprop(model().parameters()),
                OptimizerConfig(fp16=True, compact_state=True),
                DynamicGradScaler(),
            ),
            ArgumentError,
            "exp_avg_dtype=torch.int8 needs Adam or AdamW, not RMSprop",
        ),
        (_copies_averages, UsageError, "a copy has no optimizer; use state_dict()"),
        (lambda: _halves().state.update(global_count=1), UsageError, "write it into that of one of them"),
        (_two_of_a_name, ArgumentError, "two parameters are called 'w'"),
        (lambda: constant(model(), INNER["sgd"], 1.0).step(lambda: 0.0), UsageError, "step() takes no closure"),
        (lambda: copy.deepcopy(constant(model(), INNER["sgd"], 1.0)), UsageError, "cannot be pickled or deep-copied"),
    )
]


def _sparse() -> Refusal:
    """A sparse gradient gets a clear error and changes nothing."""
    module = nn.Embedding(10, 4, sparse=True).half()
    optimizer = constant(module, INNER["sgd"], 1.0)
    optimizer.scale_loss(module(torch.tensor([1, 2])).float().sum()).backward()
    words = "the gradient of 'weight' has layout torch.sparse_coo"
    return Refusal(
        "a sparse gradient", optimizer.step, GradientError, words, kept=lambda: str(snapshot(optimizer, module))
    )


def _schedules() -> list[Refusal]:
    """What a LandedLRScheduler refuses, and advances nothing."""
    inner = FP32()
    optimizer = MixedPrecisionOptimizer(inner)
    bare = lr_scheduler.ExponentialLR(optimizer, 0.5)
    schedule = LandedLRScheduler(bare)
    ready = LandedLRScheduler(lr_scheduler.ExponentialLR(_stepped(), 0.5))
    rows: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: LandedLRScheduler(schedule), ArgumentTypeError, "already"),
        (lambda: LandedLRScheduler(lr_scheduler.ReduceLROnPlateau(optimizer)), ArgumentTypeError, "metric"),
        (lambda: LandedLRScheduler(3), ArgumentTypeError, "got int"),  # type: ignore[arg-type]
        (lambda: LandedLRScheduler(bare, MixedPrecisionOptimizer(FP32())), ArgumentError, "other param groups"),
        (lambda: LandedLRScheduler(bare, "optimizer"), ArgumentTypeError, "got str"),  # type: ignore[arg-type]
        (schedule.step, UsageError, "no step of MixedPrecisionOptimizer"),
        (lambda: ready.step(3), ArgumentTypeError, "got 3"),  # type: ignore[arg-type]
        (lambda: ready.step(torch.tensor(0.0)), ArgumentTypeError, "opposite"),
        (lambda: ready.step(torch.tensor([True, False])), ArgumentTypeError, "a tensor of one bool"),
        (lambda: schedule.load_state_dict({"gamma": 0.5}), StateDictError, "last_epoch"),
        (
            lambda: schedule.load_state_dict(schedule.state_dict() | {"_last_lr": [1.0, 1.0], "last_epoch": 5}),
            StateDictError,
            "2 rates for 1 param groups",
        ),
        (lambda: schedule.load_state_dict(3), StateDictError, "must be a dict"),  # type: ignore[arg-type]
    ]
    return [
        Refusal(
            f"a schedule, {index}: {words}",
            call,
            error,
            words,
            kept=lambda: f"{schedule.state_dict()} {ready.state_dict()}",
        )
        for index, (call, error, words) in enumerate(rows)
    ]


def _stepped() -> MixedPrecisionOptimizer:
    optimizer = MixedPrecisionOptimizer(FP32())
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


SHARED = nn.Parameter(torch.ones(2))
SYNCS = _of(
    GradSync,
    ArgumentError,
    {"named_parameters": [("w", nn.Parameter(torch.ones(2)))]},
    [
        ({"reduction": "max"}, "reduction must be one of 'mean', 'sum', got 'max'"),
        ({"overlap": 1}, "overlap must be True or False, got 1"),
        ({"bucket_numel": 0}, "bucket_numel must be 1 or more, got 0"),
        ({"grad_dtype": torch.int32}, "grad_dtype and reduce_dtype must be floating point, got torch.int32"),
        ({"named_parameters": []}, "named_parameters has no parameter with requires_grad"),
        ({"named_parameters": [("a", SHARED), ("b", SHARED)]}, "parameters 'a' and 'b' are the same tensor"),
        ({"named_parameters": [("a", SHARED), ("a", nn.Parameter(torch.ones(1)))]}, "two parameters are called 'a'"),
    ],
)


def _divisor(divisor: Any) -> None:
    GradSync([("w", nn.Parameter(torch.ones(2)))]).set_divisor(divisor)


DIVISORS = _of(
    _divisor,
    ArgumentError,
    {},
    [
        ({"divisor": 0}, "divisor must be above 0, got 0"),
        ({"divisor": math.nan}, "divisor must be finite"),
        ({"divisor": torch.ones(2)}, "divisor must be one number, got a tensor of shape (2,)"),
    ],
)


def _part(name: str, scaler: Any = ONE, param: nn.Parameter | None = None, **fields: Any) -> MixedPrecisionOptimizer:
    """Return an optimizer of one parameter, for a chain."""
    named = [(name, nn.Parameter(torch.ones(3).half()) if param is None else param)]
    return MixedPrecisionOptimizer(torch.optim.SGD(named, lr=0.1), OptimizerConfig(fp16=True, **fields), scaler)


HALF = nn.Parameter(torch.ones(3).half())
CHAINS = [
    Refusal(f"a chain: {words}", call, error, words)
    for call, error, words in (
        (lambda: ChainedOptimizer([]), ArgumentError, "optimizers is empty"),
        (
            lambda: ChainedOptimizer([FP32()]),  # type: ignore[list-item]
            ArgumentTypeError,
            "optimizers[0] must be a MixedPrecisionOptimizer",
        ),
        (
            lambda: ChainedOptimizer([_part("a"), _part("b", ConstantGradScaler(1.0))]),
            ArgumentError,
            "has another grad scaler",
        ),
        (lambda: ChainedOptimizer([_part("a"), _part("b", clip_grad=2.0)]), ArgumentError, "clip_grad=2.0"),
        (
            lambda: ChainedOptimizer([_part("a", param=HALF), _part("b", param=HALF)]),
            ArgumentError,
            "hold the same parameter",
        ),
        (lambda: ChainedOptimizer([_part("a"), _part("a")]), ArgumentError, "a parameter called 'a'"),
        (
            lambda: ChainedOptimizer([_part("a")]).add_param_group({"params": [HALF]}),
            UsageError,
            "add the param group to one of",
        ),
    )
]

WHOLE = nn.Linear(2, 2).half()


def _zero1(inner: Any = torch.optim.AdamW, **options: Any) -> None:
    usual: dict[str, Any] = {"config": OptimizerConfig(fp16=True), "grad_scaler": ONE, "modules": WHOLE}
    DistributedOptimizer(inner(WHOLE.parameters()), **(usual | options))


def _muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([param for param in params if param.dim() == 2])


def _where_it_lies() -> str:
    """What a refused construction has neither moved nor hooked."""
    return str([(param.data_ptr(), bool(param._post_accumulate_grad_hooks)) for param in WHOLE.parameters()])


ZERO1 = [
    Refusal(f"ZeRO-1: {words}", partial(_zero1, **options), error, words, kept=_where_it_lies)
    for options, error, words in (
        ({"modules": []}, ArgumentTypeError, "modules must be a module or a list of modules, got []"),
        (
            {"modules": [nn.Linear(1, 1), "head"]},
            ArgumentTypeError,
            "modules must be a module or a list of modules, got [L",
        ),
        ({"modules": nn.Linear(1, 1)}, ArgumentError, "modules do not own parameter 0 of the optimizer (and 1 more)"),
        ({"bucket_numel": 0}, ArgumentError, "bucket_numel must be 1 or more, got 0"),
        ({"reduction": "max"}, ArgumentError, "reduction must be one of 'mean', 'sum', got 'max'"),
        ({"overlap_grad_reduce": 1}, ArgumentTypeError, "overlap_grad_reduce must be True or False, got 1"),
        ({"overlap_param_gather": None}, ArgumentTypeError, "overlap_param_gather must be True or False, got None"),
        ({"broadcast_params": "yes"}, ArgumentTypeError, "broadcast_params must be True or False, got 'yes'"),
        ({"shard": "rows"}, ArgumentError, "shard must be one of 'auto', 'elements', 'parameters', got 'rows'"),
        ({"elementwise": 1}, ArgumentTypeError, "elementwise must be True or False, got 1"),
        ({"grad_dtype": torch.int32}, ArgumentError, "grad_dtype and reduce_dtype must be floating point"),
        ({"groups": "world"}, ArgumentTypeError, "groups must be None, a ParallelGroups"),
        ({"grad_scaler": None}, ArgumentError, "grad_scaler is None, but fp16 gradients need one"),
        ({"config": OptimizerConfig(bf16=True)}, ArgumentError, "config.fp16 is False, but the optimizer has fp16"),
        ({"inner": torch.optim.Adafactor, "shard": "elements"}, ArgumentError, "pass shard='parameters'"),
        (
            {"inner": _muon, "shard": "elements"},
            ArgumentError,
            "optimizer Muon is not known to be elementwise",
        ),
        ({"inner": Sign, "shard": "elements"}, ArgumentError, "optimizer Sign is not known to be elementwise"),
    )
]

CAST = Tiny()
CASTS = [
    Refusal(
        f"cast_model: {words}", partial(cast_model, *arguments), error, words, kept=lambda: str([*CAST.parameters()])
    )
    for arguments, error, words in (
        ((CAST, torch.float64), ArgumentError, "dtype must be torch.float16 or torch.bfloat16, got torch.float64"),
        ((3, torch.float16), ArgumentTypeError, "model must be a torch.nn.Module, got int"),
        (
            (CAST, torch.float16, "nrom"),
            ArgumentError,
            "no module or parameter of the model; did you mean 'norm'?",
        ),
        ((CAST, torch.float16, nn.Linear(1, 1)), ArgumentError, "the given Linear is no module of the model"),
        (
            (CAST, torch.float16, [3]),
            ArgumentTypeError,
            "keep must hold name patterns, types of modules or modules, got 3",
        ),
    )
]


def _sharing() -> torch.optim.Optimizer:
    memory = torch.zeros(12).half()
    return torch.optim.SGD([nn.Parameter(memory[:8]), nn.Parameter(memory[7:])])


def _scaled() -> amp.GradScaler:
    """Return a scaler that has scaled a loss."""
    scaler = amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    return scaler


WRONG: Any = FP32()
NO_BOOLS: Any = (1, None, "yes", np.bool_(True))
MADE: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (_wraps(_sharing, None, ONE), UsageError, "parameters '0' and '1' share memory"),
    *(
        (partial(scaler.update, value), ArgumentTypeError, "found_inf must be a bool or a tensor")
        for scaler in (USED, ONE)
        for value in NO_BOOLS
    ),
    (
        partial(USED.update, torch.zeros(2)),
        ArgumentError,
        "found_inf must have one element, got shape (2,)",
    ),
    (lambda: _scaled().step(_part("w")), ArgumentTypeError, "scale_loss"),
    (lambda: _scaled().unscale_(_part("w")), ArgumentTypeError, "scale_loss"),
    (lambda: _stepped().clip_grad_value_(1.0), UsageError, "prepare_grads() first"),
    (lambda: _stepped().clip_grad_value_(0), ArgumentError, "max_value must be above 0, got 0"),
    (lambda: setattr(_stepped(), "clip_grad", -1), ArgumentError, "clip_grad must be 0 or more, got -1"),
    (
        lambda: _stepped().clip_grad_norm_(model().parameters(), 1.0),  # type: ignore[arg-type]
        ArgumentTypeError,
        "max_norm must be a number, got generator",
    ),
    (
        lambda: _stepped().clip_grad_norm_(model().parameters(), 1.0),  # type: ignore[arg-type]
        ArgumentTypeError,
        "clip_grad_norm_(1.0)",
    ),
    (lambda: _stepped().clip_grad_norm_(1.0, norm_type=math.inf), ArgumentError, "norm_type must be 2"),
    (lambda: _stepped().clip_grad_norm_(0), ArgumentError, "max_norm must be above 0, got 0"),
    (
        lambda: [one.clip_grad_norm_(1.0) for one in [_stepped()] for _ in range(2)],
        UsageError,
        "prepare_grads() has measured these gradients already",
    ),
    (lambda: [(one.prepare_grads(), one.step(int)) for one in [_stepped()]], UsageError, "step() takes no closure"),
    (lambda: StepGraph(WRONG, print), ArgumentTypeError, "optimizer must be a MixedPrecisionOptimizer"),
    (lambda: StepGraph(WRONG, print), ArgumentTypeError, "got SGD"),
    (lambda: StepGraph(_stepped(), print, warmup=0), ArgumentError, "warmup must be"),
    (lambda: report_overflows(_stepped(), path="/"), ArgumentError, "cannot be written"),
    (lambda: report_overflows(WRONG), ArgumentTypeError, "optimizer must be"),
    (lambda: report_overflows(amp.GradScaler("cpu")), ArgumentError, "model is None"),
    (
        lambda: [report_overflows(one) for one in [_stepped()] for _ in range(2)],
        UsageError,
        "reports on this optimizer already",
    ),
    (lambda: UnderflowMeter(WRONG), ArgumentTypeError, "optimizer must be"),
    (lambda: UnderflowMeter(_stepped(), every=0), ArgumentError, "every must be"),
    (lambda: StepMetrics(None).record(loss=torch.ones(2)), ArgumentError, "loss must be a number "),
    (lambda: StepMetrics(None).record(loss=torch.ones(2)), ArgumentError, "got shape (2,); pass its mean"),
    (
        lambda: StepMetrics(None).record(loss="1"),  # type: ignore[arg-type]
        ArgumentError,
        "loss must be a number or a tensor of one element, got str",
    ),
    (lambda: StepMetrics(_stepped()).record(grad_norm=1.0), ArgumentError, "grad_norm is recorded already"),
    (
        lambda: StepMetrics(WRONG),
        ArgumentTypeError,
        "optimizer must be one of megascale's, or None, got SGD",
    ),
]
CALLS = [Refusal(f"{index}: {words}", call, error, words) for index, (call, error, words) in enumerate(MADE)]

ARGUMENTS = [
    *(*SCALERS, *STATES, *CONFIGS, *BUILT, *LIONS, *WRAPPED, *SYNCS, *DIVISORS, *ZERO1, *CHAINS, *CASTS, *CALLS),
    _sparse(),
    *_schedules(),
]
