"""The axolotl plugin, with axolotl's own plugin manager and a Trainer; axolotl as a whole needs a GPU's libraries."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.errors import ArgumentTypeError
from tests.training import same_bits

pytest.importorskip("axolotl.integrations.base", reason="needs axolotl's wheel and addict: .ci/install_integrations")

from axolotl.integrations.base import PluginManager
from axolotl.utils.dict import DictDefault

from megascale.integrations.axolotl import MegascaleArgs
from tests.integrations.accelerate_cases import reset
from tests.integrations.hf_cases import logged, optimizer_of, state_of
from tests.integrations.hf_ranks import OPTIONS, build, unmixed

NAME = "megascale.integrations.axolotl.MegascalePlugin"


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
    cfg = DictDefault({"plugins": [NAME], "megascale": OPTIONS})
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
    cfg = DictDefault({"plugins": [NAME]})
    _manager(cfg).post_trainer_create(cfg, trainer)
    trainer.train()
    assert optimizer_of(trainer).get_loss_scale().item() == 2.0**16


def test_a_wrong_option_is_an_error_before_anything_is_loaded() -> None:
    """A typing error in the YAML file is named when the configuration is read."""
    with pytest.raises(ArgumentTypeError, match="did you mean 'hysteresis'"):
        _manager(DictDefault({"plugins": [NAME], "megascale": {"histeresis": 1}}))
