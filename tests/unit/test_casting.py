"""cast_model: parameters in 16 bit, buffers and chosen modules as they were, ties kept."""

import copy
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megascale import (
    ConstantGradScaler,
    DistributedOptimizer,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    build_optimizer,
    cast_model,
)
from tests.training import grad_of

FP16, FP32 = torch.float16, torch.float32


class Rotary(nn.Module):
    """Angles of positions, as Llama computes them."""

    inv_freq: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1e4 ** (-torch.arange(0, dim, 2) / dim), persistent=False)

    def forward(self, position: int) -> Tensor:
        """Return the angles at ``position``."""
        return self.inv_freq.float() * position


class Block(nn.Module):
    """A norm, a layer and its residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add to ``x``."""
        return cast(Tensor, x + self.mlp(self.norm(x)))


class Gpt(nn.Module):
    """A small model with tied weights and rotary frequencies."""

    def __init__(self, width: int = 8, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.rotary = Rotary(128)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 16, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.embed(tokens)
        x = x + self.rotary(3)[: x.shape[-1]].cos().to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))


TOKENS = torch.arange(12).reshape(2, 6)


def _dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: param.dtype for name, param in model.named_parameters()}


def test_parameters_are_cast_and_buffers_are_not() -> None:
    """RoPE's angles at position 4,095 are what they were; after ``half()`` one is most of a radian off."""
    model = Gpt()
    angles = model.rotary(4095)
    assert cast_model(model, FP16) is model
    assert set(_dtypes(model).values()) == {FP16}
    assert torch.equal(model.rotary(4095), angles)
    assert (copy.deepcopy(model).half().rotary(4095) - angles).abs().max() > 0.5
    assert model(TOKENS).dtype == FP16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tied_parameters_stay_tied(dtype: torch.dtype) -> None:
    """One parameter in two modules remains one; so do two parameters that share their memory."""
    model = cast_model(Gpt(), dtype)
    assert model.head.weight is model.embed.weight
    assert model.head.weight.dtype == dtype
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = nn.Parameter(one.weight.data)
    cast_model(nn.Sequential(one, other), dtype)
    assert one.weight.dtype == dtype
    assert one.weight.data_ptr() == other.weight.data_ptr()


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("*norm", {"blocks.0.norm.weight", "blocks.1.norm.bias", "norm.weight"}),
        (nn.LayerNorm, {"blocks.0.norm.weight", "blocks.1.norm.bias", "norm.weight"}),
        (["head", nn.LayerNorm], {"head.weight", "norm.bias"}),
        (lambda model: model.blocks[1], {"blocks.1.norm.weight", "blocks.1.mlp.weight"}),
        (lambda model: (model.embed, "blocks.0"), {"embed.weight", "blocks.0.mlp.bias"}),
        ("blocks.*.bias", {"blocks.0.mlp.bias", "blocks.1.norm.bias"}),
    ],
    ids=["pattern", "type", "both", "module", "modules", "parameters"],
)
def test_chosen_modules_keep_their_precision(keep: Any, expected: set[str]) -> None:
    """By pattern, by type, by module: they and all that is in them; everything else is cast; training works."""
    model = Gpt(tied=False)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    chosen = keep(model) if callable(keep) and not isinstance(keep, type) else keep
    cast_model(model, FP16, keep=chosen)
    dtypes = _dtypes(model)
    assert {dtypes[name] for name in expected} == {FP32}
    assert FP16 in dtypes.values()
    assert all(torch.equal(param, before[name].to(dtypes[name])) for name, param in model.named_parameters())
    if keep == "blocks.*.bias":
        return  # torch takes no layer of two dtypes
    optimizer = MixedPrecisionOptimizer(
        torch.optim.AdamW(model.named_parameters(), lr=1e-2), grad_scaler=ConstantGradScaler(2.0**12)
    )
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = cross_entropy(model(TOKENS).float().flatten(0, 1), TOKENS.flatten())
        optimizer.scale_loss(loss).backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_kept_modules_compute_in_fp32() -> None:
    """Between cast modules their results are cast back; after the last one they stay fp32, as logits should."""
    model = Gpt(tied=False)
    cast_model(model, FP16, keep=[nn.LayerNorm, "head"])
    seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda module, args, output: seen.update({name: (args[0].dtype, output.dtype)})

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(note(name))
    logits = model(TOKENS)
    assert seen == {"blocks.0.mlp": (FP16, FP16), "blocks.1.mlp": (FP16, FP16), "head": (FP32, FP32)}
    assert logits.dtype == FP32


@pytest.mark.parametrize("keep", ["head", "head.weight"])
def test_a_tied_parameter_is_kept_where_one_of_its_modules_is(keep: str) -> None:
    """By either of its names. The head's weight is the embedding's, whose results are cast for the next layer."""
    model = cast_model(Gpt(), FP16, keep=keep)
    assert model.embed.weight is model.head.weight
    assert model.head.weight.dtype == FP32
    assert model.embed(TOKENS).dtype == FP16
    assert model(TOKENS).dtype == FP32


