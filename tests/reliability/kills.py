"""SIGKILL of one rank, or of all, at random moments: the run goes on to the bits of one that was never killed."""

import contextlib
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megascale import MixedPrecisionOptimizer
from megascale.checkpoint import load
from megascale.checkpoint.directory import complete, named, unfinished_saves
from megascale.errors import CheckpointError
from tests.distributed.test_distributed_optimizer import INNER, config_of, net, scaler
from tests.jobs import Job, job, wait_until
from tests.pool import GLOO_TIMEOUT_S, Outcome, RankPool
from tests.reliability.faults import Fault
from tests.reliability.tiny_run import UPDATE_S, How, train

RANKS = 2
KILLS_A_RUN = 2
KILLS_BELOW_TORCHRUN = 3
"""The same, where each costs a new start of Python."""
SURVIVES_S = GLOO_TIMEOUT_S + 20.0
"""By then the rank that was not killed has ended: gloo waits for the rest of a message until the group's timeout."""
LOST = re.compile(r"^(?:[\w.]+\.)?((?:Runtime|Checkpoint|Dist\w*)Error): ", re.MULTILINE)
"""The last line of a survivor's traceback: the backend's error, or that of a save."""


UPDATING = "updating in host memory"


def kill_ranks(
    kills: int, seed: int, folder: Path, ranks: RankPool, *, in_host_memory: bool = False
) -> Iterator[Fault]:
    """Kill ``kills`` times in runs of forked ranks, half of them with saves in the background. Yields each kill.

    ``in_host_memory``: main params live there, and only kills in the middle of a background update count; the end is
    that of runs without.
    """
    dice = random.Random(seed)
    ends, seconds = {}, {}
    for asynchronous in (False, True):
        place, how = folder / f"whole_{asynchronous}", How(asynchronous, in_host_memory)
        [(_, ends[asynchronous]), _] = _run(ranks, place, how)
        seconds[asynchronous] = time.time() - (place / "begun_0").stat().st_mtime
        if in_host_memory:
            [(_, ends[asynchronous]), _] = _run(ranks, folder / f"plain_{asynchronous}", How(asynchronous))
    run = 0
    while kills > 0:
        how = How(run % 2 == 1, in_host_memory)
        place = folder / f"run_{run}"
        found: list[Fault] = []
        while len(found) < min(KILLS_A_RUN, kills):
            fault = _killed(ranks, place, how, dice, seconds[how.asynchronous])
            if fault is None:  # it was at its end before
                break
            found.append(fault)
        outcome = _run(ranks, place, how)
        broken = _broken(place, outcome[0][1] == ends[how.asynchronous])
        for kill in found:
            seen = f"{kill.seen}; goes on, {broken or 'same bits'}"
            yield replace(kill, seen=seen, as_promised=kill.as_promised and not broken)
        kills -= sum(UPDATING in kill.fault or not in_host_memory for kill in found)
        run += 1


def _broken(place: Path, has_same_bits: bool) -> str:
    """Return which promises of the end are broken, nothing where all are kept."""
    remains = sorted(entry.name for entry in place.iterdir() if entry.name.startswith("."))
    told = {"OTHER BITS": not has_same_bits, f"LEFT BEHIND: {remains}": remains, "NOT ALL LOAD": not _all_load(place)}
    return ", ".join(name for name, is_so in told.items() if is_so)


def _run(ranks: RankPool, place: Path, how: How) -> list[tuple[int, str]]:
    with ranks.spawn(RANKS, train, place, how) as fresh:
        return fresh.results(timeout=60)


