"""What `repr()` says: of optimizers, scalers, checkpointers, estimates. It reads nothing from a device."""

import re

import torch
from torch import nn

from megascale import (
    ChainedOptimizer,
    DistributedOptimizer,
    DynamicGradScaler,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    amp,
)
from megascale.utils import wording
from tests.fake_device.device import FakeDevice
from tests.fake_device.process import OnDevice
from tests.pool import RankPool


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8)).half()
    model[1].bias.requires_grad_(False)
    return model


def test_an_optimizer_says_what_it_is() -> None:
    """What is wrapped, dtypes, scale, clip, backend, ranks and bytes; the options of its param groups as torch does."""
    inner = torch.optim.AdamW(_model().named_parameters(), lr=0.01)
    optimizer = MixedPrecisionOptimizer(inner, None, DynamicGradScaler(2.0**10), clip_grad=1.0)
    text = repr(optimizer)
    trained = 16 * 32 + 32 + 32 * 8
    assert text.splitlines()[:9] == [
        "MixedPrecisionOptimizer (",
        "wraps: AdamW",
        f"parameters: {trained} in float16, 1 tensor frozen",
        "main params: float32",
        f"backend: {optimizer._backend.name}, on cpu",
        f"held by this rank: {_held(trained * 4, optimizer)}",
        "loss scale: DynamicGradScaler(scale=1024.0, growth_tracker=0, hysteresis_tracker=2, min_scale=1.0, "
        "growth_factor=2.0, backoff_factor=0.5, growth_interval=1000, hysteresis=2)",
        "clipping: MixedPrecisionOptimizer clips gradients to norm 1.0",
        "ranks: 1 rank decides",
    ]
    options = [line for line in repr(inner).splitlines() if line.startswith("    ") and "param_names" not in line]
    ours = [line for line in text.splitlines() if line.startswith("    ")]
    assert ours == ["    params: 4 tensors", *options]
    assert "0.weight" not in text  # no parameter's name: a model has hundreds


def _held(mains: int, optimizer: MixedPrecisionOptimizer) -> str:
    state = sum(
        value.nbytes
        for own in optimizer._inner.state.values()
        for value in own.values()
        if isinstance(value, torch.Tensor)
    )
    return f"{wording.size(mains + state)} (main params {wording.size(mains)}, optimizer state {wording.size(state)})"


def test_what_lies_in_host_memory_is_said() -> None:
    """Of a part what part, of all that left for a while that it comes back."""
    config = OptimizerConfig(fp16=True, optimizer_cpu_offload=True, optimizer_offload_fraction=0.3)
    model = _model()
    inner = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    optimizer = MixedPrecisionOptimizer(inner, config, DynamicGradScaler())
    last = model.get_parameter("1.weight")
    held = last.numel() * 4 + sum(value.nbytes for value in inner.state[last].values())
    assert f" kB), {wording.size(held)} of it in host memory\n" in repr(optimizer)
    optimizer.offload()
    assert "kB), in host memory until reload()\n" in repr(optimizer)


def test_who_clips_to_what_in_a_chain() -> None:
    """The chain clips by the norm of all gradients, whichever of its optimizers is printed."""
    scaler = DynamicGradScaler()
    first, second = (
        MixedPrecisionOptimizer(torch.optim.SGD(one.named_parameters(), lr=0.1), None, scaler, clip_grad=1.0)
        for one in (_model(), nn.ParameterDict({"other": torch.ones(3).half()}))
    )
    chain = ChainedOptimizer([first, second])
    together = "the gradients of all its optimizers together"
    assert f"clipping: ChainedOptimizer clips {together} to norm 1.0\n" in repr(chain)
    chain.clip_grad = 0.0
    assert f"clipping: its ChainedOptimizer does not clip {together} by itself\n" in repr(first)


def _sharded() -> list[str]:
    texts = []
    for shard in ("elements", "parameters"):
        model = _model()
        inner = torch.optim.AdamW(model.named_parameters(), lr=0.01)
        texts.append(repr(DistributedOptimizer(inner, None, DynamicGradScaler(), modules=model, shard=shard)))
    return texts


def test_shards(ranks: RankPool) -> None:
    """How many, of what; and the bytes are those of this rank alone. No rank waits for another."""
    whole = 16 * 32 + 32 + 32 * 8
    for elements, parameters in ranks.run(2, _sharded):
        assert "main params: float32, with the state in 2 shards of elements" in elements
        assert "main params: float32, with the state in 2 shards of whole parameters" in parameters
        assert "ranks: 2 ranks decide, data parallel 2" in elements
        held = re.search(r"main params ([\d.]+) kB", elements)
        assert held is not None
        assert float(held[1]) < whole * 4 / 1000 * 0.75


def _without_waiting(device: FakeDevice) -> tuple[str, list[str], str]:
    model = _model().to("cuda")
    scaler = DynamicGradScaler(2.0**10)
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), None, scaler)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.01, device="cuda")
    torchs = amp.GradScaler("cuda")
    torchs.scale(torch.ones((), device="cuda"))
    with device.watch() as watched:
        text = repr(optimizer) + repr(torchs)
    return text, watched.syncs(), repr(scaler)


def test_a_device_is_not_waited_for(on_device: OnDevice) -> None:
    """A scale on a GPU: what the host last knew of it. A learning rate there likewise."""
    text, syncs, scaler = on_device(_without_waiting)
    assert syncs == []
    assert scaler.startswith(
        "DynamicGradScaler(scale=<on cuda:0, 1024.0 when it was made or loaded>, growth_tracker=<on "
    )
    assert scaler in text
    assert "    lr: <on cuda:0>" in text
    assert "GradScaler(scale=<on cuda:0, get_scale() reads it>, " in text
