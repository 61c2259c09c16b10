"""MegascaleTrainer and adopt(): the optimizer that TrainingArguments name, in 16 bits, with a real Trainer."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig, build_optimizer
from megascale.errors import ArgumentError, ArgumentTypeError, UsageError
from megascale.lion import Lion
from tests.pool import RankPool
from tests.training import bits_equal, same_bits, snapshot

transformers = pytest.importorskip("transformers", reason="tests of the Trainer need transformers and accelerate")
pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

from torch.distributed.fsdp import MixedPrecisionPolicy  # noqa: E402
from transformers import LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

from megascale.amp import GradScaler  # noqa: E402
from megascale.integrations.accelerate import Accelerator  # noqa: E402
from megascale.integrations.accelerate import adopt as adopt_accelerator  # noqa: E402
from megascale.integrations.accelerate_checks import check_precision  # noqa: E402
from megascale.integrations.transformers import MegascaleTrainer, adopt  # noqa: E402
from tests.integrations.accelerate_cases import reset  # noqa: E402
from tests.integrations.hf_cases import (  # noqa: E402
    HalfTrainer,
    Overflowing,
    Samples,
    arguments,
    fsdp2_on_cpu,
    llama,
    logged,
    optimizer_of,
    state_of,
)
from tests.integrations.hf_ranks import (  # noqa: E402
    WORLDS,
    assert_others_take_it_up,
    assert_resumed,
    reduce_dtype_on_rank,
    resume_on_rank,
    train_on_rank,
)

RATE, DECAY, BETAS, EPS = 1e-3, 0.1, (0.8, 0.95), 1e-6
FP16 = {"initial_loss_scale": 2.0**12, "loss_scale_window": 2, "hysteresis": 1}
CODES = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate's state is shared by a whole process."""
    reset()
    yield
    reset()


class PlainTrainer(Overflowing, Trainer):
    """A Trainer of transformers' alone, which overflows where it is told to."""


def _made(folder: Path, kind: Any = HalfTrainer, dtype: torch.dtype = torch.float16, **options: Any) -> Any:
    megascale = {"megascale": options.pop("megascale", FP16)} if issubclass(kind, MegascaleTrainer) else {}
    model = options.pop("model", None) or llama(dtype)
    given = {"weight_decay": DECAY, "adam_beta1": BETAS[0], "adam_beta2": BETAS[1], "adam_epsilon": EPS} | options
    args = arguments(TrainingArguments, folder, max_grad_norm=0.5, **given)
    return kind(model=model, args=args, train_dataset=Samples(), **megascale)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Norms' weights are not decayed."""
    named = list(model.named_parameters())
    decayed = [param for name, param in named if "norm" not in name]
    exempt = [param for name, param in named if "norm" in name]
    return [{"params": decayed, "weight_decay": DECAY}, {"params": exempt, "weight_decay": 0.0}]


ADAMW: dict[str, Any] = {"lr": RATE, "betas": BETAS, "eps": EPS}
INNER: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw_torch": (partial(torch.optim.AdamW, **ADAMW), {}),
    "adamw_torch_fused": (partial(torch.optim.AdamW, **ADAMW, fused=True), {}),
    "adamw_8bit": (partial(torch.optim.AdamW, **ADAMW), CODES),
    "adamw_torch_8bit": (partial(torch.optim.AdamW, **ADAMW), CODES),
    "lion_32bit": (partial(Lion, lr=RATE, betas=BETAS), {}),
    "sgd": (partial(torch.optim.SGD, lr=RATE), {}),
    "rmsprop": (partial(torch.optim.RMSprop, lr=RATE), {}),
    "adagrad": (partial(torch.optim.Adagrad, lr=RATE), {}),
    "adafactor": (partial(transformers.Adafactor, lr=RATE, scale_parameter=False, relative_step=False), {}),
}


@pytest.mark.parametrize("optim", INNER)
def test_the_optimizer_that_the_arguments_name(optim: str, tmp_path: Path) -> None:
    """optim, rates, betas, weight decay groups, clipping, schedule and skips: the bits of one built by hand."""
    trainer = _made(tmp_path, optim=optim)
    trainer.bad = (2,)
    trainer.train()
    reset()
    model = llama(torch.float16)
    make, moments = INNER[optim]
    config = OptimizerConfig(fp16=True, **moments)
    scaler = DynamicGradScaler(2.0**12, growth_interval=2, hysteresis=1)
    optimizer = MixedPrecisionOptimizer(make(_groups(model)), config, scaler, named_parameters=model.named_parameters())
    args = arguments(TrainingArguments, tmp_path, max_grad_norm=0.5)
    expected = PlainTrainer(model=model, args=args, train_dataset=Samples(), optimizers=(optimizer, None))
    expected.bad = (2,)
    adopt_accelerator(expected.accelerator)
    expected.train()
    assert logged(trainer, "skipped_steps") == [0, 0, 1, 1, 1, 1]
    assert logged(trainer, "loss_scale") == [2.0**12, 2.0**13, 2.0**12, 2.0**12, 2.0**13, 2.0**13]
    assert logged(trainer, "learning_rate") == logged(expected, "learning_rate")
    assert logged(trainer, "grad_norm") == pytest.approx(logged(expected, "grad_norm"), rel=0, abs=0, nan_ok=True)
    assert same_bits(snapshot(optimizer_of(trainer), trainer.model), snapshot(optimizer, model))


