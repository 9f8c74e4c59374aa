"""Sinks of metrics besides the console: metrics.jsonl, TensorBoard, Weights & Biases, and the user's classes.

A sink has `write(step, scalars)` and `close()`; it may have `text(tag, text, step)`, `histogram(tag, values, step)`
and `flush()`. `scalars` are floats by metric name (see names.py). Each except metrics.jsonl runs in its own thread.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import uuid
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxrl.config.user_code import imported
from jaxrl.errors import ConfigError
from jaxrl.telemetry.names import CLOCKED
from jaxrl.telemetry.run_dir import dumps, write_atomic


def adds_up(name: str) -> bool:
    """Returns whether two partial values of one step add up: seconds do, and counts of events."""
    return name.startswith("time/") and name not in ("time/wall", "time/tokens_per_second", "time/compiled_programs")


class JsonLines:
    """metrics.jsonl: {"step": N, "<group/name>": value, ..., "time": {...}}, one line per step, steps growing.

    Everything measured with a clock (names.CLOCKED; time/name as "name", others by their whole names) lives under
    "time", so that two runs can be compared without it. A line is one system call, so a killed process leaves whole
    lines. Writing to the newest step again merges into its line. Lines that the disk refuses are kept, and
    written before the next one.

    Args:
      last_step: lines of later steps, and a broken last one, are dropped first (a resumed run writes them again).
    """

    def __init__(self, path: Path, last_step: int):
        self.path = path
        self._row: dict[str, Any]
        newest, self._row = self._drop_after(last_step)
        self._file = open(path, "r+b" if path.exists() else "w+b", buffering=0)  # noqa: SIM115  (held until close)
        self._lock = threading.Lock()  # a checkpoint flushes in its own thread
        self._end = self._file.seek(0, os.SEEK_END)
        self._lines = [newest]  # the newest one, and before it those that are not on disk
        self._start = self._end - len(newest)  # where the first of them begins

    def _drop_after(self, last_step: int) -> tuple[bytes, dict]:
        """Drops lines after a step. Returns the newest line that stays, and its content."""
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        count, newest = 0, {"step": -1}
        for line in lines:
            try:
                row = json.loads(line)
                step = int(row["step"])
            except (ValueError, KeyError, TypeError):
                break  # cut off by a kill or a full disk: nothing after it can be trusted
            if not line.endswith(b"\n") or step > last_step:
                break
            count, newest = count + 1, row
        if count < len(lines):
            write_atomic(self.path, b"".join(lines[:count]).decode())
        return lines[count - 1] if count else b"", newest

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Writes a step's metrics. Raises ValueError if `step` is older than the newest line; OSError if the disk
        refuses the line, which is kept.
        """
        with self._lock:
            if step < self._row["step"]:
                raise ValueError(f"metrics of step {step} after those of step {self._row['step']}")
            again = step == self._row["step"]
            row: dict[str, Any] = (self._row if again else {"step": step}) | {
                name: value for name, value in scalars.items() if not name.startswith(CLOCKED)}
            clock = dict(row.pop("time", {}))
            for name, value in scalars.items():
                if name.startswith(CLOCKED):
                    key = name.removeprefix("time/")
                    clock[key] = value + (clock.get(key, 0.0) if again and adds_up(name) else 0.0)
            self._row = row | {"time": clock}
            self._lines[len(self._lines) - again:] = [(dumps(self._row) + "\n").encode()]
            self._put()

    def flush(self) -> None:
        """Writes lines that the disk refused earlier. Raises OSError while a line is not in the file."""
        with self._lock:
            self._put()

    def _put(self) -> None:
        """Writes the lines that are kept where they belong; all, or none and raises OSError."""
        text = b"".join(self._lines)
        there = os.pread(self._file.fileno(), self._end - self._start, self._start)
        if text == there:
            return
        try:
            if os.pwrite(self._file.fileno(), text, self._start) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as e:
            os.pwrite(self._file.fileno(), there, self._start)
            self._file.truncate(self._end)
            raise OSError(e.errno, e.strerror, str(self.path)) from None
        self._end = self._start + len(text)
        self._file.truncate(self._end)  # a line that is written anew may be shorter
        self._start, self._lines = self._end - len(self._lines[-1]), self._lines[-1:]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


