"""Calls the four user hooks of an optimizer's state dict as torch calls them."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megascale.utils.collectives import raise_together

StateDict = dict[str, Any]


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
    load: Callable[[Callable[[], StateDict]], None],
    group: ProcessGroup | None,
) -> None:
    """Call ``load`` with a function that returns ``state_dict``, or what a pre hook replaces it by.

    An error of a post hook, which comes when all is loaded, is raised by all ranks of ``group``.
    """

    def given() -> StateDict:
        result = state_dict
        for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
            result = pre_hook(optimizer, result) or result
        return result

    load(given)
    error: Exception | None = None
    try:
        for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
            post_hook(optimizer)
    except Exception as caught:  # whatever it is: other ranks would go on alone
        error = caught
    raise_together(error, group)
