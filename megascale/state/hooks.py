"""Calls the four user hooks of an optimizer's state dict as torch calls them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megascale.state.live_state import LiveState, Plan, load_together
from megascale.utils.collectives import raise_together

StateDict = dict[str, Any]
Parts = Callable[[StateDict, bool], Iterable[tuple[LiveState, StateDict]]]


def raise_own(error: Exception | None) -> None:
    """Raise ``error``, if there is one."""
    if error is not None:
        raise error


def pack_with_hooks(
    optimizer: torch.optim.Optimizer,
    sync: Callable[[], object],
    pack: Callable[[], StateDict],
    agree: Callable[[Exception | None], None] = raise_own,
) -> StateDict:
    """Return the result of ``pack``, or what a post hook replaces it by.

    Args:
        optimizer: whose hooks are called.
        sync: called after the pre hooks.
        pack: returns the state dict.
        agree: called before ``pack`` with an error of a pre hook or of ``sync``, or None; raises those of all ranks
            that ``pack`` communicates with.
    """
    error: Exception | None = None
    try:
        for pre_hook in optimizer._optimizer_state_dict_pre_hooks.values():
            pre_hook(optimizer)
        sync()
    except Exception as caught:  # whatever it is: other ranks wait
        error = caught
    agree(error)
    packed = pack()
    for post_hook in optimizer._optimizer_state_dict_post_hooks.values():
        packed = post_hook(optimizer, packed) or packed
    return packed


def load_with_hooks(
    optimizer: torch.optim.Optimizer,
    state_dict: StateDict,
    strict: bool,
    parts: Parts,
    done: Callable[[], None],
    group: ProcessGroup | None,
) -> None:
    """Load ``state_dict``, or what a pre hook replaces it by, on all ranks of ``group`` or on none.

    An error of a post hook, which comes when all is loaded, is raised by all ranks, too.

    Args:
        optimizer: whose hooks are called.
        state_dict, strict: as ``load_state_dict`` was given them.
        parts: returns each live state and its part of a state dict; takes ``strict``.
        done: called when all is loaded, before the post hooks.
        group: the ranks that load together.
    """

    def plan() -> list[tuple[LiveState, Plan]]:
        given = state_dict
        for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
            given = pre_hook(optimizer, given) or given
        return [(live, live.plan(part, strict=strict)) for live, part in parts(given, strict)]

    load_together(plan, group)
    done()
    error: Exception | None = None
    try:
        for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
            post_hook(optimizer)
    except Exception as caught:  # whatever it is: other ranks would go on alone
        error = caught
    raise_together(error, group)
