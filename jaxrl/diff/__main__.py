"""The program of `jaxrl diff RUN_A RUN_B`."""

import sys

from jaxrl.__main__ import run
from jaxrl.diff import main

if __name__ == "__main__":
    sys.exit(run(main))
