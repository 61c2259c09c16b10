"""The pool of ranks survives what failing tests do to it."""

import gc
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import RankFailure, RankPool


def _sum_over_ranks(start: float) -> torch.Tensor:
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return total


def _half_tensor() -> dict[str, torch.Tensor]:
    return {"half": torch.full((3,), dist.get_rank(), dtype=torch.float16)}


def _raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise LookupError("only rank 1 fails")
    _sum_over_ranks(0.0)


def _die_on_rank_0() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    _sum_over_ranks(0.0)


def _take_the_signal() -> None:
    """As a library that handles SIGUSR1, and leaves Python's default behind."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _walks_through_its_module() -> bool:
    return any(thing is globals() for thing in gc.get_objects())


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def _unpicklable() -> object:
    return lambda: None


def _group_is_up() -> bool:
    return dist.is_initialized()


def _assert_pool_works(ranks: RankPool) -> None:
    assert [total.item() for total in ranks.run(2, _sum_over_ranks, 1.0)] == [3.0, 3.0]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_in_rank_order(ranks: RankPool, world_size: int) -> None:
    """Each rank's result, tensors with their dtype, at every world size that tests use."""
    results = ranks.run(world_size, _half_tensor)
    assert [result["half"].tolist() for result in results] == [[rank] * 3 for rank in range(world_size)]
    assert {result["half"].dtype for result in results} == {torch.float16}


def test_processes_stay_up(ranks: RankPool) -> None:
    """Starting ranks costs seconds: two calls share the same processes."""
    before = ranks.pids(2)
    _assert_pool_works(ranks)
    assert ranks.pids(2) == before


def test_exception_on_one_rank_while_the_others_wait(ranks: RankPool) -> None:
    """The failing test shows the traceback, and where the other rank waits; the next call works."""
    with pytest.raises(RankFailure) as failure:
        ranks.run(2, _raise_on_rank_1)
    errors = failure.value.errors
    assert set(errors) == {0, 1}
    assert "LookupError: only rank 1 fails" in str(errors[1])
    assert "all_reduce" in str(errors[0])
    _assert_pool_works(ranks)


def test_killed_rank_is_reported_at_once(ranks: RankPool) -> None:
    """A rank that dies does not leave the call waiting for gloo's timeout; the next call works."""
    with pytest.raises(RankFailure) as failure:
        ranks.run(2, _die_on_rank_0)
    assert "exit code -9" in str(failure.value.errors[0])
    _assert_pool_works(ranks)


def test_call_that_takes_too_long(ranks: RankPool) -> None:
    """A hang is a failure that shows where each rank is, whoever took the signal before; the next call works."""
    ranks.run(1, _take_the_signal)
    with pytest.raises(RankFailure) as failure:
        ranks.run(1, _sleep, 600.0, timeout=0.5)
    assert "in _sleep" in str(failure.value.errors[0])
    assert ranks.run(1, _sum_over_ranks, 2.0)[0].item() == 2.0


def test_result_that_cannot_be_sent(ranks: RankPool) -> None:
    """A result that does not pickle fails its test with the reason."""
    with pytest.raises(RankFailure, match="pickle"):
        ranks.run(1, _unpicklable)


def test_fresh_ranks_can_be_killed(ranks: RankPool) -> None:
    """`spawn` gives processes of a test's own, whose ends it can look at."""
    with ranks.spawn(2, _sleep, 600.0, process_group=False) as fresh:
        assert len(set(fresh.pids)) == 2
        fresh.kill(1)
        sleeping, killed = fresh.outcomes(timeout=30.0, grace=0.2)
    assert "did not return" in str(sleeping.error)
    assert "exit code -9" in str(killed.error)


def test_fresh_ranks_return_results(ranks: RankPool) -> None:
    """Without a process group the function finds torch.distributed down."""
    with ranks.spawn(1, _group_is_up, process_group=False) as fresh:
        assert fresh.results() == [False]


def test_what_a_module_is_made_of_is_left_out_of_walks_through_all_objects(ranks: RankPool) -> None:
    """The collector and `gc.get_objects` pass over modules that calls have imported, which grow with every file."""
    assert ranks.run(2, _walks_through_its_module) == [False, False]
