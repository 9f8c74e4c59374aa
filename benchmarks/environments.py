"""How many turns of episodes the pool and its workers carry, how long an engine stands idle behind slow environments, and what
long episodes hold in memory:

    python benchmarks/environments.py --env=null --workers=2 --in-flight=128   (--seconds 10; --kind async|def|class; --out FILE)
    python benchmarks/environments.py --env=null --executor=ray                 (a Ray of this host: what its way costs)
    python benchmarks/environments.py --env=lognormal --in-flight=128 --seconds 60
    python benchmarks/environments.py --env=memory

null: an environment that does nothing. A turn is one message from the episode through its worker and the pool to the trainer's
process, and the answer back. With --executor=ray the workers' time is not counted, as they are no
children of this process. Kinds: a coroutine (async), a plain function (def, a thread each), a class with reset and step.
Printed, and written to FILE: turns per second, microseconds of processor time a turn costs the trainer and the workers, and the
trainer's peak memory.
lognormal: steps of 0.5 s in the mean, sigma 1, before the embedded sampler with 32 slots; printed is the share of the time in which
it had nothing to do. memory: 512 episodes of 32k tokens, sampled at once, up to their trajectories.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import episode_engine  # noqa: E402

TURNS = 16  # of an episode
CODE = f"""
from jaxrl.envs import Step

async def null_async(task, chat):
    for _ in range({TURNS}):
        await chat.send("step")
    return 1.0

def null_def(task, chat):
    for _ in range({TURNS}):
        chat.send("step")
    return 1.0

class null_class:
    def reset(self, row, seed):
        return "step"

    def step(self, action):
        return Step("step", 1.0)
"""
TURN = {"text": "an answer of some words", "thinking": "", "calls": [], "finish": "stop"}


def processor_seconds(pids: list[int]) -> float:
    """Of other processes (Linux)."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def workers_of(pid: int) -> list[int]:
    """All processes that it started, and theirs."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found[1:]


def null(kind: str, workers: int, in_flight: int, seconds: float, executor: str = "local") -> dict:
    from jaxrl.config.load import default_config
    from jaxrl.envs.pool import EpisodePool

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "null.py").write_text(CODE)
        env = SimpleNamespace(**default_config().env.to_dict() | {
            "function": f"{folder}/null.py:null_{kind}", "workers": workers, "max_turns": TURNS, "executor": executor})
        with EpisodePool(env) as pool:
            pool.ready()
            for k in range(in_flight):
                pool.start(str(k), {"row": {"answer": "7"}, "prompt": "a question", "seed": k})
            pids, began, turns, episodes = workers_of(os.getpid()), time.monotonic(), 0, 0
            theirs, own = processor_seconds(pids), time.process_time()
            while (passed := time.monotonic() - began) < seconds:
                for event in pool.events(1.0):
                    if event.kind == "send":
                        turns += 1
                        pool.reply(event.id, TURN)
                    else:
                        assert event.kind == "done", event.data
                        episodes += 1
                        pool.start(event.id, {"row": {"answer": "7"}, "prompt": "a question", "seed": episodes})
            theirs, own = processor_seconds(pids) - theirs, time.process_time() - own
    return {"env": "null", "executor": executor, "kind": kind, "workers": workers, "in_flight": in_flight, "cores": os.cpu_count(),
            "turns_per_second": round(turns / passed), "episodes": episodes,
            "trainer_microseconds_per_turn": round(1e6 * own / turns, 1),
            "workers_microseconds_per_turn": None if executor == "ray" else round(1e6 * theirs / turns, 1),
            "trainer_peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", choices=("null", "lognormal", "memory"), default="null")
    parser.add_argument("--kind", choices=("async", "def", "class"), default="async")
    parser.add_argument("--executor", choices=("local", "ray"), default="local")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--in-flight", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", default="")
    given = parser.parse_args()
    if given.env == "null":
        result = null(given.kind, given.workers, given.in_flight, given.seconds, given.executor)
    elif given.env == "lognormal":
        result = episode_engine.lognormal(given.workers, given.in_flight, given.seconds)
    else:
        result = episode_engine.memory(given.workers)
    print(json.dumps(result))
    if given.out:
        Path(given.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
