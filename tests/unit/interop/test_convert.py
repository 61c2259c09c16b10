"""convert: main params and moments under their names, or a refusal that says why.

Layouts are written by hand here; tests/integrations converts files that the peers wrote.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megascale import DynamicGradScaler, MixedPrecisionOptimizer
from megascale.checkpoint import save
from megascale.errors import InteropError
from megascale.interop import convert
from megascale.interop.megatron import optimizer_state_dict
from tests.training import Tiny, bits_equal, grad_of
from tests.unit.interop.checkpoints import MEGATRON_SCALER, SCALER, Halves, torch_checkpoint, trained

# What comes out


def test_the_written_file_is_portable_and_loads(tmp_path: Path) -> None:
    """A weights_only load reads it, an fp16 optimizer takes it, strictly; a view is saved without what it views."""
    big = torch.zeros(300_000)
    checkpoint = torch_checkpoint()
    checkpoint["model"]["head.weight"] = big[:4].reshape(1, 4).copy_(checkpoint["model"]["head.weight"])
    torch.save(checkpoint, tmp_path / "last.pt")
    converted = convert(tmp_path / "last.pt", tmp_path / "ours.pt")
    assert (tmp_path / "ours.pt").stat().st_size < 100_000
    loaded = torch.load(tmp_path / "ours.pt", weights_only=True)
    model = Tiny().half()
    inner = torch.optim.AdamW(model.named_parameters(), lr=1.0)
    optimizer = MixedPrecisionOptimizer(inner, None, DynamicGradScaler(1.0, 1.0, 2.0, 0.5, 10, 1))
    optimizer.load_state_dict(loaded)
    assert float(optimizer.get_loss_scale()) == 512.0
    assert inner.param_groups[0]["lr"] == 0.01
    for (name, main_param), half in zip(optimizer.main_params(), model.parameters(), strict=True):
        assert bits_equal(main_param, checkpoint["model"][name])
        assert bits_equal(half, main_param.half())
    assert "7 weights as main params" in converted.report()


def test_a_source_is_never_changed_nor_aliased(tmp_path: Path) -> None:
    """A dict that is converted in memory shares no tensor with the result."""
    checkpoint = torch_checkpoint()
    before = {name: value.clone() for name, value in checkpoint["model"].items()}
    state = convert(checkpoint, None).state_dict
    for main_param in state["main_params"].values():
        main_param.zero_()
    for one in state["optimizer"]["state"].values():
        one["exp_avg"].zero_()
    assert all(bits_equal(value, before[name]) for name, value in checkpoint["model"].items())
    assert all(one["exp_avg"].any() for one in checkpoint["optimizer"]["state"].values())


class Counting(torch.optim.Adafactor):
    """Saves a count of its own."""

    count = 3

    def state_dict(self) -> dict[str, Any]:
        """Add the count."""
        return super().state_dict() | {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it."""
        self.count = state_dict["count"]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


def test_state_of_other_shapes_and_entries_of_its_own() -> None:
    """Adafactor's rows and columns have no parameter's shape; what else its state_dict() has goes on, too."""
    model, half = nn.Linear(8, 4), nn.Linear(8, 4).half()
    inner = Counting(model.parameters())
    model(torch.ones(3, 8)).sum().backward()
    inner.step()
    inner.count = 5
    converted = convert({"model": model.state_dict(), "optimizer": inner.state_dict()}, None)
    assert "count: of the optimizer's own state_dict()" in converted.report()
    scaler = DynamicGradScaler()
    optimizer = MixedPrecisionOptimizer(Counting(half.named_parameters()), None, scaler)
    optimizer.load_state_dict(dict(converted.state_dict) | {"grad_scaler": scaler.state_dict()})
    assert optimizer._inner.count == 5  # type: ignore[attr-defined]
    for key, value in inner.state[model.weight].items():
        assert bits_equal(optimizer.state[half.weight][key], value)


def test_a_folder_of_our_own_is_named(tmp_path: Path) -> None:
    """A checkpoint's folder, and the one around it."""
    folder = save(tmp_path, 1, nn.Linear(1, 1))
    for given in (folder, tmp_path):
        with pytest.raises(InteropError, match=r"is megascale's own; load it with megascale\.checkpoint\.load\(\)"):
            convert(given, None)


