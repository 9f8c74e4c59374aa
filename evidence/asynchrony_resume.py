"""Asynchrony, showings 2 and 3: killed with kill -9 in every phase with answers ahead, and the synchronous run as the limit.

python evidence/asynchrony_resume.py [embedded] [vllm]        (default both; vllm needs a vLLM that runs here)

tests/helpers/tiny_job.py with max_staleness 4 and partial rollouts, a checkpoint at every second step. Each case is killed at one point and
resumed, with the embedded engine and with a real vLLM server of the run's own; then: every sample of every step is used once, in
the order of the data, none older than 4 publications, with the seed of its step; the counters agree with the ledger; what the
checkpoint held finished was used as it was. At the end max_staleness=0 of the commit that brought asynchrony is compared with the
commit before it: parameters and samples are bitwise equal. (Of the commit at hand: tests/recipes/test_asynchrony.py, where answers that
wait for their step's weights make the synchronous run.)
"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "evidence"), str(ROOT / "tests")]

import numpy as np  # noqa: E402
from common import commit, record, table  # noqa: E402
from helpers.run_tools import environment, ledger, run  # noqa: E402

from jaxrl.checkpoint.checkpointer import _read  # noqa: E402
from jaxrl.rl.trajectories import results_from_bytes  # noqa: E402
from jaxrl.rollout import Key  # noqa: E402

STEPS, K = 8, 4
BEFORE, MERGED = "c142990", "18a75a9"
OPTIONS = (f"train.steps={STEPS}", "checkpoint.every_steps=2", "checkpoint.keep=10", "eval.every_steps=3", "eval.max_rows=2",
           f"rollout.max_staleness={K}", "rollout.partial=True", "checkpoint.export_at_end=False")
CASES = [*((f"{phase}.kill9@step=4",) for phase in ("rollout", "reward", "update")),
         *((f"checkpoint.kill9@step=4,phase={phase}",) for phase in ("before", "tensors", "commit", "after")),
         *(("update.kill9@step=5", f"resume.kill9@step=4,phase={phase}") for phase in ("before", "arrays"))]

EMBEDDED = ("rollout.slots=12",)
VLLM = ("rollout.engine=vllm", "rollout.prompt_lengths=", "model.config.num_attention_heads=1", "model.config.num_key_value_heads=1",
        "rollout.vllm.max_requests=4")
ENGINES = {"embedded": (OPTIONS + EMBEDDED, CASES), "vllm": (OPTIONS + VLLM, [CASES[i] for i in (0, 1, 2, 4, 8)])}


def held(checkpoint: Path) -> dict:
    """{(group, sample): (tokens, versions)} of the finished answers in a checkpoint, and its counters."""
    host = json.loads((checkpoint / "host" / "metadata").read_text())["host"]["parts"].get("ahead")
    if host is None:
        return {}, None
    parts = _read(checkpoint, {"ahead": {str(i): np.zeros(n, np.uint8) for i, n in enumerate(host["sizes"])}}, partial=True)
    results = [r for part in parts.arrays["ahead"].values() for r in results_from_bytes(part.tobytes())[0]]
    return {tuple(map(int, r.id.split("/")[2:])): (r.tokens.tolist(), int(r.versions[0]), int(r.versions[-1])) for r in results}, host


def one(folder: Path, engine: str, plan) -> dict:
    options = ENGINES[engine][0]
    died = 0
    for fault in plan:
        # written at once where the case needs it: vLLM's steps are so short that step 4 may come before step 2 is on disk
        written = ("checkpoint.asynchronous=False",) if len(plan) > 1 or engine == "vllm" else ()
        status, _ = run(folder, *options, f"faults.plan={fault!r},", *written)
        died += status == -signal.SIGKILL
    newest = sorted(p for p in (folder / "checkpoints").iterdir() if p.name.isdigit())[-1]
    kept, host = held(newest)
    status, text = run(folder, *options)
    assert status == 0 and died == len(plan), text
    steps, summary = ledger(folder, K), json.loads((folder / "summary.json").read_text())
    rows = {(r["group"], r["sample"]): (r["tokens"], r["version"], r["last_version"]) for own in steps for r in own}
    assert all(rows[key] == answer for key, answer in kept.items())
    assert all(r["seed"] == Key("train", step, r["group"], r["sample"]).seed(0) for step, own in enumerate(steps) for r in own)
    assert summary["samples"] == len(rows) == STEPS * 32
    if host:
        counts = host["state"]["counts"]
        assert counts["used_groups"] == 4 * int(newest.name) and len(host["state"]["groups"]) == counts["admitted_groups"] - counts["used_groups"]
    return {"engine": engine, "case": " then ".join(plan), "resumed_from": int(newest.name), "finished_and_kept": len(kept),
            "asked_for_and_not_used": 8 * len(host["state"]["groups"]) if host else 0, "samples": len(rows)}


def samples(folder: Path) -> str:
    """A hash of all samples: who they are, tokens, log-probs, scores."""
    rows = [[r[name] for name in ("group", "sample", "seed", "tokens", "logprobs", "score", "version")]
            for f in sorted((folder / "rollouts").glob("*.jsonl")) for r in map(json.loads, f.read_text().splitlines())]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def synchronous(folder: Path) -> list[dict]:
    """MERGED with max_staleness=0 and BEFORE, for plain GRPO, with dynamic sampling by refill and with greedy answers beside."""
    for commit_of in (BEFORE, MERGED):
        (folder / commit_of).mkdir()
        archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit_of], capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", str(folder / commit_of)], input=archive, check=True)
    out = []
    for preset in ("grpo", "dapo", "remax"):
        found = {}
        for name in (BEFORE, MERGED):
            root = folder / name
            where = folder / f"{preset}_{name}"
            subprocess.run([sys.executable, "-m", "jaxrl.main", f"--config={root / 'tests/tiny_job.py'}", f"--config.run.dir={where}",
                            f"--config.algorithm.preset={preset}", "--config.log.console=off", "--config.rollout.slots=12"],
                           env=environment() | {"PYTHONPATH": str(root)}, check=True)
            weights = hashlib.sha256((where / "export" / "model.safetensors").read_bytes()).hexdigest()[:16]
            found[name] = {"parameters": weights, "samples": samples(where)}
        assert found[MERGED] == found[BEFORE], found
        out.append({"preset": preset, **found[MERGED]})
    return out


def main():
    at, wanted = commit(), [a for a in sys.argv[1:] if a in ENGINES] or list(ENGINES)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows = []
        for engine in wanted:
            for i, plan in enumerate(ENGINES[engine][1]):
                rows.append(one(folder / f"{engine}{i}", engine, plan))
                print(rows[-1], flush=True)
        same = synchronous(folder)
    table(list(rows[0]), [list(r.values()) for r in rows])
    table(list(same[0]), [list(r.values()) for r in same])
    record("asynchrony_resume", {"max_staleness": K, "cases": rows, "bitwise": [BEFORE, MERGED], "synchronous": same}, at)


if __name__ == "__main__":
    main()
