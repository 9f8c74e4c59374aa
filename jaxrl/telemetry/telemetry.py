"""Telemetry: one object that receives a run's events and passes them on to console, files and sinks."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl.config.load import redacted
from jaxrl.telemetry.console import (
    SPARKS,
    PlainConsole,
    SilentConsole,
    completion_text,
    encodes,
    setup_logging,
    shortened,
)
from jaxrl.telemetry.health import Health
from jaxrl.telemetry.run_dir import Lock, dumps, merge_json, set_aside, write_atomic
from jaxrl.telemetry.sinks import JsonLines, TensorBoard, Wandb, load_sink
from jaxrl.telemetry.timing import training_seconds

log = logging.getLogger("jaxrl")
FLUSH_SECONDS = 60.0  # longest wait for a slow sink; training goes on without it
WAITING = 1000        # actions that may wait for a sink
WAITING_STEPS = 8     # steps whose rollouts may wait for the disk
HISTOGRAM_NUMBERS = 100_000
SAMPLES_EVERY = 10    # steps between two samples of training
ROLLOUTS = "rollouts/step_{:08d}.jsonl"


class Telemetry:
    """Console, metrics.jsonl, rollouts, summary.json, TensorBoard, W&B and the user's sinks of one run.

    metrics.jsonl is written at once; rollouts and each sink have a thread of their own, so that none waits for another.
    A sink that fails is logged once and tried again at the next step; one that hangs for FLUSH_SECONDS is disabled. No
    sink ends the run. Lines of metrics and rollouts that a full disk refuses are kept and tried again; `flush` raises
    while there are any.

    Args:
      run_dir: created if need be; locked against a second run until `close`.
      config: the whole config.
      total_steps: what the run aims at, for progress and time left.
      resume_step: step of the restored checkpoint. Later lines of metrics.jsonl are dropped (the run
        writes them again), TensorBoard hides its later events. None: a new run; what an earlier one left
        is moved to <run_dir>/previous-<n>.
      read_only: evaluation of a run that may be training elsewhere: only messages, samples and summary, no lock.
      console: one that `open_console` made earlier; None: one of this telemetry's own.
      silent: a process other than the first of several: it writes nothing and shows nothing, and can only read.

    Attributes:
      run_dir: Path. console: what shows the run. earlier_rollouts: steps whose rollouts/ files were there at the start.
    """

    def __init__(self, run_dir, config, total_steps: int, resume_step: int | None = None, read_only: bool = False,
                 silent: bool = False, console: SilentConsole | None = None):
        self.run_dir = Path(run_dir)
        self._log, self._seed = config.log, config.run.seed
        setup_logging(config.log.level)
        self._silent, read_only = silent, read_only or silent
        self.console = console or open_console(run_dir, config, silent)
        self.console.progress.total = total_steps
        self._health = Health(config, self.run_dir)
        self._failed: set[str] = set()
        self._sinks: dict[str, Any] = {}
        self._lock = self._lines = None
        self._closed, self._newest_rollouts = False, -1
        self._refused: dict[Path, str] = {}  # rollouts that are not on disk; written by their thread alone
        self._refusal: OSError | None = None
        self.earlier_rollouts: set[int] = set()  # steps whose rollouts an earlier process of this run wrote
        if not read_only:
            try:
                self._open_files(config, resume_step)
            except BaseException:
                self._release()
                raise
        self.earlier_rollouts |= {int(file.stem[5:]) for file in (self.run_dir / "rollouts").glob("step_*.jsonl")
                                  if file.stem[5:].isdecimal()}
        self._queues = {name: start_queue(name, WAITING) for name in self._sinks}
        self._queues["rollouts"] = start_queue("rollouts", WAITING_STEPS)
        if not read_only:
            self.text("config", f"```\n{dumps(redacted(config), indent=1)}\n```", max(0, resume_step or 0))

    def _open_files(self, config, resume_step: int | None) -> None:
        self._lock = Lock(self.run_dir)
        if resume_step is None:
            self._set_aside(config.run.resume)
        last = -1 if resume_step is None else resume_step
        self._lines = JsonLines(self.run_dir / "metrics.jsonl", last)
        if self._log.tensorboard:
            self._sinks["tensorboard"] = TensorBoard(self.run_dir / "tensorboard", last + 1)
        if self._log.wandb:
            self._sinks["wandb"] = Wandb(self.run_dir, self._log, redacted(config))
        for spec in self._log.sinks:
            self._sinks[spec] = load_sink(spec, self.run_dir, redacted(config))

    def _set_aside(self, resume: str) -> None:
        """Renames an earlier run's files that this run does not continue: its steps would be taken for this run's."""
        lines, rollouts = self.run_dir / "metrics.jsonl", self.run_dir / "rollouts"
        began = lines.exists() and lines.stat().st_size or any(rollouts.glob("*.jsonl"))
        if (resume == "never" or began) and (moved := set_aside(self.run_dir)):
            why = "run.resume=never" if resume == "never" else "there is no checkpoint to go on from"
            log.warning("%s: the earlier run's files are now in %s", why, moved)

    # ---- what recipes call

    def step(self, step: int, scalars: dict[str, float], phases: dict[str, float] | None = None) -> dict[str, float]:
        """Records the metrics of a step (see names.py) and returns them with time/*. A second call for the newest step
        merges into it.

        Args:
          scalars: metric -> number.
          phases: seconds by phase with their sum as `step`, from `Phases.take()`.

        Raises:
          ValueError: the step is older than the newest one.
        """
        values = {name: float(v) for name, v in scalars.items()}
        values |= {f"time/{name}": seconds for name, seconds in (phases or {}).items()}
        if values.get("rollout/tokens") and (seconds := training_seconds(phases or {})) > 0:
            values["time/tokens_per_second"] = values["rollout/tokens"] / seconds
        values["time/wall"] = time.time()
        if self._lines is not None:
            try:
                self._lines.write(step, values)
            except OSError as e:
                self._is_refused(f"step {step}: {self._lines.path}", e)
        for name, sink in self._sinks.items():
            self._later(name, lambda sink=sink: sink.write(step, values))
        self._try("console", lambda: self.console.step(step, values))
        for warning in () if self._silent or self._health.over else self._health.check(step, values):
            log.warning(warning)
        return values

    def _is_refused(self, what: str, error: OSError) -> None:
        if "the disk" not in self._failed:
            self._failed.add("the disk")
            log.error("%s is not written: %s. Metrics and rollouts are kept and tried again at each step; no "
                      "checkpoint counts before they are on disk", what, error.strerror)

    def rollouts(self, step: int, records: list[dict]) -> None:
        """Writes rollouts/step_<step>.jsonl atomically, in a thread, unless log.rollouts is off; at step 1 and every
        SAMPLES_EVERY steps passes log.print_samples of them to the sinks as text. records: of rl.trajectories.records.
        Rollouts that the disk refuses are written with later ones. Raises OSError if it has accepted nothing for
        FLUSH_SECONDS, or refused WAITING_STEPS steps.
        """
        if step == 1 or step % SAMPLES_EVERY == 0:
            for i, record in enumerate(sample_records(records, self._log.print_samples, self._seed, step)):
                self.text(f"sample/train/{i}", sample_text(record), step)
        if self._log.rollouts and not self._silent:
            if len(self._refused) >= WAITING_STEPS:
                self._raise_refusal()
            self._newest_rollouts = max(self._newest_rollouts, step)
            file = self.run_dir / ROLLOUTS.format(step)
            self._later("rollouts", lambda: self._put(file, "".join(dumps(r) + "\n" for r in records)))

    def _put(self, file: Path | None = None, text: str = "") -> None:
        """Writes the rollouts that the disk refused earlier, and these, in their thread."""
        self._refused |= {file: text} if file is not None else {}
        for path, held in list(self._refused.items()):
            try:
                write_atomic(path, held)
            except OSError as e:
                self._refusal = e
                self._is_refused(str(path), e)
                return
            del self._refused[path]

    def _raise_refusal(self) -> None:
        """Raises the OSError by which the disk refused rollouts, if some are not on disk."""
        if (held := list(self._refused)) and (e := self._refusal) is not None:
            raise OSError(e.errno, e.strerror, str(held[0]))

    def aside(self, action: Callable[[], object]) -> None:
        """Runs an action in the thread that writes rollouts, before the next `flush` returns; not in a silent
        telemetry. The action reports its failures itself. Raises OSError as `rollouts` does.
        """
        if not self._silent:
            self._later("rollouts", action)

    def read_rollouts(self, step: int) -> list[dict]:
        """Returns the records of a step, also of an earlier process; [] if there are none, or the file is damaged."""
        if step <= self._newest_rollouts:
            self._wait("rollouts")
        path = self.run_dir / ROLLOUTS.format(step)
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
            if all(isinstance(row, dict) for row in rows):
                return rows
            raise ValueError("a line is no record")
        except FileNotFoundError:
            return []
        except (ValueError, RecursionError) as e:  # zeros after a loss of power
            log.warning("%s is damaged (%s): its rewards are recomputed, and the step writes it again", path, e)
            return []

    def samples(self, step: int, rows: dict[str, list[dict]]) -> None:
        """Shows log.print_samples rows of each set (see `sample_records`), and passes them on as text."""
        for name, records in rows.items():
            for i, record in enumerate(sample_records(records, self._log.print_samples, self._seed, step)):
                self._try("console", lambda n=name, r=record: self.console.sample(step, n, r))
                self.text(f"sample/{name}/{i}", sample_text(record), step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Passes a text to the sinks that show text, under a tag. Returns at once, unless a sink's queue is full (then
        within FLUSH_SECONDS); a sink that fails is logged once."""
        for name, sink in self._sinks.items():
            if hasattr(sink, "text"):
                self._later(name, lambda sink=sink: sink.text(tag, text, step))

    def histograms(self, step: int, values: dict) -> None:
        """Passes distributions to the sinks that show them; of many numbers, evenly spaced ones.

        values: name (names.HISTOGRAMS) -> [n] numbers."""
        for name, numbers in values.items():
            some = numbers[:: len(numbers) // HISTOGRAM_NUMBERS + 1]
            for key, sink in self._sinks.items():
                if hasattr(sink, "histogram") and len(some):
                    tag = f"histogram/{name}"
                    self._later(key, lambda sink=sink, tag=tag, some=some: sink.histogram(tag, some, step))

    def print(self, text: str) -> None:
        """Shows a message, above a live table."""
        self._try("console", lambda: self.console.print(text))

    def summary(self, values: dict) -> dict:
        """Merges values (JSON-able) into summary.json atomically and returns the whole; a silent telemetry writes
        nothing and returns `values`."""
        return values if self._silent else merge_json(self.run_dir / "summary.json", values)

    def flush(self) -> None:
        """Waits until everything recorded so far is written. Called before each commit, also from its thread.

        A sink that is not done within FLUSH_SECONDS is disabled. Raises OSError if metrics.jsonl or a file of
        rollouts is not on disk, or the rollouts' thread is not done within that time. Does nothing after `close`.
        """
        if self._closed:  # a checkpoint may still be committing in its thread
            return
        for name, sink in self._sinks.items():
            if hasattr(sink, "flush"):
                self._later(name, sink.flush)
        if self._refused:
            self._later("rollouts", self._put)
        self._wait()
        if self._lines is not None:
            self._lines.flush()
        self._raise_refusal()

    def close(self) -> None:
        """Flushes, closes every sink, releases the run directory. May be called twice. Raises as `flush` does."""
        if self._closed:
            return
        self._closed = True
        for name, sink in self._sinks.items():
            self._later(name, sink.close)
        if self._refused:
            self._later("rollouts", self._put)
        try:
            self._wait()
            if self._lines is not None:
                self._lines.flush()
            self._raise_refusal()
        finally:
            for actions in self._queues.values():
                with contextlib.suppress(queue.Full):
                    actions.put_nowait(None)
            self._try("console", self.console.close)
            self._release()

    def _release(self) -> None:
        for file in (self._lines, self._lock):
            if file is not None:
                file.close()

    # ---- the threads of the sinks and of the rollouts

    def _later(self, name: str, action: Callable[[], object]) -> None:
        """Has the thread of this name do it. A full queue is waited for, as `_stuck` says."""
        if (actions := self._queues.get(name)) is not None:
            try:
                actions.put(lambda: self._try(name, action), timeout=FLUSH_SECONDS)
            except queue.Full:
                self._stuck(name)

    def _wait(self, *names: str) -> None:
        """Waits until the threads of these names (of all) have done their work so far, or are stuck."""
        deadline = time.monotonic() + FLUSH_SECONDS
        queues = {name: actions for name, actions in list(self._queues.items()) if name in names or not names}
        marks = {name: threading.Event() for name in queues}
        for name, actions in queues.items():
            with contextlib.suppress(queue.Full):
                actions.put(marks[name].set, timeout=max(0.0, deadline - time.monotonic()))
        for name, mark in marks.items():  # the rollouts, which may raise, are the last
            if not mark.wait(max(0.0, deadline - time.monotonic())):
                self._stuck(name)

    def _stuck(self, name: str) -> None:
        """Disables a sink whose thread did nothing for FLUSH_SECONDS; for rollouts raises OSError."""
        if name == "rollouts":
            why = f"the disk has not taken the rollouts within {FLUSH_SECONDS:.0f} s"
            raise OSError(errno.EIO, why, str(self.run_dir / name))
        if self._queues.pop(name, None) is not None:
            log.warning("telemetry: %s has not finished within %.0f s; training goes on without it, and it gets nothing"
                        " more", name, FLUSH_SECONDS)

    def _try(self, name: str, action: Callable[[], object]) -> None:
        """Runs an action of a sink; its first failure is said, and none is passed on."""
        try:
            action()
        except Exception as e:
            if name not in self._failed:
                self._failed.add(name)
                log.warning("telemetry: %s failed (%s); training goes on, its further failures are not reported", name,
                            e, exc_info=not isinstance(e, BrokenPipeError))  # `| head` has read enough


def start_queue(name: str, limit: int) -> queue.Queue:
    """Returns a queue of functions that its own thread calls in order; None ends it. They must not raise.

    At most `limit` functions wait: a slow consumer then slows the run down instead of filling its memory.
    """
    actions: queue.Queue = queue.Queue(limit)

    def work():
        while (action := actions.get()) is not None:
            action()

    threading.Thread(target=work, name=f"telemetry-{name}", daemon=True).start()
    return actions


def open_console(run_dir, config, silent: bool = False) -> SilentConsole:
    """Returns the console of a job without steps; a silent one if `silent`."""
    return make_console("off" if silent else config.log.console, 0, f"jaxrl {config.run.recipe} {run_dir}")


def make_console(mode: str, total_steps: int, title: str, stream=None) -> SilentConsole:
    """Returns the console of `log.console`: auto is the table on a terminal that can show it, else plain lines (also
    in notebooks). Characters that the stream cannot encode are shown as question marks.

    mode: auto, table, plain or off. total_steps, title: as SilentConsole. stream: None = standard output.
    """
    stream = stream or sys.stdout
    if mode == "auto":
        mode = "table" if stream.isatty() and os.environ.get("TERM") != "dumb" and encodes(stream, SPARKS) else "plain"
    if not encodes(stream, SPARKS) and isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    if mode == "table":
        from jaxrl.telemetry.table import TableConsole  # rich takes a while to import

        return TableConsole(total_steps, title, stream)
    return {"plain": PlainConsole, "off": SilentConsole}[mode](total_steps, title, stream)


def sample_records(records: list[dict], count: int, seed: int, step: int) -> list[dict]:
    """Returns at most `count` records of different prompts, drawn by seed and step: anew at every step, the same in
    every run with this seed and these records.
    """
    draw = random.Random(f"{seed} {step}")
    of: dict[str, list[dict]] = {}
    for record in records:
        of.setdefault(str(record.get("prompt", "")), []).append(record)
    return [draw.choice(of[prompt]) for prompt in draw.sample(list(of), min(count, len(of)))]


def sample_text(record: dict) -> str:
    """Returns a conversation and its result as Markdown."""
    texts = {"prompt": str(record.get("prompt", "")), "completion": completion_text(record)}
    texts = {k: shortened(text, 20_000) for k, text in texts.items()}
    verdict = {k: record[k] for k in ("score", "accurate", "advantage", "finish", "answer") if k in record}
    verdict = dumps({"rewards": record.get("reward", {}).get("parts", {}), **verdict}, indent=1)
    return "".join(f"**{k}**\n\n```\n{text}\n```\n\n" for k, text in texts.items()) + f"```\n{verdict}\n```"
