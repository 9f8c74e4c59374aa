"""The session of a run: its directory, log, stop requests, processes, checkpoints and triggers.

Recipes open one around their loop (mostly through run.fit). A Session knows no algorithm and owns none of a run's
state: the parts of a checkpoint are passed to it (see `restore`).

    with Session(spec, inputs) as s:
        s.restore(policy, parts)
        s.begin()
        while s.should_continue():
            with s.changing():  # the update
                s.advance(cursor, samples)
            s.after_step(metrics, evaluate, export)
        return s.finish(evaluate, export)

With several processes all make the same calls. Decisions that depend on time or on one process are agreed in tagged
collective calls (`together`, `decide`, `should_continue`), so that no process acts on a decision that the others lack.

If an exception leaves the session of a run.mode=train, it first saves a checkpoint, provided that a step is completed,
no update was in progress (`changing`) and all processes know of the error; summary.json has the exception as `error`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

import jax

from jaxrl.checkpoint.checkpointer import Checkpointer, CheckpointError, SavesFailed, SaveTimeout
from jaxrl.checkpoint.resume import config_changes
from jaxrl.checkpoint.uploads import Uploads
from jaxrl.config.load import get, redacted
from jaxrl.config.run_length import end, ends
from jaxrl.data.stream import Stream
from jaxrl.errors import ConfigError, RunStopped
from jaxrl.processes.deadline import time_limit
from jaxrl.processes.faults import Faults, GracefulStop
from jaxrl.processes.group import PeerLost, peers
from jaxrl.report import report_of
from jaxrl.run.callbacks import Callbacks
from jaxrl.run.closing import Closers, closing_line
from jaxrl.run.python_api import PythonInputs
from jaxrl.telemetry import Phases, Telemetry, open_console, per_step, write_config
from jaxrl.telemetry.best import Best
from jaxrl.telemetry.compilations import Compilations
from jaxrl.telemetry.health import Divergence, IdleMechanisms
from jaxrl.telemetry.profiler import Profiler, memory_steps, traced_steps
from jaxrl.telemetry.timing import triggers
from jaxrl.training.optimizer import schedule_text

log = logging.getLogger("jaxrl")
SAVE_AGAIN_SECONDS = 60.0  # from a failed save to the next attempt
LINES = 10_000  # newest lines of metrics whose seconds are compared with a plan
CLOSING_SECONDS = 60.0  # limit for closing a run whose disk hangs


class Progress(NamedTuple):
    """How far a run is: completed steps, position in the order of the data, sequences trained on."""

    step: int = 0
    cursor: int = 0
    samples: int = 0


class Session:
    """The directory, log, stop requests, checkpoints and triggers of one run; see the module for its use.

    Args:
      spec: resolved Spec. inputs: Python objects of the caller (jaxrl.run.python_api), or None.

    Attributes:
      progress: Progress. run_dir: Path. peers: the run's processes. phase: `with s.phase(name):` times part of a step.
      ended_by: why the run ends before its bounds; "" = it does not. close_at_end: function that returns its argument,
        whose `close` is called when the session ends.
      checkpointer, console, uploads (or None), resumed (checkpointer.Chosen, or None): once it is entered.
      total_steps, ending: steps of the run, and the option that bounds them: from `set_stream` on."""

    stream: Stream  # of training rows, from `set_stream` on; None where the run only evaluates
    telemetry: Telemetry  # from `open_telemetry` on

    def __init__(self, spec, inputs: PythonInputs | None = None):
        self.spec, self.inputs, self.run_dir = spec, inputs or PythonInputs(), Path(spec.run.dir)
        self.progress, self.started = Progress(), time.monotonic()
        self.phase, self.compilations = Phases(), Compilations()
        self.stop, self.peers = GracefulStop(starting=True), peers()
        self.faults = Faults(spec.faults.plan, self.peers.index)
        self.callbacks = Callbacks(self)
        self.ended_by, self._evaluates = "", True  # why something ended the run; whether there are held-out sets
        self.eval_before = self.last_eval = None
        self.parts, self.comparison, self.profiler, self.idle = (), None, None, None
        self.divergence, self.best = Divergence(spec, spec.recipe.samples), Best(spec)
        self._lines: deque[tuple[int, dict]] = deque(maxlen=LINES)  # (step, seconds by phase) of lines of metrics
        self._last_step = ends(spec).get("train.steps")
        self._stop_agreed = self._error_agreed = False
        self._whole = False  # whether the parts are those of self.step
        self._closers = Closers()
        self.close_at_end = self._closers.add

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return self.progress.step

    # -- start ---------------------------------------------------------------------------------------------------

    def __enter__(self):
        try:
            c = self.spec
            self.console = self.close_at_end(open_console(c.run.dir, c, silent=not self.peers.first))
            self.console.start()
            self._starting = self.phase("start")
            self._starting.__enter__()
            self._closers.enter(self.stop)
            self._find_checkpoint()
        except BaseException as e:
            self._closers.close(e)
            raise
        return self

    def _find_checkpoint(self) -> None:
        """Finds the checkpoint to resume, the same on all processes. Raises ConfigError if a fixed option changed."""
        c = self.spec
        to = c.checkpoint.upload.to if c.run.mode == "train" else ()
        self.uploads = self.close_at_end(Uploads(c.checkpoint.upload)) if to and self.peers.first else None
        # Metrics and rewards of the steps before a checkpoint must be on disk before it commits.
        before = lambda: self.telemetry.flush()  # noqa: E731
        self.checkpointer = self.close_at_end(Checkpointer(c.run.dir, c, self.faults, before, self.uploads))
        self.stop.newest = lambda: f"{self.checkpointer.newest()}; rerun the same command to continue"
        self.resumed = self.checkpointer.choose(c.run.resume)
        if self.resumed is None or c.run.mode != "train":
            return
        refused, taken = config_changes(self.resumed.host["config"], redacted(c.asked))
        if refused:
            raise ConfigError(f"resuming {self.resumed.path}: these options would change the past: {'; '.join(refused)}"
                              ". Use another run.dir, or run.resume=never")
        for change in taken:
            log.info("changed since the checkpoint: %s", change)

    def resumed_part(self, name: str) -> dict | None:
        """Returns a part's host values, by its name, in the checkpoint that is resumed; None if it lacks them."""
        return None if self.resumed is None else self.resumed.host.get("parts", {}).get(name)

    def set_stream(self, stream, fingerprints: dict) -> None:
        """Sets the stream of training rows (or None), and from it the run's bounds (`total_steps`, `ending`); and the
        fingerprints of its inputs, which checkpoints store."""
        self.stream, self.fingerprints = stream, fingerprints
        if stream is not None and self.peers.count == 1:  # several processes agree on a stop after the rows are read
            stream.interrupted = self.interrupted
        self.total_steps, self.ending = end(self.spec, stream and stream.total_steps)

    def set_spec(self, spec) -> None:
        """Replaces the spec with the one resolved against the actual devices."""
        self.spec = spec

    def restore(self, policy, parts=()) -> None:
        """Starts the policy and the other parts of a run, from the resumed checkpoint or from scratch.

        A part has `name`, `abstract()` (tree of ShapeDtypeStructs, {} for nothing), `start(arrays, host)` (from a
        checkpoint, or None and None), `arrays()` and `host()` (JSON-able dict; None = the part is not saved). The
        policy's trees are stored under their own names, and it has no `host`. A part that the checkpoint lacks starts
        from scratch; a stored part that the run does not use is ignored.

        Raises ConfigError if the disk lacks space for two checkpoints, and as Checkpointer.restore does."""
        self.policy, self.parts = policy, parts
        own = policy.abstract()
        everything = {**own, **{part.name: part.abstract() for part in parts}}
        try:
            self.checkpointer.require_space(everything)
        except OSError as e:
            raise ConfigError(f"run.dir={self.spec.run.dir!r}: {e.strerror}") from None
        stored = None if self.resumed is None else self.resumed.host.get("parts", {})
        wanted = {name: tree for name, tree in everything.items() if stored is None or name in stored or name in own}
        partial = bool(set(stored or ()) - set(everything))
        restored = self.checkpointer.restore(wanted, self.spec.run.resume, partial=partial)
        policy.start(restored and {name: restored.arrays[name] for name in own})
        if restored is not None:
            self.resume_at(restored.host)
        for part in parts:
            if restored is not None and stored is not None and part.name in stored:
                part.start(restored.arrays[part.name], stored[part.name])
            else:
                part.start(None, None)
        self._restored = restored
        self.due = triggers(self.spec, restored.host["triggers"] if restored else {})
        self._new = [p.name for p in parts if restored and p.name not in stored and p.host() is not None]

    def resume_at(self, host: dict) -> None:
        """Sets progress, evaluations, the best score and whether it ended the run from a checkpoint's host values."""
        self.progress = Progress(host["step"], host["cursor"], host["samples"])
        self.eval_before, self.last_eval = host["eval_before"], host["last_eval"]
        self.best = Best(self.spec, host.get("best"))
        self.checkpointer.best = self.best.step if self.spec.checkpoint.keep_best else None
        self.ended_by = self.best.over

    def open_telemetry(self, read_only: bool = False, step: int | None = None) -> None:
        """Opens the sinks of metrics. step: completed steps of the run that is resumed. read_only: writes none."""
        self.telemetry = self.close_at_end(Telemetry(
            self.run_dir, self.spec, self.total_steps, resume_step=step, read_only=read_only,
            silent=not self.peers.first, console=self.console))

    def print_summary(self, lines, numbers: dict) -> None:
        """Opens telemetry, writes config.json, and prints the start-up summary. lines: text of run.setup.describe.
        numbers: derived numbers, for config.json."""
        c = self.spec
        self.open_telemetry(step=self.step if self._restored else None)
        self.phase.watch = self.console.phase
        self.console.phase(self.phase.current)
        if self.peers.first:
            write_config(self.run_dir, c.asked, numbers)
            self.idle = IdleMechanisms(c.chosen())
        self.say(f"{lines}\n"
                 f"learns    at optimizer.lr={c.optimizer.lr:g} ({c.origin('optimizer.lr')}), "
                 f"{schedule_text(c.optimizer, self.total_steps * math.prod(c.updates))}\n"
                 f"ends      after {self.total_steps} steps: {self.ending}")
        if self._restored is not None:
            lacks = f"; it holds no {', no '.join(self._new)}" * bool(self._new)
            self.say(f"resumed   step {self.step} from {self._restored.path}{lacks}")

    def begin(self, comparison=None, rates=lambda metrics, seconds: {}) -> None:
        """Ends start-up: profiler, predictions, clocks. Called last before the loop. comparison: predicts this run and
        records what it measures (planning.comparison), or None. rates: (metrics, seconds by phase) -> further metrics.
        """
        c, process, self.rates, self.comparison = self.spec, self.peers.index, rates, comparison
        if comparison is not None and (planned := comparison.start()):
            self.say(planned)
        steps, memory = traced_steps(c.profile, process), memory_steps(c.profile, process)
        if steps or memory:
            self.profiler = self.close_at_end(Profiler(steps, self.run_dir / "profile", memory, c.profile.python))
            self.profiler.at(self.step)
        self._whole = True
        if not self.ended():  # overwrites the summary of an earlier run
            self.telemetry.summary({"finished": False, "error": None})
        self._starting.__exit__(None, None, None)
        self.phase.take()  # start-up is not part of the first step
        self.stop.started()

    # -- during a step --------------------------------------------------------------------------------------------

    def fault(self, component: str, phase: str = "") -> None:
        """Raises the fault that faults.plan injects into this component and step, if any (for tests)."""
        if self.spec.faults.plan:
            self.faults.fire(component, self.step + 1, phase)

    def say(self, text: str) -> None:
        """Prints a message on the console; nothing if it is empty."""
        if text:
            self.telemetry.print(text)

    def interrupted(self) -> bool:
        """Whether this process knows of a requested stop; it tells the others of its own signal. Not collective."""
        if self.stop.reason:
            self.peers.request_stop()
        return bool(self.stop.reason) or self.peers.stop_requested

    def stopping(self) -> bool:
        """Whether the run stops; the same on all processes, since it changes in collective calls only."""
        return self.interrupted() if self.peers.count == 1 else self._stop_agreed

    @property
    def collective_tag(self) -> str:
        """Tag of a collective call: step and weight version. Processes with different tags raise PeerLost."""
        return f"step {self.step + 1}, weights {self.step}"

    def together(self, what: str, work):
        """Runs work() and returns its result; None on every process if it is None (a stop) on any. Collective (`what`).
        With several processes a None stops the run (`stopping`), and later calls run work() but return None.

        A RunStopped or TimeoutError of one process (failed rewards, a late completion) is raised on all, on the others
        as RunStopped, so that they can still save a checkpoint together. Any other error is raised on its process
        alone."""
        return work() if self.peers.count == 1 else self._together(what, work)

    def _together(self, what: str, work):
        done, error = None, None
        try:
            done = work()
        except PeerLost:
            raise
        except (RunStopped, TimeoutError) as e:
            error = e
        with self.phase("wait"):
            states = self.peers.all_gather(f"{self.collective_tag}: {what}", [done is not None, str(error or "")])
        if any(text for _, text in states):
            self._error_agreed = True
            kind = RunStopped if error is None else type(error)
            reasons = [f"{self.peers.who(i)}: {text}" for i, (_, text) in enumerate(states) if text]
            raise kind("; ".join(reasons)) from error
        self._stop_agreed |= not all(fine for fine, _ in states)
        return None if self._stop_agreed else done

    def decide(self, what: str, choose, *arguments):
        """Returns choose(*arguments) of process 0 on all processes. Collective. what: of the decision, for its tag."""
        if self.peers.count == 1:
            return choose(*arguments)
        return self.peers.decide(f"{self.collective_tag}: {what}", choose, *arguments)

    def should_continue(self) -> bool:
        """Whether another step follows. Collective: all processes agree here on stops since the last step."""
        if self.peers.count > 1:
            self._stop_agreed |= any(self.peers.all_gather(f"{self.collective_tag}: go on?", self.interrupted()))
        return not (self.stopping() or self.ended())

    def ended(self) -> bool:
        """Whether train.steps, data.epochs or train.max_samples is reached, or something ended the run (`ended_by`)."""
        samples = self.spec.train.max_samples
        counted = (self._last_step and self.step >= self._last_step) or (samples and self.progress.samples >= samples)
        return bool(self.ended_by or counted) or self.stream.exhausted(self.progress.cursor)

    @contextlib.contextmanager
    def changing(self):
        """Context of the update and `advance`. An error inside leaves no consistent state, so none is saved."""
        self._whole = False
        yield
        self._whole = True

    def advance(self, cursor: int, samples: int) -> Progress:
        """Completes a step after its update; returns the new progress. cursor: position of the data after the step.
        samples: sequences it trained on."""
        self.progress = Progress(self.step + 1, cursor, self.progress.samples + samples)
        if self.profiler is not None:
            self.profiler.at(self.step)
        return self.progress

    # -- around steps ---------------------------------------------------------------------------------------------

    def before_first_step(self, evaluate) -> None:
        """Evaluates before the first step with eval.before, or at a resume if a stop left an evaluation due; or prints
        why the run has no steps left. evaluate: () -> (metrics, records by set, summary) of the held-out sets, empty
        after a stop; None = no sets. Raises ConfigError if these lack eval.metric."""
        self._evaluates = evaluate is not None
        if self.ended_by:
            self.say(f"this run was ended at step {self.step} by {self.ended_by}; to continue, set a larger "
                     "eval.patience, or 0")
            return
        if self.ended():
            name = self.ending.partition("=")[0]
            further = 2 * (self.step if name == "train.steps" else get(self.spec.asked, name))
            extra = "" if self.step <= self.total_steps else f" (of {self.total_steps} requested)"
            self.say(f"this run has finished its {self.step} steps{extra}; extend it with --config.{name}={further}, or"
                     " start another with --config.run.dir=...")
            return
        first = self.step == 0 and self.spec.eval.before
        if evaluate is not None and (first or self.due["eval"].missed):
            metrics = self._evaluate(evaluate)
            if metrics:  # no stop was requested
                if self.best.wanted:
                    self.best.check(metrics)
                self.eval_before = self.last_summary if first else self.eval_before
                self.callbacks.after_line(self.telemetry.step(self.step, metrics, self.phase.take()))

    def after_step(self, metrics: dict, evaluate, export, steps: int = 1, records=()) -> None:
        """Evaluates, logs, saves, exports and calls callbacks as they are due after a step.

        Args:
          metrics: name -> mean over the last `steps` steps. They are written before the step's checkpoint.
          evaluate: () -> (metrics, records by set, summary) of the held-out sets, empty after a stop; None = no sets.
          export: folder -> None, writes the model there.
          records: dicts of the step's completions, for callbacks.

        Raises RunStopped if a callback fails or saves fail (Checkpointer.save), ConfigError if an evaluation lacks
        eval.metric, and what evaluate and export raise."""
        last, due, best = self.ended(), self.is_due, False
        try:
            if evaluate is not None and (due("eval") or (last and self.spec.eval.after)):
                evaluated = self._evaluate(evaluate)
                metrics, best = metrics | evaluated, self._better(evaluated)
        finally:  # the step itself is done
            metrics = self._log_step(metrics, steps)
        if self.checkpointer.unchecked:
            self.checkpointer.check()
            if self.checkpointer.failed_since_last_call():
                self.due["save"].again(SAVE_AGAIN_SECONDS)
        if due("save") or best:
            self.save()
        if due("export"):
            self._export(export, self.run_dir / f"export_{self.step:08d}")
        if self.callbacks.used:
            self.callbacks.due("on_step", metrics)
            self.callbacks.after_line(metrics, records)

    def is_due(self, name: str) -> bool:
        """Whether "eval", "save" or "export" is due after this step, by its periods. Collective."""
        return self.decide(f"{name}?", self.due[name], self.step, self.stream.epoch(self.progress.cursor))

    def anything_due(self) -> bool:
        """Whether a step has to call `after_step` because of an evaluation, save or export. Collective."""
        return any([self.is_due(name) for name in self.due if self._evaluates or name != "eval"])  # all are asked

    def _log_step(self, metrics: dict, steps: int) -> dict:
        together, compiled = self.phase.take(), self.compilations.take()
        spent = per_step(together, steps) if steps > 1 else together
        metrics = metrics | self.rates(metrics, spent) | (self.uploads.metrics() if self.uploads is not None else {})
        metrics |= {"time/compilations": float(compiled.waited),
                    "time/compilations_background": float(compiled.background)}
        metrics = self.telemetry.step(self.step, metrics, spent)
        self._lines.append((self.step, together))
        for warning in self.idle.check(self.step, metrics) if self.idle is not None and self.idle.watched else ():
            log.warning(warning)
        for warning in self.divergence.check(self.step, metrics):
            if self.peers.first:
                log.warning(warning)
            if self.spec.train.stop_on_divergence:
                self.ended_by = f"train.stop_on_divergence: {self.divergence.found}"
        return metrics

    def _evaluate(self, evaluate) -> dict:
        """Returns metrics of the held-out sets; {} after a stop, and the evaluation stays due."""
        self.due["eval"].missed = True
        with self.phase("eval"):
            metrics, rows, summary = evaluate()
        if metrics:
            self.due["eval"].missed = False
            self.last_summary, self.last_eval = summary, {"step": self.step, **summary}
            self.telemetry.samples(self.step, rows)
            self.callbacks.due("on_evaluation", metrics, rows)
        return metrics

    def _better(self, evaluated: dict) -> bool:
        """Whether this evaluation is the best, so that a checkpoint is due. Ends the run per eval.patience."""
        if not evaluated or not self.best.wanted:
            return False
        is_best = self.best.add(self.step, evaluated)
        if not self.ended():
            self.ended_by = self.best.over
        if is_best and self.spec.checkpoint.keep_best:
            self.checkpointer.best = self.step
            return True
        return False

    def save(self) -> None:
        """Saves this step in the background (checkpoint.asynchronous) unless saved. Raises as Checkpointer.save."""
        if self.checkpointer.committed == self.step:
            return
        with self.phase("checkpoint"):
            self.checkpointer.save(self.step, *self.content())

    def content(self) -> tuple[dict, dict]:
        """Returns what a checkpoint of this step stores: (arrays: a tree of the policy's fields and of parts by
        name, JSON-able host values: progress, evaluations, config, inputs read, triggers, parts)."""
        host = {
            **self.progress._asdict(), "eval_before": self.eval_before, "last_eval": self.last_eval,
            "config": redacted(self.spec.asked), "read": self.fingerprints,
            "triggers": {name: due.state() for name, due in self.due.items()},
            "best": self.best.state(),
            "parts": {part.name: host for part in self.parts if (host := part.host()) is not None},
        }
        arrays = {part.name: part.arrays() for part in self.parts if part.name in host["parts"]}
        return self.policy.arrays() | arrays, host

    def save_and_wait(self) -> None:
        """Saves this step and returns once the checkpoint is complete on disk. Raises SavesFailed if that fails."""
        self.checkpointer.wait()  # a save of this step may be under way, and may fail
        self.save()
        self.checkpointer.require(self.step)

    def _export(self, export, folder) -> None:
        limit = self.spec.checkpoint.timeout_seconds
        late = f"export to {folder} not written within checkpoint.timeout_seconds={limit:g}"
        with self.phase("export"), time_limit(limit, late):
            export(folder)
        self.callbacks.due("on_save", str(folder))
        if self.uploads is not None and self.uploads.wants("exports", last=folder.name == "export"):
            self.uploads.add(folder, folder.name, self.step)

    # -- the end --------------------------------------------------------------------------------------------------

    def finish(self, evaluate, export) -> dict:
        """Evaluates, saves, exports and writes summary.json, whose content it returns; after a stop without the
        evaluation and the export.

        evaluate, export: functions as `after_step` takes them. Raises SavesFailed if the last checkpoint cannot be
        written."""
        c = self.spec
        stopped = self.stopping() and not self.ended()
        evaluated, best = (self.last_eval or {}).get("step") == self.step, False
        if not stopped and not evaluated and c.eval.after and evaluate is not None:
            metrics = self._evaluate(evaluate)
            best = self._better(metrics)
            if metrics:  # no stop was requested
                self.callbacks.after_line(self.telemetry.step(self.step, metrics, self.phase.take()))
            stopped = self.stopping() and self.due["eval"].missed
        unsaved = None
        try:
            if (stopped or c.checkpoint.at_end or best) and self.step > 0:
                self.save_and_wait()
            self.checkpointer.wait()
        except SavesFailed as e:
            if stopped or not c.checkpoint.export_at_end:
                raise
            unsaved = e  # an export is smaller, and may be on another disk
        self.phase.take()
        out = self._summary(stopped)
        try:
            if not stopped and c.checkpoint.export_at_end:
                self._load_best()
                self._export(export, self.run_dir / "export")
                out["export"] = str(self.run_dir / "export")
        finally:
            if unsaved is not None:
                where = f"in {out['export']}" if "export" in out else "not exported either"
                log.error("the model of step %d is %s", self.step, where)
                raise unsaved
        self.telemetry.flush()  # a finished run is on disk
        self.telemetry.summary(out)
        if c.checkpoint.upload.to:
            out["uploads"] = self.decide("uploads", self._finish_uploads, self.uploads, stopped)
            self.telemetry.summary(out)
        self.report()
        if stopped:
            saved = "all state is saved; rerun the same command to resume"
            saved = saved if self.step else "no step was completed, nothing was saved"
            self.say(f"stopped at step {self.step} of {self.total_steps}; {saved}")
        else:
            if self.comparison is not None and (compared := self.comparison.end(self._lines)):
                self.say(compared)
            self.say(closing_line(out))
        return out

    def _load_best(self) -> None:
        """With checkpoint.keep_best, loads the policy of the best evaluation if its checkpoint can be read."""
        step = self.checkpointer.best
        if step in (None, self.step):
            return
        try:
            arrays = self.checkpointer.read(step, self.policy.abstract())
        except CheckpointError as e:
            log.error("the exported model is that of step %d, not of the best evaluation: %s", self.step, e)
            return
        self.policy.state = None  # memory for one only
        self.policy.start(arrays)

    def report(self) -> None:
        """Writes report.html, on process 0, if log.report is set."""
        if self.spec.log.report and self.peers.first:
            report_of(self.run_dir)

    def _finish_uploads(self, uploads: Uploads, stopped: bool) -> dict:
        """Returns the uploads' results; after a stop waits at most run.stop_seconds, without the last checkpoint."""
        c = self.spec
        if not stopped and uploads.wants("checkpoints", last=True) and self.checkpointer.committed == self.step:
            path = self.checkpointer.path_of(self.step)
            if c.checkpoint.upload.checkpoints != "all":  # else it is in the queue already
                uploads.add(path, f"checkpoints/{path.name}", self.step)
        if waiting := int(uploads.metrics()["upload/waiting"]):
            self.say(f"uploads   {waiting} not done yet")
        out = uploads.end(c.run.stop_seconds if stopped else c.checkpoint.upload.wait_seconds)
        self.checkpointer.prune()
        return out

    def _summary(self, stopped: bool) -> dict:
        out = {
            "steps": self.step, "finished": not stopped and not self.ended_by, "error": None,
            "samples": self.progress.samples,
            "seconds": self.phase.totals(), "wall_seconds": time.monotonic() - self.started,
            "run_dir": str(self.run_dir), "checkpoints": self.spec.checkpoint.dir or str(self.run_dir / "checkpoints"),
            "metrics": str(self.run_dir / "metrics.jsonl"),
            "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        }
        if self.ended_by:
            out["ended_by"] = self.ended_by
        if self.best.step is not None:
            out["best"] = {"metric": self.best.metric, "step": self.best.step, "value": self.best.value}
        if self.divergence.found:
            out["diverged"] = self.divergence.found
        if self.comparison is not None and self.comparison.predicted:
            out |= {"planned": self.comparison.predicted, "measured": self.comparison.measured(self._lines)}
        if self.eval_before:
            out["eval_before"] = self.eval_before
        if self.last_eval and not stopped:
            out["eval_after"] = self.last_eval
        return out

    def __exit__(self, kind, error, trace):
        seconds = CLOSING_SECONDS if isinstance(error, SaveTimeout) else 0
        with time_limit(seconds, f"stopped: {error}"):  # the remaining writes may hang, too
            if error is not None and "telemetry" in vars(self) and self.spec.run.mode == "train":
                self._save_after_error(error)
            self._closers.close(error)

    def _save_after_error(self, error: BaseException) -> None:
        """Saves a checkpoint and the summary of a run that ends by an error. Raises nothing."""
        known = self.peers.count == 1 or self._error_agreed  # saving is collective
        try:
            if self._whole and known and self.step > 0 and not isinstance(error, SavesFailed):
                self.save_and_wait()
                log.error("the run ends by an error; step %d is saved: rerun the same command to resume", self.step)
        except Exception as e:
            log.error("the run ends by an error, and step %d could not be saved: %s", self.step, e)
        uploads = {"uploads": self.uploads.end(self.spec.run.stop_seconds)} if self.uploads is not None else {}
        entries = {"finished": False, "error": f"{type(error).__name__}: {error}", "steps": self.step}
        try:
            self.telemetry.summary(entries | uploads)
        except Exception as e:
            log.error("summary.json could not be written: %s", e)
        self.report()