def _killed(ranks: RankPool, place: Path, how: How, dice: random.Random, seconds: float) -> Fault | None:
    """Start the run, kill at a random moment, wait for the others' end. Returns None if the run was faster."""
    victims = dice.choice([[0], [1], [0, 1]])
    for mark in place.glob("begun_*"):
        mark.unlink()
    with ranks.spawn(RANKS, train, place, how) as fresh:
        while len(list(place.glob("begun_*"))) < RANKS:
            time.sleep(0.01)
        time.sleep(dice.uniform(0.05, 0.95) * seconds)
        marks = [place / f"updating_{victim}" for victim in victims]
        if how.in_host_memory:
            _wait_for_one(marks)
            time.sleep(dice.uniform(0.0, UPDATE_S / 2))
        doing = _doing(place, how.asynchronous)
        for victim in victims:
            fresh.kill(victim)
        outcomes = fresh.outcomes(timeout=SURVIVES_S, grace=SURVIVES_S)
    if not any("exit code -9" in str(outcomes[victim].error) for victim in victims):
        return None
    if any(map(Path.exists, marks)):  # the dead remove no file
        doing += f", {UPDATING}"
    survivors = [outcome for outcome in outcomes if outcome.rank not in victims]
    who = "all ranks" if len(victims) == RANKS else "a rank"
    held = all(_ended(outcome) for outcome in survivors) and _all_load(place)
    seen = "; ".join(_seen(outcome) for outcome in survivors) or "the processes are gone"
    return Fault("SIGKILL", f"{who}, while {doing}", seen, held)


def _wait_for_one(marks: Sequence[Path]) -> None:
    """Wait until one of these files is there, up to a second: the run may be at its end."""
    until = time.monotonic() + 1.0
    while time.monotonic() < until and not any(map(Path.exists, marks)):
        time.sleep(0.001)


def _doing(place: Path, asynchronous: bool) -> str:
    if unfinished_saves(place):
        return "saving in the background" if asynchronous else "saving"
    return "training" if named(place) else "training, before the first checkpoint"


def _ended(outcome: Outcome[object]) -> bool:
    """Return whether a survivor has finished, or ended with an error of the backend or of a save."""
    return outcome.error is None or LOST.search(outcome.error) is not None


def _seen(outcome: Outcome[object]) -> str:
    if outcome.error is None:
        return "the other had finished"
    told = LOST.findall(outcome.error)
    return f"{told[-1]} on the other" if told else outcome.error


def _all_load(place: Path) -> bool:
    """Return whether every folder with a checkpoint's name is whole, and loads."""
    for folder in named(place).values():
        module = net()
        optimizer = MixedPrecisionOptimizer(
            INNER["adamw"](module), config_of(module.first.weight.dtype), scaler(module.first.weight.dtype)
        )
        try:
            load(folder, module, optimizer)
        except CheckpointError:
            return False
    return complete(place).keys() == named(place).keys()


def kill_under_torchrun(kills: int, seed: int, folder: Path, ranks: RankPool) -> Iterator[Fault]:
    """Kill a rank again and again below torchrun, which starts all anew: the end is that of forked, unharmed ranks."""
    dice = random.Random(seed)
    end = [digest for _, digest in _run(ranks, folder / "whole", How())] if kills else []
    run_number = 0
    while kills > 0:
        place = folder / f"torchrun_{run_number}"
        mine = min(KILLS_BELOW_TORCHRUN, kills)
        with _torchrun(place, mine) as run:
            done = _kill_each_attempt(run, mine, dice)
            output = run.finish()
        same = [(place / f"end_{rank}").read_text() for rank in range(RANKS)] == end
        seen = f"torchrun starts all ranks again; {'goes on, same bits' if same else 'OTHER BITS'}"
        yield from [Fault("SIGKILL", "a rank below torchrun", seen, same and "resumed at" in output)] * done
        kills -= done
        run_number += 1


def _torchrun(place: Path, restarts: int) -> contextlib.AbstractContextManager[Job]:
    place.mkdir(parents=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [*launcher, "--max-restarts", str(restarts), "-m", "tests.reliability.tiny_run", str(place)]
    return job([sys.executable, *command], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


def _kill_each_attempt(run: Job, kills: int, dice: random.Random) -> int:
    """Kill one rank of each of torchrun's attempts at a random moment. Returns how many were killed."""
    done = 0
    for attempt in range(1, kills + 1):
        wait_until(lambda attempt=attempt: run.output.count("begun") >= attempt or run.status is not None, run)  # type: ignore[misc]
        time.sleep(dice.uniform(0.0, 0.6))
        victim = run.ranks().get(dice.randrange(RANKS))
        if victim is None:
            break
        os.kill(victim, signal.SIGKILL)
        done += 1
    return done
