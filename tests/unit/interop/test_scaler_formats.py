"""Every format's layout: what is recognised, what is said of it, and what is refused.

The layouts here are written by hand: those of Lightning before 2.0, which does not install here, from
its source; tests/integrations has files that the other peers wrote themselves.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale import ConstantGradScaler, DynamicGradScaler
from megascale.errors import ArgumentError, InteropError, StateDictError
from megascale.interop import DeepSpeedGradScaler, load_scaler_state

TORCH = {"scale": 512.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 10, "_growth_tracker": 7}
MEGATRON = {"scale": torch.tensor([512.0]), "growth_tracker": 7, "hysteresis_tracker": 1}
DEEPSPEED = {
    "dynamic_loss_scale": True, "cur_scale": 512.0, "cur_iter": 20, "last_overflow_iter": 12, "scale_factor": 2.0,
    "scale_window": 10, "optimizer_state_dict": {}, "fp32_groups_flat": [],
}  # fmt: skip

LAYOUTS: dict[str, tuple[Any, str, int]] = {
    "torch alone": (TORCH, "torch.amp", 7),
    "torch in a checkpoint": ({"epoch": 3, "amp_scaler": TORCH}, "torch.amp", 7),
    "megatron scaler": (MEGATRON, "Megatron-Core", 7),
    "megatron optimizer": ({"optimizer": {}, "grad_scaler": MEGATRON}, "Megatron-Core", 7),
    "megatron checkpoint": (
        {"iteration": 4, "optimizer": {"optimizer": {}, "grad_scaler": MEGATRON}}, "Megatron-Core", 7,
    ),
    "megatron chained": ([{"optimizer": {}, "grad_scaler": MEGATRON}] * 2, "Megatron-Core", 7),
    "megatron chained by index": (
        {"optimizer": {i: {"optimizer": {}, "grad_scaler": MEGATRON} for i in (0, 1)}}, "Megatron-Core", 7,
    ),
    "deepspeed optimizer": (DEEPSPEED, "DeepSpeed", 7),
    "deepspeed model states": ({"module": {}, "optimizer": DEEPSPEED}, "DeepSpeed", 7),
    "lightning": ({"pytorch-lightning_version": "2.6", "state_dict": {}, "MixedPrecision": TORCH}, "Lightning", 7),
    "lightning fsdp": ({"pytorch-lightning_version": "2.6", "FSDPPrecision": TORCH}, "Lightning", 7),
    "lightning 1.9": ({"pytorch-lightning_version": "1.9", "MixedPrecisionPlugin": TORCH}, "Lightning", 7),
    "lightning 1.5": ({"pytorch-lightning_version": "1.5", "native_amp_scaling_state": TORCH}, "Lightning", 7),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("saved", [False, True])
def test_layouts_are_recognised(layout: str, saved: bool, tmp_path: Path) -> None:
    """Each layout, as a dict and as a file: system, scale, tracker; ours loads the state; the source is unchanged."""
    content, system, tracker = LAYOUTS[layout]
    before = repr(content)
    source: Any = content
    if saved:
        source = tmp_path / "saved.pt"
        torch.save(content, source)
    found = load_scaler_state(source)
    assert repr(content) == before
    assert (found.system, found.scale, found.state["growth_tracker"]) == (system, 512.0, tracker)
    assert found.state["scale"].shape == (1,)
    assert found.state["scale"].dtype == torch.float32
    assert found.mapped
    assert found.not_mapped
    plain = DynamicGradScaler(1.0, 1.0, 2.0, 0.5, 10, 1)
    plain.load_state_dict(found.state)
    assert float(plain.scale) == 512.0
    constant = ConstantGradScaler(1.0)
    constant.load_state_dict(found.state)
    assert float(constant.scale) == 512.0


def test_folders_of_the_peers(tmp_path: Path) -> None:
    """Accelerate's folder, Megatron's tracker file, DeepSpeed's `latest`: the file that they mean is read."""
    for name in ("accelerate", "megatron/iter_0000040/mp_rank_00", "deepspeed/global_step7"):
        (tmp_path / name).mkdir(parents=True)
    torch.save(TORCH, tmp_path / "accelerate" / "scaler.pt")
    args = Namespace(loss_scale=None, loss_scale_window=10, hysteresis=2, min_loss_scale=4.0)
    torch.save(
        {"args": args, "optimizer": {"grad_scaler": MEGATRON}},
        tmp_path / "megatron" / "iter_0000040" / "mp_rank_00" / "model_optim_rng.pt",
    )
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("40\n")
    content = {"module": {}, "optimizer": DEEPSPEED, "ds_config": {"fp16": {"min_loss_scale": 8}}}
    torch.save(content, tmp_path / "deepspeed" / "global_step7" / "mp_rank_00_model_states.pt")
    (tmp_path / "deepspeed" / "latest").write_text("global_step7\n")
    scalers = {name: load_scaler_state(tmp_path / name).build_grad_scaler() for name in ("accelerate", "megatron")}
    assert isinstance(scalers["megatron"], DynamicGradScaler)
    assert (scalers["megatron"].growth_interval, scalers["megatron"].hysteresis) == (10, 2)
    assert scalers["megatron"].min_scale == 4.0
    deepspeed = load_scaler_state(tmp_path / "deepspeed").build_grad_scaler()
    assert isinstance(deepspeed, DeepSpeedGradScaler)
    assert deepspeed.min_scale == 8.0


