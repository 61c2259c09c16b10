"""Megatron-Core's param groups: checks of overrides and of marks on parameters.

Megatron accepts any key in an override. Keys that its schedule reads and options of the inner optimizer take effect
here; every other key is refused by name.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from megascale.errors import ArgumentError, listed

SCHEDULE_KEYS = ("max_lr", "min_lr", "start_wd", "end_wd", "wd_mult")
"""Keys of a param group that Megatron's OptimizerParamScheduler reads."""

WHOLE_OPTIMIZER = ("optimizer", "optimizer_cpu_offload", "overlap_param_gather_with_optimizer_step")
"""Keys of its config that an override may contain only with the config's own value."""

Overrides = Mapping[Any, Mapping[str, Any]]
"""By ``megatron.core.optimizer.ParamKey``."""


def overrides_refusal(
    config: Any, chunks: Sequence[nn.Module], overrides: Overrides, options: Collection[str]
) -> ArgumentError | None:
    """Return the error for bad ``overrides`` on this rank.

    Args:
        config: Megatron's OptimizerConfig.
        chunks: of the model.
        overrides: given ones, or Megatron's standard ones, which exempt biases and norms from weight decay and apply
            ``decoupled_lr``.
        options: of the inner optimizer's param groups.
    """
    for override in overrides.values():
        for key, value in override.items():
            if key in WHOLE_OPTIMIZER:
                common = getattr(config, key, None)
                if value != common:
                    return ArgumentError(
                        f"config_overrides set {key}={value!r} for some parameters and config.{key} is {common!r}; one "
                        "optimizer serves all parameters here: build one for each and put them into a ChainedOptimizer"
                    )
            elif key not in SCHEDULE_KEYS and key not in options:
                return ArgumentError(
                    f"config_overrides set {key}={value!r}, which nothing would read; an override may set "
                    f"{', '.join((*SCHEDULE_KEYS, *sorted(options)))}"
                )
    return _conflict(chunks, overrides)


def params_refusal(names: Sequence[tuple[str, nn.Parameter]]) -> ArgumentError | None:
    """Return the error for unsupported marks of Megatron on parameters. ``names``: all parameters, by name."""
    marks = {name: getattr(param, "grad_norm_group", None) for name, param in names}
    apart = {name: mark for name, mark in marks.items() if mark is not None}
    if apart:
        kinds = ", ".join(sorted({repr(kind) for kind in apart.values()}))
        return ArgumentError(
            f"{listed(apart)} have grad_norm_group {kinds}: Megatron-Core measures and clips them apart, "
            "and here one norm is that of all gradients; delete the attribute to clip them together"
        )
    return None


def _conflict(chunks: Sequence[nn.Module], overrides: Overrides) -> ArgumentError | None:
    """Return an error for a parameter with different values from two overrides: Megatron raises on one rank only."""
    from megatron.core.optimizer_param_scheduler import combine_param_group_overrides

    for chunk in chunks:
        for name, param in chunk.named_parameters():
            matching = [override for key, override in overrides.items() if key.matches(param, name)]
            try:
                combine_param_group_overrides(matching)
            except ValueError as error:
                return ArgumentError(
                    f"config_overrides give {name!r} two values: {error}; let each parameter match one"
                )
    return None
