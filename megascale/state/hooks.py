"""Calls the four user hooks of an optimizer's state dict as torch calls them."""

from collections.abc import Callable
from typing import Any

import torch

StateDict = dict[str, Any]


def pack_with_hooks(optimizer: torch.optim.Optimizer, pack: Callable[[], StateDict]) -> StateDict:
    """Return the result of ``pack``, or what a post hook replaces it by."""
    for pre_hook in optimizer._optimizer_state_dict_pre_hooks.values():
        pre_hook(optimizer)
    packed = pack()
    for post_hook in optimizer._optimizer_state_dict_post_hooks.values():
        packed = post_hook(optimizer, packed) or packed
    return packed


def load_with_hooks(optimizer: torch.optim.Optimizer, state_dict: StateDict, load: Callable[[StateDict], None]) -> None:
    """Load ``state_dict``, or what a pre hook replaces it by."""
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = pre_hook(optimizer, state_dict) or state_dict
    load(state_dict)
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)
