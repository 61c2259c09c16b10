"""Muon on the kernels' recipe: torch's bits, and a step that is skipped changes none."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megascale import ChainedOptimizer, ConstantGradScaler, MixedPrecisionOptimizer, OptimizerConfig, build_optimizer
from megascale.errors import ArgumentError, MainParamOverflowError
from megascale.kernels.newton_schulz import POLAR_EXPRESS, QUINTIC, iteration_dtype, iterations, orthogonalize

SCALE = 64.0
AS_TORCH = OptimizerConfig(fp16=True, muon_ns_dtype=torch.bfloat16)
MATRICES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4)


def _params(shapes: list[tuple[int, int]], dtype: torch.dtype = torch.float16) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def _grads(params: list[nn.Parameter], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(param.shape, generator=generator).half() for param in params]


def _wrap(params: list[nn.Parameter], config: OptimizerConfig = AS_TORCH, **options: Any) -> MixedPrecisionOptimizer:
    inner = torch.optim.Muon([(f"w{index}", param) for index, param in enumerate(params)], **options)
    return MixedPrecisionOptimizer(inner, config, ConstantGradScaler(SCALE), grads_are_scaled=True)


def _step(optimizer: MixedPrecisionOptimizer, params: list[nn.Parameter], seed: int) -> None:
    for param, grad in zip(params, _grads(params, seed), strict=True):
        param.grad = grad.to(param.dtype)
    optimizer.step()


@pytest.mark.native
@settings(max_examples=12, deadline=None)
@given(
    shapes=MATRICES,
    nesterov=st.booleans(),
    momentum=st.sampled_from([0.0, 0.3, 0.95]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    adjust_lr_fn=st.sampled_from([None, "original", "match_rms_adamw"]),
    ns_steps=st.integers(0, 6),
    lr=st.sampled_from([0.05, torch.tensor(0.05)]),
    overflows=st.sets(st.integers(0, 4)),
    backend=st.sampled_from(["reference", "native", "torch"]),
)
def test_bits_of_torch(
    shapes: list[tuple[int, int]], overflows: set[int], backend: str, **options: Any
) -> None:  # fmt: skip
    """torch.optim.Muon on fp32 copies, with unscaled gradients, has the same main params and momentum, bit for bit."""
    params = _params(shapes)
    config = OptimizerConfig(fp16=True, muon_ns_dtype=torch.bfloat16, backend=backend)
    optimizer = _wrap(params, config, **options)
    expected = [nn.Parameter(param.detach().float()) for param in params]
    plain = torch.optim.Muon(expected, **options)
    for seed in range(5):
        for param, model_grad, main in zip(params, _grads(params, seed), expected, strict=True):
            param.grad, main.grad = model_grad, model_grad.float() / SCALE
        if seed in overflows:
            params[-1].grad.view(-1)[-1] = torch.inf  # type: ignore[union-attr]
        else:
            plain.step()
        assert bool(optimizer.step().success) == (seed not in overflows)
    for (_, found), param, wanted in zip(optimizer.main_params(), params, expected, strict=True):
        assert torch.equal(found, wanted.detach())
        assert torch.equal(param, wanted.half())
        if len(overflows) < 5:
            assert torch.equal(optimizer.state[param]["momentum_buffer"], plain.state[wanted]["momentum_buffer"])


@pytest.mark.parametrize("others", [0, 1], ids=["all are copies", "one is its own main param"])
def test_an_update_that_outgrows_fp16_is_named(others: int) -> None:
    """Alone and beside an fp32 parameter, which outgrows nothing: the error names the fp16 one; main params stay."""
    params = [*_params([(3, 4)] * others, torch.float32), *_params([(4, 3)])]
    optimizer = _wrap(params, lr=1e6)
    with pytest.raises(MainParamOverflowError, match=f"'w{others}'"):
        _step(optimizer, params, 0)
    mains = [main for _, main in optimizer.main_params()]
    assert all(main.isfinite().all() for main in mains)
    assert mains[-1].abs().max() > torch.finfo(torch.float16).max


@pytest.mark.parametrize("coefficients", [[QUINTIC], POLAR_EXPRESS], ids=["quintic", "polar express"])
def test_singular_values_end_near_one(coefficients: list[tuple[float, float, float]]) -> None:
    """Of a matrix whose singular values span two powers of ten. Polar Express ends within 0.05, the quintic in 0.35."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(32, 32, generator=generator)).Q for _ in range(2))
    matrix = (left * torch.logspace(-2, 0, 32)) @ right.T
    found = orthogonalize(matrix, iterations(coefficients, 8), 1e-7)
    apart = (torch.linalg.svdvals(found) - 1).abs().max()
    assert apart < (0.05 if len(coefficients) > 1 else 0.35)
    tall = orthogonalize(matrix[:, :5], iterations(coefficients, 8), 1e-7)
    wide = orthogonalize(matrix[:, :5].T, iterations(coefficients, 8), 1e-7)
    assert torch.equal(tall, wide.T)


