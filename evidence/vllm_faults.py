"""Issue 3, showing 4: faults of real vLLM servers: what the user sees, and what comes of it.

    python evidence/vllm_faults.py            # about 8 minutes; wants vLLM (launch/install_vllm_cpu.sh) and mount rights

The cases are those of tests/helpers/vllm_cases.py; each fails where an answer is lost or doubled, a deadline is missed, or a
process stays behind.
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
from helpers.vllm_cases import CASES  # noqa: E402


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
    table(["fault", "outcome", "seconds"], [[r["fault"], r["outcome"], r["seconds"]] for r in rows])
    record("vllm_faults", rows, at)
    return failed


if __name__ == "__main__":
    sys.exit(main())
