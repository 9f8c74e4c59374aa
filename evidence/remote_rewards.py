"""Issue 22, showing 1: faults of services behind rewards: what the user sees, and what comes of it.

    python evidence/remote_rewards.py          # a minute

The cases are those of tests/helpers/service_cases.py, each with a real HTTP server and a real reward worker; each fails where a failure has a score
or enters a statistic, or where something lasts beyond its deadline.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path

sys.path[:0] = [os.path.dirname(__file__), str(Path(__file__).parent.parent / "tests")]

import conftest  # noqa: E402, F401
from common import commit, record, table  # noqa: E402
from helpers.service_cases import CASES, DEADLINE  # noqa: E402


def main() -> int:
    at, rows, failed = commit(), [], 0
    for name in sys.argv[1:] or CASES:
        started = time.monotonic()
        try:
            said, outcome = CASES[name]()
        except BaseException:
            said, outcome, failed = "", "FAILED: " + traceback.format_exc()[-600:], failed + 1
        rows.append({"fault": name, "said": said, "outcome": outcome, "seconds": round(time.monotonic() - started, 1)})
        print(f"\n{name} ({rows[-1]['seconds']} s)\n  {said}\n  -> {outcome}", flush=True)
    print()
    table(["fault", "said", "outcome"], [[r["fault"], r["said"], r["outcome"]] for r in rows])
    record("remote_rewards", {"deadline_seconds": DEADLINE, "cases": rows}, at)
    return failed


if __name__ == "__main__":
    sys.exit(main())
