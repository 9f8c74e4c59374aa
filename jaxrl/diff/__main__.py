"""The command `python -m jaxrl.diff RUN_A RUN_B`."""

import sys

from jaxrl.diff import main

if __name__ == "__main__":
    sys.exit(main())
