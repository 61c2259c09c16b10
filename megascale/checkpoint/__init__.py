"""Checkpoints: atomic folders that load on any number of ranks.

Use::

    from megascale.checkpoint import Checkpointer

    checkpointer = Checkpointer("run/checkpoints", keep_last=3)
    if checkpointer.latest():
        start = checkpointer.load(model, optimizer).step
    ...
    checkpointer.save(step, model, optimizer, user_state={"epoch": 2}, rank_state={"rng": torch.get_rng_state()})
"""

from megascale.checkpoint.checkpointer import Checkpointer, save
from megascale.checkpoint.consolidation import consolidate
from megascale.checkpoint.directory import latest
from megascale.checkpoint.loading import LoadedCheckpoint, load

__all__ = ["Checkpointer", "LoadedCheckpoint", "consolidate", "latest", "load", "save"]
