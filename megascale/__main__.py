"""``python -m megascale COMMAND ...``; see :mod:`megascale.cli`."""

import sys

from megascale.cli import main

if __name__ == "__main__":
    sys.exit(main())
