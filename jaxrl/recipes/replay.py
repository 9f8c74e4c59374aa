"""run.mode=replay: recorded updates computed again, without engine, rewards and data, by the functions that made them
(rl.prepare, rl.learn); docs/replay.md.

    start   <- the nearest checkpoint before a step, or the model as the run began with it
    for each step behind it: batch <- its record; prepare; learn; and what came of it beside what was recorded
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.checkpoint_files import Damaged, checkpoints_in, folder_of, verify
from jaxrl.config import editable, redacted
from jaxrl.errors import ConfigError
from jaxrl.recipes.algorithm import Algorithm
from jaxrl.recipes.recording import batch_of, states_of
from jaxrl.recipes.rl import Parts, learn, prepare
from jaxrl.recipes.setup import open_job, read_inputs
from jaxrl.replay import files, states, verdict
from jaxrl.replay_checks import numbers
from jaxrl.resume import config_changes
from jaxrl.roles import Policy
from jaxrl.session import Session
from jaxrl.spec import resolve
from jaxrl.telemetry.run_dir import read_json

log = logging.getLogger("jaxrl")
ASIDE = ("run.", "mesh.", "log.", "record.", "replay.", "checkpoint.", "profile.", "launch.", "plan.", "faults.", "eval.",
         "reward.workers", "train.steps")  # options that a recorded update does not depend on


class Done(NamedTuple):
    """A step that was computed again. before, after: states.Look on the host."""

    record: files.Record
    batch: Any
    prepared: Any
    metrics: dict
    before: states.Look
    after: states.Look


class Recorded:
    """Stands for Rollouts, and for the stream of rows: what a step asks of them."""

    epoch_now = 0.0

    def poll(self) -> None: ...

    def release(self, cursor: int) -> None: ...

    def epoch(self, cursor: int) -> float:
        return self.epoch_now

    total_steps, interrupted = None, None


class Replay:
    """A run's record, and parameters and optimizer as they were before one of its steps."""

    def __init__(self, s, paths: dict[int, Path], total_steps: int):
        self.s, self.paths, self.source = s, paths, Recorded()
        s.reads(self.source, {})
        s.total_steps = total_steps  # schedules count to it
        job = open_job(s.spec, read_inputs(s.spec, s.given.tokenizer))
        s.settle(job.config)
        self.algorithm = Algorithm(job, total_steps)
        self.policy = Policy(job, self.algorithm.loss, total_steps * self.algorithm.updates_per_step, self.algorithm.score)
        self.algorithm.meet(self.policy)
        s.restore(self.policy, self.algorithm.parts)
        self.parts = Parts(s, job, self.algorithm, self.policy, self.source, None)
        self.begin = self.look().sample
        self.start = s.step

    @property
    def rounding(self) -> float:
        return verdict.ROUNDING if self.parts.job.compute_dtype == jnp.float32 else verdict.COARSE

    def look(self) -> states.Look:
        return states.look_at(states_of(self.policy, self.algorithm), bool(self.s.spec.train.router_bias_rate)).on_host()

    def record(self) -> files.Record:
        """Of the next step."""
        return files.read(self.paths[self.s.step + 1])

    def one(self) -> Done:
        """The next step."""
        record = self.record()
        batch, before = batch_of(record), self.look()
        self.source.epoch_now = record.header["epoch"]
        prepared = prepare(self.parts, batch)
        metrics = learn(self.parts, batch, prepared)
        self.s.phase.take()
        return Done(record, batch, prepared, metrics, before, self.look())

    def judged(self, done: Done) -> verdict.Verdict:
        return verdict.of_step(done.record, done.prepared, done.metrics, done.before, done.after, self.begin,
                               done.batch.traj, self.rounding)


def run(config, given=None) -> dict:
    """Computes the steps of replay.steps again and returns what came of it, which is in summary.json as `replay`."""
    plan, found = Plan(config), []
    with contextlib.ExitStack() as open_ones:
        replay, said = None, plan.introduction()
        for start, wanted in plan.chains():
            open_ones.close()
            replay = plan.open(open_ones, given, start)
            replay.s.open_telemetry(read_only=True, step=replay.s.step)
            replay.s.say(said + f"from {plan.named(start)}:")
            said = ""
            while replay.s.step < wanted[-1]:
                done = replay.one()
                if replay.s.step in wanted:
                    found.append(replay.judged(done))
                    replay.s.say(line_of(found[-1]))
        out = {"replay": {"steps": [v.told() for v in found], "rounding": replay.rounding, "drift": verdict.DRIFT,
                          "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}"}}
        kinds = [v.kind for v in found]
        replay.s.say("steps: " + ", ".join(f"{kinds.count(kind)} {kind}" for kind in
                                           ("bitwise", "within rounding", "different") if kind in kinds))
        replay.s.telemetry.summary(out)
    return out