@contextmanager
def hide_module(name: str):
    """Returns a context in which imports do not find this module, unless it is imported already."""
    if name in sys.modules:
        yield
        return
    modules: dict[str, Any] = sys.modules
    modules[name] = None  # then an import of it fails
    try:
        yield
    finally:
        sys.modules.pop(name)


class TensorBoard:
    """Event files for TensorBoard. After a resume, `first_step` hides the later events of the killed run.

    Its methods raise OSError once the writer's thread has died, as on a full disk."""

    def __init__(self, folder: Path, first_step: int):
        with hide_module("torch"):  # tensorboardX names a type of it where it can, which takes a second
            from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step, flush_secs=20)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Writes the metrics of a step, name -> value."""
        for name, value in scalars.items():
            self._alive().add_scalar(name, value, step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Writes a text at a step."""
        self._alive().add_text(tag, text, step)

    def histogram(self, tag: str, values, step: int) -> None:
        """Writes the distribution of values, any shape, at a step."""
        self._alive().add_histogram(tag, values, step)

    def flush(self) -> None:
        """Writes what is buffered."""
        self._alive().flush()

    def close(self) -> None:
        """Writes what is buffered and closes the file."""
        self._alive().close()

    def _alive(self):
        """Returns the writer. Raises OSError if its thread has died, as on a full disk: nothing would read its queue
        then, and tensorboardX (2.6) and multiprocessing would wait for that at the process's end.
        """
        writer: Any = self._writer.file_writer
        events = writer.event_writer
        if not events._closed and not events._worker.is_alive():
            events._closed = True
            events._event_queue.cancel_join_thread()
        if events._closed:
            raise OSError(errno.EIO, "TensorBoard's writer has stopped; is the disk full?")
        return self._writer


class Wandb:
    """Weights & Biases. A resumed run continues the same W&B run (its id is kept in <run_dir>/wandb/run_id).

    W&B's step cannot go back after a resume, so our step is a metric that all charts use as x axis.

    log_config: config.log. config: the whole config as a dict with secrets redacted. Raises ConfigError if wandb is not
    installed."""

    def __init__(self, run_dir: Path, log_config, config: dict):
        try:
            import wandb
        except ImportError:
            raise ConfigError("log.wandb=True needs the package wandb: pip install 'jaxrl[wandb]', "
                              "or set log.wandb=False") from None
        path = run_dir / "wandb" / "run_id"
        if not path.exists():
            write_atomic(path, uuid.uuid4().hex[:12])
        self._run = wandb.init(
            project=log_config.wandb_project, group=log_config.wandb_group or None, mode=log_config.wandb_mode,
            name=log_config.wandb_name or run_dir.resolve().name, dir=str(run_dir), config=config, resume="allow",
            id=path.read_text("utf-8"), settings=wandb.Settings(silent=True))
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Logs the metrics of a step, name -> value, with the step as their x axis."""
        self._run.log({"step": step, **scalars})

    def text(self, tag: str, text: str, step: int) -> None:
        """Puts a text into the run's summary, under its tag, in place of an earlier one. step is not kept."""
        self._run.summary[tag] = text

    def close(self) -> None:
        """Finishes the run."""
        self._run.finish()


def load_sink(spec: str, run_dir: Path, config: dict) -> Any:
    """Creates `package.module:Class` or `./file.py:Class` with (run_dir, config as a redacted dict). Raises
    ConfigError naming what is missing, or the error of the class.
    """
    factory = find_sink(spec)
    try:
        sink = factory(run_dir, config)
    except Exception as e:  # it is the user's code
        raise ConfigError(f"log.sinks: {spec!r} fails when it is made: {type(e).__name__}: {e}; mend it or leave it"
                          " out") from e
    if not (callable(getattr(sink, "write", None)) and callable(getattr(sink, "close", None))):
        raise ConfigError(f"log.sinks: {spec!r}: {type(sink).__name__} lacks write(step, scalars) or close()")
    return sink


def find_sink(spec: str) -> Callable:
    """Returns the class that a spec of log.sinks names. Raises ConfigError naming what is missing.

    spec: "package.module:Class" or "./file.py:Class"."""
    if ":" not in spec:
        raise ConfigError(f"log.sinks: {spec!r} is not 'package.module:Class' or './file.py:Class'")
    try:
        return imported(spec)
    except Exception as e:  # it is the user's code
        raise ConfigError(f"log.sinks: {spec!r} cannot be imported: {type(e).__name__}: {e}; give package.module:Class"
                          " or ./file.py:Class") from None