@pytest.mark.parametrize("keep", [(), "1"])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_batch_norm_stays_in_fp32(kind: Callable[[int], nn.Module], keep: Any) -> None:
    """Its statistics, and so its parameters; torch's kernels take 16-bit inputs beside them."""
    norm = kind(8)
    model = cast_model(nn.Sequential(nn.Linear(4, 8), norm, nn.Linear(8, 1)), FP16, keep)
    assert [param.dtype for param in model.parameters()] == [FP16, FP16, FP32, FP32, FP16, FP16]
    assert {buffer.dtype for buffer in norm.buffers()} == {FP32, torch.int64}
    if kind is nn.BatchNorm1d:
        model(torch.randn(6, 4).half()).float().sum().backward()
        assert {grad_of(param).dtype for param in norm.parameters()} == {FP32}


# Buffers that were cast


BUILDERS: dict[str, Callable[[nn.Module], Any]] = {
    "DistributedOptimizer": lambda model: DistributedOptimizer(
        torch.optim.AdamW(model.named_parameters(), lr=0.1), grad_scaler=ConstantGradScaler(1.0), modules=model
    ),
    "MixedPrecisionOptimizer": lambda model: MixedPrecisionOptimizer(
        torch.optim.AdamW(list(model.parameters())[-2:], lr=0.1), grad_scaler=ConstantGradScaler(1.0)
    ),
    "build_optimizer": lambda model: build_optimizer(OptimizerConfig(fp16=True, lr=0.1), model),
    "sharded build_optimizer": lambda model: build_optimizer(
        OptimizerConfig(fp16=True, lr=0.1, use_distributed_optimizer=True), model
    ),
}


@pytest.mark.default("sharded build_optimizer", "DistributedOptimizer")
@pytest.mark.parametrize("builder", BUILDERS)
def test_buffers_in_16_bit_are_warned_of(builder: str) -> None:
    """RoPE's frequencies, BatchNorm's statistics; once, at the caller's line; also where an optimizer is given no
    modules, and parameters of another module than the buffers'.
    """
    model = nn.ModuleDict({"gpt": Gpt(), "bn": nn.BatchNorm1d(4)}).half()
    with pytest.warns(UserWarning, match="cast_model") as caught:
        BUILDERS[builder](model)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    message = str(caught[0].message)
    assert all(name in message for name in ("'gpt.rotary.inv_freq'", "'bn.running_mean'", "'bn.running_var'"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BUILDERS[builder](cast_model(nn.ModuleDict({"gpt": Gpt(), "bn": nn.BatchNorm1d(4)}), FP16))


class Scaled(nn.Module):
    """Two residual branches with a factor of each, a parameter of the block's own, as BEiT and LayerScale have them."""

    def __init__(self, width: int = 8, *, casts: bool = False) -> None:
        super().__init__()
        self.casts = casts
        self.norm, self.first, self.second = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.gamma, self.beta = nn.Parameter(torch.full((width,), 0.3)), nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Add both branches to ``x``."""
        gamma, beta = (one.to(x.dtype) if self.casts else one for one in (self.gamma, self.beta))
        x = x + gamma * self.first(self.norm(x))
        return x + beta * self.second(self.norm(x))


class Positions(nn.Module):
    """A root that owns a parameter beside its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.arange(8) / 7)
        self.layers = nn.ModuleList([Scaled(), Scaled(casts=True)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = x + self.positions
        for layer in self.layers:
            x = layer(x)
        return cast(Tensor, self.head(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "keep",
    [["*gamma"], ["*gamma", "*beta"], ["positions"], ["positions", "*gamma", "*beta"], ["positions", nn.LayerNorm]],
    ids=str,
)
def test_parameters_of_modules_with_children_are_kept(keep: list[Any], dtype: torch.dtype) -> None:
    """The model runs, forward and backward, computes what fp32 does, and kept parameters are those of before.

    It broke where a block owned what was kept: its inputs were cast to fp32, and its 16-bit layers took them.
    """
    model = Positions()
    x = torch.linspace(-1, 1, 16).reshape(2, 8)
    expected = model(x).detach()
    kept = {name: param.detach().clone() for name, param in model.named_parameters() if name in _named(model, keep)}
    cast_model(model, dtype, keep=keep)
    assert {name for name, param in model.named_parameters() if param.dtype == FP32} == kept.keys()
    assert all(torch.equal(param, kept[name]) for name, param in model.named_parameters() if name in kept)
    seen: set[torch.dtype] = set()
    model.layers[1].register_forward_pre_hook(lambda _, args: seen.add(args[0].dtype))
    cast(Scaled, model.layers[0]).first.register_forward_hook(lambda _, args, output: seen.add(output.dtype))
    given = model(x.to(dtype))
    assert dtype in seen
    torch.testing.assert_close(given.float(), expected, rtol=0.02, atol=0.02)
    given.float().sum().backward()
    assert all(param.grad is not None and param.grad.dtype == param.dtype for param in model.parameters())


def _named(model: nn.Module, keep: list[Any]) -> set[str]:
    """Return the names of the parameters that ``keep`` names."""
    norms = {f"layers.{index}.norm.{leaf}" for index in range(2) for leaf in ("weight", "bias")}
    own = {f"layers.{index}.{leaf}" for index in range(2) for leaf in ("gamma", "beta") if f"*{leaf}" in keep}
    return own | ({"positions"} if "positions" in keep else set()) | (norms if nn.LayerNorm in keep else set())
