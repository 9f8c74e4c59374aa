"""The plan's memory for an H200 beside what the card had: two jobs of benchmarks/gpu/cases.py, planned without a GPU.

    python evidence/plan_gpu.py          a minute on two quiet cores; fails where a peak is more than 5 % off

Needs what evidence/gpu_programs.py needs: Python 3.12, jax and of its version jax-cuda13-plugin and jax-cuda13-pjrt. Measured:
peak_bytes of the first light (benchmarks/results/h200_first_light; 1.5B: trace_1.5B.log), of commit 0dfe950, less what the update's
temporaries have lost since then by XLA's account of both programs (docs/measurements/speed.md).
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "evidence")]

MEASURED = {"0.5B": 12.52 - 0.56, "1.5B": 37.74 - 4.27}  # GiB
MOST = 0.05


def main() -> int:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import common
    from gpu import cases

    from jaxrl.planning import gpu_devices, plan

    if not gpu_devices.compiles("h200"):
        print("jax's CUDA plugin is not installed: pip install 'jaxrl[plan-gpu]'")
        return 2
    rows, off = [], False
    for case, measured in MEASURED.items():
        c = cases.job(case, "run")
        c.model.config, c.model.init = cases.described(cases.CASES[case].model or case), "random"
        c.run.mode, c.plan.target, c.plan.timeout_seconds = "plan", "h200:1", 3600.0
        found = plan.make(c, search=False)
        own = found["per_device"]
        peak = own["peak_bytes"] / 2**30
        rows.append({"case": case, "peak in": own["peak_in"], "planned, GiB": round(peak, 2), "measured, GiB": measured,
                     "ratio": round(peak / measured, 4), "temporaries, GiB": round(own["temporaries"][own["peak_in"]] / 2**30, 2),
                     "compiled": "gpu" in found["compile_seconds"]})
        off |= not rows[-1]["compiled"] or abs(peak / measured - 1) > MOST
        print(rows[-1], flush=True)
    common.record("plan_gpu", rows)
    return int(off)


if __name__ == "__main__":
    sys.exit(main())
