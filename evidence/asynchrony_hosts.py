"""Asynchrony, showing 5: two trainer processes, two vLLM servers, one machine, and one server killed on the way.

python evidence/asynchrony_hosts.py          (wants a vLLM that runs here)

tests/helpers/hosts_job.py over two processes of two simulated devices each, twenty steps with max_staleness 2 and partial rollouts; each
process drives a server of its own. After the sixth step the second one's server gets SIGKILL; it is started again and takes
part under the current weights. Then: the ledger of all steps, and that both processes asked for the same.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "evidence"), str(ROOT / "tests")]

from common import commit, record, table  # noqa: E402
from helpers.run_tools import environment, ledger  # noqa: E402

STEPS, KILL, K = 20, 6, 2
OPTIONS = ("mesh.fsdp=2", "mesh.dp=2", "model.config.hidden_size=128", "rollout.engine=vllm", "rollout.prompt_lengths=", f"train.steps={STEPS}",
           "eval.before=False", "eval.every_steps=0", "eval.after=False",
           "rollout.timeout_seconds=900", f"rollout.max_staleness={K}", "rollout.partial=True",
           "checkpoint.export_at_end=False", "checkpoint.every_steps=100", "launch.heartbeat_seconds=120", "rollout.vllm.restarts=3",
           "rollout.vllm.env={'OMP_NUM_THREADS': '1', 'VLLM_CPU_OMP_THREADS_BIND': 'nobind'}")


def steps_done(run: Path) -> int:
    path = run / "metrics.jsonl"
    return sum('"reward/mean"' in line for line in path.read_text().splitlines()) if path.exists() else 0


def servers(run: Path, process: int) -> list[int]:
    """Processes that serve the model folder of one trainer process."""
    folder, found = str(run / "vllm" / f"process_{process}" / "model"), []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and folder in (entry / "cmdline").read_text().split("\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return sorted(found)


def main():
    at = commit()
    with tempfile.TemporaryDirectory() as temporary:
        run, log = Path(temporary) / "run", Path(temporary) / "log"
        command = [sys.executable, "-m", "jaxrl.launch", "--processes=2", "--devices=2", "--", str(ROOT / "tests" / "helpers" / "hosts_job.py"),
                   str(run), *[f"--config.{o}" for o in OPTIONS]]
        with log.open("w") as output:
            job = subprocess.Popen(command, env=environment(), stdout=output, stderr=subprocess.STDOUT)
        while steps_done(run) < KILL:
            assert job.poll() is None, log.read_text()[-4000:]
            time.sleep(0.2)
        killed, at_step = servers(run, 1)[0], steps_done(run)
        os.kill(killed, signal.SIGKILL)
        assert job.wait() == 0, log.read_text()[-4000:]
        steps, text = ledger(run, K), log.read_text()
        lines = [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "reward/mean" in row]
        seen = [json.loads((run / f"seen_{i}.json").read_text()) for i in (0, 1)]
    said = [line.strip() for line in text.splitlines() if "vLLM server" in line]
    assert len(lines) == STEPS and seen[0]["layouts"] == seen[1]["layouts"] and sum(map(len, steps)) == STEPS * 32
    assert any("is started again" in line for line in said), said
    out = {"steps": len(lines), "killed after step": at_step, "samples": sum(map(len, steps)),
           "absent": max(row["rollout/absent_fraction"] for row in lines), "staleness max": max(row["staleness/max"] for row in lines),
           "gap of fresh tokens, largest mean": max(row["gap/stale_0"] for row in lines if "gap/stale_0" in row)}
    table(list(out), [list(out.values())])
    record("asynchrony_hosts", out | {"said": [line.split("jaxrl")[-1][:200] for line in said][:6]}, at)


if __name__ == "__main__":
    main()
