"""``python -m megascale.train [config=FILE] [a.b=c ...]``: train a task; see :mod:`megascale.train.config`."""

import sys
from collections.abc import Sequence

from megascale.errors import ArgumentError, UsageError
from megascale.utils.program import run_program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program. Exit status: 0 done, 1 a failure, 2 bad arguments, 128 + signal after a clean stop."""
    return run_program(_train, arguments, prefix="megascale.train", statuses={ArgumentError: 2, UsageError: 2})


def _train(arguments: list[str]) -> int:
    # Here: what is missing of the extra `train` is named without a traceback.
    from megascale.train.config import load_config, usage
    from megascale.train.runtime import Runtime
    from megascale.train.trainer import Trainer

    if not {"-h", "--help"}.isdisjoint(arguments):
        print(usage())
        return 0
    config = load_config(arguments)
    with Runtime(config.threads, config.distributed.timeout) as runtime:
        return Trainer(config, runtime).run()


if __name__ == "__main__":
    sys.exit(main())
