"""Console output: one plain line per step, or nothing, and log messages. (`table.py`: the live table of a terminal.)"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable

from jaxrl.telemetry.names import COLUMNS

SAMPLE_CHARACTERS = 700  # shown of a prompt and of a completion
SPARKS = "▁▂▃▄▅▆▇█"
FIRST = 10.0     # seconds of silence before the first sign of life; each further one comes after twice as long
LONGEST = 600.0  # between two of them
POLL = 1.0
NO_PHASES = ("step", "wall", "tokens_per_second", "compiled_programs", "compilations", "compilations_background")
DOING = {"start": "reading, loading, starting the engine", "rollout": "generating completions",
         "reward": "scoring completions", "score": "log-probs of the completions", "update": "optimizing",
         "publish": "new weights for the engine", "eval": "completing held-out prompts", "checkpoint": "saving",
         "export": "writing the model", "data": "reading rows", "wait": "for the other processes"}


class Progress:
    """Counts this process's steps and estimates the remaining time from all but the first, which compiles.

    Args:
      total_steps: what the run aims at. clock: seconds, monotonic.

    Attributes:
      total: total_steps; may be set later. step: the last completed one, 0 before. begin: clock at the start.
    """

    def __init__(self, total_steps: int, clock: Callable[[], float] = time.monotonic):
        self.total, self._clock = total_steps, clock
        self.begin = clock()
        self.step = 0
        self._first: tuple[int, float] | None = None

    def advance(self, step: int) -> None:
        """Counts a completed step."""
        self.step = step
        if self._first is None and step > 0:
            self._first = (step, self._clock())

    @property
    def elapsed(self) -> float:
        """The seconds since the start."""
        return self._clock() - self.begin

    @property
    def left(self) -> float | None:
        """The remaining seconds at the mean pace so far, or None before the second step."""
        if self._first is None or self.step <= self._first[0]:
            return None
        pace = (self._clock() - self._first[1]) / (self.step - self._first[0])
        return max(0.0, pace * (self.total - self.step))


class SilentConsole:
    """The console of log.console=off, which shows nothing, and the interface of all consoles.

    Args:
      total_steps: what the run aims at. title: of the live table. stream: text file to write to.

    Attributes:
      progress: Progress of the run.
    """

    def __init__(self, total_steps: int, title: str, stream):
        self.progress = Progress(total_steps)
        self.title, self.stream = title, stream

    def start(self, name: str = "start") -> None:
        """Reports the start of a phase outside of steps."""

    def phase(self, name: str) -> None:
        """Reports the phase that has just started; "" between phases."""

    def step(self, step: int, scalars: dict[str, float]) -> None:
        """Shows the metrics of a finished step. scalars: metric -> value, names as in names.py."""

    def print(self, text: str) -> None:
        """Shows a message."""

    def sample(self, step: int, name: str, record: dict) -> None:
        """Shows a sampled conversation of an evaluation. name: of the set. record: of rl.trajectories.records."""

    def close(self) -> None:
        """Restores the terminal."""


class PlainConsole(SilentConsole):
    """Prints one line per step, greppable: `step 12/100  reward 0.512  acc 45.0% ... 1.92s (rollout 1.10 update
    0.75)`.

    If nothing was printed for a while, it prints the current phase: first after twice the time of the fastest step, at
    least FIRST and at most LONGEST seconds (FIRST before two steps are done); then when the silence has doubled,
    LONGEST seconds later at most. A thread does this; `phase` starts it and `close` ends it.

    Args:
      total_steps, stream: as SilentConsole. title: not shown. clock: seconds, monotonic.
    """

    LABELS = {"policy/kl": "kl", "optim/grad_norm": "grad", "rollout/zero_signal_fraction": "zero-signal",
              "rollout/truncated_fraction": "truncated", "accuracy/train": "accuracy", "value/loss": "value-loss",
              "value/explained_variance": "explained"}

    def __init__(self, total_steps: int, title: str, stream, clock: Callable[[], float] = time.monotonic):
        super().__init__(total_steps, title, stream)
        self._clock = clock
        self._phase, self._since, self._heard = "", clock(), clock()
        self._stepped, self._fastest = None, float("inf")
        self._usual = self._patience = FIRST
        self._thread, self._closed = None, threading.Event()

    def start(self, name: str = "start") -> None:
        """Begins the first phase."""
        self.phase(name)

    def phase(self, name: str) -> None:
        """Begins a phase of the run, about which lines appear if it takes long."""
        self._phase, self._since = name, self._clock()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="still", daemon=True)
            self._thread.start()

    def step(self, step: int, scalars: dict[str, float]) -> None:
        """Prints one line with a step's metrics: those of the console's columns, seconds by phase, the time left."""
        self.progress.advance(step)
        parts = [f"step {step}/{self.progress.total}"]
        parts += [f"{self.LABELS.get(m.name, m.header)} {show(m, scalars[m.name])}"
                  for m in COLUMNS if m.name in scalars and not m.name.startswith(("time/", "eval/"))]
        if "eval/accuracy" in scalars:
            parts.append(f"eval {evaluation_line(scalars)}")
        if "time/step" in scalars:
            phases = " ".join(f"{k} {v:.2f}" for k, v in phase_seconds(scalars).items() if v >= 0.005)
            parts.append(f"{scalars['time/step']:.2f}s ({phases})")
        if "time/tokens_per_second" in scalars:
            parts.append(f"{scalars['time/tokens_per_second']:,.0f} tok/s")
        if (left := self.progress.left) is not None:
            parts.append(f"left {duration(left)}")
        now = self._clock()
        if self._stepped is not None:  # the first step compiles, and does not count
            self._fastest = min(self._fastest, now - self._stepped)
            self._usual = max(FIRST, min(LONGEST, 2 * self._fastest))
        self._stepped = now
        self.print("  ".join(parts))

    def print(self, text: str) -> None:
        """Prints a text as lines."""
        self._heard, self._patience = self._clock(), self._usual
        self.stream.write(text + "\n")
        self.stream.flush()

    def sample(self, step: int, name: str, record: dict) -> None:
        """Prints a prompt and its completion, shortened. name: of the set. record: of rl.trajectories.records."""
        lines = [f"sample of {name} at step {step}{sample_verdict(record)}"]
        for part, text in (("prompt", str(record.get("prompt", ""))), ("completion", completion_text(record))):
            body = shortened(text).replace("\n", "\n    ")
            lines.append(f"  {part}:\n    {body}")
        self.print("\n".join(lines))

    def sign_of_life(self) -> str:
        """Returns the progress line that is due, and puts off the next one; "" if none is due."""
        now, name, since = self._clock(), self._phase, self._since
        if now - self._heard < self._patience:
            return ""
        self._patience += min(self._patience, LONGEST)
        doing = "a program is being compiled" if compiling() else DOING.get(name, "")
        where, silent = f"in {name}" if name else "between phases", now - self._heard
        if now - since < silent / 2:  # other phases and steps came before it without a line
            where = f"running {duration(silent)} after the last line, now {where}"
        else:
            where = f"{where} after {duration(now - since)}"
        return f"still {where}" + f": {doing}" * bool(doing)

    def _watch(self) -> None:
        while not self._closed.wait(POLL):
            if text := self.sign_of_life():
                try:
                    self.stream.write(text + "\n")
                    self.stream.flush()
                except (OSError, ValueError):  # nobody reads
                    return

    def close(self) -> None:
        """Stops the lines about long phases."""
        self._closed.set()


def sample_verdict(record: dict) -> str:
    """Returns score, correctness and length cut of a sampled record as text."""
    out = f", score {record['score']:.3g}" if isinstance(record.get("score"), int | float) else ""
    if "accurate" in record:
        out += ", right" if record["accurate"] else ", wrong"
    return out + (", cut by the length limit" if record.get("finish") == "length" else "")


def encodes(stream, text: str) -> bool:
    """Returns whether a stream's encoding has all characters of a text; without an encoding it counts as UTF-8."""
    try:
        text.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def printable(text: str) -> str:
    """Returns a model's text with U+FFFD in place of every character but line ends and tabs that str.isprintable
    refuses (control characters, also no-break spaces and joiners), so that a completion cannot control the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def completion_text(record: dict) -> str:
    """Returns the completion of a record, or its episode as a conversation: the model's turns with their rewards, and
    the untrained text between them.
    """
    if "episode" not in record:
        return str(record.get("completion", ""))
    lines = []
    for i, piece in enumerate(record["episode"]):
        reward = f" (reward {piece['reward']:g})" if piece.get("reward") else ""
        who = f"model, turn {piece['turn'] + 1}{reward}" if piece["trained"] else "not trained"
        if i or piece["trained"]:  # the first piece is the prompt
            lines.append(f"[{who}{', a new sequence' if i and piece.get('opens') else ''}] {piece['text'].strip()}")
    return "\n".join(lines)


def shortened(text: str, limit: int = SAMPLE_CHARACTERS) -> str:
    """Returns `printable(text)`; of more than `limit` characters the first and last limit // 2, and between them how
    many more there are than `limit`."""
    text, half = printable(text), limit // 2
    return text if len(text) <= limit else f"{text[:half]} [... {len(text) - limit} characters ...] {text[-half:]}"


def evaluation_line(scalars: dict[str, float]) -> str:
    """Returns 'accuracy 53.1% (test 50.0%, hard 61.0%)', with mean@k and pass@k if there are several samples, and with
    blind controls (eval.controls); '' without eval/accuracy. scalars: metric -> value, shares from 0 to 1."""
    if "eval/accuracy" not in scalars:
        return ""
    parts = {k[5:]: v for k, v in scalars.items() if k.startswith("eval/")}
    line = f"accuracy {100 * parts['accuracy']:.1f}%"
    sets = {k.split("/")[0]: v for k, v in parts.items() if k.count("/") == 1 and k.endswith("/accuracy")}
    if len(sets) > 1:
        line += " (" + ", ".join(f"{k} {100 * v:.1f}%" for k, v in sets.items()) + ")"
    shown = {k: v for k, v in parts.items() if k.startswith(("pass@", "mean@"))}
    shown |= {k.removesuffix("/accuracy"): v for k, v in parts.items()
              if k.count("/") == 2 and k.endswith("/accuracy") and not k.endswith("/reward/accuracy")}
    return line + "".join(f"  {k} {100 * v:.1f}%" for k, v in shown.items())


def phase_seconds(scalars: dict[str, float]) -> dict[str, float]:
    """Returns the seconds by phase, longest first. scalars: metrics, of which those named time/<phase> are read."""
    phases = {k[5:]: v for k, v in scalars.items() if k.startswith("time/") and k[5:] not in NO_PHASES}
    return dict(sorted(phases.items(), key=lambda kv: -kv[1]))


def show(metric, value: float) -> str:
    """Returns a value as its console column shows it, by the metric's `format`.

    metric: names.Metric; percent multiplies by 100, an unknown format is that of small numbers."""
    if value != value:
        return "nan"
    match metric.format:
        case "fixed":
            return f"{value:.3f}"
        case "percent":
            return f"{100 * value:.1f}%"
        case "count":
            return f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"
        case "seconds":
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
    if value == 0 or 0.01 <= abs(value) < 1000:  # small
        return f"{value:.3f}" if value else "0"
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e+")


def duration(seconds: float) -> str:
    """Formats seconds: 12 -> '12s', 190 -> '3m10s', 7500 -> '2h05m'."""
    s = int(round(max(0.0, seconds)))
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    return f"{s // 3600}h{s % 3600 // 60:02d}m"


def compiling() -> bool:
    """Returns whether a thread of this process is in jax's compiler now."""
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_code.co_filename.endswith("jax/_src/compiler.py"):
                return True
            frame = frame.f_back
    return False


class _Handler(logging.Handler):
    """Writes to whatever sys.stderr is now, so that messages appear above a live table."""

    process = ""
    COLOURS = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[31m"}

    def emit(self, record: logging.LogRecord) -> None:
        label = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        colour = self.COLOURS.get(record.levelno, "") if sys.stderr.isatty() else ""
        try:
            label = f"{self.process}: " * bool(self.process) + label
            print(f"{colour}jaxrl {label}{self.format(record)}{chr(27) + '[0m' if colour else ''}", file=sys.stderr)
        except (OSError, ValueError):
            self.handleError(record)


def setup_logging(level: str, process: str = "") -> None:
    """Sends jaxrl's log to stderr at `log.level`, unless the application has configured logging itself; the level is
    set in either case.

    Args:
      process: name of a process other than the first; it logs warnings and errors only, under this name.
    """
    logger = logging.getLogger("jaxrl")
    logger.setLevel(level.upper())
    if process or _Handler.process:
        _Handler.process = process or _Handler.process
        logger.setLevel(max(logger.level, logging.WARNING))
    if not logger.handlers and not logging.getLogger().handlers:
        logger.addHandler(_Handler())
        logger.propagate = False  # libraries may give the root logger a handler later: no message twice