@pytest.mark.parametrize("dtype", ["fp16", torch.float16])
def test_an_adopted_trainer_equals_the_mixin(dtype: Any, tmp_path: Path) -> None:
    """adopt() casts the model, and from then on the trainer is one of the mixin's, under its own name."""
    expected = _made(tmp_path)
    expected.train()
    reset()
    trainer: Any = _made(tmp_path, PlainTrainer, dtype=torch.float32)
    assert adopt(trainer, dtype=dtype, **FP16) is trainer
    assert MegascaleTrainer in type(trainer).__mro__
    assert type(trainer).__name__ == "PlainTrainer"
    trainer.train()
    assert logged(trainer, "loss") == logged(expected, "loss")
    assert same_bits(state_of(trainer), state_of(expected))
    with pytest.raises(UsageError, match="MegascaleTrainer already"):
        adopt(trainer)


def _with_optimizer(folder: Path, **options: Any) -> tuple[Any, MixedPrecisionOptimizer]:
    """Return a Trainer of transformers' alone that was given an optimizer of ours."""
    model = llama(torch.float16)
    inner = torch.optim.AdamW(model.named_parameters(), lr=RATE)
    optimizer = MixedPrecisionOptimizer(inner, None, DynamicGradScaler(2.0**10))
    args = arguments(TrainingArguments, folder, **options)
    return PlainTrainer(model=model, args=args, train_dataset=Samples(), optimizers=(optimizer, None)), optimizer


def test_an_optimizer_of_ours_that_was_passed_stays(tmp_path: Path) -> None:
    """Whoever built the optimizer gets it. Without adopt() the loss is not scaled: the first step refuses that."""
    with pytest.raises(UsageError, match="the loss was not scaled: neither"):
        _with_optimizer(tmp_path)[0].train()
    reset()
    trainer, optimizer = _with_optimizer(tmp_path)
    adopt(trainer).train()
    assert optimizer_of(trainer) is optimizer
    assert optimizer.num_landed_steps == 6


def test_codes_and_remainders_by_name(tmp_path: Path) -> None:
    """Names of dtypes, as a YAML file has them; TRL's default, autocast to bf16, beside bf16 weights."""
    options = {"dtype": "bf16", "exp_avg_dtype": "int8", "exp_avg_sq_dtype": "uint8", "store_param_remainders": True}
    trainer = _made(tmp_path, dtype=torch.float32, bf16=True, megascale=options)
    trainer.train()
    optimizer = optimizer_of(trainer)
    assert {param.dtype for param in trainer.model.parameters()} == {torch.bfloat16}
    for state in optimizer.state.values():
        assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.int8, torch.uint8)
    assert optimizer._config.store_param_remainders
    assert optimizer.grad_scaler is None
    assert "loss_scale" not in trainer.state.log_history[0]


def test_autocast_over_fp32_weights_takes_our_scaler(tmp_path: Path) -> None:
    """fp16=True: torch's optimizer stays, and the scale follows the same options; also on a CPU."""
    trainer = _made(
        tmp_path, dtype=torch.float32, fp16=True, megascale={"initial_loss_scale": 2.0**10, "hysteresis": 2}
    )
    trainer.bad = (1, 3)
    trainer.train()
    assert isinstance(trainer.accelerator.scaler, GradScaler)
    assert isinstance(trainer.optimizer.optimizer, torch.optim.AdamW)
    assert logged(trainer, "loss_scale") == [2.0**10, 2.0**10, 2.0**10, 2.0**9, 2.0**9, 2.0**9]
    with pytest.raises(ArgumentError, match=r"exp_avg_dtype is for weights in 16 bits.*fp16=False and bf16=False"):
        _made(tmp_path, dtype=torch.float32, fp16=True, megascale={"exp_avg_dtype": "int8"})


