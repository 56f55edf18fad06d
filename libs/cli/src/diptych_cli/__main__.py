"""`python -m diptych_cli`, and the console script `diptych`."""

import sys

from diptych_cli.commands import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
