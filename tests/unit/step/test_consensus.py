"""The vote of a step: its numbers add up to 0 where ranks do the same, and a rank alone has none."""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from megascale import DynamicGradScaler, Lion, MixedPrecisionOptimizer, OptimizerConfig
from megascale.parallel import UNSET
from megascale.step import consensus as module
from megascale.step import facts as facts_module
from megascale.step.consensus import Consensus, Kind, StepFacts
from megascale.step.facts import FactsOfSteps
from megascale.utils.consensus import Facts, differing, digest, explained, zero_sum


class _Group:
    """As much of a process group as a vote asks for."""

    def __init__(self, ranks: list[int], rank: int) -> None:
        self.ranks, self._index = tuple(ranks), ranks.index(rank)

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self._index


@pytest.fixture(scope="module", autouse=True)
def ranks_of_groups() -> Iterator[None]:
    """Torch does not know the ranks of these groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "group_ranks", lambda group: group.ranks)
        yield


def _consensus(rank: int, sets: dict[Kind, list[int]]) -> Consensus:
    made = {kind: _Group(ranks, rank) for kind, ranks in sets.items()}
    groups = SimpleNamespace(
        grad_stats=made[None], data_parallel=made.get(False), expert_data_parallel=made.get(True, UNSET)
    )
    return Consensus(cast(Any, groups))


@st.composite
def _worlds(draw: st.DrawFn) -> list[dict[Kind, tuple[list[int], int]]]:
    """Return, for each rank, the set of ranks of each kind, and what the rank votes for in it."""
    num_ranks = draw(st.integers(2, 9))
    ranks = range(num_ranks)
    parts: dict[Kind, list[int]] = {None: [0] * num_ranks}
    parts |= {kind: draw(st.lists(st.integers(0, 2), min_size=num_ranks, max_size=num_ranks)) for kind in (False, True)}
    votes = {kind: [draw(st.sampled_from([0, 0, 0, 0, 0, 0, 1, 2])) for _ in ranks] for kind in parts}
    sets = {kind: [[one for one in ranks if own[one] == own[rank]] for rank in ranks] for kind, own in parts.items()}
    # Of the third kind not every rank has a set.
    return [
        {kind: (sets[kind][rank], votes[kind][rank]) for kind in parts if not (kind and parts[kind][rank] == 0)}
        for rank in ranks
    ]


def _do_same(world: list[dict[Kind, tuple[list[int], int]]]) -> bool:
    """Whether in each set every rank votes as every other rank of it, asked pair by pair."""
    return all(
        kind not in mine or other not in mine[kind][0] or mine[kind][1] == theirs[kind][1]
        for kind in (None, False, True)
        for mine in world
        for other, theirs in enumerate(world)
    )


def _facts(own: dict[Kind, tuple[list[int], int]]) -> StepFacts:
    return {kind: [{"a": 1.0}, {"b": value}] for kind, (_, value) in own.items()}


def _numbers(world: list[dict[Kind, tuple[list[int], int]]], times: int) -> list[list[int]]:
    """Return the numbers of all ranks, vote by vote."""
    made = [_consensus(rank, {kind: own[0] for kind, own in sets.items()}) for rank, sets in enumerate(world)]
    return [[one.vote(_facts(sets)) for one, sets in zip(made, world, strict=True)] for _ in range(times)]


_SWAPPED_KINDS = [{None: ([0, 1], 0), False: ([0, 1], 1)}, {None: ([0, 1], 1), False: ([0, 1], 0)}]
_SWAPPED_SETS = [
    {None: ([0, 1, 2, 3], 0), False: ([0, 1], 0)},
    {None: ([0, 1, 2, 3], 0), False: ([0, 1], 1)},
    {None: ([0, 1, 2, 3], 0), False: ([2, 3], 1)},
    {None: ([0, 1, 2, 3], 0), False: ([2, 3], 0)},
]


@example(world=_SWAPPED_KINDS, order=random.Random(0))
@example(world=_SWAPPED_SETS, order=random.Random(0))
@given(world=_worlds(), order=st.randoms())
def test_numbers_add_up_to_0_if_and_only_if_each_set_agrees(
    world: list[dict[Kind, tuple[list[int], int]]], order: Any
) -> None:
    """Invariant 12: any ranks, in any sets of holders, and any of them with other facts. Sums are exact in the dtype of
    statistics, whatever the order of additions, beside counts of errors.
    """
    steps = _numbers(world, 3)
    for numbers in steps:
        added = [*numbers, 5, 17]
        order.shuffle(added)
        total = np.float64(0)
        for one in added:
            assert int(np.float64(one)) == one
            total += np.float64(one)
        assert total == sum(numbers) + 22
    found = [sum(numbers) != 0 for numbers in steps]
    assert any(found) == (not _do_same(world))
    assert len(set(found)) == 1


@given(num_ranks=st.integers(2, 64), data=st.data())
def test_no_part_of_the_ranks_adds_up_to_0(num_ranks: int, data: st.DataObject) -> None:
    """Numbers are of small size at any number of ranks, and those of any part of them leave a rest."""
    limit = 2**49 // num_ranks
    numbers = [zero_sum(b"subject", num_ranks, rank, limit) for rank in range(num_ranks)]
    assert sum(numbers) == 0
    assert sum(map(abs, numbers)) < 2 * num_ranks * limit
    part = data.draw(st.sets(st.integers(0, num_ranks - 1), min_size=1, max_size=num_ranks - 1))
    assert sum(numbers[rank] for rank in part) != 0


def test_what_one_vote_misses_by_chance_another_finds() -> None:
    """The numbers of unchanged facts are others in each step: here one step of four misses the difference."""
    pair = [_consensus(rank, {None: [0, 1]}) for rank in (0, 1)]
    for one in pair:
        one._limit = 4
    sums = [sum(one.vote({None: [{"a": rank}]}) for rank, one in enumerate(pair)) for _ in range(40)]
    assert 0 in sums
    assert 20 < sum(map(bool, sums)) < 40
    assert len({pair[0].vote({None: [{"a": 1}]}) for _ in range(40)}) > 3


def test_a_rank_with_an_error_has_no_number_and_counts_its_vote() -> None:
    """Its next number is of the same step as the others'."""
    pair = [_consensus(rank, {None: [0, 1]}) for rank in (0, 1)]
    same: StepFacts = {None: [{"a": 1}]}
    assert pair[0].vote(None) == 0
    assert pair[1].vote(same) != 0
    assert sum(one.vote(same) for one in pair) == 0


