"""Refuses steps of ranks that may run out of batches one by one: inside of DistributedDataParallel.join()."""

from collections.abc import Iterable
from weakref import ref

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from megascale.errors import UsageError
from megascale.utils.live_objects import objects_of


class JoinGuard:
    """Looks whether the DistributedDataParallels around some parameters are inside of ``join()``.

    A rank that has run out of batches answers there for DistributedDataParallel, but not for a step: the message of
    the others' decision would meet one of ``join()``, and gloo ends the process for that. Which modules there are is
    found out at the first step, in tens of milliseconds; each step then reads a flag.
    """

    def __init__(self) -> None:
        self._around: list[ref[DistributedDataParallel]] | None = None

    def check(self, params: Iterable[Tensor]) -> None:
        """Raise UsageError inside of ``join()``, unless that ends the loops of all ranks with the shortest."""
        if self._around is None:
            ours = {id(param) for param in params}
            self._around = [
                ref(one)
                for one in objects_of(DistributedDataParallel)
                if any(id(param) in ours for param in one.parameters())
            ]
        for wrapper in self._around:
            config = getattr(wrapper(), "_join_config", None)  # torch keeps it after the block
            if config is not None and config.enable and not config.throw_on_early_termination:
                raise UsageError(
                    "step() inside of DistributedDataParallel.join(): a rank that has run out of batches takes no part "
                    "in the decision that all ranks share. Give each rank as many batches (DistributedSampler does, "
                    "beside a DataLoader with drop_last=True), or pass join(throw_on_early_termination=True), which "
                    "raises a RuntimeError on every rank once the first has no more: catch it around the block"
                )
