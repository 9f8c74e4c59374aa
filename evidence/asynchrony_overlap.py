"""Asynchrony, showing 1: a step takes what the longer of generation and training takes, not their sum.

python evidence/asynchrony_overlap.py [embedded] [vllm]        (default both; vllm needs a vLLM that runs here)

tests/helpers/tiny_job.py, ten steps. Training is made to wait TRAIN seconds at every update (faults.plan: update.sleep), as if it ran on
devices of its own. *embedded*: the sampler on a second simulated device, slowed by PAUSE seconds for every decode step. *vllm*: one
real server on the CPU with one sequence at once. Each with max_staleness=0, which gives the seconds of generation and of training,
with 2 and partial rollouts, and with 2 without them. Medians of the steps after the first four. The ledger of every run is
checked.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "evidence"), str(ROOT / "tests")]

from common import commit, record, table  # noqa: E402
from helpers.run_tools import environment, ledger  # noqa: E402

STEPS, WARM, K = 10, 4, 2
TRAIN, PAUSE = 2.5, 0.05
OPTIONS = {
    "embedded": {"mesh.roles": {"policy": {"devices": "0"}, "sampler": {"devices": "1"}}, "rollout.slots": 8, "rollout.decode_steps": 4,
                 "rollout.compaction": False},
    "vllm": {"rollout.engine": "vllm", "rollout.prompt_lengths": (), "model.config.num_attention_heads": 1, "model.config.num_key_value_heads": 1,
             "rollout.vllm.max_requests": 1},
}


def train(folder: str, engine: str, k: str, partial: str) -> None:
    """One run, in a process of its own."""
    import jax

    if engine == "embedded":
        jax.config.update("jax_num_cpu_devices", 2)
        from jaxrl.rollout.embedded import EmbeddedEngine

        decode = EmbeddedEngine._decode

        def slowed(self):
            before = self._counts["decode_steps"]
            decode(self)
            time.sleep(PAUSE * (self._counts["decode_steps"] - before))

        EmbeddedEngine._decode = slowed
    from helpers import tiny_job

    import jaxrl

    c = tiny_job.get_config()
    c.run.dir, c.log.console, c.train.steps = folder, "off", STEPS
    c.eval.sets, c.checkpoint.every_steps, c.checkpoint.export_at_end = (), 0, False
    c.rollout.max_staleness, c.rollout.partial = int(k), partial == "True"
    c.faults.plan = tuple(f"update.sleep@step={s},seconds={TRAIN}" for s in range(1, STEPS + 1))
    for name, value in OPTIONS[engine].items():
        *groups, option = name.split(".")
        node = c
        for group in groups:
            node = node[group]
        node[option] = value
    jaxrl.train(c)


def seconds(folder: Path) -> dict[str, float]:
    """Medians over the steps after WARM: of the whole step, of waiting for answers, of training."""
    lines = [json.loads(line)["time"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [t for t in lines if "update" in t][WARM:]
    median = lambda *names: statistics.median(sum(t.get(n, 0.0) for n in names) for t in steps)  # noqa: E731
    return {"step": median("step"), "generate": median("rollout", "reward"), "train": median("score", "update", "publish")}


def main():
    wanted, at, rows = [a for a in sys.argv[1:] if a in OPTIONS] or list(OPTIONS), commit(), []
    with tempfile.TemporaryDirectory() as temporary:
        for engine in wanted:
            found = {}
            for k, partial in ((0, False), (K, False), (K, True)):
                folder = Path(temporary) / f"{engine}_{k}_{partial}"
                subprocess.run([sys.executable, __file__, "--train", str(folder), engine, str(k), str(partial)], env=environment(), check=True)
                found[k, partial], steps = seconds(folder), ledger(folder, k)
                if k == 0:
                    assert all(r["admitted"] == r["version"] == r["last_version"] == s for s, own in enumerate(steps) for r in own)
                assert partial or all(r["version"] == r["last_version"] for own in steps for r in own)
                assert sum(map(len, steps)) == STEPS * 32
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            generate, training = found[0, False]["generate"], found[0, False]["train"]
            ahead = found[K, True]["step"]
            rows.append({"engine": engine, "generate": generate, "train": training, "synchronous step": found[0, False]["step"],
                         f"step with max_staleness={K}": ahead, "of max(generate, train)": ahead / max(generate, training),
                         "of their sum": ahead / (generate + training), "without partial": found[K, False]["step"],
                         "staleness max": max(x.get("staleness/max", 0) for x in lines),
                         "answers of several versions": sum(r["version"] < r["last_version"] for own in steps for r in own)})
    table(list(rows[0]), [[f"{v:.3f}" if isinstance(v, float) else v for v in r.values()] for r in rows])
    record("asynchrony_overlap", {"rows": rows, "steps": STEPS, "warm_up": WARM}, at)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    train(*sys.argv[2:]) if sys.argv[1:2] == ["--train"] else main()
