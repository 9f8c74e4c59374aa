"""The plan, showing 4: jobs on targets that are not here, one that cannot fit, and two published runs beside their figures.

python evidence/plan_targets.py [name ...]      (TPU targets want libtpu: pip install -e '.[plan]')

Seconds are wall time and processor time of the whole plan, compilers included. With names, results are added to the file.
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

from jaxrl.planning import plan  # noqa: E402

LONG = grpo(128, 8, 1024, 15360, 16384)
CASES = {
    "1.5B, H200": ("1.5B", "h200:1", grpo(256, 8, 512, 1024, 16384)),
    "8B at 16k, 128 v5p": ("8B", "v5p:4x4x8", LONG | {"mesh__tp": 4}),
    "8B at 16k, 64 H100": ("8B", "h100:64", LONG | {"mesh__tp": 4}),
    "32B, 256 v5p": ("32B", "v5p:4x8x8", grpo(256, 8, 1024, 7168, 8192, mesh__tp=4)),
    "70B, 512 v5p": ("70B", "v5p:8x8x8", grpo(512, 8, 1024, 7168, 8192, mesh__tp=4)),
    "70B, 8 H100 (cannot fit)": ("70B", "h100:8", grpo(64, 8, 1024, 7168, 8192, mesh__tp=8)),
    "published: MaxText Llama2-7B, 8 H100": ("7B", "h100:8", {
        "run__recipe": "sft", "train__loss_on_prompt": True, "data__prompts_per_step": 16, "data__max_prompt_tokens": 1,
        "rollout__max_new_tokens": 4095, "train__tokens_per_microbatch": 8192, "model__remat": "dots"}),
    "published: prime-rl 0.6B, one H100, 16k": ("0.6B", "h100:1", grpo(1, 8, 8192, 8192, 16384, rollout__engine="vllm",
                                                                     algorithm__old_logprobs="recompute")),
}
PUBLISHED = {
    "published: MaxText Llama2-7B, 8 H100": {"seconds per step": 0.721, "tokens/s/chip": 11360,
                                             "source": "NVIDIA/JAX-Toolbox docs/frameworks/maxtext"},
    "published: prime-rl 0.6B, one H100, 16k": {"tokens/s/chip": 11900, "peak GiB": 12.5,
                                                "source": "prime-rl benchmarks/results/BENCHMARKS.md, trainer only"},
}


def one(model: str, target: str, overrides: dict) -> dict:
    before, start = _processor(), time.monotonic()
    found = plan.make(job(model, target, **overrides))
    found["wall_seconds"], found["processor_seconds"] = round(time.monotonic() - start, 1), round(_processor() - before, 1)
    found["collectives"] = {program: entries[:4] for program, entries in found["collectives"].items()}
    return found


def _processor() -> float:
    return sum(r.ru_utime + r.ru_stime for r in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def main():
    path = RESULTS / "plan_targets.json"
    results = json.loads(path.read_text())["results"] if sys.argv[1:] and path.exists() else {}
    for name in CASES:
        if sys.argv[1:] and not any(a in name for a in sys.argv[1:]):
            continue
        results[name] = one(*CASES[name]) | ({"published": PUBLISHED[name]} if name in PUBLISHED else {})
        record("plan_targets", results)
    show(results)


def show(results: dict) -> None:
    gib = lambda n: f"{n / 2**30:.1f}"  # noqa: E731
    rows = [[name, p["target"], gib(p["per_device"]["peak_bytes"]), gib(p["per_device"]["usable_bytes"]), p["fits"],
             f"{p['step_seconds']:.1f}", f"{p['tokens_per_second_per_chip']:.0f}", f"{p['update_tokens_per_second_per_chip']:.0f}",
             f"{p['mfu']:.0%}", f"{p['communication_share']:.0%}", p["wall_seconds"], p["processor_seconds"]]
            for name, p in results.items()]
    table(["case", "target", "peak GiB", "usable", "fits", "step s", "tok/s/chip", "update tok/s/chip", "MFU", "comm.", "wall s",
           "cpu s"], rows)


if __name__ == "__main__":
    main()
