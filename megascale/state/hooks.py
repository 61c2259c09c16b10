"""The four hooks that torch lets a user put around an optimizer's state dict, called as torch calls them."""

from collections.abc import Callable
from typing import Any

import torch

StateDict = dict[str, Any]


def pack_with_hooks(optimizer: torch.optim.Optimizer, pack: Callable[[], StateDict]) -> StateDict:
    """Return what ``pack`` makes, or what a post hook puts in its place."""
    for pre_hook in optimizer._optimizer_state_dict_pre_hooks.values():
        pre_hook(optimizer)
    packed = pack()
    for post_hook in optimizer._optimizer_state_dict_post_hooks.values():
        packed = post_hook(optimizer, packed) or packed
    return packed


def load_with_hooks(optimizer: torch.optim.Optimizer, state_dict: StateDict, load: Callable[[StateDict], None]) -> None:
    """Load ``state_dict``, or what a pre hook puts in its place."""
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = pre_hook(optimizer, state_dict) or state_dict
    load(state_dict)
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)
