"""fork.run: continues a recorded run from one of its steps under other options, and computes only what they change.

    state   <- the recorded run's before fork.step: a checkpoint, and recorded steps after it computed again
    then the loop of recipes.rl.run, in which recorded completions and rewards are reused (rl.fork_source)

jaxrl.api calls `start_fork` before the recipe.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from jaxrl.checkpoint.checkpointer import Checkpointer
from jaxrl.checkpoint.files import checkpoints_in, folder_of
from jaxrl.checkpoint.resume import config_changes
from jaxrl.config.load import editable, recorded_config, redacted
from jaxrl.data.pass_rates import PassRates
from jaxrl.errors import ConfigError, RunStopped
from jaxrl.processes.group import peers
from jaxrl.records import files
from jaxrl.replay.replay import Plan, verdict_line

HERE = ("mesh", "log", "launch")  # groups of options of where a run takes place, which do not change its results


def start_fork(config, inputs):
    """Prepares a fork: returns its config with run.resume set to the recorded run's state before fork.step.

    If no checkpoint holds that state, recorded steps are computed again and a checkpoint is saved. A fork that has its
    own checkpoints resumes from them; one at step 1 starts anew, with run.resume as it is. Raises ConfigError if the
    record does not reach that step, if options differ that would change the past, and for run.resume=never beside own
    checkpoints; RunStopped if a step computed again is not the recorded one. Collective.
    """
    if not (Path(config.fork.run) / "config.json").is_file():
        raise ConfigError(f"fork.run={config.fork.run!r}: holds no config.json; expected the directory of a recorded "
                          "run")
    c, held = editable(config), recorded_config(str(Path(config.fork.run) / "config.json"), {})
    if c.run.warm_start:  # already done by the recorded run
        for name in ("path", "init", "tokenizer"):
            c.model[name] = held.model[name]
    own = folder_of(c.checkpoint.dir or Path(c.run.dir) / "checkpoints")
    if peers().decide(f"{own} holds checkpoints", lambda: bool(checkpoints_in(own))):
        if c.run.resume == "never":
            raise ConfigError(f"run.resume=never: {own} holds checkpoints, which a fork would take for its own; set "
                              "another run.dir")
        c.run.resume = "auto"  # the fork resumes
        return c
    step = c.fork.step
    for group in HERE:
        held[group] = c[group]
    held.run.mode, held.run.dir, held.run.compile_cache = "replay", c.fork.run, c.run.compile_cache
    plan = Plan(held, [step], "fork")
    start = plan.chains()[0][0]
    recorded = files.read_config(plan.folder / files.FOLDER, files.header(plan.paths[step])["config"])
    refused, _ = config_changes(recorded, redacted(c))
    if refused:
        raise ConfigError(f"fork.run={c.fork.run!r}: these options would change the past: {'; '.join(refused)}. "
                          f"--config={plan.folder / 'config.json'} takes the recorded run's own")
    if start < step - 1:
        _again(plan, inputs, c, start)
        c.run.resume = "auto"
    elif start:
        c.run.resume = str(plan.checkpoints / f"{start:08d}")
    return c


def _again(plan: Plan, inputs, c, start: int) -> None:
    """Computes recorded steps again from `start` to the one before the fork, and saves the state as the fork's first
    checkpoint. Raises RunStopped if a step differs from the recorded one."""
    last = c.fork.step - 1
    with contextlib.ExitStack() as opened:
        replay = plan.open(opened, inputs, start, last)
        s = replay.s
        if PassRates.name in (s.resumed.host["parts"] if s.resumed else ()) or s.spec.data.pass_rate_min > 0 or \
                s.spec.data.pass_rate_max < 1:
            raise ConfigError(f"fork.step={last + 1}: with data.pass_rate_* the order of the data is in checkpoints "
                              f"alone, and there is none of step {last} (the nearest before it is of step {start}); "
                              "choose the step after one")
        s.open_telemetry(read_only=True, step=s.step)
        s.say(f"fork of {plan.folder}: steps {start + 1}:{last} computed again")
        while s.step < last:
            found = replay.compare(replay.replay_step())
            s.say(verdict_line(found))
            if found.kind == "different" and found.first is not None:
                raise RunStopped(f"fork.run={c.fork.run!r}: step {s.step} computed again is not the recorded one "
                                 f"({found.first.name}: {found.first.text}); choose a step right after a checkpoint, "
                                 "or install the versions that recorded it")
        s.fingerprints = s.resumed.host["read"] if s.resumed else files.header(plan.paths[last]).get("read")
        target = Checkpointer(c.run.dir, c, s.faults)
        try:
            target.save(s.step, *s.content())
            target.wait()
            target.require(s.step)
        finally:
            target.close()