def test_votes_are_counted_by_group() -> None:
    """A chain that is built later on one rank votes with the optimizer of a rank that has none."""
    first, other = (_consensus(rank, {None: [0, 1]}) for rank in (0, 1))
    same: StepFacts = {None: [{"a": 1}]}
    first.vote(same)
    other.vote(same)
    groups = SimpleNamespace(grad_stats=other._group, data_parallel=None, expert_data_parallel=UNSET)
    assert first.vote(same) + Consensus(cast(Any, groups)).vote(same) == 0


def test_only_facts_that_have_changed_are_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with the same settings as the one before costs a comparison of dicts."""
    hashed: list[Any] = []

    def counted(facts: Any) -> bytes:
        hashed.append(dict(facts))
        return digest(facts)

    monkeypatch.setattr(module, "digest", counted)
    one = _consensus(0, {None: [0, 1], False: [0, 1]})
    for lr in (0.1, 0.1, 0.2):
        one.vote({False: [{"w": 0}, {"lr": lr}]})
    assert hashed == [{"w": 0}, {"lr": 0.1}, {"lr": 0.2}]


def test_the_order_of_facts_does_not_count() -> None:
    """Ranks may list the same in another order."""
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 2, "b": 1})


def test_a_difference_is_told_with_the_values_of_two_ranks() -> None:
    """The first label with its values, others by their labels; a fact that is missing is nothing; NaN is NaN."""
    facts: dict[int, Facts] = {
        3: {"a": 1, "b": float("nan")},
        5: {"a": 1, "b": float("nan")},
        8: {"c": 2, "b": "0.0", "a": 1},
        9: {"a": 1},
    }
    assert differing(facts) == ["b", "c"]
    assert explained(facts) == "b is nan on rank 3 and 0.0 on rank 8 (different too: c)"
    assert explained({0: {}, 1: {"a": 1}}) == "a is nothing on rank 0 and 1 on rank 1"
    many = {rank: {f"fact {index:02}": rank for index in range(12)} for rank in range(2)}
    assert str(explained(many)).endswith("fact 08 and 3 more)")
    assert explained({0: {"a": 1}, 1: {"a": 1}}) is explained({}) is None


def test_a_rank_that_is_alone_computes_nothing_of_the_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even facts are written down."""
    net = nn.Linear(4, 4)
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(net.named_parameters()))
    for owner, name in ((FactsOfSteps, "of_step"), (Consensus, "vote")):
        monkeypatch.delattr(owner, name)
    net(torch.ones(2, 4)).sum().backward()
    assert optimizer.step().success


class _Recorded(dict[str, Any]):
    """Options of a param group that know which of them were read."""

    def __init__(self, options: dict[str, Any], seen: set[str]) -> None:
        super().__init__(options)
        self._seen = seen

    def __getitem__(self, name: str) -> Any:
        self._seen.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._seen.add(name)
        return super().get(name, default)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (Lion, {}),
        (torch.optim.Muon, {}),
        (torch.optim.RMSprop, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_every_option_that_a_step_reads_is_a_fact(kind: Any, options: dict[str, Any]) -> None:
    """Invariant 12: one that is none could differ between ranks, and nobody would know."""
    net = nn.Linear(4, 4, bias=False).half()
    inner = kind(net.parameters(), lr=0.1, **options)
    optimizer = MixedPrecisionOptimizer(inner, OptimizerConfig(fp16=True), DynamicGradScaler(8.0))
    seen: set[str] = set()
    inner.param_groups[0] = _Recorded(inner.param_groups[0], seen)
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.scale_loss(net(torch.ones(2, 4).half()).float().sum()).backward()
        assert optimizer.step().success
    assert {"params", "lr"} <= seen
    [compared] = optimizer._recipe._facts._options().values()
    facts = {label.removesuffix(" of param group 0") for label in compared}
    assert seen - facts - set(facts_module._NOT_COMPARED) == set()
