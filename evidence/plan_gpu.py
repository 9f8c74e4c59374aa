"""The plan's memory and seconds for an H200 beside what the card had: two jobs of benchmarks/gpu/cases.py, planned without a GPU.

    python evidence/plan_gpu.py          a minute on two quiet cores; fails where a peak is more than 5 % off, or a phase more than 25 %

Needs what evidence/gpu_programs.py needs: Python 3.12, jax and of its version jax-cuda13-plugin and jax-cuda13-pjrt. Measured: the rows
`steps` of benchmarks/results/suite_nvidia_h200.jsonl.
"""

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "evidence")]

MEASURED = ROOT / "benchmarks/results/suite_nvidia_h200.jsonl"
CASES = {"0.5B": "c48bb8e", "1.5B": "65a5bec"}  # and the commits that they were measured at
MOST, MOST_SECONDS = 0.05, 0.25


def main() -> int:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import common
    from gpu import cases

    from jaxrl.planning import gpu_devices, plan

    if not gpu_devices.compiles("h200"):
        print("jax's CUDA plugin is not installed: pip install 'jaxrl[plan-gpu]'")
        return 2
    rows, off = [], False
    known = {(row["part"], row["name"], row["commit"]): row for row in map(json.loads, MEASURED.read_text().splitlines())}
    for case, commit in CASES.items():
        measured = known[case, "steps", commit]
        c = cases.job(case, "run")
        c.model.config, c.model.init = cases.described(cases.CASES[case].model or case), "random"
        c.run.mode, c.plan.target, c.plan.timeout_seconds = "plan", "h200:1", 3600.0
        found = plan.make(c, search=False)
        own = found["per_device"]
        peak = own["peak_bytes"] / 2**30
        seconds = {"rollout": found["phases"]["rollout"]["seconds"], "update": found["phases"]["update"]["seconds"], "step": found["step_seconds"]}
        ratios = {f"{name}, planned over measured": round(value / measured[name], 3) for name, value in seconds.items()}
        rows.append({"case": case, "peak in": own["peak_in"], "planned, GiB": round(peak, 2), "measured, GiB": measured["peak_gib"],
                     "ratio": round(peak / measured["peak_gib"], 4), **ratios,
                     "temporaries, GiB": round(own["temporaries"][own["peak_in"]] / 2**30, 2),
                     "compiled": "gpu" in found["compile_seconds"]})
        off |= not rows[-1]["compiled"] or abs(rows[-1]["ratio"] - 1) > MOST
        off |= any(abs(ratio - 1) > MOST_SECONDS for ratio in ratios.values())
        print(rows[-1], flush=True)
    common.record("plan_gpu", rows)
    return int(off)


if __name__ == "__main__":
    sys.exit(main())
