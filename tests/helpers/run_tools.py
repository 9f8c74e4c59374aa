"""Runs of the tiny job in processes of their own, and what makes two runs equal."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def command(run_dir, *overrides, config="tests/helpers/tiny_job.py"):
    return [
        sys.executable,
        "-m",
        "jaxrl.main",
        f"--config={ROOT / config}",
        f"--config.run.dir={run_dir}",
        "--config.log.console=plain",
        *[f"--config.{o}" for o in overrides],
    ]


def environment():
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def run(run_dir, *overrides, config="tests/helpers/tiny_job.py", timeout=300):
    """Runs to the end; returns (exit status, everything printed)."""
    done = subprocess.run(
        command(run_dir, *overrides, config=config), env=environment(), capture_output=True, text=True, timeout=timeout
    )
    return done.returncode, done.stdout + done.stderr


def fingerprint(run_dir) -> dict[str, str]:
    """What must be bitwise equal between an unbroken run and one that was killed and resumed: the final parameters, the
    metrics without time, and the rollouts (order of data, samples, rewards, outcomes) of every step."""
    run_dir = Path(run_dir)
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for line in metrics:
        line.pop("time")
    sha = lambda data: hashlib.sha256(data).hexdigest()[:16]  # noqa: E731
    out = {f"export/{p.name}": sha(p.read_bytes()) for p in sorted((run_dir / "export").glob("*.safetensors"))}
    out |= {f"rollouts/{p.name}": sha(p.read_bytes()) for p in sorted((run_dir / "rollouts").glob("*.jsonl"))}
    return out | {"metrics": sha(json.dumps(metrics, sort_keys=True).encode())}


def ledger(run_dir, max_staleness, sync_every=1):
    """Rows of the rollouts of every step, [[row, ...], ...], after checking them as a ledger: every sample is used once, groups in the
    order of the data without a gap, admitted <= first version <= last version <= the step's own, none older than the bound."""
    steps = [[json.loads(line) for line in f.read_text().splitlines()] for f in sorted((Path(run_dir) / "rollouts").glob("*.jsonl"))]
    keys = [(row["group"], row["sample"]) for rows in steps for row in rows]
    assert len(set(keys)) == len(keys) and keys == sorted(keys)
    groups = sorted({group for group, _ in keys})
    assert groups == list(range(len(groups)))
    for step, rows in enumerate(steps):
        for row in rows:
            assert row["admitted"] <= row["version"] <= row["last_version"] <= step or row["version"] == -1
            assert row["version"] == -1 or step // sync_every - row["version"] // sync_every <= max_staleness
    return steps