def test_a_scaler_alone_converts(tmp_path: Path) -> None:
    """A scaler's file becomes a state dict that strict=False loads for its scaler."""
    torch.save(SCALER, tmp_path / "scaler.pt")
    assert "strict=False" in convert(tmp_path / "scaler.pt", tmp_path / "ours.pt").report()
    _, inner = trained(torch.float16)
    optimizer = MixedPrecisionOptimizer(inner, None, DynamicGradScaler(1.0, 1.0, 2.0, 0.5, 10, 1))
    optimizer.load_state_dict(torch.load(tmp_path / "ours.pt", weights_only=True), strict=False)
    assert float(optimizer.get_loss_scale()) == 512.0


# Torch's checkpoints


def test_buffers_and_tied_weights_are_no_parameters() -> None:
    """Running statistics, integer buffers and the second name of a tied weight do not shift the names."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].register_parameter("weight", model.get_parameter("0.weight"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    state = convert({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, None).state_dict
    assert list(state["main_params"]) == [name for name, _ in model.named_parameters()]
    assert bits_equal(state["optimizer"]["state"]["2.bias"]["momentum_buffer"], grad_of(model.get_parameter("2.bias")))


def test_recorded_names_are_taken() -> None:
    """An optimizer built from named parameters records them: any groups, in any order, without a model."""
    model, _ = trained()
    named = list(model.named_parameters())
    groups: list[dict[str, Any]] = [{"params": named[3:]}, {"params": named[:3], "lr": 1.0}]
    optimizer = torch.optim.AdamW(groups)
    state = convert(optimizer.state_dict(), None).state_dict
    assert [group["params"] for group in state["optimizer"]["param_groups"]] == [
        [name for name, _ in named[3:]],
        [name for name, _ in named[:3]],
    ]
    assert state["main_params"] == {}


def test_names_are_not_guessed() -> None:
    """Several groups, frozen parameters, no model, wrong order: refused, until names are given."""
    model, _ = trained()
    names = [name for name, _ in model.named_parameters()]
    checkpoint = torch_checkpoint()
    two = torch.optim.AdamW([{"params": list(model.parameters())[:3]}, {"params": list(model.parameters())[3:]}])
    for changed, message in (
        ({"optimizer": two.state_dict()}, "2 param groups"),
        ({"model": checkpoint["model"] | {"extra": torch.ones(2)}}, "8 weights, the optimizer 7"),
        ({"model": None}, "no model in the order"),
        ({"model": dict(reversed(checkpoint["model"].items()))}, "has shape"),
    ):
        with pytest.raises(InteropError, match=message):
            convert(checkpoint | changed, None)
    assert convert(checkpoint | {"optimizer": two.state_dict()}, None, names=names).state_dict["main_params"]
    nested = [names[:3], names[3:]]
    grouped = convert(checkpoint | {"optimizer": two.state_dict()}, None, names=nested).state_dict
    assert [group["params"] for group in grouped["optimizer"]["param_groups"]] == nested
    for bad, message in (
        (names[:-1], "6 parameter names"),
        ([*names[:-1], names[0]], "given twice"),
        ([names[:2], names[2:]], r"groups of \[2, 5\]"),
        ([*names[:-1], "nowhere"], "no parameter 'nowhere'"),
    ):
        with pytest.raises(InteropError, match=message):
            convert(checkpoint | {"optimizer": two.state_dict()}, None, names=bad)
    with pytest.raises(InteropError, match="has shape"):
        convert(checkpoint, None, names=names[::-1])


def test_what_torch_cannot_continue_is_refused() -> None:
    """No bias correction, objects in the state, several optimizers: refused by name; a step in the group is moved."""
    checkpoint = torch_checkpoint()
    groups = checkpoint["optimizer"]["param_groups"]
    for changed, message in (
        ({"param_groups": [groups[0] | {"bias_correction": False}]}, "bias_correction"),
        ({"param_groups": [groups[0] | {"schedule": object()}]}, "schedule"),
        ({"state": {0: {"exp_avg": object()}}}, "exp_avg"),
        ({"state": {0: None}}, "cannot be read"),
    ):
        with pytest.raises(InteropError, match=message):
            convert(checkpoint | {"optimizer": checkpoint["optimizer"] | changed}, None)
    with pytest.raises(InteropError, match="2 optimizers, optimizer, other"):
        convert(checkpoint | {"other": checkpoint["optimizer"]}, None)
    moved = {
        "state": {key: {"exp_avg": one["exp_avg"]} for key, one in checkpoint["optimizer"]["state"].items()},
        "param_groups": [groups[0] | {"step": 41}],
    }
    state = convert(checkpoint | {"optimizer": moved}, None).state_dict["optimizer"]
    assert all(float(one["step"]) == 41 for one in state["state"].values())
    assert "step" not in state["param_groups"][0]


# Megatron-Core


def test_megatron_names_are_found_by_rounding() -> None:
    """Each main param belongs to the weight that it rounds to, whatever the groups and their order."""
    halves = Halves()
    model = dict(reversed(halves.model.items()))
    state = convert({"model": model, "optimizer": halves.megatron()}, None).state_dict
    halves.assert_converted(state)
    assert state["optimizer"]["param_groups"][0]["wd_mult"] == 1.0


def test_megatron_names_that_rounding_cannot_tell_are_refused() -> None:
    """Weights alike in every bit in two groups, or a main param that rounds to none: refused, until names are given."""
    halves = Halves()
    for name in ("norm.bias", "norm.weight"):
        halves.masters[name], halves.model[name] = torch.zeros(6), torch.zeros(6).half()
    groups = [["norm.bias"], [name for name in halves.names if name != "norm.bias"]]
    split = {"model": halves.model, "optimizer": halves.megatron(groups)}
    with pytest.raises(InteropError, match=r"norm\.weight, norm\.bias are alike"):
        convert(split, None)
    halves.groups = groups
    halves.assert_converted(convert(split, None, names=groups).state_dict)
    stale = {"model": halves.model | {"head.weight": torch.ones(1, 4).half()}, "optimizer": halves.megatron()}
    for names, message in ((None, "rounds to none"), (groups, "not their main params, rounded")):
        with pytest.raises(InteropError, match=message):
            convert(stale, None, names=names)


def test_megatron_fp32_parameters_have_no_main_param() -> None:
    """fp32 weights among 16-bit ones: known from the model by the given names, or from the caller."""
    halves = Halves()
    saved = halves.megatron()
    at = halves.groups[1].index("norm.weight")
    del saved["fp32_from_fp16_params"][1][at]
    model = halves.model | {"norm.weight": halves.masters["norm.weight"]}
    with pytest.raises(InteropError, match="names must be given"):
        convert({"model": model, "optimizer": saved}, None)
    halves.assert_converted(convert({"model": model, "optimizer": saved}, None, names=halves.groups).state_dict)
    state = optimizer_state_dict(saved, halves.groups, fp32_names=["norm.weight"])
    assert "norm.weight" not in state["main_params"]
    with pytest.raises(InteropError, match="say which parameters are fp32"):
        optimizer_state_dict(saved, halves.groups)


def test_megatron_chained_and_old_keys() -> None:
    """A list of optimizers is one state with the first one's scaler; keys of before Megatron-Core are known."""
    halves = Halves()
    parts = [halves.megatron([group]) for group in halves.groups]
    state = optimizer_state_dict(parts, halves.groups)
    halves.assert_converted(state)
    assert float(state["grad_scaler"]["scale"]) == 512.0
    halves.assert_converted(convert({"model": halves.model, "optimizer": parts}, None).state_dict)
    parts[1]["grad_scaler"] = MEGATRON_SCALER | {"scale": torch.tensor([2.0])}
    assert float(optimizer_state_dict(parts, halves.groups)["grad_scaler"]["scale"]) == 512.0
    saved = halves.megatron()
    old = {"optimizer_state_dict": saved["optimizer"], "fp32_from_fp16": saved["fp32_from_fp16_params"]}
    halves.assert_converted(optimizer_state_dict(old, halves.groups))