def test_any_other_optimizer(tmp_path: Path) -> None:
    """A class is wrapped; a factory that builds one of ours is left alone."""
    args = arguments(TrainingArguments, tmp_path, max_steps=2)
    chosen = (torch.optim.NAdam, {"lr": RATE})
    trainer = HalfTrainer(
        model=llama(torch.float16), args=args, train_dataset=Samples(), optimizer_cls_and_kwargs=chosen
    )
    trainer.train()
    assert isinstance(optimizer_of(trainer)._inner, torch.optim.NAdam)
    reset()
    config = OptimizerConfig(fp16=True, lr=RATE, initial_loss_scale=2.0**9)
    factory: Any = (lambda: partial(build_optimizer, config), {})
    trainer = HalfTrainer(
        model=llama(torch.float16), args=args, train_dataset=Samples(), optimizer_cls_and_kwargs=factory
    )
    trainer.train()
    assert logged(trainer, "loss_scale") == [2.0**9, 2.0**9]


@pytest.mark.parametrize("optim", ["paged_adamw_8bit", "galore_adamw", "schedule_free_adamw", "adamw_torch_4bit"])
def test_an_optimizer_that_was_never_tried_is_refused(optim: str, tmp_path: Path) -> None:
    """It pages, projects or averages by itself, or needs another library: the error lists what works."""
    trainer = _made(tmp_path, optim=optim)
    with pytest.raises(ArgumentError, match=rf"optim='{optim}'.*adamw_8bit"):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"learning_rate": 1e-3}, ArgumentTypeError, "no option 'learning_rate'"),
        ({"lr": 1e-3}, ArgumentError, "lr comes from TrainingArguments: set learning_rate there"),
        ({"clip_grad": 1.0}, ArgumentError, "set max_grad_norm there"),
        ({"histeresis": 1}, ArgumentTypeError, "did you mean 'hysteresis'"),
        ({"dtype": "int8"}, ArgumentError, "dtype must be torch.float16 or torch.bfloat16, got 'int8'"),
        ({"exp_avg_dtype": "halves"}, ArgumentError, "exp_avg_dtype must be a dtype or the name of one"),
        ({"hysteresis": 0}, ArgumentError, "hysteresis"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], error: Any, message: str, tmp_path: Path) -> None:
    """An error names the option, and nothing has changed: neither weights nor accelerator."""
    with pytest.raises(error, match=message):
        _made(tmp_path, megascale=options)
    reset()
    trainer = _made(tmp_path, PlainTrainer)
    with pytest.raises(error, match=message):
        adopt(trainer, **options)
    assert type(trainer) is PlainTrainer
    assert not isinstance(trainer.accelerator, Accelerator)


def test_what_cannot_be_adopted(tmp_path: Path) -> None:
    """No Trainer, a torch optimizer that exists, and a name in the place of a model."""
    with pytest.raises(ArgumentTypeError, match=r"trainer must be a transformers\.Trainer, got Linear"):
        adopt(nn.Linear(1, 1))
    model = llama(torch.float16)
    plain = torch.optim.AdamW(model.parameters())
    args = arguments(TrainingArguments, tmp_path)
    trainer = PlainTrainer(model=model, args=args, train_dataset=Samples(), optimizers=(plain, None))
    for refused in (lambda: adopt(trainer), lambda: HalfTrainer(model=model, args=args, optimizers=(plain, None))):
        with pytest.raises(UsageError, match="has a AdamW already: leave optimizers= out"):
            refused()
    with pytest.raises(
        ArgumentTypeError, match="Behind derives from MegascaleTrainer behind its trainer: name it first"
    ):
        type("Behind", (PlainTrainer, MegascaleTrainer), {})
    with pytest.raises(ArgumentTypeError, match=r"is a mixin: write class MyTrainer\(MegascaleTrainer, Trainer\)"):
        MegascaleTrainer(model=model, args=args)
    with pytest.raises(ArgumentError, match="model is 'some/name': leave dtype out"):
        HalfTrainer(model="some/name", args=args, megascale={"dtype": "fp16"})


@pytest.mark.parametrize(
    ("weights", "autocast", "message"),
    [
        ("fp16", {"bf16": True}, "use mixed_precision='no'"),
        ("bf16", {"fp16": True}, "use mixed_precision='no'"),
        ("fp16", {"fp16": True}, r"\(fp16=True of TrainingArguments\) means autocast over fp32 weights"),
    ],
)
def test_autocast_over_16_bit_weights_is_refused(
    weights: str, autocast: dict[str, bool], message: str, tmp_path: Path
) -> None:
    """Before the first step: what was chosen for the weights would be lost in every forward, or trained without main
    params, in silence. ``fp16=True`` is what one writes for "train in fp16".
    """
    trainer = _made(tmp_path, dtype=torch.float32, megascale={"dtype": weights}, **autocast)
    with pytest.raises(UsageError, match=message):
        trainer.train()
    reset()
    trainer = _made(tmp_path, PlainTrainer, dtype=torch.float32, **autocast)
    with pytest.raises(UsageError, match=message):
        adopt(trainer, dtype=weights).train()


