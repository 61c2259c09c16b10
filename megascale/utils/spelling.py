"""What other libraries call an argument, or a value, of ours; and which name a misspelt one looks like."""

import functools
import inspect
import re
from collections.abc import Callable, Collection
from difflib import SequenceMatcher
from typing import Any, TypeVar

from megascale.errors import ArgumentTypeError

C = TypeVar("C", bound=type)

ELSEWHERE: dict[str, tuple[str, ...]] = {
    # the norm to clip to: torch.nn.utils, Transformers and TRL, DeepSpeed, Lightning, nanoGPT
    **dict.fromkeys(
        ("max_norm", "max_grad_norm", "gradient_clipping", "gradient_clip_val", "grad_clip"), ("clip_grad",)
    ),
    # the loss scale: torch.amp, DeepSpeed, apex, Megatron-Core's scaler and its config
    "init_scale": ("initial_loss_scale", "initial_scale"),
    "initial_scale": ("initial_loss_scale",),
    "initial_loss_scale": ("initial_scale",),
    "init_loss_scale": ("initial_loss_scale", "initial_scale"),
    "initial_scale_power": ("initial_loss_scale", "initial_scale"),
    "min_scale": ("min_loss_scale",),
    "min_loss_scale": ("min_scale",),
    "max_scale": ("max_loss_scale",),
    "max_loss_scale": ("max_scale",),
    "growth_factor": ("loss_scale_growth_factor",),
    "scale_factor": ("loss_scale_growth_factor", "growth_factor"),
    "backoff_factor": ("loss_scale_backoff_factor",),
    "growth_interval": ("loss_scale_window",),
    "loss_scale_window": ("growth_interval",),
    "scale_window": ("loss_scale_window", "growth_interval"),
    "delayed_shift": ("hysteresis",),
    "consecutive_hysteresis": ("hysteresis_reset",),
    # the optimizer: Transformers, torch, DeepSpeed
    "learning_rate": ("lr",),
    "adam_epsilon": ("adam_eps",),
    "eps": ("adam_eps",),
    "betas": ("adam_beta1",),
    "momentum": ("sgd_momentum",),
    "optim": ("optimizer",),
    **dict.fromkeys(("float16", "half"), ("fp16",)),
    "bfloat16": ("bf16",),
    "cpu_offload": ("optimizer_cpu_offload",),
    "offload_optimizer": ("optimizer_cpu_offload",),
}
"""Ours of each name of theirs, of which a class has one."""


def told(cls: C) -> C:
    """Decorate a class whose constructor's arguments have other names elsewhere: who types one, or errs, is told ours.

    The error is an ArgumentTypeError, which is a TypeError, as Python's own for all other names.
    """
    constructor: Callable[..., None] = vars(cls)["__init__"]
    known = list(inspect.signature(constructor).parameters)

    @functools.wraps(constructor)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known and (hint := meant(name, known)):
                raise ArgumentTypeError(f"{cls.__name__} has no argument {name!r}{hint}")
        constructor(self, *args, **kwargs)

    setattr(cls, "__init__", checked)  # noqa: B010  # mypy's wish
    return cls


def meant(name: object, known: Collection[str]) -> str:
    """Return ``; did you mean 'window'?`` if a known name is ``name`` elsewhere, or alone is a letter or two away.

    Of names of up to four letters one letter. Digits are never taken for each other: fp8 is no misspelt fp16.
    """
    typed = str(name)
    alike = [one for one in ELSEWHERE.get(typed, ()) if one in known]
    if not alike:
        errors = {
            one: max(len(typed), len(one))
            - sum(block.size for block in SequenceMatcher(None, typed.lower(), one.lower()).get_matching_blocks())
            for one in known
            if isinstance(name, str) and re.sub(r"\D", "", one) == re.sub(r"\D", "", typed)
        }
        least = min(errors.values(), default=3)
        alike = [one for one in errors if errors[one] == least <= (2 if max(len(typed), len(one)) > 4 else 1)]
    return f"; did you mean {alike[0]!r}?" if len(alike) == 1 else ""
