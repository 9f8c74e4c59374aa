"""The tiny job as one of several processes, sampled anew or from what an earlier run recorded.

    python -m jaxrl.launch --processes=N -- tests/helpers/hosts_job.py RUN_DIR [--recorded=DIR] [--config.group.option=value ...]

Each process writes what it decided into RUN_DIR/seen_<process>.json: the seeds it asked with, every Layout, the rows and
which of them its devices hold, and fingerprints of every state that was saved or restored.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path[:0] = map(str, Path(__file__).resolve().parents[1:3])

import numpy as np  # noqa: E402

import jaxrl  # noqa: E402
from helpers import tiny_job  # noqa: E402
from jaxrl import training  # noqa: E402
from jaxrl.checkpoint.checkpointer import flatten  # noqa: E402
from jaxrl.config.load import parse_flags, put  # noqa: E402
from jaxrl.processes.exchange import to_host  # noqa: E402
from jaxrl.processes.group import peers  # noqa: E402
from jaxrl.rl import rollouts  # noqa: E402
from jaxrl.roles import role  # noqa: E402
from jaxrl.rollout import Engine, Health, Result  # noqa: E402
from jaxrl.run.session import Session  # noqa: E402


class Recorded(Engine):
    """An engine that repeats the answers of another run's rollouts/ and eval/ files."""

    def __init__(self, config, *_):
        self.folder, self.group_size = Path(config.user.recorded), config.rollout.group_size
        self.waiting, self.known = [], {}

    def submit(self, requests):
        self.waiting += requests

    def poll(self, deadline_s):
        out, self.waiting = [self.result(r) for r in self.waiting], []
        return out

    def result(self, request):
        stream, step, position, sample, _ = request.key
        file = self.folder / "rollouts" / f"step_{step + 1:08d}.jsonl"
        if file not in self.known:
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            self.known[file] = {(r["group"], r["sample"]): r for r in rows}
        row = self.known[file][position, sample]
        assert stream == "train" and row["seed"] == request.seed
        logprobs = np.array(row["logprobs"], np.float32)
        return Result(request.id, np.array(row["tokens"], np.int32), logprobs, 0 * logprobs,
                      np.full(len(logprobs), step, np.int32), row["finish"], request.seed)

    def health(self):
        return Health(True)

    def publish(self, params, version):
        pass

    abort = close = lambda self, *args: None


def watch(seen):
    """Notes what a process decides on its way."""
    layout, requests, place = training.make_layout, rollouts.make_requests, role.put

    def make_layout(*args, **kwargs):
        out = layout(*args, **kwargs)
        seen["layouts"].append(hashlib.sha256(repr(out).encode()).hexdigest()[:16])
        return out

    def make_requests(*args):
        out = requests(*args)
        seen["seeds"] += [[r.id, r.seed] for r in out]
        return out

    def put_rows(batch, sharding):
        out = place(batch, sharding)
        whole, parts = np.asarray(batch.tokens), out.tokens.addressable_shards
        assert all(np.array_equal(np.asarray(p.data), whole[p.index]) for p in parts)
        seen["rows"].append(hashlib.sha256(b"".join(x.tobytes() for x in (
            batch.tokens, batch.positions, batch.segments, batch.sources, batch.targets))).hexdigest()[:16])
        seen["held"].append(sorted({p.index[0].start or 0 for p in parts}))
        return out

    save, restore = Session.save, Session.restore

    def save_and_note(run):
        seen["saved"].append([run.step, fingerprint(run)])
        save(run)

    def restore_and_note(run, *parts):
        restore(run, *parts)
        if run.resumed is not None:
            seen["restored"].append([run.step, fingerprint(run)])

    training.make_layout, rollouts.make_requests, role.put = make_layout, make_requests, put_rows
    Session.save, Session.restore = save_and_note, restore_and_note


def fingerprint(run) -> str:
    """Of every array of the state, and of the place in the data."""
    leaves = flatten(run.policy.arrays())
    digest = hashlib.sha256(json.dumps(list(run.progress)).encode())
    for name in sorted(leaves):
        digest.update(name.encode() + to_host(leaves[name]).tobytes())
    return digest.hexdigest()[:16]


def main(run_dir, *flags):
    recorded = next((f.removeprefix("--recorded=") for f in flags if f.startswith("--recorded=")), "")
    config = tiny_job.get_config()
    config.run.dir, config.log.console = run_dir, "plain"
    if recorded:
        config.rollout.engine, config.user.recorded = f"{Path(__file__).resolve()}:Recorded", recorded
        config.eval.before = config.eval.after = False
        config.eval.every_steps = 0
    for name, value in parse_flags([f for f in flags if not f.startswith("--recorded=")])[1].items():
        put(config, name, value)
    seen = {name: [] for name in ("layouts", "seeds", "rows", "held", "saved", "restored")}
    watch(seen)
    jaxrl.train(config)
    file = Path(run_dir) / f"seen_{peers().index}.json"
    earlier = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({name: earlier.get(name, []) + values for name, values in seen.items()}))
    peers().leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
