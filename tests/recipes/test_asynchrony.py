"""Runs that generate ahead of training: the ledger, the bound, the synchronous run as the limit, interruption and resuming."""

import json

import numpy as np
import pytest
from helpers import tiny_job
from helpers.run_tools import fingerprint, ledger

import jaxrl
from jaxrl.checkpoint.checkpointer import _read
from jaxrl.config.load import default_config
from jaxrl.errors import ConfigError
from jaxrl.processes.faults import FaultError
from jaxrl.resolve.checks.common import check
from jaxrl.rl.trajectories import results_from_bytes
from jaxrl.rollout import Key
from jaxrl.rollout.embedded import EmbeddedEngine
from jaxrl.rollout.embedded import make_engine as make_embedded

STEPS = 6


def config(folder, **changes):
    c = tiny_job.get_config()
    c.run.dir, c.log.console = str(folder), "off"
    c.train.steps, c.rollout.slots, c.rollout.compaction = STEPS, 12, False  # 32 answers a step
    c.eval.before, c.eval.every_steps, c.eval.max_rows, c.checkpoint.every_steps = False, 3, 2, 2
    for name, value in changes.items():
        *groups, option = name.split("__")
        node = c
        for group in groups:
            node = node[group]
        node[option] = value
    return c


def lines(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "reward/mean" in row]


def own_engine(config, model, tokenizer, mesh, eos_ids, hf_config):
    engine = make_embedded(config, model, tokenizer, mesh, eos_ids)
    engine.__class__ = Waits
    engine.back = []
    return engine


class Waits(EmbeddedEngine):
    """The embedded engine, which looks at a request only when the version of the step it is meant for is published."""

    def submit(self, requests):
        self.back += requests

    def publish(self, params, version):
        super().publish(params, version)
        self._forward()

    def poll(self, deadline_s):
        self._forward()
        return super().poll(deadline_s)

    def _forward(self):
        ready = [r for r in self.back if not r.id.startswith("train/") or int(r.id.split("/")[1]) <= self._version]
        self.back = [r for r in self.back if r not in ready]
        if ready:
            super().submit(ready)


@pytest.mark.slow
def test_answers_that_wait_for_their_step_are_the_synchronous_run(tmp_path):
    """All that lies between asking ahead and using changes nothing: parameters, samples and rewards are bitwise those of
    max_staleness=0."""
    jaxrl.train(config(tmp_path / "sync"))
    c = config(tmp_path / "ahead", rollout__max_staleness=2, rollout__partial=True, algorithm__mismatch__correction="none")
    c.rollout.engine = f"{__file__}:own_engine"
    jaxrl.train(c)
    assert [rows[0]["admitted"] for rows in ledger(tmp_path / "ahead", 0)] == [0, 0, 0, 1, 2, 3]
    assert [rows[0]["admitted"] for rows in ledger(tmp_path / "sync", 0)] == list(range(STEPS))
    sync, ahead = fingerprint(tmp_path / "sync"), fingerprint(tmp_path / "ahead")
    assert sync["export/model.safetensors"] == ahead["export/model.safetensors"]
    for folder in ("sync", "ahead"):
        for file in (tmp_path / folder / "rollouts").iterdir():
            rows = [{k: v for k, v in json.loads(line).items() if k != "admitted"} for line in file.read_text().splitlines()]
            file.write_text(json.dumps(rows))
    assert all((tmp_path / "sync" / "rollouts" / f.name).read_text() == f.read_text()
               for f in (tmp_path / "ahead" / "rollouts").iterdir())


