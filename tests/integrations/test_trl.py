"""TRL's trainers with MegascaleTrainer before them: SFT, DPO, GRPO and RLOO, in one process and on ranks."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megascale.errors import UsageError
from tests.pool import RankPool
from tests.training import bits_equal, same_bits

pytest.importorskip("trl", reason="needs trl: .ci/install_integrations")


from megascale.integrations.transformers import adopt
from tests.integrations.accelerate_cases import reset
from tests.integrations.hf_cases import llama, logged, optimizer_of, state_of
from tests.integrations.hf_ranks import (
    OPTIONS,
    WORLDS,
    assert_others_take_it_up,
    assert_resumed,
    build,
    resume_on_rank,
    train_on_rank,
    unmixed,
)

KINDS = ("sft", "dpo", "grpo", "rloo")


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate's state is shared by a whole process."""
    reset()
    yield
    reset()


@pytest.mark.parametrize("kind", KINDS)
def test_every_trainer_of_trl_trains_in_fp16(kind: str, tmp_path: Path) -> None:
    """The mixin, and adopt() of a trainer that exists: the same bits; an overflow is skipped and logged."""
    states = []
    for way in ("mixin", "adopt"):
        trainer = build(kind, tmp_path, torch.float16) if way == "mixin" else unmixed(kind, tmp_path, torch.float16)
        if way == "adopt":
            adopt(trainer, **OPTIONS)
        trainer.bad = (1,)
        trainer.train()
        assert logged(trainer, "skipped_steps") == [0, 1, 1, 1, 1, 1]
        assert logged(trainer, "loss_scale") == [2.0**12, 2.0**11, 2.0**11, 2.0**12, 2.0**12, 2.0**13]
        assert {param.dtype for param in trainer.model.parameters()} == {torch.float16}
        start = dict(llama(torch.float16).named_parameters())
        assert not all(bits_equal(param, start[name]) for name, param in trainer.model.named_parameters())
        states.append(state_of(trainer))
        reset()
    assert same_bits(*states)


@pytest.mark.parametrize("kind", KINDS)
def test_trls_default_of_bf16_is_refused_beside_fp16_weights(kind: str, tmp_path: Path) -> None:
    """TRL's configs set bf16=True unless told otherwise: fp16 weights would be rounded to bf16 in every forward."""
    trainer = build(kind, tmp_path, torch.float16, bf16=None)
    with pytest.raises(UsageError, match=r"computes in torch\.bfloat16.*bf16=False and fp16=False"):
        trainer.train()


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_bf16_weights_with_trls_defaults(kind: str, tmp_path: Path) -> None:
    """Nothing but the mixin: fp32 main params under bf16 weights, no loss scale."""
    trainer = build(kind, tmp_path, torch.bfloat16, {}, bf16=None)
    assert trainer.args.bf16
    trainer.train()
    assert optimizer_of(trainer).grad_scaler is None
    assert {main.dtype for _, main in optimizer_of(trainer).main_params()} == {torch.float32}


@pytest.mark.parametrize(("kind", "layout"), [("sft", "fsdp2"), ("grpo", "ddp"), ("grpo", "fsdp2"), ("dpo", "ddp")])
def test_a_run_goes_on_after_a_restart(kind: str, layout: str, ranks: RankPool, tmp_path: Path) -> None:
    """Two ranks: resumed on two with all bits, and on four with the main params, scale and trackers that were saved."""
    arguments = (kind, layout, str(tmp_path), torch.float16)
    whole = ranks.run(2, train_on_rank, *arguments, timeout=120)
    assert whole[0]["skips"] == [0, 1, 1, 1, 1, 1]
    assert_resumed(ranks.run(2, resume_on_rank, *arguments, timeout=120), whole, to_the_end=True)
    assert_resumed(ranks.run(4, resume_on_rank, *arguments, timeout=120), whole, to_the_end=False)


@pytest.mark.release
@pytest.mark.parametrize("worlds", WORLDS, ids=str)
@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_a_run_goes_on_in_new_processes_of_another_number(
    kind: str, worlds: tuple[int, int], ranks: RankPool, tmp_path: Path
) -> None:
    """FSDP2 in fp16: main params, weights, scale, trackers and counts are what was saved, bit for bit."""
    assert_others_take_it_up(ranks, kind, worlds, str(tmp_path))


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_adapters_and_8_bit_moments(kind: str, tmp_path: Path) -> None:
    """LoRA's adapters in fp16 over a frozen fp16 base, whose moments are 8-bit codes: they alone move."""
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    options = OPTIONS | {"exp_avg_dtype": "int8", "exp_avg_sq_dtype": "uint8"}
    trainer = build(kind, tmp_path, torch.float16, options, peft_config=config)
    before = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
    trainer.train()
    optimizer = optimizer_of(trainer)
    assert optimizer.grad_scaler is not None
    assert all("lora" in name for name, _ in optimizer.main_params())
    for state in optimizer.state.values():
        assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.int8, torch.uint8)
    moved = {name for name, param in trainer.model.named_parameters() if not bits_equal(param, before[name])}
    assert moved
    assert all("lora" in name for name in moved)