def test_megatron_distributed_and_parallel_checkpoints_are_refused(tmp_path: Path) -> None:
    """Shards of the distributed optimizer, and several model-parallel ranks, are not read; the scaler is."""
    halves = Halves()
    saved = halves.megatron()
    del saved["fp32_from_fp16_params"], saved["optimizer"]["state"]
    content = {"model": halves.model, "optimizer": saved}
    with pytest.raises(InteropError, match="distributed optimizer"):
        convert(content, None)
    assert convert(content, None, scaler_only=True).state_dict["grad_scaler"]["growth_tracker"] == 7
    for rank in (0, 1):
        (tmp_path / f"mp_rank_0{rank}").mkdir()
        torch.save({"optimizer": halves.megatron()}, tmp_path / f"mp_rank_0{rank}" / "model_optim_rng.pt")
    with pytest.raises(InteropError, match="2 model-parallel ranks"):
        convert(tmp_path, None)
    folder = tmp_path / "iter_0000100"
    folder.mkdir()
    torch.save({}, folder / "common.pt")  # of a torch_dist checkpoint
    with pytest.raises(InteropError, match=r"--ckpt-convert-format torch --ckpt-convert-save DIR: .* distrib_optim.pt"):
        convert(folder, None)


# DeepSpeed


@pytest.mark.parametrize(("ranks", "gap"), [(1, 0), (2, 0), (3, 0), (12, 0), (2, 5)])
def test_zero_shards_are_put_together(ranks: int, gap: int, tmp_path: Path) -> None:
    """Any number of ranks (in order beyond nine), gaps between parameters, padding."""
    halves = Halves()
    halves.assert_converted(convert(halves.zero(tmp_path / "zero", ranks, gap), None).state_dict)
    with pytest.raises(InteropError, match="give none"):
        convert(tmp_path / "zero", None, names=halves.names)