@pytest.mark.parametrize("k,n,partial", [(2, 1, True), pytest.param(1, 2, False, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_every_sample_is_used_once_in_order_within_the_bound(tmp_path, k, n, partial):
    c = config(tmp_path / "run", rollout__max_staleness=k, rollout__sync_every=n, rollout__partial=partial)
    summary = jaxrl.train(c)
    steps = ledger(tmp_path / "run", k, n)
    assert summary["samples"] == sum(map(len, steps)) == STEPS * 32
    spans = {(row["version"], row["last_version"]) for rows in steps for row in rows}
    assert any(first < last for first, last in spans) == partial  # only then do answers go on under newer weights
    published = {0, 2, 3, 4, 6} if n == 2 else set(range(STEPS + 1))  # 3: an evaluation sees the weights of its step
    assert {v for span in spans for v in span} <= published
    found = lines(tmp_path / "run")
    assert max(row["staleness/max"] for row in found) >= 1 and min(row["rollout/ahead_groups"] for row in found[:-2]) >= 8
    for row, own in zip(found, steps, strict=True):
        shares = [row[name] for name in row if name.startswith("staleness/") and name[10:].isdigit()]
        assert len(shares) == k + 1 and abs(sum(shares) - 1) < 1e-5
        parts = [row.get(f"gap/stale_{b}", 0.0) * row[f"staleness/{b}"] for b in range(k + 1)]
        assert abs(sum(parts) - row["gap/mean"]) < 1e-5
        assert "gap/weight_mean" in row and row["staleness/mean"] <= row["staleness/max"] <= k
        assert np.isclose(row["reward/mean"], np.mean([r["score"] for r in own]))
    assert max(row["gap/stale_1"] for row in found if "gap/stale_1" in row) > 10 * found[0]["gap/mean"]


def held(folder, step):
    """Answers that a checkpoint holds beside the policy: {(group, sample): tokens}."""
    host = json.loads((folder / "checkpoints" / f"{step:08d}" / "host" / "metadata").read_text())["host"]
    abstract = {"ahead": {str(i): np.zeros(n, np.uint8) for i, n in enumerate(host["parts"]["ahead"]["sizes"])}}
    parts = _read(folder / "checkpoints" / f"{step:08d}", abstract, partial=True).arrays["ahead"]
    results = [r for part in parts.values() for r in results_from_bytes(part.tobytes())[0]]
    return {tuple(map(int, r.id.split("/")[2:])): (r.tokens.tolist(), r.versions[0]) for r in results}, host["parts"]["ahead"]["state"]


@pytest.mark.slow
def test_interrupted_and_resumed_nothing_is_lost_or_doubled(tmp_path):
    options = dict(rollout__max_staleness=4, rollout__partial=True, train__steps=8, checkpoint__at_end=False)
    with pytest.raises(FaultError):
        jaxrl.train(config(tmp_path / "run", faults__plan=("update.raise@step=4",), **options))
    kept, state = held(tmp_path / "run", 2)
    assert kept and len(state["groups"]) == 16  # finished before their step, of what was asked for
    summary = jaxrl.train(config(tmp_path / "run", **options))
    steps = ledger(tmp_path / "run", 4)
    assert summary["samples"] == sum(map(len, steps)) == 8 * 32
    rows = {(row["group"], row["sample"]): (row["tokens"], row["version"]) for rows in steps for row in rows}
    assert {key: rows[key] for key in kept} == kept  # used as they were
    for step, own in enumerate(steps):  # of the step they are meant for, whoever asked, and however often
        assert all(row["seed"] == Key("train", step, row["group"], row["sample"]).seed(0) for row in own)


@pytest.mark.parametrize("changes,message", [
    (dict(rollout__partial=True), "rollout.partial=True has no effect with rollout.max_staleness=0"),
    (dict(rollout__max_staleness=1, mesh__roles={"sampler": {"rest": "none"}}), "mesh.roles.sampler.rest=none with rollout.max_staleness=1"),
    (dict(rollout__sync_every=4, run__recipe="sft"), "rollout.sync_every=4 has no effect with run.recipe=sft; set run.recipe=rl or distill"),
    (dict(rollout__max_staleness=-1), "rollout.max_staleness=-1"),
    (dict(rollout__sync_every=0), "rollout.sync_every=0"),
])
def test_what_cannot_go_together_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        check(config(tmp_path, **changes))


def test_by_default_every_step_samples_from_its_own_weights():
    r = default_config().rollout
    assert (r.max_staleness, r.sync_every, r.partial) == (0, 1, False)
