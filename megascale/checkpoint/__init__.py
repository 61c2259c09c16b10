"""Checkpoints: atomic folders that load on any number of ranks.

Use::

    from megascale.checkpoint import Checkpointer

    checkpointer = Checkpointer("run/checkpoints", keep_last=3)
    if checkpointer.latest():
        start = checkpointer.load(model, optimizer).step
    ...
    checkpointer.save(step, model, optimizer, user_state={"epoch": 2}, rank_state={"rng": torch.get_rng_state()})
"""

from megascale.checkpoint.checkpointer import Checkpointer, LoadedCheckpoint, load, save
from megascale.checkpoint.directory import latest

__all__ = ["Checkpointer", "LoadedCheckpoint", "latest", "load", "save"]
