"""The fault campaign: injects every fault, and writes a table of them with what the user saw.

python -m tests.reliability.campaign --kills 100 --out benchmarks/results/faults.md
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.pool import RankPool
from tests.reliability import disk_faults, host_faults
from tests.reliability.faults import Fault, table
from tests.reliability.kills import kill_ranks, kill_under_torchrun

TORCHRUN_SHARE = 10
"""One in this many kills is made below torchrun, whose starts take most of the time."""


def families(kills: int, seed: int, folder: Path, ranks: RankPool) -> Iterator[Fault]:
    """Inject all faults; those for which this machine lacks the means are named on stdout."""
    for missing, inject in (
        (disk_faults.why_not(folder), lambda: disk_faults.broken_disks(folder / "disks", ranks)),
        (host_faults.why_not(), lambda: host_faults.cut_link(folder / "hosts")),
    ):
        if missing:
            print(f"left out: {missing}")
        else:
            yield from inject()
    below_torchrun = kills // TORCHRUN_SHARE
    yield from kill_ranks(kills - below_torchrun, seed, folder / "kills", ranks)
    yield from kill_under_torchrun(below_torchrun, seed, folder / "torchrun", ranks)


def main() -> int:
    """Run the campaign. Exit status 1 if a fault did not end as promised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims of kills")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    started, found = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        for fault in families(options.kills, options.seed, Path(folder), RankPool()):
            found.append(fault)
            print(f"{time.monotonic() - started:6.1f} s  {fault}", flush=True)
    if options.out is not None:
        options.out.write_text(table(found))
    broken = [fault for fault in found if not fault.as_promised]
    print(f"{len(found)} faults, {len(broken)} not as promised, {time.monotonic() - started:.0f} s")
    return int(bool(broken))


if __name__ == "__main__":
    raise SystemExit(main())