@pytest.mark.parametrize(("avx512", "amx"), [(False, False), (False, True), (True, False)])
def test_iterations_are_in_bf16_where_that_is_fast(avx512: bool, amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every accelerator, and on a CPU with instructions for it; another CPU would multiply bf16 by software."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": avx512, "amx_tile": amx})
    assert iteration_dtype(torch.device("cpu")) == (torch.bfloat16 if avx512 or amx else torch.float32)
    assert iteration_dtype(torch.device("cuda")) == torch.bfloat16


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "coefficients": ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients of a param group must be three numbers"),
    "no coefficients": ({"ns_coefficients": []}, "ns_coefficients of a param group must be three numbers"),
    "one number": ({"ns_coefficients": 3.0}, "ns_coefficients of a param group must be three numbers"),
    "four numbers": ({"ns_coefficients": [(1.0, 2.0, 3.0, 4.0)]}, "ns_coefficients of a param group must be three"),
    "a row of words": ({"ns_coefficients": [QUINTIC, "abc"]}, "ns_coefficients of a param group must be three"),
    "a row that is none": ({"ns_coefficients": [QUINTIC, 3.0]}, "ns_coefficients of a param group must be three"),
    "iterations": ({"ns_steps": 100}, "ns_steps of a param group"),
    "adjustment": ({"adjust_lr_fn": "spectral"}, "adjust_lr_fn of a param group"),
    "momentum": ({"momentum": "much"}, "momentum of a param group must be a number"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_options_are_named_before_anything_changes(kind: str) -> None:
    """An option set to nonsense: an error that names it, and no weight or momentum has changed."""
    options, message = BAD[kind]
    params = _params([(3, 3)])
    optimizer = _wrap(params, lr=0.1)
    _step(optimizer, params, 0)
    before = params[0].detach().clone()
    optimizer.param_groups[0].update(options)
    with pytest.raises(ArgumentError, match=message):
        _step(optimizer, params, 1)
    assert torch.equal(params[0], before)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.hidden = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.gate = nn.Linear(6, 4, bias=False)
        self.lm_head = nn.Linear(4, 7)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits."""
        found: Tensor = self.lm_head(self.gate(self.norm(self.hidden(self.tokens(ids)))))
        return found


@pytest.mark.parametrize("attention", ["multihead_attn", "multi_head_attention", "selfMultiHeadAttn", "attn"])
@pytest.mark.parametrize("head", ["head", "lm_head", "heads", "mlp_head"])
def test_attention_of_several_heads_is_hidden(attention: str, head: str) -> None:
    """Torch's own decoder layers call theirs ``multihead_attn``: AdamW got its matrices, as those of a model's head."""
    module = nn.ModuleDict({attention: nn.MultiheadAttention(8, 2), head: nn.Linear(8, 8)})
    config = OptimizerConfig(optimizer="muon", lr=1e-2)
    chain = build_optimizer(config, module)
    assert isinstance(chain, ChainedOptimizer)
    names = {type(one._inner).__name__: one._param_names() for one in chain._optimizers}
    assert names["Muon"] == [f"{attention}.in_proj_weight", f"{attention}.out_proj.weight"]
    assert f"{head}.weight" in names["AdamW" if "AdamW" in names else "Adam"]


def test_config_gives_hidden_matrices_to_muon() -> None:
    """Embeddings, heads, norms and biases go to AdamW; one scaler, one decision, one norm over all."""
    config = OptimizerConfig(
        fp16=True, lr=0.02, optimizer="muon", muon_adam_lr=1e-3, muon_coefficient_type="polar_express", loss_scale=256.0
    )
    model = _Model().half()
    optimizer = build_optimizer(config, model, overrides={"gate.*": {"optimizer": "adam", "lr_mult": 0.5}})
    assert isinstance(optimizer, ChainedOptimizer)
    inner = {type(one._inner).__name__: one for one in optimizer._optimizers}
    assert inner.keys() == {"Muon", "AdamW"}
    assert [name for name, _ in inner["Muon"].main_params()] == ["hidden.weight"]
    assert {group["lr"] for group in inner["AdamW"].param_groups} == {1e-3, 5e-4}
    assert inner["Muon"].param_groups[0]["lr"] == 0.02
    assert inner["Muon"].param_groups[0]["ns_coefficients"] == POLAR_EXPRESS
    assert inner["Muon"].grad_scaler is inner["AdamW"].grad_scaler
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for factor, lands in ((torch.inf, False), (1.0, True)):
        optimizer.zero_grad()
        (optimizer.scale_loss(model(torch.arange(7)).float().logsumexp(-1).mean()) * factor).backward()
        result = optimizer.step()
        assert bool(result.success) == lands
        assert [torch.equal(param, before[name]) for name, param in model.named_parameters()] == [not lands] * 8


@pytest.mark.parametrize(
    ("fields", "overrides", "message"),
    [
        ({"optimizer": "muon"}, {"*": {"optimizer": "adam"}}, "modules have no hidden matrix"),
        ({"optimizer": "muon"}, {"norm.*": {"optimizer": "muon"}}, "which takes matrices"),
        ({"optimizer": "adam"}, {"norm.*": {"optimizer": "muon"}}, "needs config.optimizer='muon'"),
        ({"optimizer": "muon"}, {"norm.*": {"optimizer": "sgd"}}, "must be one of"),
    ],
)
def test_muon_for_what_it_cannot_update(fields: dict[str, Any], overrides: Any, message: str) -> None:
    """Named before anything is built."""
    with pytest.raises(ArgumentError, match=message):
        build_optimizer(OptimizerConfig(lr=0.1, **fields), _Model(), overrides=overrides)
