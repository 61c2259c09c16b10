"""One vote: whether ranks take the same step, in one number that travels with the step's statistics.

**What goes wrong without it.** Ranks that hold copies of a parameter stay equal because they do the same. If one of
them has another learning rate, has frozen a layer, or has loaded an older state, nothing fails: from that step on the
ranks train different models. Comparing the settings of all ranks in each step would find it, and cost a collective and
a wait of the host.

**The vote.** Each rank writes down facts of its step (:mod:`megascale.step.facts`): "lr of param group 0" is 0.1. From
them it makes one number, and adds it to its count of errors in the vector of statistics, which a step sums over all
ranks in any case. No collective is added, and the host waits for nothing. A sum that is not 0 makes every rank refuse
the step, as an error of one rank does, and before a bit has changed.

**Why zero-sum, per set of holders.** Not all ranks must agree with all: another stage of a pipeline, or the holder of
another expert, may well have other settings. So ranks vote in sets: those that hold the same dense parameters, those
that hold the same experts, and, about the loss scale, all that decide together. The numbers of a set add up to 0 where
its facts are the same (:func:`megascale.utils.consensus.zero_sum`): then the set leaves no trace in the sum, and one
number carries the votes of any number of sets, of which no rank knows but its own. A variance could not do that: it
would have to be one per set. The ranks of a set are drawn into its numbers, so that two sets that differ in the same
way do not cancel each other.

**Why the numbers change in each step.** Different facts could by chance add up to 0 as well: once in :attr:`_limit`
cases, which is 2**49 / number of ranks where statistics are fp64, and 2**20 / number of ranks where they are fp32. The
number of the vote is drawn into the numbers, so that chance does not repeat: what is missed is found in the next step.

**Exact.** All numbers are integers. The sum over any ranks, in any order, is below what the statistics' dtype holds
exactly, so that it is 0 or is not.

**What it costs.** A rank that is alone computes nothing of it. Otherwise: a dict of some dozen facts, compared with the
step before; only facts that have changed are hashed again.

**The explanation.** The vote does not say what differs. So facts are kept, of this step and of the one before, as an
accelerator's host learns of the sum one step late, and :meth:`Consensus.explain` exchanges them once the step is
refused: one gather, and each rank names the same difference.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from enum import IntEnum
from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup

from megascale.errors import ArgumentError, MegascaleError, UsageError, listed
from megascale.kernels import stats_dtype
from megascale.parallel import UNSET, ParallelGroups
from megascale.utils.collectives import group_rank, group_ranks, group_size
from megascale.utils.consensus import Difference, Facts, differences, digest, gathered_facts, zero_sum

Kind = bool | None
"""Whose facts: False those of dense parameters, True those of experts, None those of all ranks that decide together."""


class Topic(IntEnum):
    """What facts are about, in the order in which a difference is told: causes before what may follow from them."""

    SCALER = 0
    REPLICAS = 1
    """Only told: ranks whose replicas may differ do not vote."""
    NEW = 2
    """Digests of the first values of parameters that GradSync reduces from this step on."""
    ABSENT = 3
    """Parameters that this rank leaves out of the step: frozen since, without a gradient, or in no param group."""
    GROUPS = 4
    """Which param group a parameter is in."""
    COUNTS = 5
    SETTINGS = 6


StepFacts = Mapping[tuple[Kind, Topic], Facts]
"""What one rank does in one step."""
_Told = tuple[Mapping[Kind, tuple[int, ...]], Mapping[int, StepFacts | None]]
"""What a rank tells others: the ranks of its sets, and its facts by the number of the vote."""

_num_votes: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
"""How often each group has voted. Each vote goes into a collective: its ranks have all voted as often."""


class Consensus:
    """Votes on what the ranks of ``groups.grad_stats`` do in a step, and names what differs.

    Args:
        groups: of all members.
        device: of the statistics.

    Attributes:
        is_alone: whether this rank decides alone: then there is nothing to vote on.
    """

    def __init__(self, groups: ParallelGroups, device: torch.device) -> None:
        self._group = groups.grad_stats
        self.is_alone = group_size(self._group) == 1
        experts = None if groups.expert_data_parallel is UNSET else groups.expert_data_parallel
        self._holders: dict[Kind, ProcessGroup | None] = {
            None: self._group,
            False: groups.data_parallel,
            True: experts,
        }
        # A rank votes in three sets at most; what is left of the four bits is for counts of errors.
        exact = 53 if stats_dtype(device) == torch.float64 else 24
        self._limit = max(1, 2 ** (exact - 4) // group_size(self._group))
        self._recent: deque[tuple[int, StepFacts | None]] = deque(maxlen=2)
        self._ranks: dict[Kind, tuple[int, ...]] = {}
        if not self.is_alone:
            self._ranks = {kind: group_ranks(group) for kind, group in self._holders.items() if group is not None}
        # No two sets share these: what ranks of one set exchange must not cancel with the same of another.
        self._sets = {kind: repr((kind, ranks)).encode() for kind, ranks in self._ranks.items()}
        self._digests: dict[tuple[Kind, Topic], tuple[Facts, bytes]] = {}

    def vote(self, facts: StepFacts | None) -> int:
        """Return this rank's number for what it does in this step; all ranks' numbers add up to 0 if they do the same.

        ``facts``: None where this rank has an error, which is counted beside the number.
        """
        if self._group is None or self.is_alone:
            return 0
        number = _num_votes[self._group] = _num_votes.get(self._group, 0) + 1
        self._recent.append((number, facts))
        subjects: dict[Kind, bytes] = {}
        for (kind, topic), own in (facts or {}).items():
            if topic is not Topic.REPLICAS and group_size(self._holders[kind]) > 1:
                subject = subjects.get(kind) or b"%d %s" % (number, self._sets[kind])
                known = self._digests.get((kind, topic))  # facts are seldom others than in the step before
                if known is None or known[0] != own:
                    known = self._digests[kind, topic] = own, digest(own)
                subjects[kind] = b"%s %d %s" % (subject, topic, known[1])
        return sum(
            zero_sum(subject, group_size(self._holders[kind]), group_rank(self._holders[kind]), self._limit)
            for kind, subject in subjects.items()
        )

    def explain(self, error: Exception | None) -> None:
        """Raise on every rank alike: the ``error`` of a rank, else one that names what differs. All call it together.

        Facts are then forgotten: the next step is compared anew.
        """
        mine: _Told = self._ranks, dict(self._recent)
        self._recent.clear()
        every = gathered_facts(mine, error, self._group)
        if not self.is_alone:
            raise _named(every) or UsageError(
                "the ranks disagree about this step (settings, parameters or number of steps), but their facts "
                "about it are already dropped; no parameter has changed: build the optimizer, set options, load state "
                "and call step() identically on every rank"
            )


def _named(every: Mapping[int, _Told]) -> MegascaleError | None:
    """Return the error that names what differs; None if nothing does. ``every``: by rank."""
    for topic in Topic:
        for facts in _compared(every, topic):
            found = list(differences(facts))
            if found:
                return _error(topic, facts, found)
    return None


def _compared(every: Mapping[int, _Told], topic: Topic) -> Iterator[dict[int, Facts]]:
    """Yield the facts of a topic that are to be the same, by rank, for each step and set of ranks.

    A rank that had an error in a step, or has not taken it, says nothing about it. One that is in a set and has none of
    its parameters leaves them all out, but does not say whether they may part.
    """
    for number in sorted({number for _, own in every.values() for number in own}):
        told = {rank: facts for rank, (_, own) in every.items() if (facts := own.get(number)) is not None}
        sets = ((kind, every[rank][0].get(kind, ())) for rank, own in told.items() for kind, _ in own)
        for kind, ranks in dict.fromkeys(sets):
            says = {rank: told[rank].get((kind, topic)) for rank in ranks if rank in told}
            yield {rank: own or {} for rank, own in says.items() if own is not None or topic is not Topic.REPLICAS}


def _error(topic: Topic, facts: Mapping[int, Facts], found: list[Difference]) -> MegascaleError:
    """Return the error that names the first difference, or, of parameters, all of them."""
    if topic is Topic.SCALER:
        return UsageError(
            f"ranks that decide together have other loss scales, or not all of them have one: {found[0]}; give each "
            "the same scaler, load the same scaler state on each, or leave out of groups.grad_stats what trains on "
            "its own"
        )
    names = dict.fromkeys(difference.label for difference in found)
    if topic is Topic.NEW:
        return ArgumentError(
            f"parameters that are new in this step differ between data-parallel ranks: among {listed(names)}; unfreeze "
            "the same ones with the same values on every rank, before GradSync.add(), or pass replicas_may_differ=True"
        )
    if topic is Topic.ABSENT:
        left_out = {rank: [name for name in names if name in own] for rank, own in facts.items()}
        ranks = [rank for rank, absent in left_out.items() if absent]
        others = f" (ranks {', '.join(map(str, ranks))} failed)" if len(ranks) > 1 else ""
        return UsageError(
            f"rank {ranks[0]}: parameter {listed(left_out[ranks[0]])} takes no part in the step on this rank, frozen, "
            "without a gradient or in no param group, but other ranks update it: freeze it, or take it out, on every "
            f"rank alike{others}"
        )
    return UsageError(
        f"ranks that hold the same parameters have other settings: {found[0]}; use the same value on every "
        "rank. If these replicas are different models on purpose, pass replicas_may_differ=True to "
        "MixedPrecisionOptimizer"
    )
