"""The life of a run around its steps: start, resume, count, evaluate, save, stop, export."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time

import jax
import numpy as np

from jaxrl import data as data_room
from jaxrl import training
from jaxrl.checkpoint import Checkpointer, DiskHangs, SavesFail
from jaxrl.config import get, redacted
from jaxrl.deadline import within
from jaxrl.errors import ConfigError, RunStopped
from jaxrl.faults import Faults, GracefulStop
from jaxrl.limits import end, ends
from jaxrl.models import hf
from jaxrl.planning.comparison import Beside
from jaxrl.processes.group import PeerLost, peers
from jaxrl.recipes import setup
from jaxrl.recipes.closing import Closers, closing
from jaxrl.recipes.evaluate import summary, write_rows
from jaxrl.recipes.given import Given, call_back
from jaxrl.recipes.inputs import compared
from jaxrl.recipes.trajectories import trial_items
from jaxrl.resume import config_changes
from jaxrl.rewards import RewardPool
from jaxrl.rollout import make_engine
from jaxrl.rollout.driven import Driven
from jaxrl.sharding import memory
from jaxrl.spec import resolve
from jaxrl.telemetry import Every, Phases, Telemetry, find_sink, open_console, per_step, write_config
from jaxrl.telemetry.compilations import Compilations
from jaxrl.telemetry.flops import Speed
from jaxrl.telemetry.health import Idle
from jaxrl.telemetry.profiler import Profiler, memory_of, steps_of
from jaxrl.types import TrainState

log = logging.getLogger("jaxrl")
SAVE_AGAIN_SECONDS = 60.0  # after the disk refused a save
CLOSING_SECONDS = 60.0  # for closing a run whose disk hangs


class NothingFinite(RunStopped):
    """Too many updates in a row were not finite."""


class Run:
    """A context manager around one job. The recipe calls prepare, before_first_step, then per step advance and
    after_step, and close_run. `state`, `step`, `cursor`, `samples` are the run; everything else can be rebuilt.

    With several processes all walk through the same calls. What depends on time or on what happened to one of them is
    agreed at stamped meetings (`together`, `decide`, `finished`), so that none can act on a decision the others lack.

    Leaving by an error saves first, where the state is that of a whole step (`changing`) and all processes know of the error;
    the error itself goes on. summary.json then has it as `error`.
    """

    def __init__(self, config, given=None, with_engine=True):
        self.config, self.given = resolve(config), given or Given()
        self.step = self.cursor = self.samples = 0
        self.state = None
        self.supply = None  # of answers, where the recipe samples (recipes.supply)
        self.published = -1  # completed steps of the engine's weights
        self.eval_before = self.last_eval = None
        self.started = time.monotonic()
        self.compilations = Compilations()
        self.stop = GracefulStop(starting=True)
        self.peers = peers()
        self.faults = Faults(config.faults.plan, self.peers.index)
        self._stop_agreed = self._error_agreed = False
        self._whole = False  # the state is that of self.step
        self.telemetry = None
        self.answers, self.ended_by = [], ""  # records of the newest step, for callbacks; why one of them ended the run
        self._with_engine = with_engine
        self._closers = Closers()
        self.own = self._closers.own

    # -- start ---------------------------------------------------------------------------------------------------

    def __enter__(self):
        try:
            return self._open()
        except BaseException as e:
            self._closers.close(e)
            raise

    def _open(self):
        c = self.config
        self.console = self.own(open_console(c.run.dir, c, silent=not self.peers.first))
        self.console.start()
        self.phases = Phases()
        self._starting = self.phases("start")
        self._starting.__enter__()
        self._closers.enter(self.stop)
        inputs = self._read_inputs()
        self.job = setup.open_job(c, inputs)
        c = self.config = self.job.config
        self.engine = None
        if self._with_engine:
            engine = make_engine(
                c, self.job.model, self.job.tokenizer, self.job.mesh_of("sampler"), self.job.eos_ids, self.job.hf_config)
            self.engine = self.own(Driven(engine) if c.ahead and self.job.apart("sampler") else engine)
            if self.job.rests("sampler"):
                if not hasattr(self.engine, "rest"):
                    raise ConfigError(f"rollout.placement=colocated: the engine {c.rollout.engine!r} has no method rest()")
                self.engine.rest()  # what is loaded next finds its devices free
        return self

    def _read_inputs(self) -> setup.Inputs:
        """Reads and checks everything that a user brings, before any device work. Raises ConfigError."""
        c = self.config
        for sink in c.log.sinks:
            find_sink(sink)
        if self._with_engine:  # workers start while the rest is read
            self.rewards = self.own(RewardPool(c, functions=self.given.rewards))
            self.eval_rewards = self.rewards
            if c.eval.rewards:
                self.eval_rewards = self.own(RewardPool(c, names=c.eval.rewards))
        inputs = setup.read_inputs(c, self.given.tokenizer)
        # What is older than a checkpoint must be on disk before it: metrics, and the rewards decided so far.
        self.checkpointer = self.own(Checkpointer(c.run.dir, c, self.faults, lambda: self.telemetry.flush()))
        self.stop.newest = lambda: f"checkpoints: {self.checkpointer.newest()}; the same command goes on"
        chosen = self.checkpointer.choose(c.run.resume)  # process 0 looks, the others take the same
        self._held = None if chosen is None else chosen.host.get("parts", {})
        if chosen is None:
            setup.check_weights(c, inputs)
        elif c.run.mode == "train":
            self._refuse_other_past(chosen)
        train_set, self.eval_sets = self._load_data(inputs)
        self.read = compared(c, self.peers, inputs, train_set, self.eval_sets, chosen)
        self.stream = None
        if train_set is not None:
            self.stream = self.own(data_room.Stream.from_config(c, train_set))
            if self.peers.count == 1:  # several agree on a stop behind the step's rows, where they meet
                self.stream.interrupted = self.interrupted
        self.total_steps, self.ending = end(c, self.stream and self.stream.total_steps)
        if self._with_engine:
            self._try_rewards(inputs.tokenizer, train_set)
        return inputs

    def _load_data(self, inputs):
        c, tokenizer, eos, given = self.config, inputs.tokenizer, inputs.eos_ids[0], self.given
        train_set = None if c.run.mode == "eval" else data_room.load_train(c, tokenizer, eos, given.data)
        return train_set, data_room.load_eval_sets(c, tokenizer, eos, train_set, given.eval, given.data)

    def _try_rewards(self, tokenizer, train_set) -> None:
        """A reward that cannot be imported, or fails on the first rows of what it is for, stops the run here."""
        c = self.config
        first_eval = next(iter(self.eval_sets.values()), None)
        scored = train_set if c.recipe.samples and train_set is not None else first_eval
        for pool, dataset in {self.eval_rewards: first_eval, self.rewards: scored}.items():
            pool.wait()
            if c.reward.trial and dataset is not None:
                pool.trial(trial_items(dataset, tokenizer, c.data.response_prefix))

    def check(self) -> None:
        """Reads and checks all inputs and closes them again. Raises ConfigError; touches no device."""
        try:
            self._read_inputs()
        except BaseException as e:
            self._closers.close(e)
            raise
        self._closers.close()

    def __exit__(self, kind, error, trace):
        seconds = CLOSING_SECONDS if isinstance(error, DiskHangs) else 0
        with within(seconds, f"stopped: {error}"):  # what is still to be written may hang, too
            if error is not None and self.telemetry is not None and self.config.run.mode == "train":
                self._keep(error)
            self._closers.close(error)

    def _keep(self, error: BaseException) -> None:
        """What can be kept of a run that ends by an error. Raises nothing: the user is to see the error."""
        known = self.peers.count == 1 or self._error_agreed  # saving is a thing of all processes
        try:
            if self._whole and known and self.step > 0 and not isinstance(error, SavesFail):
                self.save_for_good()
                log.error("the run ends by an error; step %d is saved, the same command goes on from it", self.step)
        except Exception as e:
            log.error("the run ends by an error, and step %d could not be saved: %s", self.step, e)
        try:
            self.telemetry.summary({"finished": False, "error": f"{type(error).__name__}: {error}", "steps": self.step})
        except Exception as e:
            log.error("summary.json could not be written: %s", e)

    def prepare(self, updates_per_step: int, loss, parts=()) -> None:
        """Optimizer, state (restored or new), update program, telemetry; publishes the first weights.

        `parts` are what a checkpoint holds beside the policy. A part has `name`, `abstract()` (tree of ShapeDtypeStructs, {} for
        nothing), `start(arrays, host)` (what a checkpoint held, or None and None), `arrays()` and `host()` (JSON-able dict; None
        = nothing of it is kept). A checkpoint without a part starts it anew, one with a part that is not wanted leaves it.
        """
        c, job, self.parts = self.config, self.job, parts
        axes = setup.flat_axes(job.tree)
        total = max(1, self.total_steps * updates_per_step)
        self.optimizer, self.schedule = training.make_optimizer(c.optimizer, total, axes)
        abstract = setup.abstract_state(job, self.optimizer)
        everything = {**vars(abstract), **{part.name: part.abstract() for part in parts}}
        try:
            self.checkpointer.require_space(everything)
        except OSError as e:
            raise ConfigError(f"run.dir={c.run.dir!r}: {e.strerror}") from None
        held = self._held  # None where nothing is resumed
        wanted = {name: tree for name, tree in everything.items() if held is None or name in held or name in vars(abstract)}
        dropped = set(held or ()) - set(everything)
        restored = self.checkpointer.restore(wanted, c.run.resume, partial=bool(dropped))
        if restored is None:
            self.state = setup.new_state(job, self.optimizer, abstract, setup.start_params(job))
        else:
            self._take_over(restored)
        for part in parts:
            known = restored is not None and part.name in held
            part.start(*(restored.arrays[part.name], held[part.name]) if known else (None, None))
        self.telemetry = self.own(
            Telemetry(job.run_dir, c, self.total_steps, resume_step=self.step if restored else None, silent=not self.peers.first,
                      console=self.console)
        )
        self.phases.watch = self.telemetry.phase
        self.telemetry.phase(self.phases.current)
        if self.peers.first:
            write_config(job.run_dir, c.asked, setup.derived(c))
        self.update = training.make_update(job.model, self.optimizer, self.schedule, loss)
        self.idle = Idle(c.chosen())
        origin = c.origin("optimizer.lr")
        self.say(f"{setup.describe(job, self._data_numbers())}\nlearns    at optimizer.lr={c.optimizer.lr:g} ({origin}), "
                 f"{c.optimizer.schedule}\nends      after {self.total_steps} steps: {self.ending}")
        if restored is not None:
            new = [part.name for part in parts if part.name not in held and part.host() is not None]
            self.say(f"resumed   step {self.step} from {restored.path}" + f"; it holds no {', no '.join(new)}" * bool(new))
        self.beside = Beside(c, job, self.step)
        if planned := self.beside.start():
            self.say(planned)
        self._triggers(restored.host["triggers"] if restored else {})
        process = self.peers.index
        self.profiler = self.own(Profiler(steps_of(c.profile, process), job.run_dir / "profile", memory_of(c.profile, process),
                                          c.profile.python))
        self.speed = Speed(job, self.state.trainable)
        if self.engine is not None:
            self.publish()
            self._show_first_prompt()
        self.profiler.at(self.step)
        self._whole = True
        if not self.ended():  # whatever an earlier run said, and however this one ends
            self.telemetry.summary({"finished": False, "error": None})
        self._starting.__exit__(None, None, None)
        self.phases.take()  # start-up is not part of the first step
        self.stop.started()

    def held(self, name: str) -> dict | None:
        """What the checkpoint that is resumed holds of a part (its `host`); known before the part starts."""
        return (self._held or {}).get(name)

    def _refuse_other_past(self, chosen):
        refused, taken = config_changes(chosen.host["config"], redacted(self.config.asked))
        if refused:
            raise ConfigError(f"resuming {chosen.path}: these options would change the past: {'; '.join(refused)}. Use another run.dir,"
                              " or run.resume=never")
        for change in taken:
            log.info("changed since the checkpoint: %s", change)

    def _take_over(self, restored):
        host = restored.host
        self.state = TrainState(**{f.name: restored.arrays[f.name] for f in dataclasses.fields(TrainState)})
        self.step, self.cursor, self.samples = host["step"], host["cursor"], host["samples"]
        self.eval_before, self.last_eval = host["eval_before"], host["last_eval"]

    def _data_numbers(self):
        return {"training rows": len(self.stream.dataset)}

    def _show_first_prompt(self):
        if self.stream is not None and self.step == 0:
            example = self.stream.dataset[0]
            self.say(f"first prompt ({len(example.prompt_ids)} tokens): {self.job.tokenizer.decode(example.prompt_ids)!r}")

    def _triggers(self, states: dict) -> None:
        c = self.config
        periods = {
            "eval": dict(steps=c.eval.every_steps, epochs=c.eval.every_epochs, seconds=c.eval.every_seconds),
            "save": dict(steps=c.checkpoint.every_steps, epochs=c.checkpoint.every_epochs,
                      seconds=60 * c.checkpoint.every_minutes),
            "export": dict(steps=c.checkpoint.export_every_steps, epochs=c.checkpoint.export_every_epochs,
                        seconds=60 * c.checkpoint.export_every_minutes),
        }
        self.due = {name: Every(**period, state=states.get(name)) for name, period in periods.items()}

    # -- during a step --------------------------------------------------------------------------------------------

    def phase(self, name: str):
        return self.phases(name)

    def fault(self, component: str, phase: str = "") -> None:
        self.faults.fire(component, self.step + 1, phase)

    def say(self, text: str) -> None:
        """A message to the person at the console."""
        self.telemetry.print(text)

    def interrupted(self) -> bool:
        """Whether a stop has reached this process, by a signal of its own or by word of another; asked while it works alone."""
        if self.stop.requested:
            self.peers.ask_stop()
        return self.stop.requested or self.peers.stop_asked

    def stopping(self) -> bool:
        """Whether the run is to stop, the same on all processes: it changes at meetings only. (Alone: at once.)"""
        return self.interrupted() if self.peers.count == 1 else self._stop_agreed

    @property
    def place(self) -> str:
        """The stamp of a meeting: which step the run is in, and which weights it samples from."""
        return f"step {self.step + 1}, weights {self.step}"

    def together(self, what: str, work):
        """What work() returns, or None on every process where a stop reached one of them before it was done (work() is None).

        What stops one of them (an engine that is lost, rewards that fail, an answer that never came) stops all: each raises
        it, and they can still save together.
        """
        if self.peers.count == 1:
            return work()
        done, error = None, None
        try:
            done = work()
        except PeerLost:
            raise
        except (RunStopped, TimeoutError) as e:
            error = e
        with self.phase("wait"):
            states = self.peers.meet(f"{self.place}: {what}", [done is not None, str(error or "")])
        if any(text for _, text in states):
            self._error_agreed = True
            kind = RunStopped if error is None else type(error)
            raise kind("; ".join(f"{self.peers.who(i)}: {text}" for i, (_, text) in enumerate(states) if text)) from error
        self._stop_agreed |= not all(fine for fine, _ in states)
        return None if self._stop_agreed else done

    def decide(self, what: str, choose, *arguments):
        """What process 0 finds by choose(*arguments), on all."""
        return self.peers.decide(f"{self.place}: {what}", choose, *arguments)

    def finished(self) -> bool:
        """Asked before every step. A stop that reached any process since is agreed here."""
        if self.peers.count > 1:
            self._stop_agreed |= any(self.peers.meet(f"{self.place}: go on?", self.interrupted()))
        return self.stopping() or self.ended()

    def ended(self) -> bool:
        """Whether one of train.steps, data.epochs and train.max_samples is reached, or a callback ended it; the same on all processes."""
        steps, samples = ends(self.config).get("train.steps"), self.config.train.max_samples
        counted = (steps and self.step >= steps) or (samples and self.samples >= samples)
        return bool(self.ended_by or counted) or self.stream.exhausted(self.cursor)

    @contextlib.contextmanager
    def policy_at_rest(self):
        """The policy's state is in host memory meanwhile, where mesh.roles says so."""
        if not self.job.rests("policy"):
            yield
            return
        where = jax.tree.map(lambda x: x.sharding, self.state)
        self.state = memory.to_host(self.state)
        self._tell_engine()
        try:
            yield
        finally:
            self.state = jax.device_put(self.state, where)
            self._tell_engine()

    def _tell_engine(self) -> None:
        """Where the weights are that it may have to give to a server; else it would keep their old place alive."""
        if hasattr(self.engine, "moved"):
            self.engine.moved(setup.policy_params(self.state))

    def publish(self) -> None:
        """Gives the engine the current weights under the version = completed steps."""
        give = (self.supply or self.engine).publish
        self.together("new weights", lambda: give(setup.policy_params(self.state), self.step) or True)
        self.published = self.step

    @contextlib.contextmanager
    def changing(self):
        """Around what turns the state of one step into that of the next. An error in here leaves a state of no step."""
        self._whole = False
        yield
        self._whole = True

    def advance(self, cursor: int, samples: int) -> None:
        """The update of this step is done: the step counts."""
        self.step += 1
        self.cursor = cursor
        self.samples += samples
        if self.supply is not None:
            self.supply.ahead.used(cursor)
        self.profiler.at(self.step)

    def check_finite(self, state=None) -> None:
        """Raises NothingFinite after too many such updates of a TrainState (None: the policy's)."""
        streak = int(np.asarray((state or self.state).stats["nonfinite_streak"]))
        if streak >= self.config.optimizer.max_nonfinite:
            limit = self.config.optimizer.max_nonfinite
            raise NothingFinite(
                f"{streak} updates in a row had a non-finite loss or gradient (optimizer.max_nonfinite={limit});"
                f" parameters are unchanged since. Lower optimizer.lr or look at the rewards in {self.job.run_dir / 'rollouts'}"
            )

    def stream_metrics(self) -> dict[str, float]:
        data = self.stream.dataset
        filtered = len(data.filtered)
        return {
            "data/epoch": self.stream.epoch(self.cursor),
            "data/samples": float(self.samples),
            "data/filtered_fraction": filtered / (filtered + len(data)),
            "data/bad_rows": float(data.bad.count),
            "time/compiled_programs": float(self.engine.health().get("compiled", 0)) if self.engine else 0.0,
        }

    # -- around steps ---------------------------------------------------------------------------------------------

    def before_first_step(self, evaluate) -> None:
        if self.ended():
            name = self.ending.partition("=")[0]
            further = 2 * (self.step if name == "train.steps" else get(self.config, name))
            asked = "" if self.step <= self.total_steps else f" ({self.total_steps} are asked for)"
            self.say(
                f"this run has finished its {self.step} steps{asked}; extend it with --config.{name}={further}, or start another with"
                " --config.run.dir=..."
            )
            return
        first = self.step == 0 and self.config.eval.before
        if (first or self.due["eval"].missed) and self.eval_sets and self.engine:
            with self.phase("eval"):
                metrics = self._evaluate(evaluate)
            if not metrics:  # a stop was asked for
                return
            self.eval_before = summary(metrics) if first else self.eval_before
            self.ended_by = call_back(self, self.telemetry.step(self.step, metrics, self.phases.take()))

    def after_step(self, metrics: dict, evaluate, steps: int = 1) -> None:
        """Evaluates, logs and saves as the triggers say. One line of metrics, written before its checkpoint; `metrics` are per step,
        of the last `steps` steps."""
        epoch = self.stream.epoch(self.cursor)
        last = self.ended()
        due = lambda name: self.decide(f"{name}?", self.due[name], self.step, epoch)  # noqa: E731
        try:
            if self.eval_sets and self.engine and (due("eval") or (last and self.config.eval.after)):
                with self.phase("eval"):
                    metrics = metrics | self._evaluate(evaluate)
        finally:  # the step itself is done
            metrics = self._log_step(metrics, steps)
        self.checkpointer.check()
        if self.checkpointer.take_refused():
            self.due["save"].again(SAVE_AGAIN_SECONDS)
        if due("save"):
            self.save()
        if due("export"):
            self.export(self.job.run_dir / f"export_{self.step:08d}")
        self.ended_by = call_back(self, metrics)

    def _log_step(self, metrics: dict, steps: int) -> dict:
        together = self.phases.take()
        spent, compiled = per_step(together, steps), self.compilations.take()
        metrics = metrics | self.speed.rates(metrics, spent) | {
            "time/compilations": float(compiled.waited), "time/compilations_beside": float(compiled.beside)}
        metrics = self.telemetry.step(self.step, metrics, spent)
        self.beside.add(self.step, together)
        for warning in self.idle.check(self.step, metrics) if self.peers.first else ():
            log.warning(warning)
        return metrics

    def _evaluate(self, evaluate) -> dict:
        """Metrics of the held-out sets; {} when a stop came on the way. What is not finished is due again."""
        self.due["eval"].missed = True
        if self.published != self.step:  # rollout.sync_every is above 1; the accuracy of a step is that of its weights
            self.publish()
        metrics, rows = evaluate(self)
        if not metrics:  # a stop was asked for
            return {}
        if self.peers.first:
            write_rows(self.job.run_dir, self.step, rows)
        self.due["eval"].missed = False
        self.last_eval = {"step": self.step, **summary(metrics)}
        self.telemetry.samples(self.step, rows)
        return metrics

    def save(self) -> None:
        if self.checkpointer.committed == self.step:
            return
        with self.phase("checkpoint"):
            host = {
                "step": self.step,
                "cursor": self.cursor,
                "samples": self.samples,
                "eval_before": self.eval_before,
                "last_eval": self.last_eval,
                "config": redacted(self.config.asked),
                "read": self.read,
                "triggers": {name: due.state() for name, due in self.due.items()},
                "parts": {part.name: host for part in self.parts if (host := part.host()) is not None},
            }
            arrays = {**vars(self.state), **{part.name: part.arrays() for part in self.parts if part.name in host["parts"]}}
            self.checkpointer.save(self.step, arrays, host)

    def save_for_good(self) -> None:
        """Returns once this step is on disk, whole. Raises SavesFail where that cannot be."""
        self.checkpointer.wait()  # a save of this step may be under way, and may fail
        self.save()
        self.checkpointer.require(self.step)

    def export(self, folder) -> None:
        c, limit = self.config, self.config.checkpoint.timeout_seconds
        with self.phase("export"), within(limit, f"export to {folder} not written within checkpoint.timeout_seconds={limit:g}"):
            hf.export(
                self.job.model,
                setup.policy_params(self.state),
                folder,
                self.job.hf_config,
                c.checkpoint.export_dtype,
                tokenizer=self.job.tokenizer,
                shard_gb=c.checkpoint.shard_gb,
                eos_ids=self.job.eos_ids,
            )

    def close_run(self, evaluate) -> dict:
        """Final evaluation, checkpoint, export and summary; after a stop request only the checkpoint."""
        c = self.config
        stopped = self.stopping() and not self.ended()
        evaluated = (self.last_eval or {}).get("step") == self.step
        if not stopped and not evaluated and c.eval.after and self.eval_sets and self.engine:
            with self.phase("eval"):
                self.telemetry.step(self.step, self._evaluate(evaluate), self.phases.take())
            stopped = self.stopping() and self.due["eval"].missed
        unsaved = None
        try:
            if (stopped or c.checkpoint.at_end) and self.step > 0:
                self.save_for_good()
            self.checkpointer.wait()
        except SavesFail as e:
            if stopped or not c.checkpoint.export_at_end:
                raise
            unsaved = e  # an export is smaller, and may lie elsewhere
        self.phases.take()
        out = {
            "steps": self.step,
            "finished": not stopped,
            "error": None,
            "samples": self.samples,
            "seconds": self.phases.totals(),
            "wall_seconds": time.monotonic() - self.started,
            "run_dir": str(self.job.run_dir),
            "checkpoints": str(self.job.run_dir / "checkpoints"),
            "metrics": str(self.job.run_dir / "metrics.jsonl"),
            "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        }
        if self.ended_by:
            out["ended_by"] = self.ended_by
        if self.beside.predicted:
            out["planned"], out["measured"] = self.beside.predicted, self.beside.measured()
        if self.eval_before:
            out["eval_before"] = self.eval_before
        if self.last_eval and not stopped:
            out["eval_after"] = self.last_eval
        try:
            if not stopped and c.checkpoint.export_at_end:
                self.export(self.job.run_dir / "export")
                out["export"] = str(self.job.run_dir / "export")
        finally:
            if unsaved is not None:
                log.error("the model of step %d is %s", self.step, f"in {out['export']}" if "export" in out else "not exported either")
                raise unsaved
        self.telemetry.flush()  # what is not on disk is no finished run
        self.telemetry.summary(out)
        if stopped:
            saved = "everything is saved, the same command goes on from here" if self.step else "no step was done, nothing was saved"
            self.say(f"stopped at step {self.step} of {self.total_steps}; {saved}")
        else:
            if compared := self.beside.end():
                self.say(compared)
            self.say(closing(out))
        return out

    def publish_newest(self):
        """(parameters, where they come from): the newest checkpoint's if there is one, else the model as given; the engine
        has them. Opens telemetry that writes no metrics."""
        c, job = self.config, self.job
        optimizer, _ = training.make_optimizer(c.optimizer, 1, setup.flat_axes(job.tree))
        state = setup.abstract_state(job, optimizer)
        restored = self.checkpointer.restore({"trainable": state.trainable, "frozen": state.frozen}, c.run.resume, partial=True)
        params = setup.initial_params(job) if restored is None else setup.without_value(training.merge(**restored.arrays))
        self.step = 0 if restored is None else restored.host["step"]
        self.telemetry = self.own(Telemetry(job.run_dir, c, self.total_steps, resume_step=self.step, read_only=True,
                                             silent=not self.peers.first, console=self.console))
        self.engine.publish(params, self.step)
        return params, restored.path if restored else (c.model.path or "random initialisation")