def test_a_policy_of_fsdp2_in_the_other_format_is_refused() -> None:
    """MixedPrecisionPolicy(param_dtype=torch.bfloat16) rounds fp16 weights in every forward, as autocast does."""
    with fsdp2_on_cpu(mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        accelerator = Accelerator(cpu=True)
        assert accelerator.is_fsdp2
        with pytest.raises(UsageError, match=r"param_dtype=torch.bfloat16.*leave param_dtype out"):
            accelerator.prepare_model(llama(torch.float16))
        check_precision(accelerator, "model", llama(torch.float32).parameters())
        check_precision(accelerator, "model", llama(torch.bfloat16).parameters())


@pytest.mark.parametrize("base", [torch.float16, torch.bfloat16])
def test_lora_over_a_frozen_base_in_16_bits(base: torch.dtype, tmp_path: Path) -> None:
    """Adapters in fp32 train; gradients that flow through a frozen fp16 base are scaled."""
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(llama(base), config)
    trainer = _made(tmp_path, model=model, megascale={} if base == torch.bfloat16 else FP16)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    trainer.train()
    optimizer = optimizer_of(trainer)
    assert len(list(optimizer.main_params())) == 8
    assert (optimizer.grad_scaler is not None) is (base == torch.float16)
    for name, param in model.named_parameters():
        assert bits_equal(param, before[name]) is ("lora" not in name)
        assert param.dtype == (torch.float32 if "lora" in name else base)


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    """load_best_model_at_end puts saved weights into the model, and they reach the main params."""
    args = arguments(
        TrainingArguments,
        tmp_path,
        learning_rate=0.5,  # the first checkpoint is the best
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
    )
    trainer = HalfTrainer(
        model=llama(torch.float16), args=args, train_dataset=Samples(), eval_dataset=Samples(), megascale=FP16
    )
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert best is not None
    assert best.endswith("checkpoint-2")
    saved = LlamaForCausalLM.from_pretrained(best, dtype=torch.float16).state_dict()
    for name, main in optimizer_of(trainer).main_params():
        assert bits_equal(trainer.model.state_dict()[name], saved[name])
        assert bits_equal(main.half(), saved[name])


LAYOUTS = ("ddp", "fsdp2", "fsdp2-full", "fsdp2-ram", "fsdp2-checkpointing")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_goes_on_after_a_restart(layout: str, ranks: RankPool, tmp_path: Path) -> None:
    """Two ranks, an overflow on one: saved, resumed on two with all bits, and on four with what was saved.

    FSDP2: sharded and whole state dicts, RAM-efficient loading, activation checkpointing by the plugin.
    """
    arguments_ = ("trainer", layout, str(tmp_path), torch.float16)
    whole = ranks.run(2, train_on_rank, *arguments_, timeout=120)
    assert whole[0]["scales"] == [2.0**12, 2.0**11, 2.0**11, 2.0**12, 2.0**12, 2.0**13]
    assert whole[0]["skips"] == [0, 1, 1, 1, 1, 1]
    wrapper = "DistributedDataParallel" if layout == "ddp" else "FSDPLlamaForCausalLM"
    assert [one["model"] for one in whole] == [wrapper] * 2
    assert_resumed(ranks.run(2, resume_on_rank, *arguments_, timeout=120), whole, to_the_end=True)
    assert_resumed(ranks.run(4, resume_on_rank, *arguments_, timeout=120), whole, to_the_end=False)


@pytest.mark.release
@pytest.mark.parametrize("worlds", WORLDS, ids=str)
def test_a_run_goes_on_in_new_processes_of_another_number(
    worlds: tuple[int, int], ranks: RankPool, tmp_path: Path
) -> None:
    """FSDP2 in fp16: main params, weights, scale, trackers and counts are what was saved, bit for bit."""
    assert_others_take_it_up(ranks, "trainer", worlds, str(tmp_path))


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_fsdp2_with_autocast_to_bf16(weights: torch.dtype, ranks: RankPool, tmp_path: Path) -> None:
    """bf16=True: Accelerate makes fp32 shards of the weights, which are main params, and computes in bf16."""
    arguments_ = ("trainer", "fsdp2", str(tmp_path), weights, {"megascale": {}, "bf16": True})
    whole = ranks.run(2, train_on_rank, *arguments_, timeout=120)
    assert whole[0]["dtypes"] == ["torch.float32"]
    assert all(value.dtype != torch.bfloat16 for value in whole[0]["at_end"].values())
    assert_resumed(ranks.run(2, resume_on_rank, *arguments_, timeout=120), whole, to_the_end=True)


def test_gradients_are_reduced_in_fp32(ranks: RankPool, tmp_path: Path) -> None:
    """TrainingArguments have no key for FSDP2's reduce dtype: the trainer sets it."""
    assert ranks.run(2, reduce_dtype_on_rank, str(tmp_path)) == ["torch.float32"] * 2
