"""The axolotl plugin, with axolotl's own plugin manager and a Trainer; axolotl as a whole needs a GPU's libraries."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.errors import ArgumentTypeError
from tests.pool import RankPool
from tests.training import same_bits

pytest.importorskip("axolotl.integrations.base", reason="needs axolotl's wheel and addict: .ci/install_integrations")

from axolotl.integrations.base import PluginManager
from axolotl.utils.dict import DictDefault

from megascale.integrations.axolotl import MegascaleArgs
from tests.integrations.accelerate_cases import reset
from tests.integrations.hf_cases import logged, optimizer_of, state_of
from tests.integrations.hf_ranks import (
    AXOLOTL_PLUGIN,
    OPTIONS,
    WORLDS,
    assert_others_take_it_up,
    assert_resumed,
    build,
    resume_on_rank,
    train_on_rank,
    unmixed,
)


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate's state, and axolotl's plugins, are shared by a whole process."""
    reset()
    yield
    reset()
    PluginManager.get_instance().plugins.clear()


def _manager(cfg: Any) -> Any:
    """Do with the configuration what axolotl does."""
    manager = PluginManager.get_instance()
    for name in cfg["plugins"]:
        manager.register(name)
    for plugin in manager.plugins.values():
        plugin.register(cfg)
    return manager


def test_a_yaml_key_is_all(tmp_path: Path) -> None:
    """Axolotl's manager loads the plugin by name, and its trainer then trains as MegascaleTrainer does."""
    cfg = DictDefault({"plugins": [AXOLOTL_PLUGIN], "megascale": OPTIONS})
    manager = _manager(cfg)
    assert manager.get_input_args() == ["megascale.integrations.axolotl.MegascaleArgs"]
    assert MegascaleArgs.model_validate(cfg).megascale == OPTIONS
    states: list[dict[str, torch.Tensor]] = []
    for make in (unmixed, build):
        trainer = make("trainer", tmp_path, torch.float16)
        if make is unmixed:
            manager.post_trainer_create(cfg, trainer)
        trainer.bad = (1,)
        trainer.train()
        assert logged(trainer, "skipped_steps") == [0, 1, 1, 1, 1, 1]
        states.append(state_of(trainer))
        reset()
    assert same_bits(*states)


def test_without_the_key_defaults_are_taken(tmp_path: Path) -> None:
    """The plugin alone gives main params and a scale of 65,536."""
    trainer = unmixed("trainer", tmp_path, torch.float16)
    cfg = DictDefault({"plugins": [AXOLOTL_PLUGIN]})
    _manager(cfg).post_trainer_create(cfg, trainer)
    trainer.train()
    assert optimizer_of(trainer).get_loss_scale().item() == 2.0**16


def test_a_wrong_option_is_an_error_before_anything_is_loaded() -> None:
    """A typing error in the YAML file is named when the configuration is read."""
    with pytest.raises(ArgumentTypeError, match="did you mean 'hysteresis'"):
        _manager(DictDefault({"plugins": [AXOLOTL_PLUGIN], "megascale": {"histeresis": 1}}))


@pytest.mark.parametrize("layout", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_a_run_goes_on_after_a_restart(layout: str, ranks: RankPool, tmp_path: Path) -> None:
    """Two ranks, an overflow on one: resumed on two with all bits, and on four with what was saved."""
    given = ("axolotl", layout, str(tmp_path), torch.float16)
    whole = ranks.run(2, train_on_rank, *given, timeout=200)
    assert whole[0]["skips"] == [0, 1, 1, 1, 1, 1]
    with ranks.spawn(2, resume_on_rank, *given) as fresh:
        assert_resumed(fresh.results(timeout=200), whole, to_the_end=True)
    assert_resumed(ranks.run(4, resume_on_rank, *given, timeout=200), whole, to_the_end=False)


@pytest.mark.release
@pytest.mark.parametrize("worlds", WORLDS, ids=str)
def test_a_run_goes_on_in_new_processes_of_another_number(
    worlds: tuple[int, int], ranks: RankPool, tmp_path: Path
) -> None:
    """FSDP2 in fp16: main params, weights, scale, trackers and counts are what was saved, bit for bit."""
    assert_others_take_it_up(ranks, "axolotl", worlds, str(tmp_path))
