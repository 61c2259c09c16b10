"""Which mutants of the core lives find: see tests/life.py and tests/mutants.py.

    python -m tests.mutants_of_life --sample 42 --seed 1 --out benchmarks/results/mutants_of_life.md

Mutants are drawn until as many are found as ``--sample`` says whose statement the lives execute. Each has one program,
``python -m tests.life``, with a time limit: what outlasts it is found, too.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutants import Copy, core, mutants_of


def lived(copy: Copy, given: argparse.Namespace, environment: dict[str, str]) -> str:
    """Return what the lives say of the copy: "" where nothing is wrong, else the last line that names it."""
    program = [sys.executable, "-W", "ignore", "-m", "tests.life", "--number", "0", "--lives", str(given.lives)]
    environment = os.environ | {"PYTHONPATH": str(copy.folder), "OMP_NUM_THREADS": "1"} | environment
    try:
        done = subprocess.run(
            [*program, "--ranks", str(given.ranks)],
            cwd=copy.folder,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=given.limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "the time limit"
    lines = [line.strip() for line in done.stderr.splitlines() if "Error" in line] or ["an error"]
    return "" if done.returncode == 0 else lines[-1][-200:]


def main() -> None:
    """Try a sample, print each outcome, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("sample", 40), ("seed", 1), ("lives", 6), ("ranks", 2), ("limit", 300)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    everything = [mutant for path in core() for mutant in mutants_of(path)]
    drawn = random.Random(given.seed).sample(everything, 5 * given.sample)
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        with copy.marking(drawn) as environment:
            told = lived(copy, given, environment)
        if told:
            sys.exit(f"the lives do not run without a mutant: {told}")
        met = [drawn[number] for number in sorted(int(path.name) for path in copy.marks.iterdir())]
        lines = []
        for mutant in met[: given.sample]:
            with copy.applied(mutant):
                told = lived(copy, given, {})
            lines.append(f"- {f'found: {told}' if told else 'NOT FOUND'}: {mutant}")
            print(lines[-1], flush=True)
    found = sum("NOT FOUND" not in line for line in lines)
    summary = f"{found} of {len(lines)} mutants found; of {len(drawn)} drawn the lives execute {len(met)}."
    print(summary)
    if given.out is not None:
        command = f"`python -m tests.mutants_of_life {' '.join(sys.argv[1:])}`"
        given.out.write_text(
            "\n".join(["# Mutants of the core that lives find", "", command, "", summary, "", *lines, ""])
        )


if __name__ == "__main__":
    main()