@pytest.mark.parametrize(("file", "text"), [("latest", "../../etc"), ("latest_checkpointed_iteration.txt", "../x")])
def test_tracker_files_lead_nowhere_else(file: str, text: str, tmp_path: Path) -> None:
    """A tracker file that names a path out of the folder is refused."""
    (tmp_path / file).write_text(text)
    with pytest.raises(InteropError, match=file.partition(".")[0]):
        load_scaler_state(tmp_path)


def test_constant_scales() -> None:
    """Megatron's {}, and a static scale of DeepSpeed."""
    empty = load_scaler_state({"grad_scaler": {}, "optimizer": {}})
    assert (empty.dynamic, empty.state) == (False, {})
    with pytest.raises(InteropError, match="initial_scale"):
        empty.build_grad_scaler()
    assert float(empty.build_grad_scaler(initial_scale=16.0).scale) == 16.0
    static = load_scaler_state(DEEPSPEED | {"dynamic_loss_scale": False})
    assert isinstance(static.build_grad_scaler(), ConstantGradScaler)
    args = Namespace(loss_scale=64.0)
    assert load_scaler_state({"args": args, "optimizer": {"grad_scaler": {}}}).scale == 64.0


def test_what_is_not_recorded_is_asked_for() -> None:
    """Megatron's state has no window: the helper names what lacks, and takes it."""
    found = load_scaler_state(MEGATRON)
    with pytest.raises(InteropError, match=r"growth_interval=\.\.\., hysteresis=\.\.\., min_scale=\.\.\."):
        found.build_grad_scaler()
    with pytest.raises(ArgumentError, match="unknown configuration window"):
        found.build_grad_scaler(window=3)
    scaler = found.build_grad_scaler(growth_interval=8, hysteresis=2, min_scale=1.0)
    assert scaler.state_dict() == MEGATRON | {"scale": scaler.scale}


def changed(state: dict[str, Any], **values: Any) -> dict[str, Any]:
    """Return a copy of ``state`` with other values; None removes a key."""
    return {key: value for key, value in (state | values).items() if value is not None}


