"""Episodes of a model with recurrent layers: which share of later turns goes on in its slot.

    python evidence/hybrid_turns.py [--steps=40] [--prefill]     # some ten minutes on two cores, warm start included

configs/env.py:calc and its warm start with the layers of configs/sft_hybrid.py (three recurrences, one attention), seed 0. No stop strings.
The config has rollout.compaction=False, with which every turn is prefilled (--prefill); without that argument it is True, the default.
Counts the later turns that the embedded sampler was asked for, of training and evaluation, and those that ran their new tokens alone;
the others were prefilled whole. Writes evidence/results/hybrid_turns.json. Exits with 1 below 80 % of turns that go on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")
from common import RESULTS, record, table  # noqa: E402

import jaxrl  # noqa: E402
from jaxrl.config import load_config  # noqa: E402
from jaxrl.rollout.embedded import EmbeddedEngine  # noqa: E402


def get_config(arg=None):
    """configs/env.py:calc, or with arg="warm" its warm start, with another model."""
    if arg != "warm":
        job = load_config("env:calc")
        job.run.warm_start = f"{Path(__file__).resolve()}:warm"
        return job
    job, hybrid = load_config("env_sft:calc"), load_config("sft_hybrid")
    sizes = {name: job.model.config[name] for name in ("vocab_size", "max_position_embeddings", "rope_theta")}
    job.model.config = {**hybrid.model.config.to_dict(), **sizes}
    return job


def counted(steps: int, prefill: bool, folder: str) -> dict:
    """Runs the job; returns its accuracies, the gap, and the counts of its sampler."""
    later, totals = Counter(), Counter()
    submit, close = EmbeddedEngine.submit, EmbeddedEngine.close

    def asked(self, requests):
        later[id(self)] += sum(bool(request.after) for request in requests)
        submit(self, requests)

    def closed(self):
        if not self._closed:
            totals.update({**self.counters(), "later_turns": later.pop(id(self), 0)})
        close(self)

    job = load_config(f"{Path(__file__).resolve()}", {"run.dir": f"{folder}/run", "train.steps": steps, "rollout.compaction": not prefill})
    with mock.patch.multiple(EmbeddedEngine, submit=asked, close=closed):
        summary = jaxrl.train(job)
    lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text("utf-8").splitlines()]
    gaps = [line["gap/mean"] for line in lines if "gap/mean" in line]
    names = ("requests", "later_turns", "extended_prompts", "extended_tokens", "prefilled_tokens", "parked", "parked_past", "evicted")
    return {"steps": steps, "before": summary["eval_before"]["accuracy"], "after": summary["eval_after"]["accuracy"],
            "gap_mean": sum(gaps) / len(gaps), **{name: totals[name] for name in names},
            "share": totals["extended_prompts"] / totals["later_turns"]}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prefill", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = counted(args.steps, args.prefill, folder)
    table(list(found), [[round(x, 9) for x in found.values()]])
    path = RESULTS / "hybrid_turns.json"
    results = json.loads(path.read_text("utf-8"))["results"] if path.exists() else {}
    record("hybrid_turns", results | {"prefilled" if args.prefill else "kept": found})
    return int(not args.prefill and found["share"] < 0.8)


if __name__ == "__main__":
    sys.exit(main())
