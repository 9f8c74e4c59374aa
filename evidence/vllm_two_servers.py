"""Issue 3, showing 5: two servers and one trainer train together; one server is killed and another joins during the run.

    python evidence/vllm_two_servers.py       # about 4 minutes; wants vLLM

Weights cross by the network transport. The third server is named from the start and begins to answer in the middle.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

import conftest  # noqa: E402, F401
import jax.numpy as jnp  # noqa: E402
from common import commit, record, table  # noqa: E402
from helpers import tiny_job  # noqa: E402
from helpers.rollout_helpers import random_params  # noqa: E402

from jaxrl import models  # noqa: E402
from jaxrl.models.io import hf  # noqa: E402
from jaxrl.rollout.vllm import adapter  # noqa: E402
from jaxrl.rollout.vllm.process import ServerProcess, free_port  # noqa: E402

MODEL = {**tiny_job.MODEL, "num_attention_heads": 1, "num_key_value_heads": 1}
STEPS = 2000  # never reached: the run is asked to stop once the third server has answered ENOUGH requests
ENOUGH = 200
NICE = ["nice", "-n", "19"]


def server(folder: Path, port: int, patient: bool = True) -> ServerProcess:
    """On two cores a server that starts gets no turn beside a busy trainer and a busy server: those are `patient`. One thread
    each: vLLM's threads wait for each other busily, and three servers' on the same two cores never meet."""
    command, env = adapter.launch(tiny_job.get_config(), str(folder / "model"), "float32", 128, port, cpu=True, key="")
    env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return ServerProcess([*NICE * patient, *command], env, folder / f"server_{port}.log")


def steps_done(run: Path) -> int:
    path = run / "metrics.jsonl"
    return sum('"reward/mean"' in line for line in path.read_text().splitlines()) if path.exists() else 0


def wait_for(run: Path, step: int, job) -> None:
    while steps_done(run) < step:
        assert job.poll() is None, job.stdout.read()
        time.sleep(0.1)


def wait_for_answers(run: Path, port: int, job) -> int:
    """Steps done when the server on `port` has answered its first request; returns after ENOUGH of them."""
    first, end = 0, time.monotonic() + 400
    while time.monotonic() < end:
        assert job.poll() is None, job.stdout.read()
        answered = sum(line.endswith(f':{port}"]]}}') for line in (run / "requests.jsonl").read_text().splitlines())
        first = first or (steps_done(run) if answered else 0)
        if answered >= ENOUGH:
            return first
        time.sleep(0.5)
    raise TimeoutError("the third server did not join")


def main() -> int:
    at, folder = commit(), Path(tempfile.mkdtemp(prefix="vllm-two-"))
    model = models.build(MODEL, compute_dtype=jnp.float32, scan_layers=False)
    hf.export(model, random_params(model, 0, 0.1), folder / "model", {**MODEL, hf.SOURCE: {}}, "float32")
    ports = [free_port("127.0.0.1") for _ in range(3)]
    servers = [server(folder, port) for port in ports[:2]]
    run = folder / "run"
    urls = ",".join(f"http://127.0.0.1:{port}" for port in ports)
    job = subprocess.Popen(
        [*NICE, sys.executable, "-m", "jaxrl.main", f"--config={HERE.parent}/tests/helpers/tiny_job.py", f"--config.run.dir={run}",
         "--config.log.console=plain", "--config.model.config.num_attention_heads=1",
         "--config.model.config.num_key_value_heads=1", "--config.rollout.prompt_lengths=", f"--config.rollout.servers={urls}",
         "--config.rollout.vllm.transport=network", "--config.log.trace_requests=true", f"--config.train.steps={STEPS}",
         "--config.optimizer.lr=3e-3", "--config.eval.every_steps=0", "--config.rollout.vllm.setup_seconds=200"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    try:
        wait_for(run, 5, job)
        servers[0].kill()
        killed = steps_done(run)
        servers.append(server(folder, ports[2], patient=False))
        joined = wait_for_answers(run, ports[2], job)
        job.terminate()
        text, _ = job.communicate(timeout=60)
    finally:
        job.kill()
        for one in servers:
            one.stop()
    assert job.returncode == 0, text
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [r for r in rows if "reward/mean" in r]
    traced = [json.loads(line) for line in (run / "requests.jsonl").read_text().splitlines()]
    ids = [t["id"] for t in traced if t["id"].startswith("train/") and int(t["id"].split("/")[1]) < len(rows)]
    answered = {f"server {i}": sum(t["events"][-1][2].endswith(str(port)) for t in traced) for i, port in enumerate(ports)}
    result = {
        "steps": len(rows), "killed_after_step": killed, "joined_after_step": joined, "answered": answered, "lost": len(rows) * 32 - len(set(ids)),
        "doubled": len(ids) - len(set(ids)), "absent_fraction_max": max(r["rollout/absent_fraction"] for r in rows),
        "gap_max": max(r["gap/max"] for r in rows), "reward_first_5": sum(r["reward/mean"] for r in rows[:5]) / 5,
        "reward_last_5": sum(r["reward/mean"] for r in rows[-5:]) / 5,
        "said": [line.replace(str(folder), "...") for line in text.splitlines() if "vLLM" in line],
    }
    table(["figure", "value"], [[k, v] for k, v in result.items() if k != "said"])
    print("\n".join(result["said"]))
    record("vllm_two_servers", result, at)
    shutil.rmtree(folder, ignore_errors=True)
    good = not result["absent_fraction_max"] and not result["lost"] and not result["doubled"] and all(answered.values())
    return 0 if good and result["gap_max"] < 1e-3 and result["reward_last_5"] > result["reward_first_5"] else 1


if __name__ == "__main__":
    sys.exit(main())
