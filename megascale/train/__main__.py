"""``python -m megascale.train [config=FILE] a.b=c ...``: train one of the tasks; see :mod:`megascale.train.config`."""

import sys

from megascale.errors import ArgumentError, MegascaleError, UsageError
from megascale.train.config import load_config, usage
from megascale.train.runtime import Runtime
from megascale.train.trainer import Trainer


def main(arguments: list[str]) -> int:
    """Run the program. Exit status: 0 done, 1 a failure, 2 bad arguments, 128 + signal after a clean stop."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print(usage())
        return 0
    try:
        config = load_config(arguments)
        with Runtime(config.threads) as runtime:
            return Trainer(config, runtime).run()
    except MegascaleError as error:
        print(f"megascale.train: {error}", file=sys.stderr)
        return 2 if isinstance(error, ArgumentError | UsageError) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