def line_of(found: verdict.Verdict) -> str:
    first = found.first
    where = "" if first is None else f"; {'most' if found.kind != 'different' else 'first'} at {first.name}: {first.text}"
    return f"  step {found.step:6d}  {found.kind}{where}"


class Plan:
    """Which steps of a recorded run are computed again, and from where. Raises ConfigError for what cannot be."""

    def __init__(self, config, wanted: list[int] | None = None):
        self.config, self.folder, self._verified = config, Path(config.run.dir), {}
        self.checkpoints = folder_of(config.checkpoint.dir or self.folder / "checkpoints")
        self.paths = files.steps(self.folder / files.FOLDER)
        if not self.paths:
            raise ConfigError(f"replay.run={config.run.dir!r}: {self.folder / files.FOLDER} holds no record; train with "
                              "--config.record.every=1")
        newest = files.read(next(reversed(self.paths.values())))
        self.header = newest.header
        self.wanted = wanted or numbers(config.replay.steps) or [s for s in self.paths if self.nearest(s) is not None]
        if missing := [s for s in self.wanted if s not in self.paths]:
            raise ConfigError(f"replay.steps={config.replay.steps}: step {missing[0]} is not recorded; recorded are "
                              f"{ranges(list(self.paths))}")

    def nearest(self, step: int) -> int | None:
        """The newest checkpoint (0 = the beginning) before a step from which every step up to it is recorded."""
        chain = step
        while chain - 1 in self.paths:
            chain -= 1
        for path in reversed(checkpoints_in(self.checkpoints)):
            if chain - 1 <= int(path.name) < step and self._whole(path):
                return int(path.name)
        return 0 if chain == 1 and self.config.lora.init != "eva" else None  # whose start would need rows of the data

    def _whole(self, path) -> bool:
        if path not in self._verified:
            try:
                self._verified[path] = verify(path) is None
            except Damaged as e:
                log.error("%s is damaged and is left out: %s", path, e)
                self._verified[path] = False
        return self._verified[path]

    def chains(self) -> list[tuple[int, list[int]]]:
        """(checkpoint to start from, steps that are wanted behind it) until all are computed."""
        out = []
        for step in self.wanted:
            start = self.nearest(step)
            if start is None:
                raise ConfigError(f"replay.steps={self.config.replay.steps}: step {step} cannot be computed again: there "
                                  f"is no whole checkpoint in {self.checkpoints} from which every step up to it is "
                                  f"recorded; recorded are {ranges(list(self.paths))}. record.every=1 records all, "
                                  "checkpoint.keep=-1 keeps all checkpoints")
            if out and out[-1][1][-1] >= start:
                out[-1][1].append(step)
            else:
                out.append((start, [step]))
        return out

    def named(self, start: int) -> str:
        return f"the checkpoint of step {start}" if start else "the beginning of the run"

    def open(self, stack: contextlib.ExitStack, given, start: int) -> Replay:
        """The state after step `start`, in a Session of its own."""
        asked = editable(self.config)
        asked.run.resume = str(self.checkpoints / f"{start:08d}") if start else "never"
        s = stack.enter_context(Session(resolve(asked, engine=self.header["engine"]), given))
        return Replay(s, self.paths, self.header["total_steps"])

    def introduction(self) -> str:
        """What is replayed, and what is other than when it was recorded. Raises ConfigError where the recorded state
        means something else under these options."""
        held = read_json(self.folder / "config.json")
        refused, taken = config_changes(held.get("config", {}), redacted(self.config)) if held else ([], [])
        if refused:
            raise ConfigError(f"replay of {self.folder}: under these options its record means something else: "
                              f"{'; '.join(refused)}. --config={self.folder / 'config.json'} takes the run's own")
        lines = [f"replay of {self.folder}, recorded {ranges(list(self.paths))}"]
        lines += [f"  other than recorded: {text}" for text in taken if not text.startswith(ASIDE)]
        if self.header["jax"] != jax.__version__:
            lines.append(f"  other than recorded: jax {self.header['jax']} -> {jax.__version__}")
        return "\n".join(lines) + "\n"


def ranges(steps: list[int]) -> str:
    """[1, 2, 3, 7] -> "steps 1:3, 7"."""
    out = []
    for step in steps:
        if out and out[-1][1] == step - 1:
            out[-1][1] = step
        else:
            out.append([step, step])
    return "steps " + ", ".join(f"{a}:{b}" if a != b else f"{a}" for a, b in out)
