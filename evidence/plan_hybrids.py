"""Plans of Qwen3.5's text models on targets that are not here.

    python evidence/plan_hybrids.py [NAME ...]      (minutes each; the TPU wants libtpu: pip install -e '.[plan]')

GRPO of 128 prompts of 1,024 tokens a step in groups of 8, completions of 3,072 tokens, the embedded sampler, the whole model trains; of the
largest the trainer alone, since a copy of its weights does not fit on the devices of one host.
With names, results are added to evidence/results/plan_hybrids.json, each with its commit.
"""

import json
import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from common import RESULTS, commit, record  # noqa: E402
from plan_shapes import grpo  # noqa: E402
from plan_targets import one, show  # noqa: E402

JOB = grpo(128, 8, 1024, 3072, 8192, rollout__engine="jax", plan__timeout_seconds=3600)
HOST = {"optimizer__offload": True}
CASES = {
    "4B, one H200": ("3.5-4B", "h200:1", JOB | {"rollout__slots": 64}),
    "4B, one H100": ("3.5-4B", "h100:1", JOB | HOST | {"rollout__slots": 32, "train__tokens_per_microbatch": 4096}),
    "27B, 8 H100": ("3.5-27B", "h100:8", JOB | HOST | {"mesh__tp": 4, "rollout__slots": 64, "train__tokens_per_microbatch": 4096}),
    "35B-A3B, 8 H100": ("3.5-35B-A3B", "h100:8", JOB | HOST | {"mesh__ep": 8}),
    "35B-A3B, 16 H100": ("3.5-35B-A3B", "h100:16", JOB | HOST | {"mesh__ep": 8}),
    "35B-A3B, 16 v5p": ("3.5-35B-A3B", "v5p:16", JOB | {"mesh__ep": 4}),
    "397B-A17B, 128 H100": ("3.5-397B-A17B", "h100:128", JOB | HOST | {"mesh__ep": 8, "plan__part": "training"}),
}


def main():
    path, at = RESULTS / "plan_hybrids.json", commit()
    results = json.loads(path.read_text())["results"] if path.exists() else {}
    for name in sys.argv[1:] or CASES:
        results[name] = one(*CASES[name]) | {"commit": at}
        record("plan_hybrids", results, at)
    show(results)


if __name__ == "__main__":
    main()
