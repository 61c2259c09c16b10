"""axolotl: a plugin for the key ``plugins`` of its YAML file, and the key ``megascale`` that the plugin adds."""

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from megascale.integrations.transformers import adopt, options_of


class MegascaleArgs(BaseModel):
    """The key ``megascale`` of axolotl's YAML file: options of :class:`MegascaleTrainer`, all optional."""

    megascale: dict[str, Any] | None = None


class MegascalePlugin(BasePlugin):
    """Lets axolotl's trainer train in 16 bits: see :class:`megascale.integrations.transformers.MegascaleTrainer`.

    axolotl's own keys decide the rest: ``optimizer``, ``learning_rate``, ``weight_decay``, ``max_grad_norm``,
    ``lr_scheduler``. ``float16: true`` loads weights in fp16, ``bfloat16: true`` in bf16.
    """

    def register(self, cfg: Any) -> None:
        """Check the key ``megascale``, before a model is loaded. Raises as MegascaleTrainer does."""
        options_of(cfg.get("megascale") or {})

    def get_input_args(self) -> str:
        """Return the model of the keys that the plugin adds."""
        return f"{__name__}.{MegascaleArgs.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Adopt the trainer."""
        adopt(trainer, **(cfg.get("megascale") or {}))