def test_zero_checkpoints_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """A missing shard, weights of another step, shapes that leave elements over, stage 3, elastic: refused by name."""
    halves = Halves()
    folder = halves.zero(tmp_path / "zero", 2)
    model = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)

    first, second = (dict(group) for group in model["param_shapes"])
    for changed, message in (
        ({"module": model["module"] | {"head.weight": torch.ones(1, 4).half()}}, r"'head\.weight' are not their main"),
        ({"param_shapes": [{"first.weight": (6, 4)}, second]}, "1 shapes and 3 gaps"),
        ({"param_shapes": [first | {"first.weight": (6, 2)}, second]}, "the recorded parameters take 40"),
        ({"param_shapes": [first | {"first.weight": (600, 4)}, second]}, "lies beyond"),
        ({"param_shapes": [first]}, "does not record the shapes"),
    ):
        torch.save(model | changed, folder / "mp_rank_00_model_states.pt")
        with pytest.raises(InteropError, match=message):
            convert(folder, None)
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    shard = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = torch.load(shard, weights_only=True)
    torch.save({"optimizer_state_dict": content["optimizer_state_dict"] | {"zero_stage": 3}}, shard)
    with pytest.raises(InteropError, match=r"ZeRO stage 3; .*alone \(scaler_only=True, or --scaler-only"):
        convert(folder, None)
    torch.save({"optimizer_state_dict": content["optimizer_state_dict"] | {"base_optimizer_state": [{}]}}, shard)
    with pytest.raises(InteropError, match="save without elastic_checkpoint"):
        convert(folder, None)
    torch.save(content, shard)
    damaged = bytearray(shard.read_bytes())
    place = damaged.index(content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].numpy().tobytes())
    damaged[place] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(InteropError, match=r"rank_1_mp.* is damaged: the checksum of .*; copy the file again"):
        convert(folder, None)
    shard.unlink()
    with pytest.raises(InteropError, match="all files of one save"):
        convert(folder, None)
    (folder / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(InteropError, match=r"lacks mp_rank_\*_model_states.pt"):
        convert(folder, None)
