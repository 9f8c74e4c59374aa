"""Models of experts on targets that are not here: plans with mesh.ep, and what stands for layouts with pipelines.

python evidence/plan_experts.py [name ...]      (TPU targets want libtpu: pip install -e '.[plan]')

Per pass and layer: what one device is sent over ep (the tokens) and over fsdp (the weights), from the compiled program.
`exposed`: seconds of all communication of the update beside those of computing, none hidden. With names, results are added to the file.
"""

import json
import os
import resource
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from common import RESULTS, record, table  # noqa: E402
from plan_shapes import grpo, job  # noqa: E402

from jaxrl.planning import compiling, plan  # noqa: E402

SERVED = {"rollout__engine": "vllm", "rollout__placement": "colocated"}
REST = {"mesh__roles": {"policy": {"rest": "host"}}}
ALONE = {"rollout__engine": "vllm", "plan__part": "training"}
CASES = {
    "30B-A3B, 16 H100": ("30B-A3B", "h100:16", grpo(64, 16, 1024, 7168, 16384, mesh__ep=8, **SERVED, rollout__vllm__tensor_parallel=4,
                                                    rollout__vllm__memory_fraction=0.4)),
    "30B-A3B, 64 v5p": ("30B-A3B", "v5p:4x4x4", grpo(128, 16, 1024, 7168, 16384, mesh__ep=4)),
    "235B-A22B, 256 H100": ("235B-A22B", "h100:256", grpo(512, 16, 1024, 7168, 16384, mesh__ep=8, **SERVED, **REST,
                                                          rollout__vllm__tensor_parallel=8, rollout__vllm__memory_fraction=0.85)),
    "235B-A22B, 256 v5p": ("235B-A22B", "v5p:8x8x4", grpo(512, 16, 1024, 7168, 16384, mesh__ep=4, **ALONE)),
    "235B-A22B, 128 H100": ("235B-A22B", "h100:128", grpo(256, 16, 1024, 7168, 16384, mesh__ep=8, **ALONE)),
    "671B-A37B, 1024 H100": ("671B", "h100:1024", grpo(512, 16, 1024, 7168, 16384, mesh__ep=8, **ALONE)),
    "gpt-oss-120b, 64 H100": ("gpt-oss-120b", "h100:64", grpo(256, 16, 1024, 7168, 16384, mesh__ep=8, **ALONE)),
}


def _processor() -> float:
    return sum(r.ru_utime + r.ru_stime for r in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def over(found, group):
    """Bytes that a device sends in an update's microbatch to a group of so many devices."""
    return sum(c["sent"] for c in found["collectives"]["update"] if c["group"] == group)


def one(name: str) -> dict:
    """For GPUs without the TPU compiler's cross-check, which plan_targets.py shows."""
    model, target, overrides = CASES[name]
    asked, compiling.has_libtpu = compiling.has_libtpu, (lambda: False) if target.startswith("h100") else compiling.has_libtpu
    before, start = _processor(), time.monotonic()
    try:
        found = plan.make(job(model, target, plan__timeout_seconds=900.0, **overrides), search=False)
    finally:
        compiling.has_libtpu = asked
    found["wall_seconds"], found["processor_seconds"] = round(time.monotonic() - start, 1), round(_processor() - before, 1)
    found["sent_over"] = {str(size): over(found, size) for size in {c["group"] for c in found["collectives"]["update"]}}
    found["collectives"] = {"update": found["collectives"]["update"][:8]}
    found.pop("asynchrony", None)
    return found


def row(name, p):
    gib, update = (lambda n: f"{n / 2**30:.1f}"), p["phases"]["update"]
    mesh = " x ".join(f"{a} {n}" for a, n in p["mesh"].items() if n > 1)
    return [name, mesh, gib(p["per_device"]["peak_bytes"]), p["per_device"]["peak_in"], gib(p["per_device"]["usable_bytes"]),
            "yes" if p["fits"] else "no", f"{update['seconds']:.0f}", f"{update['serial'] - update['network']:.0f}",
            f"{update['network']:.0f}", f"{p['update_tokens_per_second_per_chip']:,.0f}", f"{p['mfu']:.0%}", p["wall_seconds"],
            p["processor_seconds"]]


def main():
    path = RESULTS / "plan_experts.json"
    results = json.loads(path.read_text())["results"] if sys.argv[1:] and path.exists() else {}
    for name in CASES:
        if sys.argv[1:] and not any(a in name for a in sys.argv[1:]):
            continue
        results[name] = one(name)
        print(name, results[name]["reason"] or "fits", flush=True)
        record("plan_experts", results)
    table(["job", "mesh", "peak GiB", "in", "usable", "fits", "update s", "computing", "communication", "update tokens/s/chip", "MFU",
           "wall s", "cpu s"], [row(name, p) for name, p in results.items()])


if __name__ == "__main__":
    main()