REFUSED: dict[str, tuple[Any, str]] = {
    "scale 0": (changed(TORCH, scale=0.0), "fallen to where no step"),
    "scale inf": (changed(TORCH, scale=float("inf")), "must be finite"),
    "scale NaN": (changed(MEGATRON, scale=torch.tensor([float("nan")])), "must be finite"),
    "scale negative": (changed(TORCH, scale=-2.0), "above 0"),
    "scale too large": (changed(DEEPSPEED, cur_scale=2.0**128), r"2\*\*127"),
    "scale of two": (changed(MEGATRON, scale=torch.ones(2)), "must be a number"),
    "scale a string": (changed(MEGATRON, scale="x"), "must be a number"),
    "key missing": (changed(TORCH, growth_interval=None), "lacks growth_interval"),
    "key unknown": (changed(TORCH, _hysteresis_tracker=2), "_hysteresis_tracker, which is not torch's"),
    "tracker float": (changed(TORCH, _growth_tracker=1.5), "growth tracker must be an integer"),
    "tracker negative": (changed(TORCH, _growth_tracker=-1), "0 or more"),
    "backoff 0": (changed(TORCH, backoff_factor=0.0), "backoff_factor 0.0"),
    "megatron lacks": ({"grad_scaler": {"scale": 2.0}, "optimizer": {}}, "lacks growth_tracker, hysteresis_tracker"),
    "deepspeed window": (changed(DEEPSPEED, scale_window=0), "1 or more"),
    "deepspeed overflow ahead": (changed(DEEPSPEED, last_overflow_iter=20), "is damaged"),
    "deepspeed lacks": (changed(DEEPSPEED, cur_iter=None), "lacks cur_iter"),
    "torch several": ({"a": TORCH, "b": changed(TORCH, scale=4.0)}, "2 grad scalers that differ"),
    "no scaler": ({"pytorch-lightning_version": "2.6", "state_dict": {}}, "holds no loss scaler"),
    "apex": (
        {"optimizer": {"state": {}, "param_groups": []}, "amp": {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 7}}},
        "or by a library that is not read here, such as apex.amp",
    ),
    "fairseq": (
        {"args": None, "optimizer_history": [{}], "last_optimizer_state": {"loss_scale": 512.0, "param_groups": []}},
        "no checkpoint of .* it has args, last_optimizer_state, optimizer_history",
    ),
    "unknown": ({"weights": torch.ones(2)}, "no checkpoint of .* it has weights"),
    "empty": ({}, "it has nothing"),
    "megascale": ({"optimizer": {}, "main_params": {}, "grad_scaler": {}, "version": 1}, "megascale's own"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_mapped_is_refused_by_name(case: str) -> None:
    """Bad numbers, missing and unknown keys, several scalers: InteropError, a StateDictError, says which."""
    content, message = REFUSED[case]
    with pytest.raises(InteropError, match=message) as caught:
        load_scaler_state(content)
    assert isinstance(caught.value, StateDictError)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed(TORCH, _growth_tracker=10), "compares with =="),
        (changed(DEEPSPEED, cur_scale=1000.1), "fp32 rounds to"),
        ([{"grad_scaler": MEGATRON}, {"grad_scaler": MEGATRON | {"scale": torch.tensor([4.0])}}], "the first one's"),
    ],
)
def test_what_no_scaler_continues_exactly_is_said(content: Any, message: str) -> None:
    """The nearest state is taken, and the notes say what differs."""
    found = load_scaler_state(content)
    assert found.state
    assert any(message in note for note in found.not_mapped)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"growth_interval": 7}, "at or above the growth_interval of 7: the peer compares with =="),
        ({"hysteresis": 1}, "hysteresis tracker is 2, above the hysteresis of 1"),
        ({"min_scale": 1024.0}, "scale is 512.0, below the min_scale of 1024.0"),
        ({"max_scale": 256.0}, "scale is 512.0, above the max_scale of 256.0"),
    ],
)
def test_a_configuration_that_breaks_the_continuation_is_refused(config: dict[str, Any], message: str) -> None:
    """What the caller adds is held against the state, as what the checkpoint says is when it is read."""
    found = load_scaler_state(MEGATRON | {"hysteresis_tracker": 2})
    given = {"growth_interval": 8, "hysteresis": 2, "min_scale": 1.0}
    found.build_grad_scaler(**given)
    with pytest.raises(InteropError, match=f"Megatron-Core: the .*{message}.*; pass what the run was configured with"):
        found.build_grad_scaler(**given | config)


@pytest.mark.parametrize(
    ("option", "value", "name", "message"),
    [
        ("loss_scale_window", 7, "growth_interval", "compares with =="),
        ("hysteresis", 1, "hysteresis", "above the hysteresis of 1"),
        ("min_loss_scale", 1024.0, "min_scale", "below the min_scale of 1024.0"),
    ],
)
def test_a_recorded_configuration_that_breaks_it_is_noted(option: str, value: Any, name: str, message: str) -> None:
    """A file's own rule that does not fit its state: the notes say so, and the nearest scaler is built."""
    args = {"loss_scale": None, "loss_scale_window": 8, "hysteresis": 2, "min_loss_scale": 1.0} | {option: value}
    state = MEGATRON | {"hysteresis_tracker": 2}
    found = load_scaler_state({"args": Namespace(**args), "optimizer": {"grad_scaler": state}})
    assert [note for note in found.not_mapped if message in note]
    scaler = found.build_grad_scaler()
    assert getattr(scaler, name) == value
    assert float(scaler.scale) == max(512.0, args["min_loss_scale"])


@pytest.mark.parametrize("name", ["growth_interval", "hysteresis", "min_scale", "max_scale"])
def test_a_configuration_of_another_type_is_an_argument_error(name: str) -> None:
    """It is checked before it is compared with the state."""
    given = {"growth_interval": 8, "hysteresis": 2, "min_scale": 1.0} | {name: "x"}
    with pytest.raises(ArgumentError, match=f"{name} must be an? (number|integer), got 'x'"):
        load_scaler_state(MEGATRON).build_grad_scaler(**given)
