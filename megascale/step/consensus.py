"""One vote: whether ranks take the same step, in one number that travels with the step's statistics.

**What goes wrong without it.** Ranks that hold copies of a parameter stay equal because they do the same. If one of
them has another learning rate, has frozen a layer, or has loaded an older state, nothing fails: from that step on the
ranks train different models. Comparing the settings of all ranks in each step would find it, and cost a collective and
a wait of the host.

**The vote.** Each rank writes down facts of its step (:mod:`megascale.step.facts`): "lr of param group 0" is 0.1. From
their digest it makes one number, and adds it to its count of errors in the vector of statistics, which a step sums over
all ranks in any case. No collective is added, and the host waits for nothing. A sum that is not 0 makes every rank
refuse the step, as an error of one rank does, and before a bit has changed.

**Why zero-sum, per set of holders.** Not all ranks must agree with all: another stage of a pipeline, or the holder of
another expert, may well have other settings. So ranks vote in sets: those that hold the same dense parameters, those
that hold the same experts, and, about the loss scale, all that decide together. The numbers of a set add up to 0 where
its facts are the same (:func:`megascale.utils.consensus.zero_sum`): then the set leaves no trace in the sum, and one
number carries the votes of any number of sets, of which no rank knows but its own. A variance could not do that: it
would have to be one per set. The ranks of a set are drawn into its numbers, so that two sets that differ in the same
way do not cancel each other.

**Why the numbers change in each step.** Different facts could by chance add up to 0 as well: once in ``_limit`` cases,
which is 2**49 / number of ranks where statistics are fp64, and 2**20 / number of ranks where they are fp32. The number
of the vote is drawn into the numbers, so that chance does not repeat: what is missed is found in the next step.

**Exact.** All numbers are integers. The sum over any ranks, in any order, is below what the statistics' dtype holds
exactly, so that it is 0 or is not.

**What it costs.** A rank that is alone computes nothing of it. Otherwise: a dict of some dozen facts, compared with the
step before; only a part of the facts that has changed is hashed again.

**The explanation.** The vote does not say what differs. So facts are kept, of this step and of the one before, as an
accelerator's host learns of the sum one step late, and :meth:`Consensus.explain` exchanges them once the step is
refused: one gather, and each rank names the same difference.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup

from megascale.errors import UsageError
from megascale.parallel import UNSET, ParallelGroups
from megascale.utils.collectives import gather_or_raise, group_rank, group_ranks, group_size
from megascale.utils.consensus import Facts, digest, explained, zero_sum

Kind = bool | None
"""Whose facts: False those of dense parameters, True those of experts, None those of all ranks that decide together."""
StepFacts = Mapping[Kind, Sequence[Facts]]
"""What one rank does in one step: for each set of ranks, facts in parts that change at different times, causes before
what may follow from them."""
_Told = tuple[Mapping[Kind, tuple[int, ...]], Mapping[int, StepFacts | None]]
"""What a rank tells others: the ranks of its sets, and its facts by the number of the vote."""

_num_votes: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""How often each group has voted. Each vote goes into a collective: its ranks have all voted as often."""


class Consensus:
    """Votes on what the ranks of ``groups.grad_stats`` do in a step, and names what differs.

    Args:
        groups: of all members.
        device: of the statistics.

    Attributes:
        is_alone: whether this rank decides alone: then there is nothing to vote on.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        self._group = groups.grad_stats
        self.is_alone = group_size(self._group) == 1
        experts = None if groups.expert_data_parallel is UNSET else groups.expert_data_parallel
        holders: dict[Kind, ProcessGroup | None] = {None: self._group, False: groups.data_parallel, True: experts}
        sets = {} if self.is_alone else {kind: group for kind, group in holders.items() if group_size(group) > 1}
        self._ranks = {kind: group_ranks(group) for kind, group in sets.items()}
        self._index = {kind: group_rank(group) for kind, group in sets.items()}
        # No two sets share these: what ranks of one set exchange must not cancel with the same of another.
        self._sets = {kind: repr((kind, ranks)).encode() for kind, ranks in self._ranks.items()}
        # A rank votes in three sets at most; what is left of the four bits is for counts of errors. fp64 has 53.
        self._limit = max(1, 2 ** (53 - 4) // group_size(self._group))
        self._recent: deque[tuple[int, StepFacts | None]] = deque(maxlen=2)
        self._digests: dict[tuple[Kind, int], tuple[Facts, bytes]] = {}

    def vote(self, facts: StepFacts | None) -> int:
        """Return this rank's number for what it does in this step; all ranks' numbers add up to 0 if they do the same.

        Not called where this rank is alone. ``facts``: None where it has an error, which is counted beside the number.
        """
        number = _num_votes[self._group] = _num_votes.get(self._group, 0) + 1
        self._recent.append((number, facts))
        total = 0
        for kind, parts in (facts or {}).items():
            if kind not in self._ranks:
                continue
            subject = b"%d %s" % (number, self._sets[kind])
            for place, part in enumerate(parts):
                known = self._digests.get((kind, place))  # facts are seldom others than in the step before
                if known is None or known[0] != part:
                    known = self._digests[kind, place] = part, digest(part)
                subject += known[1]
            total += zero_sum(subject, len(self._ranks[kind]), self._index[kind], self._limit)
        return total

    def explain(self, error: Exception | None) -> None:
        """Raise on every rank alike: the ``error`` of a rank, else one that names what differs. All call it together.

        Facts are then forgotten: the next step is compared anew.
        """
        mine: _Told = self._ranks, dict(self._recent)
        self._recent.clear()
        answers = gather_or_raise(mine, error, self._group)
        if self.is_alone:
            return
        for kind, facts in _compared(dict(zip(group_ranks(self._group), answers, strict=True))):
            found = explained(facts)
            if found is not None and kind is None:
                raise UsageError(
                    f"ranks that decide together have other loss scales, or not all of them have one: {found}; give "
                    "each the same scaler, load the same scaler state on each, or leave out of groups.grad_stats what "
                    "trains on its own"
                )
            if found is not None:
                raise UsageError(
                    f"ranks that hold the same parameters do not take the same step: {found}; have the same settings, "
                    "parameters, loaded state and number of steps on every rank. If these replicas are different "
                    "models on purpose, pass replicas_may_differ=True to MixedPrecisionOptimizer"
                )
        raise UsageError(
            "the ranks disagree about this step (settings, parameters or number of steps), but their facts about it "
            "are already dropped; no parameter has changed: build the optimizer, set options, load state and call "
            "step() identically on every rank"
        )


def _compared(every: Mapping[int, _Told]) -> Iterator[tuple[Kind, dict[int, Facts]]]:
    """Yield the facts that are to be the same, by rank: of each step, of each set of ranks, part by part.

    A rank that had an error in a step, or has not taken it, says nothing about it. One that is in a set and holds none
    of its parameters lacks facts that the others have.
    """
    for number in sorted({number for _, steps in every.values() for number in steps}):
        told = {rank: facts for rank, (_, steps) in every.items() if (facts := steps.get(number)) is not None}
        for kind in (None, False, True):
            for ranks in dict.fromkeys(every[rank][0].get(kind, ()) for rank, facts in told.items() if kind in facts):
                parts = {rank: told[rank].get(kind, ()) for rank in ranks if rank in told}
                for one_part in zip_longest(*parts.values(), fillvalue={}):
                    yield kind, dict(zip(parts, one_part, strict=True))
