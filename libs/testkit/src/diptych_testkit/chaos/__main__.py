"""`python -m diptych_testkit.chaos`."""

import sys

from diptych_testkit.chaos.options import parse
from diptych_testkit.chaos.running import main

if __name__ == "__main__":
    sys.exit(main(parse(sys.argv[1:])))
