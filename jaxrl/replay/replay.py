"""run.mode=replay: computes recorded updates again, without engine, rewards and data, with the functions that made them
(rl.step.prepare, rl.step.learn); docs/guides/replay.md.

    start   <- the nearest checkpoint before a step, or the model that the run started from
    for each later step: batch <- its record; prepare; learn; compare the result with the record
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.checkpoint.files import DamagedCheckpoint, checkpoints_in, folder_of, verify
from jaxrl.checkpoint.resume import config_changes
from jaxrl.config.load import editable, flat, put, redacted
from jaxrl.config.schema import options
from jaxrl.errors import ConfigError
from jaxrl.records import files, states
from jaxrl.replay import verdict, what_if
from jaxrl.resolve.checks.replay import numbers
from jaxrl.resolve.spec import resolve
from jaxrl.rl.recording import restore_batch, trained_states
from jaxrl.rl.roles import Roles
from jaxrl.rl.step import lay_out, learn, prepare
from jaxrl.run.session import Session
from jaxrl.run.setup import open_job, read_model_inputs
from jaxrl.telemetry.run_dir import read_json

log = logging.getLogger("jaxrl")
# Options that a recorded update does not depend on.
ASIDE = ("run.", "mesh.", "log.", "record.", "replay.", "checkpoint.", "profile.", "launch.", "plan.", "faults.",
         "eval.", "reward.workers", "reward.executor", "reward.ray_", "train.steps")


class Done(NamedTuple):
    """A step that was computed again, with fingerprints of the states before and after it, on the host.

    Attributes:
      record: what was recorded of it. batch: rl.rollouts.Batch restored from it. prepared: rl.step.Prepared.
      metrics: of the update. before, after: states.Look.
    """

    record: files.Record
    batch: Any
    prepared: Any
    metrics: dict
    before: states.Look
    after: states.Look


class Replay:
    """A recorded run with its parameters and optimizer in the state before one of its steps.

    Args:
      s: session of the recorded config. paths: recorded step -> file. total_steps: of the recorded run, for schedules.

    Attributes:
      begin: [P] float32 sample of the parameters at the start (states.Look.sample). start: its step.
      job: run.setup.Job. roles: rl.roles.Roles in that state. likelihood: program of what_if, which sets it.
    """

    likelihood = None  # cached by what_if

    def __init__(self, s, paths: dict[int, Path], total_steps: int):
        self.s, self.paths = s, paths
        s.set_stream(None, {})
        s.total_steps = total_steps  # schedules count to it
        self.job = open_job(s.spec, read_model_inputs(s.spec, s.inputs.tokenizer))
        s.set_spec(self.job.config)
        self.roles = Roles(self.job, total_steps)
        s.restore(self.roles.policy, self.roles.parts)
        self.begin = self.hash_states().sample
        self.start = s.step

    @property
    def rounding(self) -> float:
        """The relative difference that counts as rounding: larger if the model is not computed in fp32."""
        return verdict.ROUNDING if self.job.compute_dtype == jnp.float32 else verdict.COARSE

    def hash_states(self) -> states.Look:
        """Returns the fingerprint of the current states, on the host."""
        moves = bool(self.s.spec.train.router_bias_rate)
        return states.look_at(trained_states(self.roles), moves).on_host()

    def record(self) -> files.Record:
        """Reads the record of the next step. Raises ConfigError if it is damaged (records.files.read)."""
        return files.read(self.paths[self.s.step + 1])

    def replay_step(self) -> Done:
        """Computes the next step again from its record; session and roles are one step further afterwards. Raises
        ConfigError if the record is damaged."""
        record, spec, roles, s = self.record(), self.s.spec, self.roles, self.s
        batch, before = restore_batch(record), self.hash_states()
        layout = lay_out(spec, self.job.row_shapes, batch.traj, s.step, self.job.score_shapes)
        prepared = prepare(spec, roles, batch, layout)
        metrics = learn(spec, roles, batch, prepared, s.step)
        s.advance(batch.cursor, samples=batch.traj.num_trajectories)
        metrics |= roles.after_step(s.step, record.header["epoch"])
        return Done(record, batch, prepared, metrics, before, self.hash_states())

    def compare(self, done: Done) -> verdict.Verdict:
        """Compares a step that was computed again with its record, within `rounding`; see replay.verdict."""
        return verdict.of_step(done.record, done.prepared, done.metrics, done.before, done.after, self.begin,
                               done.batch.traj, self.rounding)


def run(config, inputs=None) -> dict:
    """Computes the steps of replay.steps again.

    inputs: what the run was started with from Python (PythonInputs), or None.

    Returns the entries of summary.json: `replay` with a verdict for each step, and `tried` for the settings of
    replay.try. Raises ConfigError for steps that cannot be computed again (Plan), also if none can."""
    plan, found, tried = Plan(config), [], []
    if not plan.wanted:
        raise ConfigError(f"replay.run={config.run.dir!r}: no recorded step can be computed again: {plan.no_start()}")
    with contextlib.ExitStack() as open_ones:
        for start, wanted in plan.chains():
            open_ones.close()
            replay = plan.open(open_ones, inputs, start, wanted[0])
            replay.s.open_telemetry(read_only=True, step=replay.s.step)
            replay.s.say(plan.introduction(start, wanted[0]))
            while replay.s.step < wanted[-1]:
                if config.replay["try"] and replay.s.step + 1 in wanted:
                    tried.append(what_if.table(replay, config))
                done = replay.replay_step()
                if replay.s.step in wanted:
                    found.append(replay.compare(done))
                    replay.s.say(verdict_line(found[-1]))
        out = {"replay": {"steps": [v.summary() for v in found], "rounding": replay.rounding, "drift": verdict.DRIFT,
                          "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}"}}
        out |= {"tried": tried} if tried else {}
        kinds = [v.kind for v in found]
        replay.s.say("steps: " + ", ".join(f"{kinds.count(kind)} {kind}" for kind in
                                           ("bitwise", "within rounding", "different") if kind in kinds))
        replay.s.telemetry.summary(out)
        if tried:
            replay.s.report()
    return out


def verdict_line(found: verdict.Verdict) -> str:
    """Returns the console line of a step's verdict."""
    first = found.first
    which = "first" if found.kind == "different" else "from"
    where = "" if first is None else f"; {which} {first.name}: {first.text}"
    return f"  step {found.step:6d}  {found.kind}{where}"


class Plan:
    """Plans which steps of a recorded run are computed again, and from which checkpoints.

    Args:
      config: the whole config; run.dir is the recorded run.
      wanted: steps, instead of replay.steps; without either, all that can be computed again.
      option: group of the options that name run and steps, for messages.

    Attributes:
      paths: recorded step -> file. checkpoints: folder of the run's checkpoints. folder: of the run.
      wanted: steps to compute, ascending; may be replaced before `chains`.

    Raises:
      ConfigError: nothing is recorded, or a requested step is not.
    """

    def __init__(self, config, wanted: list[int] | None = None, option: str = "replay"):
        steps = f"{option}.steps={config.replay.steps}"
        if option != "replay" and wanted:
            steps = f"{option}.step={wanted[0]}"
        self._steps = steps
        self.config, self.folder, self._verified = config, Path(config.run.dir), {}
        self._configs, self.taken = {}, []
        self.checkpoints = folder_of(config.checkpoint.dir or self.folder / "checkpoints")
        self.paths = files.steps(self.folder / files.FOLDER)
        if not self.paths:
            raise ConfigError(f"{option}.run={config.run.dir!r}: {self.folder / files.FOLDER} holds no record; train "
                              "with --config.record.every=1")
        newest = files.read(next(reversed(self.paths.values())))
        self.header = newest.header
        if wanted is None:
            wanted = numbers(config.replay.steps) or [s for s in self.paths if self.nearest(s) is not None]
        self.wanted = wanted
        if missing := [s for s in self.wanted if s not in self.paths]:
            raise ConfigError(f"{steps}: step {missing[0]} is not recorded; recorded are "
                              f"{ranges(list(self.paths))}")

    def nearest(self, step: int) -> int | None:
        """Returns the latest checkpoint (0 = the start of the run) from which every step up to `step` is recorded,
        under the config of `step`; None if there is none.

        Damaged checkpoints are logged and not used, nor is the start with lora.init=eva, which needs the data."""
        chain = step
        while chain - 1 in self.paths and self._config(chain - 1) == self._config(step):
            chain -= 1
        for path in reversed(checkpoints_in(self.checkpoints)):
            if chain - 1 <= int(path.name) < step and self._whole(path):
                return int(path.name)
        return 0 if chain == 1 and self.config.lora.init != "eva" else None  # whose start would need rows of the data

    def _config(self, step: int) -> str:
        """Returns the file name of the config of a step: a resumed run may have changed it."""
        if step not in self._configs:
            self._configs[step] = files.header(self.paths[step])["config"]
        return self._configs[step]

    def _whole(self, path) -> bool:
        if path not in self._verified:
            try:
                self._verified[path] = verify(path) is None
            except DamagedCheckpoint as e:
                log.error("%s is damaged and is not used: %s", path, e)
                self._verified[path] = False
        return self._verified[path]

    def no_start(self) -> str:
        """Returns why a recorded step cannot be computed again, for messages, with the remedy."""
        return (f"there is no whole checkpoint in {self.checkpoints} from which every step up to it is recorded; "
                f"recorded are {ranges(list(self.paths))}. record.every=1 records all, checkpoint.keep=-1 keeps all "
                "checkpoints")

    def chains(self) -> list[tuple[int, list[int]]]:
        """Returns [(checkpoint to start from, requested steps after it)] that cover all requested steps.

        Raises ConfigError for a step that no checkpoint leads to.
        """
        out = []
        for step in self.wanted:
            start = self.nearest(step)
            if start is None:
                raise ConfigError(f"{self._steps}: step {step} cannot be computed again: {self.no_start()}")
            if out and out[-1][1][-1] >= start and self._config(out[-1][1][-1]) == self._config(step):
                out[-1][1].append(step)
            else:
                out.append((start, [step]))
        return out

    def open(self, stack: contextlib.ExitStack, inputs, start: int, step: int) -> Replay:
        """Opens the state after step `start` in a new Session, which `stack` closes, with the config that `step` was
        recorded under. inputs: PythonInputs, or None. Raises ConfigError for an option that would change the meaning of
        the record."""
        asked = self._asked(step)
        asked.run.resume = str(self.checkpoints / f"{start:08d}") if start else "never"
        header = files.header(self.paths[step])
        s = stack.enter_context(Session(resolve(asked, engine=header["engine"]), inputs))
        return Replay(s, self.paths, header["total_steps"])

    def _asked(self, step: int):
        """Returns the recorded config of a step with the options that differ between this config and the run's latest.

        Raises ConfigError for an option that would change the meaning of the record.
        """
        held = files.read_config(self.folder / files.FOLDER, self._config(step))
        newest = read_json(self.folder / "config.json").get("config")
        asked, then, last = editable(self.config), flat(held), flat(newest if isinstance(newest, dict) else held)
        for name, value in flat(redacted(self.config)).items():
            if value == last.get(name) and name in then and then[name] != value and name in options():
                put(asked, name, then[name])
        refused, taken = config_changes(held, redacted(asked))
        if refused:
            raise ConfigError(f"replay of {self.folder}: its record means something else with these options: "
                              f"{'; '.join(refused)}. Use the run's own: --config={self.folder / 'config.json'}")
        self.taken = [text for text in taken if not text.startswith(ASIDE)]
        return asked

    def introduction(self, start: int, step: int) -> str:
        """Returns the console lines about what is replayed and what differs from the recorded run.

        start: step of the checkpoint, 0 = the start of the run. step: the first that is asked for.

        Raises ConfigError for an option that would change the meaning of the record.
        """
        self._asked(step)
        lines = [f"replay of {self.folder}, recorded {ranges(list(self.paths))}"]
        lines += [f"  other than recorded: {text}" for text in self.taken]
        if self.header["jax"] != jax.__version__:
            lines.append(f"  other than recorded: jax {self.header['jax']} -> {jax.__version__}")
        where = f"the checkpoint of step {start}" if start else "the beginning of the run"
        return "\n".join([*lines, f"from {where}:"])


def ranges(steps: list[int]) -> str:
    """Formats step numbers as ranges: [1, 2, 3, 7] -> "steps 1:3, 7"."""
    out = []
    for step in steps:
        if out and out[-1][1] == step - 1:
            out[-1][1] = step
        else:
            out.append([step, step])
    return "steps " + ", ".join(f"{a}:{b}" if a != b else f"{a}" for a, b in out)
